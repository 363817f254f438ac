"""shop: find a product that fits an instruction, choose its options and buy it, as in WebShop.

The task is that of WebShop (arXiv 2207.01206): a search page, pages of results, pages of products
with options, and the purchase, which ends the episode with a score. The catalogue is WebShop's,
from the user's files, or made (webshop/made.py). Search is BM25, in place of WebShop's Lucene.
"""

from __future__ import annotations

import copy
import functools
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from params.schema.base import Flag, Float, Frozen, NonNegative, Positive, Probability
from tasks.environments.contract import FREE_TEXT, EnvironmentKind
from tasks.environments.webshop import catalogue_files, made, shop_pages
from tasks.environments.webshop.products import Goal, Product
from tasks.environments.webshop.purchase_score import STOP_WORDS, score
from tasks.environments.webshop.shop_pages import ITEM, RESULTS, SEARCH, Place
from tasks.environments.webshop.shop_search import Shop, open_shop
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import REFUSAL, Call, Observation, Question

ACT = re.compile(r"(search|click)\[(.*)\]", re.DOTALL)
WORD = re.compile(r"[\w'.-]+")
LIMIT = re.compile(r"price lower than ([0-9]+(?:\.[0-9]+)?) dollars")
UNSAID = frozenset(
    "i am looking find me need would like choose want buy color size scent pack flavor".split()
)
LISTED_SEARCH = "search[<your query>]"  # how a list of admissible acts names the search
LONGEST_QUERY = 400  # characters


class ShopSettings(Frozen):
    """What the shop sells, what an agent sees of it, and what a purchase is worth."""

    files: str | None  # a folder with WebShop's files; null: a catalogue that is made
    products: Annotated[Positive, Field(ge=24)] | None  # how many, made or the first of the files
    catalogue_seed: NonNegative  # of a catalogue that is made, and of prices in files
    written: Flag  # of files: instructions that people wrote; false: those that were made
    results: Positive  # products on a page of results
    title_words: Positive | None  # words of a title that are shown; null: all
    steps: Positive  # acts of an episode, at most
    hidden: Flag  # true: the agent is not told what it can click
    graded: Flag  # true: a purchase earns ``success`` times its score; false: only with score 1
    success: Float  # reward of a purchase with score 1
    penalty: Float  # reward of an act that is not possible
    wrong_act: Probability  # chance that an act of the expert is a random one


class WebShop:
    """One episode: a customer with an instruction."""

    def __init__(self, settings: ShopSettings) -> None:
        self.settings = settings

    def start(self, task: Question, seed: int) -> Observation:
        """Open the search page; ``seed`` decides the expert's mistakes."""
        data = json.loads(task.data)
        self.shop = shop_of(self.settings)
        if data["catalogue"] != self.shop.digest:
            raise ValueError(
                "the catalogue is not the one that the tasks were made for: run prepare again"
            )
        self.goal = Goal.of_data(data["goal"])
        self.seed, self.taken, self.place = seed, 0, Place()
        self.looked: frozenset[str] = frozenset()  # products that the expert has looked at
        return self._seen(Outcome.OK)

    def act(self, call: Call) -> Observation:
        """Search or click. An act that is not possible costs the penalty, and changes nothing."""
        self.taken += 1
        written = " ".join(str(call.values.get("text", call.argument)).lower().split())
        matched = ACT.fullmatch(written)
        kind, argument = (matched[1], matched[2].strip()) if matched else ("", "")
        leads = shop_pages.clickable(self.place, self.settings.results)
        if kind == "search" and 0 < len(argument) <= LONGEST_QUERY:
            hits = tuple(self.shop.search(argument))
            self.place = Place(RESULTS, argument, hits)
        elif kind == "click" and argument in leads:
            place = leads[argument]
            if place is None:
                return self._bought()
            self.place = place
        else:
            refused = self._seen(Outcome.NOT_ADMISSIBLE, self.settings.penalty)
            why = "elsewhere" if kind == "click" else "form"  # no such link here, or no act
            return replace(refused, info={**refused.info, REFUSAL: why})
        return self._seen(Outcome.OK)

    def fork(self) -> WebShop:
        """Return a copy that goes on from here; a place is never changed, so it can be shared."""
        return copy.copy(self)

    def solve(self) -> Call | None:
        """Return the scripted shopper's next act, or at the rate ``wrong_act`` a random one.

        It knows what an agent knows: the instruction and the page.
        """
        chance = random.Random(f"{self.seed}/{self.taken}/expert")
        wrong = chance.random() < self.settings.wrong_act
        text = self._random(chance) if wrong else self._shopping()
        return Call(FREE_TEXT.name, text)

    def _random(self, chance: random.Random) -> str:
        clicks = sorted(shop_pages.clickable(self.place, self.settings.results))
        query = chance.choice(sorted(_words(self.goal.instruction)))
        return f"click[{chance.choice(clicks)}]" if clicks else f"search[{query}]"

    def _shopping(self) -> str:
        place = self.place
        if place.page == SEARCH:
            said = self.goal.instruction.split(", and price")[0].split(". price")[0]
            return f"search[{' '.join(_words(said))}]"
        if place.page == RESULTS:
            product = self._choice(shop_pages.shown(place, self.settings.results))
            return f"click[{product.asin}]" if product else "click[back to search]"
        if place.page != ITEM or place.product is None:
            return "click[< prev]"
        self.looked |= {place.product.asin}
        for name, values in place.product.options.items():
            mentions = [value for value in values if _says(self.goal.instruction, name, value)]
            if mentions and name not in place.chosen:
                return f"click[{max(mentions, key=len).lower()}]"
        return "click[buy now]"

    def _choice(self, products: Sequence[Product]) -> Product | None:
        """Return the product whose title has most words of the instruction, if it can be paid."""
        limit = LIMIT.search(self.goal.instruction)
        most = float(limit[1]) if limit else float("inf")
        instruction_words = set(_words(self.goal.instruction))
        fits = [each for each in products if each.price <= most and each.asin not in self.looked]
        return max(
            fits, key=lambda p: len(instruction_words & set(_words(p.title.lower()))), default=None
        )

    def _bought(self) -> Observation:
        assert self.place.product
        earned = score(self.place.product, self.goal, self.place.chosen)
        whole = self.settings.success * (earned if self.settings.graded else earned == 1.0)
        info = {"score": earned, "success": earned == 1.0}
        return Observation(Outcome.OK, shop_pages.DONE, whole, terminated=True, info=info)

    def _seen(self, outcome: str, reward: float = 0.0) -> Observation:
        settings = self.settings
        clicks = shop_pages.clickable(self.place, settings.results)
        search = [LISTED_SEARCH] if self.place.page == SEARCH else []
        acts = (*search, *(f"click[{each}]" for each in clicks))
        text = shop_pages.text(self.place, settings.results, settings.title_words)
        return Observation(
            outcome,
            text,
            reward,
            truncated=self.taken >= settings.steps,
            state=self.place.key,
            actions=() if settings.hidden else acts,
            info={"score": 0.0, "success": False},
        )


