def balance(amounts: list[int]) -> int:
    return sum(amounts)
