"""The tables of params/: benchmarks, algorithms and architectures."""

import json

import pytest

from params.schema import algorithms, architectures, benchmarks
from params.schema.reading import validate
from tests.params.edits import REMOVED, edited

LOADERS = {
    "benchmarks": benchmarks.load_benchmarks,
    "algorithms": algorithms.load_algorithms,
    "architectures": architectures.load_architectures,
}
BENCHMARK = {
    "hub": {
        "name": "someone/something",
        "revision": "0123456789abcdef0123456789abcdef01234567",
        "files": {"test": "data/test.parquet"},
    },
    "question": "prompt.0.content",
    "answer": "answer",
    "answer_after": "####",
    "solution": None,
    "records": None,
    "scorer": "exact",
}
OPTIONAL = {
    "aliases": "more",
    "boxed": True,
    "only": {"image": ""},
    "decode": "xor_canary",
    "papers_scorer": "judge",
}
ALGORITHM = {
    "branching": "none",
    "marks": "none",
    "estimator": {"kind": "group_relative", "std": True},
    "ratio": "token",
    "clip": {"low": 0.1, "high": 0.3},
    "averaging": "token_mean",
}
ARCHITECTURE = {"revision": "a" * 40, "config": {"model_type": "qwen2"}}
ROWS = {"benchmarks": BENCHMARK, "algorithms": ALGORITHM, "architectures": ARCHITECTURE}
GAE = {"kind": "gae", "gamma": 1.0, "lambda": 0.9}
CRITIC = {"backbone": "own", "value_clip": 0.5, "coefficient": 0.5}


def table(folder, name, **rows):
    """Return the table ``name`` with these rows, read from ``folder``."""
    (folder / f"{name}.yaml").write_text(json.dumps(rows))
    return LOADERS[name](folder)


def fault(model, values):
    """Return the message of the error that ``values`` give, which is one line."""
    with pytest.raises(ValueError) as caught:
        validate(model, values, "file")
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


# ---------------------------------------------------------------- any table


@pytest.mark.parametrize("name", LOADERS)
def test_fault_names_file_and_row(tmp_path, name):
    with pytest.raises(ValueError) as caught:
        table(tmp_path, name, good=ROWS[name], mine={**ROWS[name], "colour": "blue"})
    start = f"{tmp_path / name}.yaml, row mine: unknown key 'colour'"
    assert str(caught.value).startswith(start)


@pytest.mark.parametrize("row", [None, "text", [1]])
@pytest.mark.parametrize("name", LOADERS)
def test_row_must_be_a_mapping(tmp_path, name, row):
    with pytest.raises(ValueError, match=rf"{name}\.yaml, row mine: "):
        table(tmp_path, name, mine=row)


@pytest.mark.parametrize("text", ["", "- row"])
@pytest.mark.parametrize("name", LOADERS)
def test_table_without_rows_is_refused(tmp_path, name, text):
    (tmp_path / f"{name}.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"{name}\.yaml is missing or has no rows"):
        LOADERS[name](tmp_path)


@pytest.mark.parametrize("name", ["benchmarks", "algorithms"])
def test_missing_table_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=rf"{name}\.yaml is missing or has no rows"):
        LOADERS[name](tmp_path)


def test_architectures_may_be_missing(tmp_path):
    assert architectures.load_architectures(tmp_path) == {}


@pytest.mark.parametrize("name", LOADERS)
def test_rows_of_the_project_load(name):
    assert LOADERS[name]()


# ---------------------------------------------------------------- benchmarks


def test_benchmark_keeps_its_values(tmp_path):
    own = {**BENCHMARK, "hub": None, "scorer": "f1", **OPTIONAL}
    rows = table(tmp_path, "benchmarks", mine=BENCHMARK, own={**own, "licence": "MIT"})
    dumped = {name: row.model_dump(mode="json", exclude_unset=True) for name, row in rows.items()}
    assert dumped == {"mine": BENCHMARK, "own": own}, "the licence is in no key"
    assert rows["own"].licence == "MIT"


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"answer": REMOVED}, ["missing key 'answer'", "add it"]),
        ({"hub__revision": REMOVED}, ["missing key 'hub.revision'", "add it"]),
        ({"hub__branch": "main"}, ["unknown key 'hub.branch'"]),
        ({"hub__revision": "main"}, ["'hub.revision' = 'main'", "pattern '^[0-9a-f]{40}$'"]),
        ({"hub__revision": BENCHMARK["hub"]["revision"][1:]}, ["'hub.revision' = '12345"]),
        ({"scorer": {"field": "kind"}}, ["'scorer'", "<its value>"]),
        ({"scorer": {"kind": "exact"}}, ["'scorer'", "'exact', 'maths' or 'f1'"]),
        ({"question": 5}, ["'question' = 5", "valid string"]),
        ({"decode": "rot13"}, ["'decode' = 'rot13'", "'xor_canary'"]),
        ({"papers_scorer": "exact"}, ["'papers_scorer' = 'exact'", "'f1' or 'judge'"]),
        ({"boxed": 1}, ["'boxed' = 1", "write true or false"]),
        ({"only": {"image": None}}, ["'only.image' = None", "put it in quotes"]),
    ],
)
def test_faulty_benchmark_is_refused(changes, parts):
    message = fault(benchmarks.Benchmark, edited(BENCHMARK, changes))
    assert [part for part in parts if part not in message] == []


