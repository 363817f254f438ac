"""Rows of the table as literals, and the functions that they name."""

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from params.schema.algorithms import INFRASTRUCTURE, Algorithm, load_algorithms
from tasks.learning import losses, objectives
from tasks.learning.algorithm import CENTRED, ESTIMATORS, assemble
from tasks.learning.estimators import LeafTrajectory, critic, group, step, tree_credit
from tasks.learning.importance import MEASURES, WEIGHTS, Bounds, Importance

BUDGET = 40  # response tokens
TWENTY = {"low": 0.2, "high": 0.2, "dual": None}
RELATIVE = {"kind": "group_relative", "std": True}
TWO_LEVEL = {"kind": "two_level", "omega": 1.0, "gamma": 0.95, "std": True}
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
    "luspo": (
        *("none", "none", RELATIVE, "sequence", {"low": 3e-4, "high": 4e-4, "dual": None}),
        *("token_mean", {}),
    ),
    "maxrl": (*("none", "none", {"kind": "mean_relative"}, "token", TWENTY, "sequence_mean", {}),),
    "gdpo": (
        *("none", "none", {"kind": "part_relative", "weights": {}}, "token", TWENTY),
        *("sequence_mean", {}),
    ),
    "tree_grpo": (
        *("random", "none", {"kind": "rollout_relative"}, "token", TWENTY, "sequence_mean", {}),
    ),
    "cispo": (
        *("none", "none", RELATIVE, "token", {"low": None, "high": 4.0, "dual": None}),
        *("token_mean", {"objective": {"kind": "cispo"}}),
    ),
    "sapo": (
        *("none", "none", RELATIVE, "token", None, "sequence_mean"),
        {"objective": {"kind": "sapo", "positive": 1.0, "negative": 1.05}},
    ),
    "dppo": (
        *("none", "none", RELATIVE, "token", {"low": None, "high": 19.0, "dual": None}),
        "token_mean",
        {
            "objective": {"kind": "dppo", "trust": {"low": 0.2, "high": 0.2}},
            "against": "sampler",
            "importance": {"weight": "none", "cap": 2.0, "mask": None, "negative": None},
        },
    ),
    "distil": (
        *("none", "none", {"kind": "none"}, "token", TWENTY, "token_mean"),
        {"teacher": {"weight": 1.0}},
    ),
    "gigpo": (
        *("none", "step", {**TWO_LEVEL, "key": "observation"}),
        *("token", TWENTY, "token_mean", {"kl": kl("loss", "k3", 0.01)}),
    ),
    "gagpo": (
        *(
            "none",
            "step",
            {**GROUPED, "normalisation": "group", "omega": 0.0, "key": "observation"},
        ),
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
IMPORTANCE = {"dppo": Importance(None, 2.0)}  # of rows that have no token weight up to 2
UNLESS_GIVEN = {
    "group_filter": "none",
    "surplus": "wasted",
    "overlong": None,
    "kl": None,
    "critic": None,
    "entropy_bonus": 0.0,
    "importance": {"weight": "token", "cap": 2.0, "mask": None, "negative": None},
    "objective": {"kind": "clipped"},
    "against": "old",
    "teacher": None,
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
    "maxrl": chosen(group.mean_relative),
    "distil": chosen(group.nothing),
    "gdpo": chosen(group.part_relative, weights={}),
    "tree_grpo": chosen(tree_credit.rollout_relative),
    **dict.fromkeys(("luspo", "cispo", "sapo", "dppo"), chosen(group.group_relative, std=True)),
    "gspo": chosen(group.group_relative, std=True),
    "gigpo": chosen(step.two_level, omega=1.0, gamma=0.95, std=True, key="observation"),
    "gagpo": chosen(
        step.grouped_gae,
        **{"gamma": 0.95, "lambda_": 0.8, "normalisation": "group", "omega": 0.0},
        key="observation",
    ),
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
            # the first two are everybody's, but of the last one, which begins by itself
            tokens[0 if leaf == leaves - 1 else 2 :] += 100 * (leaf + 1)
            made[-1].append(
                LeafTrajectory(
                    reward=float(random.integers(0, 3)),
                    token_rewards=0.1 * random.standard_normal(count),
                    tokens=tokens,
                    steps=np.sort(np.concatenate([[0, 1, 2], random.integers(0, 3, count - 3)])),
                    states=("start", str(leaf % 2), "end"),
                    values=random.standard_normal(count),
                    parts={"answer": float(random.integers(0, 2)), "length": random.random()},
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
    old = losses.AGAINST["sampler"] if name == "dppo" else losses.RATIOS[ratio].old
    assert loss.ratio == losses.ImportanceRatio(losses.RATIOS[ratio].units, old)
    ends = clip and {**clip, "low": math.inf if clip["low"] is None else clip["low"]}
    assert loss.clip == (objectives.Clip(**ends) if ends else None)
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
    assert loss.entropy_bonus == 0.0
    assert loss.importance == IMPORTANCE.get(name, Importance(WEIGHTS["token"], 2.0))


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
        "gdpo": {"weights": {"length": 3.0}},
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
        ("gagpo", {"key": "history"}),
    ):
        row = ROWS[name]
        other = row.model_copy(update={"estimator": row.estimator.model_copy(update=changes)})
        one, two = (assemble(r, BUDGET).estimator(groups())[0][0] for r in (row, other))
        assert not np.allclose(one, two), name
    values = ROWS["grpo"].model_dump() | {
        "clip": {"low": 0.1, "high": 0.3, "dual": 3.0},
        "entropy_bonus": 0.01,
        "importance": {
            "weight": "sequence",
            "cap": 3.0,
            "mask": {"kind": "geometric", "low": 0.9, "high": 1.1},
            "negative": 0.1,
        },
    }
    loss = assemble(Algorithm.model_validate(values), BUDGET).loss
    assert loss.clip == objectives.Clip(0.1, 0.3, 3.0)
    assert loss.entropy_bonus == 0.01
    mask = Bounds(MEASURES["geometric"], 0.9, 1.1)
    assert loss.importance == Importance(WEIGHTS["sequence"], 3.0, mask, 0.1)


def test_objectives_have_their_settings():
    views = SimpleNamespace(
        advantages=torch.tensor([[1.0, -1.0]]),
        logprobs=torch.tensor([[-0.1, -0.7]]),
        sampler_logprobs=torch.tensor([[-0.7, -0.1]]),
        mask=torch.tensor([[True, True]]),
    )
    ratio = torch.tensor([[8.0, 0.1]])

    def terms(**changes):
        values = ROWS["dppo"].model_dump() | changes
        loss = assemble(Algorithm.model_validate(values), BUDGET).loss
        return loss.objective.terms(ratio, views, loss.clip)[0].tolist()

    assert terms() == [0, 0], "beyond 0.2 of the sampler's probability"
    wide, cispo = {"kind": "dppo", "trust": {"low": 0.9, "high": 0.9}}, {"kind": "cispo"}
    assert terms(objective=wide) == terms(objective=cispo) == pytest.approx([0.8, -0.07])
    low = terms(objective=cispo, clip={"low": 0.5, "high": 4.0})
    assert low == pytest.approx([0.5, -0.35]), "both ends of the clip range"
    sapo = {"kind": "sapo", "positive": 2.0, "negative": 1.0}
    found = terms(objective=sapo, clip=None)
    assert found == pytest.approx([-2 / (1 + math.exp(-14)), 4 / (1 + math.exp(0.9))])


def test_a_former_name_of_the_cap_is_taken():
    values = {
        name: value for name, value in ROWS["grpo"].model_dump().items() if name != "importance"
    }
    for cap, weight in ((None, None), (1.5, WEIGHTS["token"])):
        row = Algorithm.model_validate(values | {"importance_cap": cap})
        found = assemble(row, BUDGET).loss.importance
        assert found == Importance(weight, 2.0 if cap is None else cap)
    with pytest.raises(ValueError, match=r"importance_cap is what importance\.cap was"):
        Algorithm.model_validate(values | {"importance_cap": 1.0, "importance": {}})


def test_all_estimators_named_and_centred_ones_centred():
    assert set(ESTIMATORS) == {row.estimator.kind for row in ROWS.values()}
    for name, row in ROWS.items():
        credit = assemble(row, BUDGET).estimator(groups())
        means = [np.mean([leaf.mean() for leaf in leaves]) for leaves in credit]
        assert (row.estimator.kind in CENTRED) == (np.abs(means).max() < 1e-9), name
