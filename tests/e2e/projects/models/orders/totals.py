from __future__ import annotations

from .models import Item, Order


def count(order: Order) -> int:
    return sum(item.quantity for item in order.items)


def largest(order: Order) -> Item:
    return max(order.items, key=lambda item: item.quantity)