# ---------------------------------------------------------------- algorithms

IMPOSSIBLE = [
    ({"surplus": "next"}, ["no group is left over", "set it to wasted, or group_filter to spread"]),
    (
        {"surplus": "next", "group_filter": "spread", "ratio": "none", "clip": None},
        ["an earlier policy's groups", "set surplus to wasted, or choose a ratio"],
    ),
    # what one choice asks of another
    ({"critic": CRITIC}, ["critic is given", "group_relative uses none", "set critic to null"]),
    ({"estimator": "tree_value", "critic": CRITIC}, ["tree_value uses none", "critic to null"]),
    ({"estimator": GAE}, ["the estimator gae needs the section critic"]),
    ({"branching": "marks"}, ["branching at marks needs marks", "other than none"]),
    ({"branching": "entropy"}, ["judged after tool results", "marks is none", "to tool_call"]),
    ({"branching": "entropy", "marks": "step"}, ["marks is step", "set it to tool_call"]),
    ({"ratio": "none"}, ["ratio is none and clip is given", "nothing to clip"]),
    ({"clip": None}, ["ratio is token and clip is null", "needs its clip range"]),
    ({"ratio": "segment"}, ["a ratio of segments needs marks", "or the ratio sequence"]),
    ({"averaging": "unit_mean"}, ["units of the ratio, which is token", "average by token_mean"]),
    (
        {"averaging": "unit_mean", "ratio": "none", "clip": None},
        ["units of the ratio, which is none"],
    ),
    (
        {"estimator": {"kind": "two_level", "omega": 1, "gamma": 1}},
        ["two_level credits environment steps, and marks is none", "set it to step"],
    ),
    (
        {"estimator": {"kind": "grouped_gae", "gamma": 1, "lambda": 1}, "marks": "tool_call"},
        ["grouped_gae credits environment steps, and marks is tool_call"],
    ),
    # a choice that is none
    ({"colour": "blue"}, ["unknown key 'colour'", "remove it"]),
    ({"ratio": REMOVED}, ["missing key 'ratio'", "add it"]),
    ({"clip": REMOVED}, ["missing key 'clip'"]),
    ({"branching": "magic"}, ["'branching' = 'magic'", "'none', 'marks', 'entropy' or 'random'"]),
    ({"marks": "magic"}, ["'marks.kind' = 'magic'", "'tool_call'", "'step'"]),
    ({"estimator": "magic"}, ["'magic'", "'kind'", "'group_relative'", "'prefix_calibrated'"]),
    ({"ratio": "magic"}, ["'ratio' = 'magic'", "'segment' or 'sequence'"]),
    ({"averaging": "magic"}, ["'averaging' = 'magic'", "'unit_mean' or 'constant_length'"]),
    ({"group_filter": "magic"}, ["'group_filter' = 'magic'", "'none' or 'spread'"]),
    # settings of a choice
    ({"marks": "entropy"}, ["entropy marks with neither", "either quantile or threshold"]),
    (
        {"marks": {"kind": "entropy", "quantile": 0.9, "threshold": 0.5}},
        ["entropy marks with quantile and threshold"],
    ),
    ({"marks": {"kind": "step", "threshold": 0.5}}, ["step marks with threshold", "none of them"]),
    ({"marks": {"kind": "entropy", "quantile": 1}}, ["'marks.quantile' = 1", "less than 1"]),
    ({"marks": {"kind": "entropy", "threshold": 2}}, ["'marks.threshold' = 2"]),
    ({"estimator": {"kind": "batch_whitened"}}, ["missing key 'estimator.baseline'"]),
    ({"estimator": {"kind": "gae", "gamma": 1}}, ["missing key 'estimator.lambda'"]),
    ({"estimator": {**GAE, "gamma": 1.5}, "critic": CRITIC}, ["'estimator.gamma' = 1.5"]),
    ({"estimator": {"kind": "return", "std": True}}, ["unknown key 'estimator.std'"]),
    (
        {"estimator": {"kind": "prefix_calibrated", "key": "text"}},
        ["'estimator.key' = 'text'", "'lineage' or 'token_ids'"],
    ),
    (
        {"estimator": {"kind": "tree_value", "key": "lineage"}},
        ["unknown key 'estimator.key'"],
    ),
    ({"clip": {"low": 0.2}}, ["missing key 'clip.high'"]),
    ({"clip": {"low": "wide", "high": 0.2}}, ["'clip.low' = 'wide'"]),
    ({"clip": {"low": -0.2, "high": 0.2}}, ["'clip.low' = -0.2", "greater than 0"]),
    ({"clip": {"low": 0.2, "high": 0.2, "dual": 1}}, ["'clip.dual' = 1", "greater than 1"]),
    (
        {"kl": {"place": "loss", "estimator": "k1", "coefficient": 0.1}},
        ["k1 in the loss has an on-policy gradient of mean zero", "k2 or k3"],
    ),
    (
        {"kl": {"place": "reward", "estimator": "k3", "coefficient": 0.1}},
        ["k3 in the reward: only k1 is defined there"],
    ),
    (
        {"kl": {"place": "loss", "estimator": "k3", "coefficient": 0}},
        ["'kl.coefficient' = 0", "greater than 0"],
    ),
    (
        {"kl": {"place": "loss", "estimator": "k3", "coefficient": 1, "refresh": 0}},
        ["'kl.refresh' = 0"],
    ),
    ({"overlong": {"buffer": 0, "factor": 1}}, ["'overlong.buffer' = 0"]),
    ({"overlong": {"buffer": 1.5, "factor": 1}}, ["'overlong.buffer' = 1.5"]),
    (
        {"estimator": GAE, "critic": {**CRITIC, "backbone": "borrowed"}},
        ["'critic.backbone' = 'borrowed'", "'own' or 'shared'"],
    ),
    ({"entropy_bonus": -1}, ["'entropy_bonus' = -1"]),
    ({"importance_cap": 0.9}, ["'importance.cap' = 0.9", "greater than or equal to 1"]),
    ({"importance_cap": 2, "importance": {}}, ["importance_cap is what importance.cap was"]),
    ({"importance": {"weight": "leaf"}}, ["'importance.weight' = 'leaf'", "'token', 'sequence'"]),
    (
        {"importance": {"mask": {"kind": "token", "low": 1.5, "high": 2}}},
        ["low is 1.5", "set low to at most 1"],
    ),
    ({"importance": {"mask": {"kind": "k3", "low": 1, "high": 2}}}, ["leave low out"]),
    ({"objective": "sapo"}, ["sapo has no clip range", "set clip to null"]),
    ({"objective": "cispo", "ratio": "none", "clip": None}, ["cispo bounds a ratio", "token"]),
    ({"clip": {"low": None, "high": 1}}, ["clip.low is null", "take the objective cispo"]),
    (
        {"objective": "cispo", "clip": {"low": None, "high": 1, "dual": 3}},
        ["clip.dual belongs to the objective clipped"],
    ),
    (
        {"objective": {"kind": "dppo", "trust": {"low": 0.2, "high": 0.2}}, "ratio": "sequence"},
        ["dppo looks at single tokens", "set it to token"],
    ),
    ({"against": "sampler"}, ["would count twice", "set importance.weight to none"]),
    (
        {"against": "sampler", "ratio": "none", "clip": None},
        ["against is sampler, and ratio is none"],
    ),
    ({"counts": "tokens"}, ["'counts' = 'tokens'", "'leaves' or 'paths'"]),
]


