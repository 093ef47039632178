from .. import units  # noqa: TID252
from .knife import slice_up


def cut(length: int) -> list[int]:
    return slice_up(units.to_mm(length))
