"""A shop that is open in this process: its products, and their search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tasks.environments.webshop.products import Product, digest
from tasks.tools.bm25 import best, index_texts, words

FOUND = 50  # most products that a search finds
K1, B = 0.9, 0.4  # of BM25: the defaults of pyserini, which WebShop searches with


@dataclass(frozen=True)
class Shop:
    """A catalogue with its index."""

    products: Sequence[Product]
    by_asin: dict[str, Product]  # in lower case
    index: Any
    digest: str

    def search(self, keywords: str) -> list[Product]:
        """Return at most ``FOUND`` products, best first."""
        return [self.products[position] for position in best(self.index, words(keywords), FOUND)]


def open_shop(products: Sequence[Product]) -> Shop:
    """Index a catalogue."""
    index = index_texts([indexed(product) for product in products], K1, B)
    by_asin = {product.asin.lower(): product for product in products}
    return Shop(products, by_asin, index, digest(products))


def indexed(product: Product) -> str:
    """Return the text by which a product is found; WebShop indexes these parts."""
    options = ", and ".join(f"{name}: {', '.join(each)}" for name, each in product.options.items())
    parts = (product.title, product.description, *product.features[:1], options)
    return " ".join(parts).lower()
