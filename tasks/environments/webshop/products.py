"""What a shop sells, and what a customer wants."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Product:
    """An entry of the catalogue."""

    asin: str  # its number
    title: str
    category: str  # of WebShop's five, such as "fashion"
    query: str  # what a customer searches for who wants this kind of thing
    path: str  # of the product tree: "Clothing › Men › Shirts"
    description: str
    features: tuple[str, ...]
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]  # name -> values
    price: float  # dollars


@dataclass(frozen=True)
class Goal:
    """What a customer wants. A product is wanted by its kind, attributes, options and price."""

    instruction: str
    category: str
    query: str
    path: str
    title: str  # of the product that the goal was made from
    attributes: tuple[str, ...]
    options: tuple[str, ...]  # values
    price: float  # the most that it may cost, in dollars

    def as_data(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return asdict(self)

    @staticmethod
    def of_data(data: Mapping[str, Any]) -> Goal:
        """Return the goal that ``as_data`` wrote."""
        lists = {name: tuple(data[name]) for name in ("attributes", "options")}
        return Goal(**{**data, **lists})


def digest(products: Sequence[Product]) -> str:
    """Return a digest of a catalogue, in its order."""
    text = json.dumps([asdict(product) for product in products], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def most_price(price: float, chances: Sequence[float]) -> float:
    """Return the limit that a customer names for a product of this price.

    As in WebShop: the larger of two of the next four tens of dollars, which ``chances``, two
    numbers from 0 to 1, choose.
    """
    tens = [10.0 * count for count in range(1, 100) if 10.0 * count > price][:4]
    if len(tens) < 2:
        return 1_000_000.0
    first = int(chances[0] * len(tens))
    second = int(chances[1] * (len(tens) - 1))
    return tens[max(first, second + (second >= first))]
