"""A flat script: a function, and a module beside it."""

import scale


def score(name: str, points: int) -> str:
    return f"{name}: {scale.percent(points)} %"
