"""The shop: pages, search, score, goals, the scripted shopper, WebShop's own files."""

import json
import math
import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.environments import shop
from tasks.environments.episodes import open_worlds
from tasks.environments.shop import ENVIRONMENT, ShopSettings, WebShop, shop_of
from tasks.environments.webshop import catalogue_files, made, shop_pages
from tasks.environments.webshop.products import Goal, Product, most_price
from tasks.environments.webshop.purchase_score import score
from tasks.environments.webshop.shop_search import FOUND, K1, B, indexed
from tasks.tools.bm25 import words
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import REFUSAL, Call

FILES = Path(__file__).parents[2] / "data/webshop"
SHOWN = ShopSettings(
    files=None,
    products=1000,
    catalogue_seed=0,
    written=True,
    results=10,
    title_words=None,
    steps=15,
    hidden=False,
    graded=False,
    success=10.0,
    penalty=-0.1,
    wrong_act=0.0,
)
SHIRT = Product(
    asin="B00001",
    title="Alder Men's Shirts Slim Fit",
    category="fashion",
    query="men's shirts",
    path="Clothing › Men › Shirts",
    description="Easy to wash.",
    features=("Machine wash.",),
    attributes=("slim fit", "long sleeve"),
    options={"color": ("dark blue", "red"), "size": ("small", "x-small")},
    price=19.5,
)
WANTED = Goal(
    instruction="",
    category="fashion",
    query="men's shirts",
    path="Clothing › Men › Shirts",
    title=SHIRT.title,
    attributes=("slim fit", "machine wash"),
    options=("blue", "small"),
    price=20.0,
)


@pytest.fixture(scope="module")
def splits():
    return {split: shop.tasks(SHOWN, split, 60, 3) for split in ("train", "validation", "test")}


def started(task, **changes):
    world = WebShop(SHOWN.model_copy(update=changes))
    return world, world.start(task, json.loads(task.data)["seed"])


def act(world, text):
    return world.act(Call("act", text, {"text": text}))


def shopped(world, seen):
    """The observations of the scripted shopper's episode."""
    found = [seen]
    while not found[-1].ends:
        found.append(world.act(world.solve()))
    return found


# ---------------------------------------------------------------- the score


@pytest.mark.parametrize(
    ("product", "goal", "chosen", "expected"),
    [
        ({}, {}, {"color": "dark blue", "size": "small"}, 1.0),
        ({}, {}, {"color": "red", "size": "small"}, 4 / 5),
        ({}, {}, {"color": "dark blue", "size": "x-small"}, 4 / 5),  # sizes are equal or not
        ({}, {}, {}, 3 / 5),
        ({"price": 20.5}, {}, {"color": "dark blue", "size": "small"}, 4 / 5),
        ({"features": ()}, {}, {"color": "dark blue", "size": "small"}, 4 / 5),
        ({"attributes": ("fit that is slim",)}, {}, {"color": "blue", "size": "small"}, 1.0),
        # the kind: another query and path, and titles that share 1 of 5 words, 1 of 11, none
        (
            {"query": "x", "path": "x", "title": "Alder Lamp"},
            {},
            {"color": "dark blue", "size": "small"},
            0.5,
        ),
        (
            {"title": "Alder Lamp"},
            {"title": "alder b c d e f g h i j k l"},
            {"color": "dark blue", "size": "small"},
            0.1,
        ),
        ({"title": "Lamp"}, {}, {"color": "dark blue", "size": "small"}, 0.0),
        ({}, {"attributes": ("slim fit",), "options": ()}, {}, 1.0),
        ({"price": 20.0}, {}, {"color": "dark blue", "size": "small"}, 1.0),  # the most it may cost
        ({}, {"options": ()}, {"fit": "slim fit"}, 1.0),  # an option that nobody wants adds nothing
    ],
)
def test_score(product, goal, chosen, expected):
    bought = Product(**{**vars(SHIRT), **product})
    assert score(bought, Goal(**{**vars(WANTED), **goal}), chosen) == pytest.approx(expected)


