from acme.shared import money

from . import table


def rate(plan: str) -> str:
    return money.show(table.RATES[plan])
