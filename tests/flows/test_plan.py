import re
import runpy
import shutil
import sys

import pytest
import yaml

from flows.commands import plan as command
from flows.host import disk, gpu_cards
from flows.host.gpu_cards import CARDS, GIB, Card
from params import recipe_files
from params.schema import recipe as schema
from tasks.recipes import load as settings_of
from tests import toy_project as toy

PAPERS = ("qwen2.5-3b", "qwen2.5-7b", "llama3.1-8b", "qwen3-8b", "qwen3-14b")
UNKNOWN = {"kind": "pretrained", "name": "some/model", "revision": None, "context": 512}
REFUSED = "no setting makes it fit"


@pytest.fixture(autouse=True)
def checkout(tmp_path, monkeypatch):
    """A folder with the recipes, on a machine without a GPU."""
    for folder in ("params", "own"):
        shutil.copytree(toy.ROOT / folder, tmp_path / folder, ignore=lambda *_: ["__pycache__"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_cards, "card_here", lambda: None)
    return tmp_path


def said(capsys, *arguments):
    status = command.main([*arguments])
    return status, capsys.readouterr().out


def rewritten(folder, name, **changes):
    """The recipe's file with other values; ``section__key=value``."""
    file = folder / "params" / f"{name}.yaml"
    values = recipe_files.read(name, file.parent)
    for path, value in changes.items():
        *sections, key = path.split("__")
        place = values
        for section in sections:
            place = place[section]
        place[key] = value
    file.write_text(yaml.dump(values))


@pytest.mark.parametrize("name", recipe_files.names())
def test_every_recipe_fits_or_is_refused_with_a_reason(capsys, name):
    status, text = said(capsys, name, "--card", *CARDS)
    fits = [f"{card.name}: fits: " in text for card in CARDS.values()]
    fails = [f"{card.name}: does not fit: " in text for card in CARDS.values()]
    assert [not each for each in fits] == fails
    assert status == any(fails)
    assert text.count("an iteration takes some") == sum(fits)
    reasons = text.count("the largest parts are") + text.count("vllm needs")
    assert reasons == sum(fails)
    assert text.count(REFUSED) + text.count("    set ") == sum(fails)


def test_report_has_all_its_parts(capsys):
    status, text = said(capsys, "qwen2.5-3b")
    assert status == 0  # no card was asked for
    for words in (
        "Qwen/Qwen2.5-3B-Instruct, 3.09 billion weights, all learn; arpo, passes in bfloat16",
        *("master weights", "gradients", "Adam's moments", "bfloat16 cast"),
        *("activations", "logits", "vLLM's share"),
        *(card.name for card in CARDS.values()),
        "128 questions x 16 paths x 8192 = 16,777,216",
        "disk, at most",
        "an estimate",
        "20% of a card's dense bfloat16 operations and 60% of its bandwidth",
    ):
        assert words in text


def test_parts_add_up_to_the_need_of_each_phase(capsys):
    _, text = said(capsys, "qwen2.5-7b", "--card", "141")
    lines = re.findall(r"^  (\S.*?) +([\d.]+)$", text, re.MULTILINE)
    parts = re.findall(r"^    (\S.*?) {2,}([\d.]+)$", text, re.MULTILINE)
    shown = {title: float(size) for title, size in lines}
    assert sum(float(size) for _, size in parts) == pytest.approx(sum(shown.values()), abs=0.5)
    for phase, adds in (("update", "the update adds"), ("sampling", "sampling adds")):
        (need,) = re.findall(rf"\b{phase} ([\d.]+)(?:,| of)", text)
        assert float(need) == pytest.approx(shown["stays"] + shown[adds], abs=0.2)


def test_disk_is_that_of_the_check_before_a_run(capsys):
    _, text = said(capsys, "tiny")
    recipe = settings_of("tiny")
    weights = disk.WEIGHT * disk.parameters(recipe.prepare.policy)
    needs = disk.needs(recipe, schema.algorithm_of(recipe), weights).values()
    total = sum(need.lasting for need in needs) + max(need.passing for need in needs)
    assert f"disk, at most: {total / GIB:.1f} GiB" in text
    assert "keep.weights_every 20, optimizer_last 2" in text
    assert "machine.device is cpu" in text and "main memory here: update" in text


def test_advice_written_into_the_recipe_fits(capsys, checkout):
    status, text = said(capsys, "qwen2.5-7b", "--card", "80")
    assert status == 1
    advised = text.split("    set ")[1].split(" (it needs")[0]
    rewritten(checkout, "qwen2.5-7b", **yaml.safe_load(advised))
    status, text = said(capsys, "qwen2.5-7b", "--card", "80")
    assert status == 0, text
    assert "adapters of" in text


def test_too_small_share_for_vllm_is_raised(capsys, checkout):
    rewritten(checkout, "qwen2.5-3b", engine__memory=0.05)
    status, text = said(capsys, "qwen2.5-3b", "--card", "141")
    assert status == 1
    assert "vllm needs 8.0 GiB, and engine.memory 0.05 of the card is 7.0" in text
    assert "    set engine.memory: 0.6 (it needs" in text


PROPOSED = re.compile(
    r"    with machine.precision: bfloat16: ([\d.]+) GiB, (.+) an iteration, in place of ([\d.]+) "
    r"GiB, (.+)"
)


def needs(text):
    """The most GiB of any phase, and the time of an iteration, of the only card in a report."""
    phases = re.search(r"fits: (.+) of [\d.]+ GiB", text)[1]
    time = re.search(r"takes some (.+?): ", text)[1]
    return max(re.findall(r"[\d.]+", phases), key=float), time


def test_proposal_gains_what_it_says(capsys, checkout):
    rewritten(checkout, "tiny", machine__device="cuda")
    _, text = said(capsys, "tiny", "--card", "24")
    [(then, faster, now, slower)] = PROPOSED.findall(text)
    assert (now, slower) == needs(text)
    assert "with machine.precision: bfloat16; engine.kind: vllm" in text
    rewritten(checkout, "tiny", machine__precision="bfloat16")
    _, text = said(capsys, "tiny", "--card", "24")
    assert (then, faster) == needs(text)
    assert float(then) < float(now)
    assert PROPOSED.findall(text) == []


def test_nothing_is_proposed_where_no_gpu_is_asked_for(capsys):
    assert "bfloat16: " not in said(capsys, "tiny")[1]
    assert "    with " not in said(capsys, "qwen2.5-3b", "--card", "80")[1]  # it has both


def test_proposal_for_a_card_that_is_too_small_says_what_makes_it_fit(capsys):
    _, text = said(capsys, "gsm8k", "--card", "80")
    [line] = [line for line in text.splitlines() if "bfloat16; reinforce.rollout.rows" in line]
    assert "recompute: true" in line and "in place of" in line
    _, kept, fewer = re.findall(r"rows: (\d+)", text)[:3]
    assert int(kept) > int(fewer)  # than without bfloat16


def test_what_contradicts_is_printed(capsys, checkout):
    rewritten(checkout, "tiny", dialogue__system="Write <search>words</search>.")
    status, text = said(capsys, "tiny")
    assert status == 0
    [line] = [line for line in text.splitlines() if line.startswith("contradicts: ")]
    assert "params/tiny.yaml: 'dialogue.system' shows the tags <search>" in line


def test_model_that_is_not_here_says_where_commits_are(capsys, checkout):
    rewritten(checkout, "tiny", prepare__policy=UNKNOWN)
    assert command.main(["tiny"]) == 2
    words = capsys.readouterr().err
    assert "https://huggingface.co/some/model/commits/main" in words
    assert "git ls-remote https://huggingface.co/some/model HEAD" in words


def test_several_recipes_give_the_documented_table(capsys):
    status, text = said(capsys, *PAPERS)
    assert status == 0
    assert len(text.splitlines()) == 2 + len(PAPERS)
    assert text in (toy.ROOT / "docs/gpu.md").read_text(), "make plan prints another table now"


def test_one_card_that_is_too_small_gives_status_1(capsys):
    assert said(capsys, "qwen2.5-3b", "--card", "141")[0] == 0
    assert said(capsys, "qwen2.5-3b", "--card", "24", "141")[0] == 1
    assert said(capsys, "tiny", "qwen2.5-3b", "--card", "24")[0] == 1


@pytest.mark.parametrize(("gib", "status"), [(40, 1), (100, 0)])
def test_gpu_of_this_machine_counts_with_its_memory(capsys, monkeypatch, gib, status):
    alike = CARDS["80"]
    here = Card("here (a GPU)", gib * GIB, alike.operations, alike.bandwidth)
    monkeypatch.setattr(gpu_cards, "card_here", lambda: here)
    found, text = said(capsys, "qwen2.5-3b")
    assert found == status
    assert f"here (a GPU): {'does not fit' if status else 'fits'}" in text
    assert said(capsys, "qwen2.5-3b", "--card", "80")[0] == 0, "another card was asked for"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prepare__policy__name": "nobody/nothing"}, "add a row with its config.json"),
        ({"engine__memory": -1}, "engine.memory"),
        ({"lora": {"rank": 1, "alpha": 1, "modules": ["all"]}}, "'lora.modules' names all"),
    ],
)
def test_recipe_that_cannot_be_planned_is_an_error(capsys, checkout, changes, words):
    rewritten(checkout, "qwen2.5-3b", **changes)
    assert command.main(["qwen2.5-3b"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("plan: ")
    assert words in captured.err


def test_program_returns_its_status(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["plan", "qwen3-14b", "--card", "24"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("flows.plan", run_name="__main__")
    assert ended.value.code == 1
    printed = capsys.readouterr()
    assert REFUSED in printed.out
    assert printed.err == ""


@pytest.mark.parametrize("world", ["alfworld", "webshop"])
def test_worlds_of_the_larger_model_are_planned(capsys, checkout, world):
    """All else is as for the smaller one. Four cards hold all weights, one holds adapters."""
    small, large = (settings_of(f"{world}-{size}").model_dump() for size in ("1.5b", "7b"))
    assert large["prepare"]["policy"]["name"] == "Qwen/Qwen2.5-7B-Instruct"
    for settings in (small, large):
        settings["prepare"]["policy"] = settings["prepare"]["policy"]["context"]
    assert small == large
    status, text = said(capsys, f"{world}-7b", "--card", "80")
    assert status == 1 and "7.62 billion weights, all learn" in text
    assert "set lora: {rank: 32" in text
    rewritten(checkout, f"{world}-7b", machine__processes=4)
    assert said(capsys, f"{world}-7b", "--card", "141")[0] == 0


def test_fresh_prompts_are_counted_for_each_step(capsys):
    """16 tasks x 8 paths, each of 50 prompts of 2,048 tokens and 25,600 sampled tokens."""
    status, text = said(capsys, "alfworld-1.5b", "--card", "80")
    assert status == 0 and "16 questions x 8 paths x 130048 = 16,646,144" in text