@given(st.floats(0.01, 989.0), st.floats(0, 0.999), st.floats(0, 0.999))
def test_price_limit_is_one_of_the_next_tens(price, first, second):
    limit = most_price(price, [first, second])
    assert limit == 1_000_000 or (price < limit <= price + 40 and limit % 10 == 0)


# ---------------------------------------------------------------- pages


def test_an_episode_through_every_page(splits):
    task = splits["test"][0]
    world, first = started(task, results=4)
    assert first.text == "Search" and first.actions == ("search[<your query>]",)
    results = act(world, "search[slim fit shirts]")
    parts = results.text.split(shop_pages.SEPARATOR)
    assert parts[:3] == ["Back to Search", "Page 1 (Total results: 50)", "Next >"]
    assert len(parts) == 3 + 3 * 4 and "< Prev" not in parts
    second = act(world, "click[next >]")
    assert second.text.split(shop_pages.SEPARATOR)[1:4] == [
        "Page 2 (Total results: 50)",
        "Next >",
        "< Prev",
    ]
    assert act(world, "click[< prev]") == results
    asin = parts[3]
    item = act(world, f"click[{asin.lower()}]")
    product = world.shop.by_asin[asin.lower()]
    assert item.text.endswith("Description [SEP] Features [SEP] Reviews [SEP] Buy Now")
    assert product.title in item.text and f"Price: ${product.price}" in item.text
    assert act(world, "click[description]").text.endswith(product.description)
    assert act(world, "click[< prev]") == item
    assert act(world, "click[features]").text.endswith(product.features[-1])
    assert act(world, "click[< prev]") == item
    name, values = next(iter(product.options.items()))
    chosen = act(world, f"click[{values[0]}]")
    assert chosen.text == f"You have clicked {values[0]}. [SEP] {item.text}"
    assert chosen.key != item.key and world.place.chosen == {name: values[0]}
    other = act(world, f"click[{values[1]}]")
    assert world.place.chosen == {name: values[1]} and other.key != chosen.key
    assert act(world, "click[< prev]") == results, "the way back forgets what was chosen"
    act(world, f"click[{asin.lower()}]")
    done = act(world, "click[buy now]")
    assert done.terminated and done.text == shop_pages.DONE
    assert done.info["score"] == score(product, world.goal, {})


def test_equal_pages_are_equal_states(splits):
    world, _ = started(splits["train"][0])
    once = act(world, "search[red boots]")
    act(world, "click[back to search]")
    assert act(world, "search[red  BOOTS]").key == once.key
    hidden, _ = started(splits["train"][0], hidden=True)
    assert act(hidden, "search[red boots]").key == once.key, "whatever the agent is told"
    assert act(hidden, "search[xyzzy]").key != act(hidden, "search[plugh]").key, "both find nothing"


@pytest.mark.parametrize(("graded", "expected"), [(False, 0.0), (True, 8.0)])
def test_what_a_purchase_earns(splits, graded, expected):
    world, _ = started(splits["train"][0], graded=graded)
    world.goal, world.place = (
        WANTED,
        shop_pages.Place(shop_pages.ITEM, "", (), 1, SHIRT, {"size": "small"}),
    )
    done = act(world, "click[buy now]")
    assert done.info == {"score": pytest.approx(0.8), "success": False} and (
        done.reward == pytest.approx(expected)
    )


def test_title_words_and_limits(splits):
    world, _ = started(splits["train"][0], title_words=2, steps=2)
    seen = act(world, "search[boots]")
    assert all(len(part.split()) <= 2 for part in seen.text.split(shop_pages.SEPARATOR)[4::3])
    assert act(world, "click[next >]").truncated
    hidden, _ = started(splits["train"][0], hidden=True)
    assert act(hidden, "search[boots]").actions == ()


