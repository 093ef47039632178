def add(cents: int) -> int:
    return cents * 120 // 100
