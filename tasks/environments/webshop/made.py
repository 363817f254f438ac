"""A catalogue and goals that are made from a seed, for a shop without WebShop's files."""

from __future__ import annotations

import hashlib
import math
import random
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tasks.environments.webshop.products import Goal, Product, most_price

LETTERS = "BCDFGHJKLMNPQRSTVWXZ"  # no vowels, no words
COLORS = tuple("black white red blue green grey pink purple brown yellow orange navy".split())
SIZES = ("small", "medium", "large", "x-large", "xx-large")
SHOES = tuple(f"{size}" for size in range(6, 13))
BRANDS = tuple(
    "Alder Bramble Corvo Dunmore Elgin Farrow Gable Halden Ivory Juno Kestrel Larch Maren Norrow "
    "Orchid Pell Quill Rowan Sorrel Tamsin Umber Vale Wren Yarrow".split()
)


@dataclass(frozen=True)
class Kind:
    """A kind of product: what it is called, and what can differ."""

    query: str
    category: str
    path: str
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    prices: tuple[int, int]  # dollars


def _kinds(
    category: str,
    path: str,
    attributes: str,
    options: Mapping[str, tuple[str, ...]],
    prices: tuple[int, int],
    queries: str,
) -> list[Kind]:
    attribute_names = tuple(attribute.strip() for attribute in attributes.split(","))
    return [
        Kind(
            name.strip(),
            category,
            f"{path} › {name.strip().title()}",
            attribute_names,
            options,
            prices,
        )
        for name in queries.split(",")
    ]


CLOTHES = "machine wash, slim fit, long sleeve, short sleeve, hand wash, loose fit, quick drying, "
KINDS = (
    *_kinds(
        "fashion",
        "Clothing › Men",
        CLOTHES + "button closure, cotton spandex, tumble dry",
        {"color": COLORS, "size": SIZES},
        (12, 70),
        "men's shirts, men's shorts, men's sweaters, men's jackets",
    ),
    *_kinds(
        "fashion",
        "Clothing › Women",
        CLOTHES + "elastic waist, high waist, polyester spandex",
        {"color": COLORS, "size": SIZES},
        (12, 80),
        "women's dresses, women's leggings, women's blouses, women's coats",
    ),
    *_kinds(
        "fashion",
        "Shoes › Everyone",
        "rubber sole, anti slip, memory foam, arch support, arch lace up, leather sole, wide fit",
        {"color": COLORS, "size": SHOES},
        (25, 140),
        "running shoes, hiking boots, sandals, slippers",
    ),
    *_kinds(
        "beauty",
        "Beauty › Care",
        "cruelty free, fragrance free, paraben free, long lasting, easy to use, "
        "for sensitive skin, natural ingredients, travel size",
        {"scent": ("lavender", "rose", "citrus", "mint", "vanilla"), "pack": ("1", "2", "3", "6")},
        (6, 45),
        "shampoo, face cream, lip balm, body lotion",
    ),
    *_kinds(
        "electronics",
        "Electronics › Gear",
        "fast charging, noise cancelling, water resistant, wireless bluetooth, hands free, "
        "long battery life, easy to carry, high resolution",
        {"color": COLORS[:6], "style": ("basic", "plus", "pro")},
        (15, 240),
        "headphones, portable speakers, power banks, smart watches",
    ),
    *_kinds(
        "furniture",
        "Home › Rooms",
        "solid wood, easy to assemble, space saving, heavy duty, non slip, easy to clean, "
        "metal legs, stain resistant",
        {"color": COLORS[:8], "size": ("twin", "full", "queen", "king")},
        (40, 420),
        "bed frames, side tables, book shelves, area rugs",
    ),
    *_kinds(
        "grocery",
        "Food › Pantry",
        "gluten free, sugar free, low sodium, non gmo, dairy free, high protein, plant based, "
        "kosher",
        {"flavor": ("chocolate", "vanilla", "berry", "lemon", "salted"), "pack": ("1", "4", "8")},
        (4, 35),
        "protein bars, crackers, trail mix, herbal tea",
    ),
)
WORDINGS = (
    "i want {attributes} {query} with {options}, and price lower than {price:.2f} dollars",
    "find me {attributes} {query} with {options}, and price lower than {price:.2f} dollars",
    "i need {query} that are {attributes}. choose {options}. price lower than {price:.2f} dollars",
    "i like {query}, {attributes}, with {options}, and price lower than {price:.2f} dollars",
)
SHARES = {"train": range(14), "validation": range(14, 18), "test": range(18, 24)}  # of a digest


