"""The smallest recipe over a base: it loads, alone and with each line that it shows in use."""

import re
import shutil

import pytest

from params import new_recipe, recipe_files, strict_yaml
from params.merging import merge
from params.schema.base import PARAMS
from tasks import recipes

SHOWN = re.compile(r"^(\s*)# (\S+:)(?= |$)", re.MULTILINE)  # a key that is commented out
MOST_LINES, MOST_KEYS = 30, 20


@pytest.fixture
def folder(tmp_path):
    for file in PARAMS.glob("*.yaml"):
        shutil.copy(file, tmp_path)
    return tmp_path


def holding(text, name):
    """Return what holds with a recipe's text over its base."""
    own = strict_yaml.parse(text, name)
    return merge(recipe_files.read(own["base"], PARAMS), own)


@pytest.mark.parametrize("base", recipe_files.names(PARAMS))
def test_a_new_recipe_says_what_must_be_its_own(base):
    text = new_recipe.text_of("mine", base, PARAMS)
    lines = text.splitlines()
    keys = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    assert len(lines) <= MOST_LINES and len(keys) <= MOST_KEYS
    recipe, before = (
        recipes.check(values, "it")
        for values in (holding(text, "it"), recipe_files.read(base, PARAMS))
    )
    if intake := before.prepare.intake:
        assert recipe.prepare.intake.folder.as_posix() == "data/sources/intake/mine"
        assert recipe.prepare.intake.set == intake.set
    others = {"expect": None, "champion": None}
    after = recipe.model_copy(update={"prepare": before.prepare})
    assert after.model_dump() == before.model_copy(update=others).model_dump()


@pytest.mark.parametrize("base", recipe_files.names(PARAMS))
def test_each_line_that_is_shown_is_valid(base):
    """All of them together; and those that do not belong together without the others."""
    text = new_recipe.text_of("mine", base, PARAMS)
    shown = [match[2] for match in SHOWN.finditer(text)]
    assert {"seed:", "machine:", "engine:", "policy:", "questions:", "dialogue:"} <= {*shown}
    used = SHOWN.sub(r"\1\2", text)
    stays = re.sub(r"^ *\S+: null\b.*\n", "", used, flags=re.MULTILINE)  # expert, its tools
    for written in (stays, used):
        written = re.sub(r"^tools:\n(?! )", "", written, flags=re.MULTILINE)
        recipes.check(holding(written, "it"), "it")
    before = recipe_files.read(base, PARAMS)
    assert holding(used, "it")["seed"] == before["seed"]
    assert [*holding(used, "it")["tools"]] == [new_recipe.EXAMPLE]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "is no name"),
        ("a b", "is no name"),
        ("../a", "is no name"),
        ("a/b", "is no name"),
        ("-a", "is no name"),
        (".a", "is no name"),
        ("mine.yaml", "is no name"),
        ("ä", "is no name"),
        ("a\n", "is no name"),
        ("sources", "other files"),
        ("resolved", "other files"),
        ("algorithms", "other files"),
        ("tiny", "is there already"),
        ("Tiny", "is there already"),
    ],
)
def test_name_that_cannot_be(name, reason):
    with pytest.raises(ValueError, match=reason):
        new_recipe.check_name(name, PARAMS)


@pytest.mark.parametrize("name", ["mine", "m", "1e3", "qwen2.5_a-b"])
def test_name_that_can_be(name):
    new_recipe.check_name(name, PARAMS)


@pytest.mark.parametrize(
    ("base", "reason"),
    [
        ("tyni", r"no recipe 'tyni' to start from \(did you mean 'tiny'\?\).*recipes here"),
        ("algorithms", "no recipe 'algorithms'"),
        ("../params/tiny", "no recipe"),
        ("three", r"three has 3 bases already.*'two', 'one', 'tiny'"),
    ],
)
def test_base_that_cannot_be(folder, base, reason):
    for name, below in (("three", "two"), ("two", "one"), ("one", "tiny")):
        (folder / f"{name}.yaml").write_text(f"base: {below}\n")
    assert new_recipe.text_of("mine", "two", folder)
    with pytest.raises(ValueError, match=reason):
        new_recipe.text_of("mine", base, folder)
