"""The first file of each page about one's own parts runs as it is written, with its recipe."""

import re
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import yaml

from tasks import recipes
from tasks.dialects import open_dialect
from tasks.environments import open_environment
from tasks.policy.tiny import build_tokenizer
from tasks.rewards.scoring import score_trees
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import PROMPT, TURN, Call, Node, Observation, Question, Tree

ROOT = Path(__file__).parents[1]
TINY = yaml.safe_load((ROOT / "params/tiny.yaml").read_text())
MOST_LINES = 40


def blocks(page, language):
    """Return the blocks of code of a page in a language."""
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def files_of(page):
    """Return the files of own/ that a page shows: path -> source."""
    found = [re.match(r"# (own/\w+\.py)\n", block) for block in blocks(page, "python")]
    return {m[1]: block for m, block in zip(found, blocks(page, "python"), strict=True) if m}


def merged(recipe, change):
    """Return a recipe with other sections; environment, dialect and questions as a whole."""
    whole = deepcopy(recipe)
    for key, value in change.items():
        nested = isinstance(value, dict) and isinstance(whole.get(key), dict)
        replaced = key in ("environment", "dialect", "questions") or value == {}
        whole[key] = merged(whole[key], value) if nested and not replaced else value
    return whole


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder with the files of a page; returns the page's first recipe, checked."""

    def prepared(page):
        for name, source in files_of(page).items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(source)
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        change = yaml.safe_load(blocks(page, "yaml")[0])
        return recipes.check(merged(TINY, change), page)

    return prepared


@pytest.mark.parametrize("page", ["own-tool.md", "own-environment.md", "own-reward.md"])
def test_a_page_begins_with_a_short_file(page):
    assert len(next(iter(files_of(page).values())).splitlines()) <= MOST_LINES


def test_own_tool(checkout, tmp_path):
    recipe = checkout("own-tool.md")
    with open_environment(recipe.tools, {}, 1, tmp_path) as opened, opened.session() as session:
        ((handle, _),) = session.open([Question("q", "toy", "?", ())])
        rome, odd = session.act([(handle, Call("weather", city)) for city in ("Rome", "\ud800")])
    assert rome == Observation(Outcome.OK, "sunny, 24 degrees")
    assert odd.outcome == Outcome.OK


def test_own_environment(checkout, tmp_path):
    recipe = checkout("own-environment.md")
    ((name, chosen),) = recipe.environment.items()
    kind = recipes.kind_of("environment", name)
    task = kind.tasks(chosen, "train", 1, 0)[0]
    with open_environment({}, recipe.environment, 1, tmp_path) as opened:
        assert [spec.name for spec in opened.specs] == ["guess"]
        with opened.session() as session:
            ((handle, first),) = session.open([task])
            assert first.text == "6 guesses left"
            bad, wrong = (
                session.act([(handle, Call("guess", word))])[0] for word in ("no", "zzzzz")
            )
    assert (bad.outcome, bad.reward) == ("not_admissible", -0.1)
    assert (wrong.text, wrong.terminated, wrong.info) == ("-----", False, {"success": False})


def test_own_reward(checkout):
    recipe = checkout("own-reward.md")
    question = Question("q", "toy", "?", ("7",))
    none = np.zeros(0, np.float32)
    text = "<think>a b</think><answer>\\boxed{7}</answer>"
    tree = Tree(
        question,
        [
            Node(-1, PROMPT, "", "?", np.zeros(1, np.int32), none, none),
            Node(0, TURN, Outcome.ANSWER, text, np.zeros(1, np.int32), none, none),
        ],
        [1],
    )
    (row,) = score_trees([tree], recipe.reinforce.reward)
    words = len(text.split())
    assert row["parts"]["brevity"] == pytest.approx(0.2 * (1 - words / 200))
    assert row["reward"] == pytest.approx(1 + row["parts"]["brevity"])


def test_own_dialect(checkout):
    checkout("own-dialect.md")
    change = yaml.safe_load(blocks("own-dialect.md", "yaml")[1])
    recipe = recipes.check(merged(TINY, change), "own-dialect.md")
    tokenizer = build_tokenizer(["Here you are: 7"], recipe.prepare.policy)
    dialect = open_dialect(recipe.dialect, tokenizer, recipe.dialogue, [])
    tokens = np.zeros(0, np.int32)
    text, _ = dialect.observe(tokens, tokens, [Call("python", "7")], [Observation("ok", "7")], 60)
    assert text == "<result>Here you are: 7</result>"
