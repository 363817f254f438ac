"""WebShop's score of a purchase, from 0 to 1 (arXiv 2207.01206, section 3.2; its goal.py).

    score = type * (attributes + options + price) / (wanted attributes + wanted options + 1)

where the three count what fits. WebShop compares the nouns of titles, which spaCy's largest English
model finds; here all words but stop words are compared, since that model is not to be had
everywhere. Fuzzy matching is that of rapidfuzz, the library behind WebShop's thefuzz.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rapidfuzz import fuzz, utils

from tasks.environments.webshop.products import Goal, Product

ALIKE = 85  # least token set ratio, of 100, of two texts that mean the same
EXACT = ("size",)  # names of options whose values must be equal
COLORS = (
    "black white red blue green grey gray pink purple brown yellow orange navy beige gold silver "
    "ivory khaki teal burgundy rose wine camel charcoal coffee cream"
).split()
STOP_WORDS = frozenset("a an and for from in of on or the to with by at is are that this".split())
WORD = re.compile(r"[a-z0-9']+")


def score(product: Product, goal: Goal, options: Mapping[str, str]) -> float:
    """Return the score of buying a product with the chosen options, from 0 to 1."""
    fitting = (
        sum(has_attribute(product, attribute) for attribute in goal.attributes)
        + sum(is_wanted(product, goal, name, value) for name, value in options.items())
        + (product.price <= goal.price)
    )
    share = fitting / (len(goal.attributes) + len(goal.options) + 1)
    return type_factor(product, goal) * min(share, 1.0)


def type_factor(product: Product, goal: Goal) -> float:
    """Return how far the product is of the wanted kind: 1, 0.5, 0.1 or 0."""
    same_query = product.query == goal.query
    same_path = len(_steps(product.path) & _steps(goal.path)) >= 2
    goal_words, bought = _words(goal.title), _words(product.title)
    common = len(goal_words & bought) / len(goal_words) if goal_words else 0.2
    if common == 0:
        return 0.0
    if common < 0.1:
        return 0.1
    return 1.0 if same_query or same_path or common > 0.2 else 0.5


def has_attribute(product: Product, attribute: str) -> bool:
    """Return whether an attribute of the product is like the wanted one, or its texts name it."""
    return any(_alike(each, attribute) for each in product.attributes) or _named(product, attribute)


def is_wanted(product: Product, goal: Goal, name: str, value: str) -> bool:
    """Return whether a chosen option is like a wanted one, or a text of the product names it."""
    option, goal_options = _color(value), [_color(each) for each in goal.options]
    if name.lower() in EXACT:
        fits = option in goal_options
    else:
        fits = any(_alike(each, option) for each in goal_options)
    return fits or _named(product, option)


def _alike(first: str, second: str) -> bool:
    return fuzz.token_set_ratio(first, second, processor=utils.default_process) > ALIKE


def _named(product: Product, phrase: str) -> bool:
    texts = (product.title, " ".join(product.features), product.description)
    return any(phrase in text.lower() for text in texts)


def _color(value: str) -> str:
    """Return the plain color in a value such as "dark blue", else the value."""
    return next((color for color in COLORS if color in value), value)


def _steps(path: str) -> set[str]:
    return {step.strip() for step in path.split("›")}


def _words(title: str) -> set[str]:
    return set(WORD.findall(title.lower())) - STOP_WORDS
