def slice_up(length: int) -> list[int]:
    return [length // 2, length - length // 2]
