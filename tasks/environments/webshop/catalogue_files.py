"""WebShop's own files: a catalogue and instructions, in the form of its data sets.

items_shuffle*.json     a list of products
items_ins_v2*.json      asin -> attributes, an instruction that was made, and its attributes
items_human_ins*.json   asin -> instructions that people wrote, with attributes and options

They are JSON texts that are read whole: WebShop's largest catalogue needs some 15 GiB of memory.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.environments.webshop.products import Goal, Product, most_price

CATALOGUE, MADE, WRITTEN = "items_shuffle*.json", "items_ins_v2*.json", "items_human_ins*.json"
TEXTS = ("asin", "name", "category", "query", "product_category", "full_description")
LONGEST_ASIN = 10  # characters; WebShop leaves longer ones out
UNPRICED = 100.0  # dollars: WebShop's price of a product that has none
SHOWN = 20  # faults that are named one by one
TEST, VALIDATION = (
    500,
    1000,
)  # WebShop's goals: the first 500 for test, the next 1,000 for validation
SHUFFLE = 233  # WebShop's seed for the order of goals


def missing(folder: Path) -> list[str]:
    """Return a line for each file that is not there; [] for none."""
    return [
        f"environment.shop.files: {folder} has no file {name}: put WebShop's data there, or set "
        "files to null for a catalogue that is made"
        for name in (CATALOGUE, MADE, WRITTEN)
        if not any(folder.glob(name))
    ]


def products(folder: Path, count: int | None, seed: int) -> list[Product]:
    """Return the first ``count`` products of the files, or all; each asin once.

    ``seed`` draws prices from ranges. Raises ValueError with all faults.
    """
    if absent := missing(folder):
        raise ValueError("\n".join(absent))
    entries, attributes = _read(folder, CATALOGUE), _read(folder, MADE)
    if not isinstance(entries, list) or not isinstance(attributes, dict):
        raise ValueError(f"{folder}: {CATALOGUE} must hold a list, and {MADE} an object")
    chance = random.Random(f"{seed}/prices")
    by_asin: dict[str, Product] = {}
    faults: list[str] = []
    for index, entry in enumerate(entries[:count]):
        if wrong := _faults(entry):
            faults += [f"{_file(folder, CATALOGUE)}, entry {index}: {fault}" for fault in wrong]
        elif entry["asin"] != "nan" and len(entry["asin"]) <= LONGEST_ASIN:
            listed = attributes.get(entry["asin"], {}).get("attributes", ())
            by_asin.setdefault(entry["asin"], _product(entry, tuple(listed), chance))
    if faults:
        more = [f"and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
        raise ValueError("\n".join([*faults[:SHOWN], *more]))
    return list(by_asin.values())


def _file(folder: Path, name: str) -> Path:
    return min(folder.glob(name))


@functools.lru_cache(maxsize=3)
def _text(file: Path, changed: float) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON ({error}): fetch it again") from error


def _read(folder: Path, name: str) -> Any:
    file = _file(folder, name)
    return _text(file, file.stat().st_mtime)


def _faults(entry: Any) -> list[str]:
    if not isinstance(entry, dict):
        return [f"is a {type(entry).__name__}: expected an object"]
    faults = [
        f"{name} is {entry.get(name)!r:.60}: expected a text"
        for name in TEXTS
        if not isinstance(entry.get(name), str)
    ]
    options = entry.get("customization_options") or {}
    if not isinstance(options, dict):
        faults.append(f"customization_options is {options!r:.60}: expected an object, or null")
    return faults


def _product(
    entry: Mapping[str, Any], attributes: tuple[str, ...], chance: random.Random
) -> Product:
    features = entry.get("small_description") or [""]
    return Product(
        asin=entry["asin"],
        title=entry["name"],
        category=entry["category"],
        query=entry["query"].lower().strip(),
        path=entry["product_category"],
        description=entry["full_description"],
        features=tuple(features if isinstance(features, list) else [features]),
        attributes=attributes,
        options=_options(entry.get("customization_options") or {}),
        price=_price(entry.get("pricing") or "", chance),
    )


def _options(given: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return names and values as WebShop writes them: in lower case, with " | " for "/"."""
    return {
        name.lower(): tuple(
            str(each["value"]).strip().replace("/", " | ").lower() for each in contents
        )
        for name, contents in given.items()
        if contents
    }


def _price(text: str, chance: random.Random) -> float:
    """Return the price in "$12.50", a draw from the range in "$10 - $20", or UNPRICED."""
    prices = [float(each.replace(",", "")) for each in re.findall(r"\$([\d,]+\.?\d*)", text)][:2]
    if not prices:
        return UNPRICED
    return prices[0] if len(prices) == 1 else round(chance.uniform(*sorted(prices)), 2)


# ---------------------------------------------------------------- goals


def goals(
    folder: Path, products: Sequence[Product], split: str, count: int, seed: int, written: bool
) -> list[Goal]:
    """Return goals of a split: those that people wrote, or those that were made.

    All goals are shuffled; the first 500 are for test, the next 1,000 for validation, the others
    for training, as in WebShop; of fewer than 3,000 goals, a sixth and a third. Raises ValueError
    where there are too few.
    """
    instructions = _read(folder, WRITTEN if written else MADE)
    chance = random.Random(f"{seed}/limits")
    every = list((_written if written else _made)(products, instructions, chance))
    random.Random(SHUFFLE).shuffle(every)
    test, validation = _shares(len(every))
    parts = {
        "test": every[:test],
        "validation": every[test:validation],
        "train": every[validation:],
    }
    if len(parts[split]) < count:
        raise ValueError(
            f"{folder}: {len(parts[split])} goals are there for {split}, and {count} are asked "
            f"for: lower prepare.questions.{split}, or raise environment.shop.products"
        )
    return parts[split][:count]


def _shares(count: int) -> tuple[int, int]:
    """Return where the goals for test and those for validation end."""
    if count >= 2 * (TEST + VALIDATION):
        return TEST, TEST + VALIDATION
    return count // 6, count // 2


def _written(
    products: Sequence[Product], instructions: Mapping[str, Any], chance: random.Random
) -> Iterator[Goal]:
    for product in products:
        for each in instructions.get(product.asin, ()):
            if each["instruction_attributes"]:
                options = each["instruction_options"]
                values = options.values() if isinstance(options, dict) else options
                text = each["instruction"].strip(".")
                yield _goal(product, text, each["instruction_attributes"], tuple(values), chance)


def _made(
    products: Sequence[Product], instructions: Mapping[str, Any], chance: random.Random
) -> Iterator[Goal]:
    for product in products:
        instruction = instructions.get(product.asin, {})
        if not instruction.get("instruction") or not instruction.get("instruction_attributes"):
            continue
        names = sorted(product.options)
        for values in itertools.product(*(product.options[name] for name in names)):
            options = ", and ".join(f"{n}: {value}" for n, value in zip(names, values, strict=True))
            text = instruction["instruction"] + (f" with {options}" if options else "")
            yield _goal(product, text, instruction["instruction_attributes"], values, chance)


def _goal(
    product: Product,
    text: str,
    attributes: Sequence[str],
    values: tuple[str, ...],
    chance: random.Random,
) -> Goal:
    price = most_price(product.price, [chance.random(), chance.random()])
    limit = f", and price lower than {price:.2f} dollars" if price < 1_000_000 else ""
    return Goal(
        instruction=text + limit,
        category=product.category,
        query=product.query,
        path=product.path,
        title=product.title,
        attributes=tuple(attributes),
        options=values,
        price=price,
    )