@pytest.mark.parametrize(
    ("changes", "parts"), IMPOSSIBLE, ids=[parts[0] for _, parts in IMPOSSIBLE]
)
def test_impossible_algorithm_is_refused(changes, parts):
    message = fault(algorithms.Algorithm, edited(ALGORITHM, changes))
    assert [part for part in parts if part not in message] == []


def test_all_faults_of_a_row_at_once():
    message = fault(algorithms.Algorithm, {**ALGORITHM, "critic": CRITIC, "clip": None})
    assert "critic is given" in message
    assert "clip is null" in message


def test_choice_without_settings_is_its_kind(tmp_path):
    short = {**ALGORITHM, "estimator": "leave_one_out", "marks": "step"}
    long = {**ALGORITHM, "estimator": {"kind": "leave_one_out"}, "marks": {"kind": "step"}}
    rows = table(tmp_path, "algorithms", short=short, long=long)
    assert rows["short"] == rows["long"]
    assert rows["short"].estimator == algorithms.LeaveOneOut(kind="leave_one_out")


def test_defaults_of_an_algorithm(tmp_path):
    other = {**ALGORITHM, "importance_cap": None, "estimator": {"kind": "prefix_calibrated"}}
    rows = table(tmp_path, "algorithms", mine=ALGORITHM, other=other)
    row = rows["mine"]
    assert (row.group_filter, row.overlong, row.kl, row.critic) == ("none", None, None, None)
    assert (row.entropy_bonus, row.objective.kind, row.against) == (0.0, "clipped", "old")
    assert (row.importance.weight, row.importance.cap, row.counts) == ("token", 2.0, "leaves")
    assert rows["other"].importance.weight == "none"
    assert rows["other"].estimator == algorithms.PrefixCalibrated(
        kind="prefix_calibrated", key="lineage"
    )
