"""The cold start beside TRL's SFTTrainer: both sides learn the same."""

import warnings
from pathlib import Path

import pyarrow as pa
import pytest

from benchmarks import cold_start as bench
from benchmarks.cases import load_settings
from tasks.policy.tiny import build_policy, build_tokenizer
from tasks.questions.trace_tables import TRACES
from tasks.trees.tables import write_table

STEPS = 3


@pytest.fixture(scope="module")
def start(tmp_path_factory, tiny):
    """A recipe, the folder of a very small policy, and traces as long as household's."""
    folder = tmp_path_factory.mktemp("bench")
    recipe = load_settings("household")
    settings = tiny.model_copy(update={"context": 512})
    tokenizer = build_tokenizer(["Go to a cabinet."], settings)
    policy = build_policy(settings, tokenizer, 0)
    policy.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    rows = [*bench.episodes(40, len(tokenizer), 0)]
    write_table(pa.Table.from_pylist(rows, schema=TRACES), folder / "traces.parquet")
    return recipe, folder / "policy", folder / "traces.parquet"


@pytest.mark.parametrize("shape", [bench.SHAPES[1], bench.SHAPES[-1]], ids=str)
def test_both_sides_learn_the_same(start, shape):
    recipe, folder, traces = start
    ours = bench.beamline(recipe, Path(folder), traces)(STEPS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = bench.batches(recipe, traces, range(STEPS))
        step = bench.trl(recipe, folder, shape)
        theirs = [step(rows) for rows in batches]
        untrained = bench.trl(recipe, folder, shape)(batches[-1])
    assert ours == pytest.approx(theirs, abs=2e-4)
    assert abs(ours[-1] - untrained) > 2e-3, "the steps before have changed the policy"


def test_traces_are_as_long_as_households(start):
    rows = [*bench.episodes(400, 300, 1)]
    lengths = [len(row["tokens"]) for row in rows]
    assert 250 < sum(lengths) / len(rows) < 340, "of household: 295"
    assert 55 < sum(sum(row["trained"]) for row in rows) / len(rows) < 80, "of household: 67"
