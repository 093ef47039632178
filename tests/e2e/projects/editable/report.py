"""A script of the project, which imports the package that is installed in editable form."""

from ledger.entries import balance


def report(amounts: list[int]) -> str:
    return f"balance {balance(amounts)}"
