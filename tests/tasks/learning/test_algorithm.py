"""Rows of the table as literals, and the functions that they name."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from params.schema.algorithms import INFRASTRUCTURE, Algorithm, load_algorithms
from tasks.learning import losses
from tasks.learning.algorithm import CENTRED, ESTIMATORS, assemble
from tasks.learning.estimators import LeafTrajectory, critic, group, step, tree_credit

BUDGET = 40  # response tokens
TWENTY = {"low": 0.2, "high": 0.2, "dual": None}
RELATIVE = {"kind": "group_relative", "std": True}
GROUPED = {"kind": "grouped_gae", "gamma": 0.95, "lambda_": 0.8}
CALIBRATED = {"kind": "prefix_calibrated", "key": "lineage"}


def marks(kind):
    return {"kind": kind, "quantile": None, "threshold": None}


def kl(place, estimator, coefficient):
    return {
        "place": place,
        "estimator": estimator,
        "coefficient": coefficient,
        "refresh": None,
    }


# as the rows are meant: branching, marks, estimator, ratio, clip, averaging, and more
TABLE = {
    "reinforce": ("none", "every_token", {"kind": "return"}, "none", None, "token_mean", {}),
    "grpo": ("none", "none", RELATIVE, "token", TWENTY, "sequence_mean", {}),
    "dr_grpo": (
        *("none", "none", {"kind": "group_relative", "std": False}),
        *("token", TWENTY, "constant_length", {}),
    ),
    "dapo": (
        *("none", "none", RELATIVE, "token", {"low": 0.2, "high": 0.28, "dual": None}),
        *("token_mean", {"group_filter": "spread", "overlong": {"buffer": 1 / 5, "factor": 1.0}}),
    ),
    "reinforce_pp": (
        *("none", "none", {"kind": "batch_whitened", "baseline": False}, "token", TWENTY),
        *("token_mean", {"kl": kl("reward", "k1", 0.01)}),
    ),
    "reinforce_pp_baseline": (
        *("none", "none", {"kind": "batch_whitened", "baseline": True}, "token", TWENTY),
        *("token_mean", {"kl": kl("loss", "k2", 0.001)}),
    ),
    "rloo": (
        *("none", "none", {"kind": "leave_one_out"}, "token", TWENTY),
        *("constant_length", {"kl": kl("reward", "k1", 0.05)}),
    ),
    "ppo": (
        *("none", "none", {"kind": "gae", "gamma": 1.0, "lambda_": 1.0}, "token", TWENTY),
        "token_mean",
        {
            "kl": kl("loss", "k3", 0.001),
            "critic": {"backbone": "own", "value_clip": 0.5, "coefficient": 0.5},
        },
    ),
    "gspo": (
        *("none", "none", RELATIVE, "sequence", {"low": 3e-4, "high": 4e-4, "dual": None}),
        *("unit_mean", {}),
    ),
    "gigpo": (
        *("none", "step", {"kind": "two_level", "omega": 1.0, "gamma": 0.95, "std": True}),
        *("token", TWENTY, "token_mean", {"kl": kl("loss", "k3", 0.01)}),
    ),
    "gagpo": (
        *("none", "step", {**GROUPED, "normalisation": "group", "omega": 0.0}),
        *("segment", TWENTY, "unit_mean", {"kl": kl("loss", "k3", 0.01)}),
    ),
    "gpg": ("marks", "tool_call", CALIBRATED, "token", TWENTY, "sequence_mean", {}),
    "arpo": ("entropy", "tool_call", RELATIVE, "token", TWENTY, "sequence_mean", {}),
    "arpo_kl": (
        *("entropy", "tool_call", RELATIVE, "token", TWENTY, "sequence_mean"),
        {"kl": kl("loss", "k3", 0.5)},
    ),
    "arpo_hard": ("entropy", "tool_call", CALIBRATED, "token", TWENTY, "sequence_mean", {}),
    "tree_value": (
        *("entropy", "tool_call", {"kind": "tree_value", "leave_one_out": True}, "token", TWENTY),
        *("constant_length", {"counts": "paths"}),
    ),
}
UNLESS_GIVEN = {
    "group_filter": "none",
    "overlong": None,
    "kl": None,
    "critic": None,
    "entropy_bonus": 0.0,
    "importance_cap": 2.0,
    "counts": "leaves",
    "masked": INFRASTRUCTURE,
}


def chosen(function, **choice):
    """An estimator with its choices, without the table's and the schema's help."""
    return partial(function, choice=SimpleNamespace(**choice))


EXPECTED = {
    "reinforce": chosen(group.returns),
    "grpo": chosen(group.group_relative, std=True),
    "dr_grpo": chosen(group.group_relative, std=False),
    "dapo": chosen(group.group_relative, std=True),
    "reinforce_pp": chosen(group.batch_whitened, baseline=False),
    "reinforce_pp_baseline": chosen(group.batch_whitened, baseline=True),
    "rloo": chosen(group.leave_one_out),
    "ppo": chosen(critic.gae, gamma=1.0, lambda_=1.0),
    "gspo": chosen(group.group_relative, std=True),
    "gigpo": chosen(step.two_level, omega=1.0, gamma=0.95, std=True),
    "gagpo": chosen(step.grouped_gae, gamma=0.95, lambda_=0.8, normalisation="group", omega=0.0),
    "gpg": chosen(tree_credit.prefix_calibrated),
    "arpo": chosen(group.group_relative, std=True),
    "arpo_kl": chosen(group.group_relative, std=True),
    "arpo_hard": chosen(tree_credit.prefix_calibrated),
    "tree_value": chosen(tree_credit.tree_value, leave_one_out=True),
}
ROWS = load_algorithms()


def groups(seed=0):
    """Leaves with steps, shared tokens, shared states and values, so that estimators differ."""
    random = np.random.default_rng(seed)
    made = []
    for leaves in (4, 3):
        made.append([])
        for leaf in range(leaves):
            count = int(random.integers(3, 9))
            tokens = np.arange(count)
            tokens[2:] += 100 * (leaf + 1)  # the first two are everybody's
            made[-1].append(
                LeafTrajectory(
                    reward=float(random.integers(0, 3)),
                    token_rewards=0.1 * random.standard_normal(count),
                    tokens=tokens,
                    steps=np.sort(np.concatenate([[0, 1, 2], random.integers(0, 3, count - 3)])),
                    states=("start", str(leaf % 2), "end"),
                    values=random.standard_normal(count),
                )
            )
    return made


def test_table_has_the_rows_of_algorithms_section_1():
    assert [name for name in ROWS if name in TABLE] == list(TABLE)  # and a user's own rows


@pytest.mark.parametrize("name", TABLE)
def test_row_has_the_choices_of_algorithms_section_1(name):
    branching, mark, estimator, ratio, clip, averaging, more = TABLE[name]
    assert ROWS[name].model_dump() == {
        "branching": branching,
        "marks": marks(mark),
        "estimator": estimator,
        "ratio": ratio,
        "clip": clip,
        "averaging": averaging,
        **UNLESS_GIVEN,
        **more,
    }


@pytest.mark.parametrize("name", TABLE)
def test_a_row_gives_the_estimator_that_it_names(name):
    found = assemble(ROWS[name], BUDGET).estimator
    for seed in range(3):
        given = groups(seed)
        for own, expected in zip(found(given), EXPECTED[name](given), strict=True):
            for credit, right in zip(own, expected, strict=True):
                np.testing.assert_array_equal(credit, right)


@pytest.mark.parametrize("name", TABLE)
def test_a_row_gives_the_loss_that_it_names(name):
    _, _, _, ratio, clip, averaging, more = TABLE[name]
    loss = assemble(ROWS[name], BUDGET).loss
    assert loss.ratio == losses.RATIOS[ratio]
    assert loss.clip == (losses.Clip(**clip) if clip else None)
    if averaging == "constant_length":
        lengths, units = torch.tensor([3, 5, 9]), torch.tensor([1, 1, 1])
        assert loss.averaging.denominator(lengths, units) == 3 * BUDGET
    else:
        assert loss.averaging == getattr(losses, averaging.upper())
    term = more.get("kl")
    in_loss = term is not None and term["place"] == "loss"
    estimators = {"k2": losses.k2, "k3": losses.k3}
    expected = (
        losses.KlPenalty(estimators[term["estimator"]], term["coefficient"]) if in_loss else None
    )
    assert loss.kl == expected
    assert (loss.entropy_bonus, loss.importance_cap) == (0.0, 2.0)


def test_the_rows_of_the_table_are_distinct_algorithms():
    dumps = [str(row.model_dump()) for row in ROWS.values()]
    assert len(set(dumps)) == len(dumps)


def differing(one, other):
    one, other = ROWS[one].model_dump(), ROWS[other].model_dump()
    return {choice for choice in one if one[choice] != other[choice]}


def test_grpo_and_arpo_differ_in_branching_alone():
    assert differing("grpo", "arpo") == {"branching", "marks"}


def test_arpo_rows_differ_in_one_choice():
    assert differing("arpo", "arpo_kl") == {"kl"}
    assert differing("arpo", "arpo_hard") == {"estimator"}
    assert differing("arpo_hard", "tree_value") == {"estimator", "averaging", "counts"}


def test_settings_of_a_choice_reach_its_function():
    """Of each estimator another setting gives other credit; of the loss, other parts."""
    for name, changes in {
        "grpo": {"std": False},
        "reinforce_pp": {"baseline": True},
        "ppo": {"gamma": 0.5},
        "gigpo": {"omega": 0.5},
        "tree_value": {"leave_one_out": False},
    }.items():
        row = ROWS[name]
        other = row.model_copy(update={"estimator": row.estimator.model_copy(update=changes)})
        one, two = (assemble(r, BUDGET).estimator(groups())[0][0] for r in (row, other))
        assert not np.allclose(one, two), name
    for name, changes in (
        ("ppo", {"lambda_": 0.3}),
        ("gagpo", {"lambda_": 0.3}),
        ("gagpo", {"gamma": 0.5}),
        ("gagpo", {"omega": 0.5}),
        ("gagpo", {"normalisation": "batch"}),
        ("gagpo", {"normalisation": "none"}),
    ):
        row = ROWS[name]
        other = row.model_copy(update={"estimator": row.estimator.model_copy(update=changes)})
        one, two = (assemble(r, BUDGET).estimator(groups())[0][0] for r in (row, other))
        assert not np.allclose(one, two), name
    values = ROWS["grpo"].model_dump() | {
        "clip": {"low": 0.1, "high": 0.3, "dual": 3.0},
        "entropy_bonus": 0.01,
        "importance_cap": None,
    }
    loss = assemble(Algorithm.model_validate(values), BUDGET).loss
    assert loss.clip == losses.Clip(0.1, 0.3, 3.0)
    assert (loss.entropy_bonus, loss.importance_cap) == (0.01, None)


def test_all_estimators_named_and_centred_ones_centred():
    assert set(ESTIMATORS) == {row.estimator.kind for row in ROWS.values()}
    for name, row in ROWS.items():
        credit = assemble(row, BUDGET).estimator(groups())
        means = [np.mean([leaf.mean() for leaf in leaves]) for leaves in credit]
        assert (row.estimator.kind in CENTRED) == (np.abs(means).max() < 1e-9), name
