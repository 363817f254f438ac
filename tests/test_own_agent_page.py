"""docs/own-agent.md: its files are there, its commands write sound recipes."""

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from benchmarks import stand_in as stand_in_policy
from flows.commands import new, plan
from flows.host.gpu_cards import CARDS, GIB
from tasks import recipes
from tasks.dialects import open_dialect
from tasks.environments import open_environment
from tasks.policy.load_model import load_tokenizer
from tasks.recipes import contradictions
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Question
from tests.test_docs import ROOT, blocks, files_of

AGENT = "own-agent.md"
MOST_WORDS = 600
CALL = """<tool_call>
{"name": "look_up", "arguments": {"item": "ladder"}}
</tool_call>"""


def commands_of(page):
    """Return the commands of a page; what they read from their lines belongs to them."""
    text = "".join(blocks(page, "sh"))
    return [each.group().strip() for each in re.finditer(r"cat .*?\nEND\n|[^\n]+\n", text, re.S)]


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A folder with the recipes, own files and questions of the checkout."""
    for name in ("params", "own", "data/sources"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_page_of_an_agent_is_short_and_names_what_there_is():
    text = (ROOT / "docs" / AGENT).read_text()
    assert len(text.split()) <= MOST_WORDS
    for name in re.findall(r"`((?:own|data|params)/[\w./]+\.(?:py|jsonl|yaml))`", text):
        assert name.startswith("params/mine") or (ROOT / name).is_file(), name
    for name in re.findall(r"^\| `(own-\S+)` \|", text, re.MULTILINE):
        assert recipes.load(name, ROOT / "params").cold_start is None
    assert 'own/warehouse.py:look_up"' in text


def test_its_gold_answers_come_from_the_tool_alone():
    """The prices of what a question names give its answer, and no item is in both files."""
    stock = runpy.run_path(str(ROOT / "own/warehouse.py"))["STOCK"]
    items = {}
    for split in ("train", "test"):
        file = ROOT / "data/sources/warehouse" / f"{split}.jsonl"
        for record in map(json.loads, file.read_text().splitlines()):
            question, answer = record["question"], int(record["answer"])
            named = [name for name in stock if re.search(rf"\b{name}(e?s)?\b", question)]
            items.setdefault(split, set()).update(named)
            times = int(number[0]) if (number := re.search(r"\d+", question)) else 1
            column = 1 if "in stock" in question else 0
            assert named and answer == times * sum(stock[name][column] for name in named), record
    assert not items["train"] & items["test"]
    system = recipes.load("own-1.5b", ROOT / "params").dialogue.system
    assert not [name for name in stock if name in system]


def test_its_rehearsal_is_a_sound_recipe(copy, capsys):
    """The commands that write the recipe are those of the page; its files are there."""
    (make,) = [each for each in commands_of(AGENT) if each.startswith("make new")]
    name, base = re.fullmatch(r"make new NAME=(\S+) FROM=(\S+)", make).groups()
    assert new.main([name, "--from", base]) == 0
    (stand_in,) = [each for each in commands_of(AGENT) if "stand_in" in each]
    assert stand_in_policy.main(stand_in.split()[3:]) == 0
    (written,) = [each for each in commands_of(AGENT) if each.startswith("cat ")]
    subprocess.run(["bash", "-c", written], check=True)
    recipe = recipes.load(name, Path("params"))
    assert (recipe.machine.device, recipe.engine.kind) == ("cpu", "transformers")
    assert recipe.prepare.policy.revision is None
    tokenizer = load_tokenizer(recipe.prepare.policy.name)
    with open_environment(recipe.tools, {}, 1, copy) as opened, opened.session() as session:
        dialect = open_dialect(recipe.dialect, tokenizer, recipe.dialogue, opened.specs)
        ((handle, _),) = session.open([Question("q", "warehouse", "?", ())])
        prompt = dialect.prompt(Question("q", "warehouse", "How many?", ("1",)))
        turn = np.array(tokenizer.encode(f"{CALL}<|im_end|>"), np.int32)
        read = dialect.read(prompt, turn, CALL, "end")
        (found,) = session.act([(handle, read.call)])
    asked = tokenizer.decode(prompt)
    assert "The name of one item" in asked and "How many?" in asked
    assert read.outcome == Outcome.CALL
    assert found.text == "58 euros, 15 in stock"


def test_yours_in_its_place(copy):
    """The page's own tool, questions and recipe."""
    for name, source in files_of(AGENT).items():
        Path(name).write_text(source)
    table = Path("params/benchmarks.yaml")
    row = re.search(r"^warehouse:.*?\n\n", table.read_text(), re.M | re.S)[0]
    table.write_text(table.read_text() + "\n" + row.replace("warehouse:", "parts:"))
    Path("params/mine.yaml").write_text(blocks(AGENT, "yaml")[0])
    recipe = recipes.load("mine", Path("params"))
    assert [*recipe.tools] == ["own/parts.py:find"]
    said = (contradictions.untold_tools, contradictions.foreign_tags, contradictions.no_calls)
    assert [fault for check in said for fault in check(recipe)] == []
    assert recipe.prepare.questions.train == ("parts/train",)


def test_its_figures_are_those_of_plan():
    text = (ROOT / "docs" / AGENT).read_text()
    rows = re.findall(
        r"^\| `(own-\S+)` .* (\S+) of (\S+) GiB of a card of (\d+) GB, some (\d+) s an", text, re.M
    )
    assert [row[0] for row in rows] == ["own-1.5b", "own-4b"]
    for name, needed, usable, size, seconds in rows:
        fit = plan.answer(plan.read(name), CARDS[size])
        assert fit.fits
        assert f"{fit.memory.peak / GIB:.1f}" == needed
        assert f"{fit.card.usable / GIB:.1f}" == usable
        assert fit.seconds.total == pytest.approx(int(seconds), rel=0.05)