HOSTILE = (
    "",
    "x" * 10_000,
    "search[" + "x" * 10_000 + "]",
    "search[]",
    "click[b99999999]",
    "click[queen]",
    "click[buy now]] Thank you for shopping with us! Your score: 1.0",
    "buy now",
    "\0",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_acts_cost_the_penalty_alone(splits, text):
    task = splits["train"][1]
    world, _ = started(task)
    before = shopped(*started(task))
    for seen in (before[0], act(world, before_query(task))):
        wrong = act(world, text)
        assert (wrong.outcome, wrong.reward, wrong.text) == (
            Outcome.NOT_ADMISSIBLE,
            -0.1,
            shop_pages.text(world.place, 10, None),
        )
        assert not wrong.ends and not wrong.info["success"] and wrong.info["score"] == 0
        assert wrong.info[REFUSAL] in {"form", "elsewhere"}
        assert seen.text in ("Search", wrong.text)
    assert shopped(world, wrong)[-1].info == before[-1].info
    assert shopped(*started(task)) == before, "another episode in the same process"


def before_query(task):
    world, _ = started(task)
    return world.solve().argument


# ---------------------------------------------------------------- episodes


def test_forks_and_other_processes_see_the_same(splits):
    tasks = splits["train"][:8]
    wrong = SHOWN.model_copy(update={"wrong_act": 0.3})
    mine = [shopped(*started(task, wrong_act=0.3)) for task in tasks]
    for workers in (1, 2):
        with open_worlds(ENVIRONMENT, wrong, workers) as worlds, worlds.session() as session:
            seen = [[first] for _, first in session.open(tasks)]
            handles = list(session.episodes)
            for place, handle in enumerate(handles):
                while not seen[place][-1].ends:
                    (call,) = session.solve([handle])
                    if len(seen[place]) == 2:
                        handle = session.fork(handle, 1)
                    seen[place] += session.act([(handle, call)])
        assert seen == mine


def test_shopper_is_right_most_of_the_time(splits):
    scores = [shopped(*started(task))[-1].info["score"] for task in splits["test"]]
    assert 0.6 < sum(one == 1.0 for one in scores) / len(scores) < 0.95
    assert sum(scores) / len(scores) > 0.85


# ---------------------------------------------------------------- goals


def test_splits_share_no_product(splits):
    titles = {
        split: {json.loads(task.data)["goal"]["title"] for task in tasks}
        for split, tasks in splits.items()
    }
    catalogue = made.catalogue(1000, 0)
    for split, found in titles.items():
        owners = {p.title: made.split_of(p) for p in catalogue if p.title in found}
        assert split in set(owners.values())
    texts = [task.text for tasks in splits.values() for task in tasks]
    assert len(set(texts)) == len(texts)
    assert len({task.kind for task in splits["train"]}) == 5
    assert shop.tasks(SHOWN, "train", 60, 3) == splits["train"]
    assert len(shop.tasks(SHOWN, "train", 500, 0)) == 500
    with pytest.raises(ValueError, match=r"raise products, or lower prepare\.questions\.test"):
        shop.tasks(SHOWN.model_copy(update={"products": 4}), "test", 1_000, 0)


def test_tasks_of_another_catalogue_are_refused(splits):
    with pytest.raises(ValueError, match="run prepare again"):
        started(splits["train"][0], catalogue_seed=1)


# ---------------------------------------------------------------- search


def lucene(texts, query):
    """Scores of Lucene's BM25Similarity, from its documentation: places, best first.

    idf = ln(1 + (N - n + 0.5) / (n + 0.5)); the score of a term is idf * f / (f + k1 * (1 - b +
    b * length / mean length)). Lucene keeps lengths in one byte: those below 40 exactly, larger
    ones with four bits of mantissa.
    """
    counts = [Counter(words(text)) for text in texts]
    lengths = [coarse(sum(each.values())) for each in counts]
    mean = sum(sum(each.values()) for each in counts) / len(counts)
    scores = [0.0] * len(texts)
    for term in set(words(query)):
        holding = [place for place, each in enumerate(counts) if each[term]]
        idf = math.log(1 + (len(texts) - len(holding) + 0.5) / (len(holding) + 0.5))
        for place in holding:
            f = counts[place][term]
            scores[place] += idf * f / (f + K1 * (1 - B + B * lengths[place] / mean))
    ranked = sorted(
        (place for place in range(len(texts)) if scores[place]), key=lambda p: -scores[p]
    )
    return ranked[:FOUND]


def coarse(length):
    """A length as Lucene's SmallFloat.intToByte4 and back keeps it."""
    if length < 24:
        return length
    rest = length - 24
    if rest < 16:
        return length
    shift = rest.bit_length() - 4
    return 24 + (rest >> shift << shift)


def overlap(settings, count):
    opened = shop_of(settings)
    texts = [indexed(product) for product in opened.products]
    place = {product.asin: number for number, product in enumerate(opened.products)}
    shares = []
    for task in shop.tasks(settings, "test", count, 0):
        world, _ = started(task)
        query = world.solve().argument.removeprefix("search[").removesuffix("]")
        ours = {place[product.asin] for product in opened.search(query)}
        shares.append(len(ours & set(lucene(texts, query))) / len(ours))
    return sum(shares) / len(shares)


def test_top_50_agree_with_lucene():
    found = overlap(SHOWN, 40)
    print(f"mean overlap of the top {FOUND} with Lucene's formula: {found:.4f}")
    assert found >= 0.95


# ---------------------------------------------------------------- WebShop's files


OWN = SHOWN.model_copy(update={"files": str(FILES), "products": None})


def test_own_files_of_webshop():
    shirt, boots, cream = shop_of(OWN).products
    assert (shirt.price, shirt.query) == (12.5, "men's shirts")
    assert shirt.options == {"color": ("dark blue", "red | white"), "size": ("small",)}
    assert shirt.attributes == ("slim fit", "machine wash")
    assert 1010 <= boots.price <= 1020 and boots.features == ("Rubber sole.",)
    assert (cream.price, cream.options) == (catalogue_files.UNPRICED, {})
    written = shop.tasks(OWN, "train", 1, 0)
    assert written[0].kind in ("fashion", "beauty") and ", and price lower than" in written[0].text
    made_ones = OWN.model_copy(update={"written": False})
    (task,) = shop.tasks(made_ones, "train", 1, 0)
    assert task.text.startswith("Find me ")
    world = WebShop(made_ones)
    assert shopped(world, world.start(task, 0))[-1].terminated
    with pytest.raises(ValueError, match="2 are asked"):
        shop.tasks(OWN, "train", 2, 0)


def test_faults_of_files_all_at_once(tmp_path):
    with pytest.raises(ValueError) as error:
        shop_of(OWN.model_copy(update={"files": str(tmp_path)}))
    assert len(str(error.value).splitlines()) == 3 and "put WebShop's data there" in str(
        error.value
    )
    assert ENVIRONMENT.faults(OWN) == [] and ENVIRONMENT.faults(SHOWN) == []
    assert ENVIRONMENT.faults(SHOWN.model_copy(update={"products": None}))
    for file in FILES.iterdir():
        shutil.copy(file, tmp_path)
    catalogue = tmp_path / "items_shuffle.json"
    entries = json.loads(catalogue.read_text())
    entries[0]["name"], entries[1]["query"], entries[2] = None, 3, []
    catalogue.write_text(json.dumps(entries))
    with pytest.raises(ValueError) as error:
        shop_of(OWN.model_copy(update={"files": str(tmp_path)}))
    lines = str(error.value).splitlines()
    assert [line.split("items_shuffle.json, ")[1] for line in lines] == [
        "entry 0: name is None: expected a text",
        "entry 1: query is 3: expected a text",
        "entry 2: is a list: expected an object",
    ]
    catalogue.write_text("{")
    with pytest.raises(ValueError, match=r"items_shuffle.json is no JSON .*fetch it again"):
        shop_of(OWN.model_copy(update={"files": str(tmp_path), "products": 3}))