def _words(text: str) -> list[str]:
    """Return the words of an instruction that say something of the product, each once, in order."""
    words = (word.strip(".'-") for word in WORD.findall(text.lower()))
    return [word for word in dict.fromkeys(words) if word and word not in STOP_WORDS | UNSAID]


def _says(instruction: str, name: str, value: str) -> bool:
    """Return whether an instruction names an option: "size: 7", or a value that is no number."""
    named = f"{name}: {value}".lower()
    plain = value.lower() if not value.replace(".", "").isdigit() else named
    return bool(re.search(rf"(?<![\w-]){re.escape(plain)}(?![\w-])", instruction.lower()))


@functools.lru_cache(maxsize=2)
def _opened(folder: str | None, count: int | None, seed: int) -> Shop:
    """Return the shop of a catalogue; it is opened once in a process."""
    products = (
        catalogue_files.products(Path(folder), count, seed)
        if folder
        else made.catalogue(count or 0, seed)
    )
    return open_shop(products)


def shop_of(settings: ShopSettings) -> Shop:
    """Return the shop of these settings. Raises ValueError for faulty files, with all faults."""
    return _opened(settings.files, settings.products, settings.catalogue_seed)


def tasks(settings: ShopSettings, split: str, count: int, seed: int) -> list[Question]:
    """Return ``count`` instructions of a split.

    Raises ValueError for faulty files, with all faults, and where there are too few goals.
    """
    shop = shop_of(settings)
    if settings.files:
        goals = catalogue_files.goals(
            Path(settings.files),
            shop.products,
            split,
            count,
            settings.catalogue_seed,
            settings.written,
        )
    else:
        goals = made.goals(shop.products, split, count, seed)
    return [_question(split, number, goal, shop) for number, goal in enumerate(goals)]


def _question(split: str, number: int, goal: Goal, shop: Shop) -> Question:
    data: dict[str, Any] = {"seed": number, "catalogue": shop.digest, "goal": goal.as_data()}
    return Question(
        f"{split}-{number:05d}", goal.category, goal.instruction, (), data=json.dumps(data)
    )


def _faults(settings: ShopSettings) -> list[str]:
    """Return what is wrong with the settings, one line each."""
    if settings.files is None and settings.products is None:
        return ["products is null, and files too: say how many products are made, 1000 for example"]
    return []


ENVIRONMENT = EnvironmentKind(
    settings=ShopSettings,
    world="tasks/environments/shop.py:WebShop",
    specs=lambda settings: [FREE_TEXT],
    tasks=tasks,
    faults=_faults,
)
