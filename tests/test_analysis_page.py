"""The code of docs/tracking.md runs in order on a real run, and its frames agree."""

import contextlib
import io
import re

import pandas as pd
import pytest

from flows.analysis import frames
from flows.analysis.trajectories import evaluation, training
from tests.checkout import ROOT

RUN = "smoke"


@pytest.fixture(scope="module")
def run(smoke_run):
    return smoke_run[0]


@pytest.fixture(scope="module")
def page(run):
    """Run the page; return its names, and what each block printed."""
    text = (ROOT / "docs/tracking.md").read_text()
    names, printed = {}, []
    with contextlib.chdir(run), pd.option_context("display.width", 100):
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(block.replace('"tiny-search"', f'"{RUN}"'), names)
            printed.append(out.getvalue())
    return names, printed


def test_each_question_has_an_answer(page):
    _, printed = page
    assert len(printed) >= 11
    assert all(printed)


def test_frames_agree_with_each_other_and_with_the_curve(page, run):
    names, _ = page
    nodes, leaves, rewards = names["nodes"], names["leaves"], names["rewards"]
    curve, decisions = frames.curve(RUN, project=run), frames.decisions(RUN, project=run)
    assert len(leaves) == len(rewards) == curve["leaves"].sum()
    assert leaves["branched_from"].notna().sum() == decisions["added"].sum() > 0
    assert len(names["calls"]) == curve["tool_calls"].sum()
    assert nodes[nodes["kind"] == "turn"]["tokens"].sum() == curve["sampled_tokens"].sum()
    trained = frames.token_values(RUN, project=run)["ratio"].str.len()
    assert trained.sum() == curve["trained_tokens"].sum(), "in one pass over each batch"
    assert (~nodes["shared"]).sum() >= len(leaves), "each trajectory ends in a node of its own"
    assert nodes[nodes["depth"] == 0]["shared"].all(), "a prompt has several"
    lengths = leaves["shared_tokens"] + leaves["own_tokens"]
    assert (lengths == rewards["response_tokens"]).all()
    parts = frames.parts(RUN, project=run).groupby([*frames.KEYS, "leaf"], sort=False)["value"]
    assert parts.sum().to_numpy() == pytest.approx(rewards["reward"].to_numpy())
    tokens = names["tokens"].groupby([*frames.KEYS, "leaf"])["advantage"].mean()
    means = frames.advantages(RUN, names["last"], run).set_index([*frames.KEYS, "leaf"])
    pd.testing.assert_series_equal(
        tokens,
        means["advantage"].sort_index(),
        rtol=1e-5,
        check_names=False,
        check_index_type=False,
    )


def test_iterations_are_chosen(page, run):
    names, _ = page
    last = names["nodes"].query("iteration == 1").reset_index(drop=True)
    pd.testing.assert_frame_equal(frames.nodes(RUN, 1, run), last)
    assert set(frames.rewards(RUN, [0, 1], run)["iteration"]) == {0, 1}


def test_missing_tables_name_file_and_command(run):
    with pytest.raises(ValueError, match=r"tiny/trees/nodes\.parquet .* `make run RECIPE=tiny`"):
        frames.nodes("tiny", project=run)
    with pytest.raises(ValueError, match="only recipes with an environment have steps"):
        frames.steps(RUN, project=run)
    with pytest.raises(ValueError, match="no recipe 'none'"):
        frames.answers("none", project=run)


def test_trees_are_streamed_with_their_rewards(page, run):
    names, _ = page
    found = [
        (one.place["iteration"], one.tree.question.id, row["leaf"], trajectory[-1].outcome)
        for one in training(RUN, None, run)
        for row, trajectory in zip(one.rewards, one.tree.trajectories(), strict=True)
    ]
    columns = ["iteration", "question", "leaf", "outcome"]
    assert found == list(names["rewards"][columns].itertuples(index=False, name=None))
    asked = [(one.place["agent"], one.tree.question.id) for one in evaluation(RUN, run)]
    answers = frames.answers(RUN, run)[["agent", "question"]]
    assert asked == list(answers.itertuples(index=False, name=None))
