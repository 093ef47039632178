def to_mm(cm: int) -> int:
    return 10 * cm