def catalogue(count: int, seed: int) -> list[Product]:
    """Return ``count`` products, of all kinds in turn."""
    chance = random.Random(f"{seed}/catalogue")
    return [
        _product(KINDS[index % len(KINDS)], asin, chance)
        for index, asin in enumerate(_asins(count, chance))
    ]


def _asins(count: int, chance: random.Random) -> list[str]:
    """Draw different numbers of products, such as BQ7K, as short as they can be.

    A small policy can copy one of letters and digits in turn, in which few signs follow themselves;
    of digits alone, it swaps them.
    """
    signs = [LETTERS]
    while math.prod(map(len, signs)) < count:
        signs.append(string.digits if signs[-1] == LETTERS else LETTERS)
    asins = []
    for number in chance.sample(range(math.prod(map(len, signs))), count):
        asin = ""
        for each in signs:
            number, index = divmod(number, len(each))
            asin += each[index]
        asins.append(f"B{asin}")
    return asins


def _product(kind: Kind, asin: str, chance: random.Random) -> Product:
    attributes = tuple(chance.sample(kind.attributes, chance.randint(3, 5)))
    options = {
        name: tuple(sorted(chance.sample(values, chance.randint(2, min(5, len(values))))))
        for name, values in kind.options.items()
    }
    shown = " ".join(attributes[:2])
    price = chance.randrange(100 * kind.prices[0], 100 * kind.prices[1]) / 100
    return Product(
        asin=asin,
        title=f"{chance.choice(BRANDS)} {string.capwords(f'{kind.query} {shown}')}",
        category=kind.category,
        query=kind.query,
        path=kind.path,
        description=f"These {kind.query} are {', '.join(attributes[:-1])} and {attributes[-1]}.",
        features=tuple(f"{attribute.capitalize()}." for attribute in attributes),
        attributes=attributes,
        options=options,
        price=price,
    )


def goals(products: Sequence[Product], split: str, count: int, seed: int) -> list[Goal]:
    """Draw goals of a split; no two splits share a product that a goal was made from.

    Raises ValueError where the catalogue has too few.
    """
    chance = random.Random(f"{seed}/goals/{split}")
    result: list[Goal] = []
    taken: set[str] = set()
    for goal in _drawn([each for each in products if split_of(each) == split], chance, 20 * count):
        if len(result) == count:
            break
        if goal.instruction not in taken:
            taken.add(goal.instruction)
            result.append(goal)
    if len(result) < count:
        raise ValueError(
            f"environment.shop: {len(result)} goals for {split} are found among {len(products)} "
            f"products, and {count} are asked for: raise products, or lower "
            f"prepare.questions.{split}"
        )
    return result


def _drawn(products: Sequence[Product], chance: random.Random, tries: int) -> Iterator[Goal]:
    for _ in range(tries if products else 0):
        yield _goal(chance.choice(products), chance)


def split_of(product: Product) -> str:
    """Return the split whose goals may be made from a product, by the digest of its content."""
    text = f"{product.title}/{sorted(product.attributes)}/{product.price}"
    number = hashlib.blake2b(text.encode(), digest_size=2).digest()[0] % 24
    return next(split for split, numbers in SHARES.items() if number in numbers)


def _goal(product: Product, chance: random.Random) -> Goal:
    attributes = tuple(chance.sample(product.attributes, chance.randint(1, 2)))
    options = {name: chance.choice(values) for name, values in product.options.items()}
    price = most_price(product.price, [chance.random(), chance.random()])
    words = {
        "attributes": " and ".join(attributes),
        "query": product.query,
        "options": ", and ".join(f"{name}: {value}" for name, value in options.items()),
        "price": price,
    }
    return Goal(
        instruction=chance.choice(WORDINGS).format(**words),
        category=product.category,
        query=product.query,
        path=product.path,
        title=product.title,
        attributes=attributes,
        options=tuple(options.values()),
        price=price,
    )
