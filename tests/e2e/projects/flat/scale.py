TOP = 20


def percent(points: int) -> int:
    return 100 * points // TOP
