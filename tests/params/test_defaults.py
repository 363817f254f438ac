"""Keys that a recipe may leave out: the value that stands for each, and where it is documented."""

import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from params import overrides, recipe_files
from params.schema.base import PARAMS
from params.schema.defaults import ENTRY, defaults
from tasks import recipes
from tasks.ledger import keys
from tests.params.edits import REMOVED, edited

ROOT = PARAMS.parent
ROW = re.compile(r"^\| `([\w.*]+)` \| `([^`]+)` \| \S.* \|$", re.MULTILINE)
JUDGE = yaml.safe_load("""
models: [{kind: endpoint, url: "http://127.0.0.1:8000/v1", name: a, key_variable: null}]
prompt: prompts/judge.txt
votes: 1
temperature: 0.6
max_tokens: 300
ask_again: 2
own_policy: false
concurrency: 16
timeout_seconds: 60.0
retries: 5
budget: {calls: null, tokens: null}
""")
NEW = {  # which recipes of the project leave out
    "machine__disk_gib": None,
    "expect": None,
    "prepare__policy__rotary_base": 100.0,
    "dialogue__prompt": "growing",
    "dialogue__history": 2,
    "dialogue__prompt_tokens": None,
    "reinforce__curriculum": None,
    "reinforce__update__stop_at_kl": None,
}
TEACHER = {"kind": "pretrained", "name": "a/b", "revision": "c" * 40, "gguf": None}
SERVER = {
    **{"kind": "server", "url": "http://127.0.0.1:8000/v1", "name": "a", "key_variable": None},
    **{"concurrency": 8, "timeout_seconds": 120.0, "retries": 5},
    "budget": {"calls": None, "tokens": None},
}


def written(name, **changes):
    """Return a parsed recipe that writes all of its keys; those of tiny policies are theirs."""
    values = recipe_files.read(name)
    tiny = values["prepare"]["policy"]["kind"] == "tiny"
    new = {key: value for key, value in NEW.items() if tiny or "rotary_base" not in key}
    return edited(values, new | changes)


SECTIONS = written("tiny-reward-model", judge=JUDGE, reward_model__again=None)
NONE = written("tiny", prepare__intake=None, reinforce__validation=None)
PRETRAINED = written("gsm8k", prepare__policy__gguf=None, prepare__policy__origin=None)
TAUGHT = written("tiny", teacher=TEACHER)
ASKED = written("tiny", teacher=SERVER)
WRITTEN = {
    **{"sections": SECTIONS, "none": NONE, "pretrained": PRETRAINED, "taught": TAUGHT},
    "asked": ASKED,
}


def place_of(values, key):
    """Return the section of a key, and the key's name there; None where a section is missing."""
    *above, name = key.split(".")
    for part in above:
        values = values[0] if part == ENTRY else values.get(part)
        if values is None:
            return None
    return values, name


def left_out(values):
    """Return a copy of a recipe without the keys that have their defaults, and these keys."""
    values, gone = edited(values, {}), set()
    for key, default in reversed(defaults().items()):  # those in a section before the section
        place = place_of(values, key)
        given = place[0].get(place[1], REMOVED) if place else REMOVED
        if place and (given == default or (given == {} and isinstance(default, dict))):
            del place[0][place[1]]
            gone.add(key)
    return values, gone


@dataclass(frozen=True)
class Inputs:
    agent: Any
    settings: Any
    reward: Any
    judge: Any
    rows: Any


def keys_of(recipe):
    """Return the ledger's keys of a stage, and of a sub-step that is given these sections."""
    inputs = Inputs(
        recipes.agent_of(recipe),
        recipe.reinforce,
        recipe.reinforce.reward,
        recipe.judge,
        [recipe.prepare, recipe.evaluate, recipe.verdict, recipe.reward_model],
    )
    identities = keys.identities(inputs, ROOT / "tasks/advantage.py")
    return keys.stage_key(recipe), keys.key_of(identities)


@pytest.mark.parametrize("values", WRITTEN.values(), ids=WRITTEN)
def test_recipe_without_the_keys_is_the_same_with_the_same_keys(values):
    whole, small = (recipes.check(each, "it") for each in (values, left_out(values)[0]))
    assert small == whole
    assert keys_of(small) == keys_of(whole)


def test_every_default_was_left_out_there():
    assert set.union(*(left_out(values)[1] for values in WRITTEN.values())) == set(defaults())


@pytest.mark.parametrize(
    "key",
    [
        *("seed", "machine.device", "prepare.policy", "prepare.questions", "prepare.expert"),
        *("dialogue.system", "tools", "dialect", "engine.kind", "cold_start", "judge.budget"),
        *("reinforce.algorithm", "reinforce.iterations", "reinforce.rollout.leaves"),
        *("reinforce.reward", "reinforce.update.learning_rate", "evaluate.temperature", "verdict"),
    ],
)
def test_what_decides_a_run_has_no_default(key):
    with pytest.raises(ValueError, match=rf"^it: missing key '{re.escape(key)}': add it"):
        recipes.check(edited(SECTIONS, {key.replace(".", "__"): REMOVED}), "it")


def test_page_lists_every_default():
    page = (ROOT / "docs/own-recipe.md").read_text()
    table = page.split("## Keys that may be left out\n")[1].split("\n## ")[0]
    listed = [(key, yaml.safe_load(value)) for key, value in ROW.findall(table)]
    assert listed == [*defaults().items()]


def test_a_key_that_is_left_out_can_be_set(tmp_path):
    """Each key is added to its section, which stays as it is."""
    for number, values in enumerate(WRITTEN.values()):
        small, gone = left_out(values)
        for key in filter(partial(place_of, small), gone):  # whose section is there
            file = Path(tmp_path, f"{number}-{key.replace(ENTRY, '0')}.yaml")
            file.write_text(yaml.safe_dump(small))
            value = json.dumps(defaults()[key])
            overrides.apply([f"{key.replace(ENTRY, '0')}={value}"], file)
            section, name = place_of(changed := yaml.safe_load(file.read_text()), key)
            assert section.pop(name) == defaults()[key]
            assert changed == small
