"""A brought tokenizer that changes texts, draws, or takes marks for texts is refused."""

import json

import pytest

from params.schema.agent import Dialogue
from params.schema.prepare import PretrainedPolicy
from tasks.dialects import open_dialect
from tasks.dialects.native import Native
from tasks.dialects.tags import Tags
from tasks.policy.load_model import fetch_tokenizer
from tasks.tools.contract import text_spec

DIALOGUE = Dialogue(system="", turn_tokens=20, result_tokens=20, response_tokens=80, tool_calls=2)
SPECS = [text_spec("python", "Run code.", "code", "Python.")]


def edited(folder, file, change):
    path = folder / file
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def normalizer(**settings):
    return lambda values: values.update(normalizer=settings)


def spaces(values):
    normalizer(type="Replace", pattern={"Regex": "\\s+"}, content=" ")(values)


def strip(values):
    normalizer(type="Strip", strip_left=True, strip_right=True)(values)


def without_lines(values):
    vocabulary = values["model"]["vocab"]
    vocabulary["\u1234"] = vocabulary.pop("\u010a")  # the byte of a line's end
    values["model"]["merges"] = [
        pair for pair in values["model"]["merges"] if "\u010a" not in "".join(pair)
    ]


def greedy_tags(values):
    for mark in values["added_tokens"]:
        if mark["content"] == "<python>":
            mark["rstrip"] = True


CHANGES = {
    "dropout": ("tokenizer.json", lambda v: v["model"].update(dropout=0.3), "other ids each time"),
    "case": ("tokenizer.json", normalizer(type="Lowercase"), "changes texts: 'def F"),
    "spaces": ("tokenizer.json", spaces, "changes texts: 'def F"),
    "edges": ("tokenizer.json", strip, r"changes texts: '\\n  a b"),
    "lines": ("tokenizer.json", without_lines, "changes texts: 'def F"),
    "tags": ("tokenizer.json", greedy_tags, "changes texts: 'a<python>"),
    "marks": (
        "tokenizer_config.json",
        lambda values: values.update(split_special_tokens=True),
        "set split_special_tokens .* to false",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_tokenizer_that_changes_what_it_is_given_is_refused(name, policy, tokenizer, tmp_path):
    file, change, words = CHANGES[name]
    policy.save_pretrained(tmp_path / "brought")
    tokenizer.save_pretrained(tmp_path / "brought")
    settings = PretrainedPolicy(
        kind="pretrained", name=str(tmp_path / "brought"), revision=None, context=64
    )
    open_dialect({"tags": Tags()}, fetch_tokenizer(settings), DIALOGUE, SPECS)
    edited(tmp_path / "brought", file, change)
    with pytest.raises(ValueError, match=f"dialect.tags: the policy's tokenizer .*{words}"):
        open_dialect({"tags": Tags()}, fetch_tokenizer(settings), DIALOGUE, SPECS)
    if name != "tags":  # native writes none
        with pytest.raises(ValueError, match=f"dialect.native: the policy's tokenizer .*{words}"):
            open_dialect(
                {"native": Native(renderer="default")}, fetch_tokenizer(settings), DIALOGUE, SPECS
            )
