"""WebShop's pages as texts, with what can be clicked on them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tasks.environments.webshop.products import Product

SEPARATOR = " [SEP] "
BACK, NEXT, PREVIOUS, BUY = "Back to Search", "Next >", "< Prev", "Buy Now"
SUB_PAGES = ("Description", "Features", "Reviews")
DONE = "Thank you for shopping with us!"
SEARCH, RESULTS, ITEM = "search", "results", "item"  # kinds of pages; else one of SUB_PAGES


@dataclass(frozen=True)
class Place:
    """Where a customer is."""

    page: str = SEARCH
    keywords: str = ""
    found: tuple[Product, ...] = field(default=(), repr=False)  # by the last search
    number: int = 1  # of the page of results
    product: Product | None = None
    chosen: Mapping[str, str] = field(default_factory=dict)  # options: name -> value

    @property
    def key(self) -> str:
        """Return a key of this place: equal for equal pages, however they were reached."""
        asin = self.product.asin if self.product else ""
        shown = [self.page, self.keywords, self.number, asin, sorted(self.chosen.items())]
        return json.dumps(shown)


def clickable(place: Place, results: int) -> dict[str, Place | None]:
    """Return what can be clicked, in lower case, and where it leads; None: the purchase."""
    if place.page == SEARCH:
        return {}
    leads: dict[str, Place | None] = {BACK.lower(): Place()}
    if place.page == RESULTS:
        pages = -(-len(place.found) // results)
        if place.number < pages:
            leads[NEXT.lower()] = replace(place, number=place.number + 1)
        if place.number > 1:
            leads[PREVIOUS.lower()] = replace(place, number=place.number - 1)
        for product in shown(place, results):
            leads[product.asin.lower()] = replace(place, page=ITEM, product=product, chosen={})
        return leads
    if place.page in SUB_PAGES:
        return leads | {PREVIOUS.lower(): replace(place, page=ITEM)}
    assert place.product
    leads[PREVIOUS.lower()] = replace(place, page=RESULTS, product=None, chosen={})
    leads |= {page.lower(): replace(place, page=page) for page in SUB_PAGES}
    for name, values in place.product.options.items():
        for value in values:
            leads[value.lower()] = replace(place, chosen={**place.chosen, name: value})
    return leads | {BUY.lower(): None}


def shown(place: Place, results: int) -> Sequence[Product]:
    """Return the products on a page of results."""
    return place.found[(place.number - 1) * results :][:results]


def text(place: Place, results: int, title_words: int | None) -> str:
    """Return the page as WebShop's text mode shows it, without the instruction.

    As in its rich mode, a page says which options have been chosen.
    """
    if place.page == SEARCH:
        return "Search"
    if place.page == RESULTS:
        return SEPARATOR.join(_results(place, results, title_words))
    assert place.product
    parts = [BACK, PREVIOUS]
    if place.page != ITEM:
        return SEPARATOR.join([*parts, _sub_page(place.product, place.page)])
    clicked = [f"You have clicked {value}." for value in place.chosen.values()]
    for name, values in place.product.options.items():
        parts += [name, *values]
    parts += [_cut(place.product.title, title_words), f"Price: ${place.product.price}"]
    return SEPARATOR.join([*clicked, *parts, "Rating: N.A.", *SUB_PAGES, BUY])


def _results(place: Place, results: int, title_words: int | None) -> list[str]:
    pages = -(-len(place.found) // results)
    parts = [BACK, f"Page {place.number} (Total results: {len(place.found)})"]
    parts += [NEXT] * (place.number < pages) + [PREVIOUS] * (place.number > 1)
    for product in shown(place, results):
        parts += [product.asin, _cut(product.title, title_words), f"${product.price}"]
    return parts


def _sub_page(product: Product, page: str) -> str:
    texts = {
        "Description": product.description,
        "Features": SEPARATOR.join(product.features),
        "Reviews": "",
    }
    return texts[page]


def _cut(title: str, most: int | None) -> str:
    return title if most is None else " ".join(title.split()[:most])
