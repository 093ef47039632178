from __future__ import annotations

from decimal import Decimal

from pydantic import BaseModel, Field


class Item(BaseModel):
    name: str
    quantity: int = Field(gt=0)


class Order(BaseModel):
    items: list[Item]
    discount: Decimal = Decimal(0)
