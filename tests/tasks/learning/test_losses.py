import itertools
import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from params.schema import algorithms
from tasks.learning import importance, losses, objectives
from tasks.learning.importance import MEASURES, WEIGHTS, Bounds, Importance
from tasks.learning.losses import KlPenalty, Loss, policy_loss, value_loss
from tasks.learning.objectives import Clip
from tasks.learning.views import Views, sampled_only
from tests.examples import examples

BUDGET = 9.0
AVERAGINGS = {name: make(BUDGET) for name, make in losses.AVERAGINGS.items()}
CLIPS = {"asymmetric": Clip(0.2, 0.28), "dual": Clip(0.1, 0.3, 1.5)}
RATIOS, KLS = losses.RATIOS, losses.KL_ESTIMATORS
OBJECTIVES = {
    "clipped": objectives.CLIPPED,
    "cispo": objectives.WEIGHTED,
    "sapo": objectives.soft(1.0, 1.05),
    "dppo": objectives.trusted(0.05, 0.1),
}
NO_LOWER_END = Clip(math.inf, 0.3)
MASKS = {
    "token": Bounds(MEASURES["token"], 0.7, 1.4),
    "sequence": Bounds(MEASURES["sequence"], 0.5, 1.6),
    "geometric": Bounds(MEASURES["geometric"], 0.9, 1.2),
    "k3": Bounds(MEASURES["k3"], 0.0, 0.12),
}
LOGPROBS = ("logprobs", "old_logprobs", "sampler_logprobs", "reference_logprobs")

some_examples = examples(30)
each_ratio = pytest.mark.parametrize("ratio", RATIOS.values(), ids=list(RATIOS))
each_averaging = pytest.mark.parametrize("averaging", AVERAGINGS.values(), ids=list(AVERAGINGS))


def views(logprobs, advantages, mask=None, segments=None, **others):
    """Views from lists; the rest is 0, all tokens are sampled and make one segment."""
    like = np.zeros(np.shape(logprobs))

    def tensor(values, dtype=torch.float64):
        return torch.tensor(np.broadcast_to(like if values is None else values, like.shape)).to(
            dtype
        )

    return Views(
        tensor(logprobs).requires_grad_(),
        tensor(others.get("old_logprobs")),
        tensor(advantages),
        tensor(like == 0 if mask is None else mask, torch.bool),
        tensor(segments, torch.int64),
        tensor(others.get("sampler_logprobs", others.get("old_logprobs"))),
        tensor(others.get("entropies")).requires_grad_(),
        tensor(others["reference_logprobs"]) if "reference_logprobs" in others else None,
    )


def denominator_of(some, loss):
    units = loss.ratio.count(some.segments, some.mask)
    return loss.averaging.denominator(some.mask.sum(-1), units)


def loss_of(some, loss):
    """Loss, gradient at the log-probabilities and the entropies, metrics."""
    value, metrics = policy_loss(some, loss, denominator_of(some, loss))
    gradient, at_entropies = torch.autograd.grad(
        value, (some.logprobs, some.entropies), allow_unused=True, materialize_grads=True
    )
    return value.item(), gradient, at_entropies, {name: float(metrics[name]) for name in metrics}


def token_loss(ratio="token", averaging="token_mean", clip=CLIPS["asymmetric"], **others):
    return Loss(RATIOS[ratio], None if ratio == "none" else clip, AVERAGINGS[averaging], **others)


def truncated(cap):
    """Token weights up to a cap; None: no weights."""
    return Importance() if cap is None else Importance(WEIGHTS["token"], cap)


def made_batch(random, leaves, tokens, share, spread, borders):
    """Leaves with observed tokens in their midst and segments of random lengths.

    ``share`` of the tokens are sampled, ``borders`` of them start a segment; the log-ratios
    have the standard deviation ``spread``.
    """
    old = -0.1 - 3 * random.random((leaves, tokens))

    def near(values, by=spread):
        return values + by * random.standard_normal((leaves, tokens))

    advantages = near(random.standard_normal((leaves, 1)), random.choice([0.0, 1.0]))
    advantages[random.random(leaves) < 0.2] = 0
    starts = random.random((leaves, tokens)) < borders
    starts[:, 0] = False
    return views(
        near(old),
        advantages,
        random.random((leaves, tokens)) < share,
        starts.cumsum(-1),
        old_logprobs=old,
        sampler_logprobs=near(old, 0.5),
        reference_logprobs=near(old, 0.7),
        entropies=random.random((leaves, tokens)),
    )


def batches():
    """Among them: leaves of unequal lengths, of one token, of none; leaves whose advantage is 0;
    ratios of exactly 1 and far outside the clip."""
    return st.builds(
        made_batch,
        st.integers(0, 2**32 - 1).map(np.random.default_rng),
        leaves=st.integers(1, 4),
        tokens=st.integers(1, 7),
        share=st.sampled_from([0.3, 0.7, 1.0]),
        spread=st.sampled_from([0.0, 0.1, 0.5, 2.0]),
        borders=st.sampled_from([0.0, 0.4, 1.0]),
    )


def choices(**fixed):
    """Losses of every combination of choices."""
    parts = {
        "ratio": st.sampled_from(list(RATIOS.values())),
        "clip": st.sampled_from(list(CLIPS.values())),
        "averaging": st.sampled_from(list(AVERAGINGS.values())),
        "kl": st.sampled_from([None, *(KlPenalty(KLS[name], 0.3) for name in KLS)]),
        "entropy_bonus": st.sampled_from([0.0, 0.05]),
        "importance": st.builds(
            Importance,
            st.sampled_from([None, *WEIGHTS.values()]),
            st.just(1.2),
            st.sampled_from([None, *MASKS.values()]),
            st.sampled_from([None, 0.1]),
        ),
        "objective": st.sampled_from(list(OBJECTIVES.values())),
    }
    made = {name: st.just(value) for name, value in fixed.items()}
    return st.builds(Loss, **(parts | made))


# ---------------------------------------------------------------- against the formulas, slowly


def slow_loss(some, loss):
    """The formulas of docs/own-algorithm.md, a token at a time; as a torch scalar of float64."""
    leaves, total = len(some.mask), torch.zeros((), dtype=torch.float64)
    units_of_leaves = [slow_units(some, loss.ratio, leaf) for leaf in range(leaves)]
    for leaf, units in enumerate(units_of_leaves):
        for unit in units:
            rho = slow_ratio(some, loss.ratio, leaf, unit)
            for token in unit:
                weight = {
                    AVERAGINGS["token_mean"]: 1,
                    AVERAGINGS["constant_length"]: 1,
                    AVERAGINGS["sequence_mean"]: 1 / sum(map(len, units)),
                    AVERAGINGS["unit_mean"]: 1 / len(unit),
                }[loss.averaging]
                total = total + weight * slow_element(some, loss, leaf, token, rho)
    denominator = {
        AVERAGINGS["token_mean"]: sum(len(unit) for units in units_of_leaves for unit in units),
        AVERAGINGS["constant_length"]: leaves * BUDGET,
        AVERAGINGS["sequence_mean"]: leaves,
        AVERAGINGS["unit_mean"]: sum(map(len, units_of_leaves)),
    }[loss.averaging]
    return total / max(1, denominator)


def slow_units(some, ratio, leaf):
    """The sampled tokens of a leaf, in lists that share a ratio."""
    sampled = [t for t in range(some.mask.shape[1]) if some.mask[leaf, t]]
    if ratio.units is RATIOS["token"].units:
        return [[token] for token in sampled]
    if ratio is RATIOS["sequence"]:
        return [sampled] if sampled else []
    by_segment = itertools.groupby(sampled, lambda token: int(some.segments[leaf, token]))
    return [list(tokens) for _, tokens in by_segment]


def slow_ratio(some, ratio, leaf, unit):
    old = some.logprobs.detach() if ratio is RATIOS["none"] else some.old_logprobs
    old = some.sampler_logprobs if ratio.old is losses.AGAINST["sampler"] else old
    logs = [(some.logprobs[leaf, t] - old[leaf, t]).clamp(-20, 20) for t in unit]
    return torch.exp(sum(logs) / len(logs))


def slow_element(some, loss, leaf, token, rho):
    element = slow_term(some, loss, leaf, token, rho) * slow_importance(some, loss, leaf, token)
    if loss.kl is not None:
        d = (some.reference_logprobs[leaf, token] - some.logprobs[leaf, token]).clamp(-10, 10)
        penalty = {"k1": -d, "k2": d * d / 2, "k3": torch.exp(d) - d - 1}
        name = next(name for name in KLS if KLS[name] is loss.kl.estimator)
        element = element + loss.kl.coefficient * penalty[name]
    return element - loss.entropy_bonus * some.entropies[leaf, token]


def slow_term(some, loss, leaf, token, rho):
    """The term of each objective, from the formula in its paper."""
    advantage, logprob = some.advantages[leaf, token], some.logprobs[leaf, token]
    now = float(logprob.detach())
    clip = loss.clip or Clip(math.inf, math.inf)
    within = rho.clamp(1 - clip.low, 1 + clip.high)
    if loss.objective is OBJECTIVES["sapo"]:
        tau = 1.0 if advantage > 0 else 1.05
        return -(4 / tau) / (1 + torch.exp(-tau * (rho - 1))) * advantage
    if loss.objective is OBJECTIVES["cispo"]:
        return -within.detach() * advantage * logprob
    if loss.objective is OBJECTIVES["dppo"]:
        gap = math.exp(now) - math.exp(some.sampler_logprobs[leaf, token])
        trusted = gap <= 0.1 if advantage > 0 else -gap <= 0.05
        return -within.detach() * advantage * logprob * trusted
    if loss.clip is None:
        return -rho * advantage
    element = -min(rho * advantage, within * advantage)
    if clip.dual is not None and advantage < 0:
        return min(element, -clip.dual * advantage)
    return element


def slow_importance(some, loss, leaf, token):
    """min(w, cap), or 0 where a mask leaves the token out."""
    chosen = loss.importance
    sampled = [t for t in range(some.mask.shape[1]) if some.mask[leaf, t]]
    logs = [float(some.old_logprobs[leaf, t] - some.sampler_logprobs[leaf, t]) for t in sampled]
    measured = {
        MEASURES["token"]: math.exp(logs[sampled.index(token)]),
        MEASURES["sequence"]: math.exp(sum(logs)),
        MEASURES["geometric"]: math.exp(sum(logs) / len(logs)),
        MEASURES["k3"]: sum(math.exp(x) - x - 1 for x in logs) / len(logs),
    }
    if chosen.mask and not chosen.mask.low <= measured[chosen.mask.measure] <= chosen.mask.high:
        return 0.0
    now = some.logprobs.detach()
    moved = [float(some.sampler_logprobs[leaf, t] - now[leaf, t]) for t in sampled]
    too_far = chosen.negative is not None and sum(moved) / len(moved) > chosen.negative
    if too_far and some.advantages[leaf, token] < 0:
        return 0.0
    return min(measured[chosen.weight], chosen.cap) if chosen.weight else 1.0


def assert_equals_the_slow_loop(some, loss):
    value, gradient, at_entropies, _ = loss_of(some, loss)
    slow = slow_loss(some, loss)
    assert value == pytest.approx(slow.item(), abs=1e-12)
    if slow.requires_grad:
        expected = torch.autograd.grad(
            slow, (some.logprobs, some.entropies), allow_unused=True, materialize_grads=True
        )
        torch.testing.assert_close(gradient, expected[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(at_entropies, expected[1], rtol=1e-12, atol=1e-12)


@each_ratio
@each_averaging
def test_each_combination_equals_the_slow_loop(ratio, averaging):
    some = made_batch(np.random.default_rng(0), 4, 7, share=0.7, spread=0.5, borders=0.4)
    assert some.mask.sum() > 12
    for clip, name in itertools.product((None, *CLIPS.values()), (None, *KLS)):
        kl = KlPenalty(KLS[name], 0.3) if name else None
        weighted = Importance(WEIGHTS["token"], 1.2)
        assert_equals_the_slow_loop(some, Loss(ratio, clip, averaging, kl, 0.05, weighted))


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=list(OBJECTIVES))
@pytest.mark.parametrize("mask", [None, *MASKS.values()], ids=["none", *MASKS])
@pytest.mark.parametrize("weight", [None, *WEIGHTS.values()], ids=["none", *WEIGHTS])
def test_each_objective_and_importance_equals_the_slow_loop(objective, mask, weight):
    some = made_batch(np.random.default_rng(1), 6, 7, share=0.7, spread=0.5, borders=0.4)
    for negative, clip in itertools.product((None, 0.1), (None, NO_LOWER_END, *CLIPS.values())):
        chosen = Importance(weight, 1.2, mask, negative)
        for ratio in (RATIOS["token"], replace(RATIOS["token"], old=losses.AGAINST["sampler"])):
            loss = Loss(ratio, clip, AVERAGINGS["token_mean"], None, 0.0, chosen, objective)
            assert_equals_the_slow_loop(some, loss)
        left_out = ~importance.kept(sampled_only(some), chosen) & some.mask
        assert bool(left_out.any()) == bool(mask or negative), "the batch has what is left out"


@given(batches(), choices())
@examples(150)
def test_value_and_gradient_equal_the_slow_loop(some, loss):
    assert_equals_the_slow_loop(some, loss)


@given(batches(), choices(ratio=RATIOS["segment"], objective=objectives.CLIPPED))
@examples(25)
def test_the_gradient_is_the_slope_of_the_loss(some, loss):
    gradient, step = loss_of(some, loss)[1], 1e-6
    for place in np.ndindex(*some.mask.shape):
        nudge = torch.zeros_like(some.logprobs)
        nudge[place] = step
        up, down = (
            slow_loss(replace(some, logprobs=some.logprobs + sign * nudge), loss).item()
            for sign in (1, -1)
        )
        assert float(gradient[place]) == pytest.approx((up - down) / (2 * step), abs=1e-6)


def test_rows_name_existing_parts():
    rows = algorithms.load_algorithms().values()
    assert {row.ratio for row in rows} == set(RATIOS)
    assert {row.averaging for row in rows} == set(AVERAGINGS)
    assert {row.kl.estimator for row in rows if row.kl} == set(KLS)


# ---------------------------------------------------------------- golden values


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "low", "high"),
    [
        (1.0, 2.0, -2.0, -2.0, 0, 0),
        (1.1, 2.0, -2.2, -2.2, 0, 0),
        (1.5, 2.0, -2.56, 0.0, 0, 1),  # clipped above: 1.28 * 2
        (0.5, 2.0, -1.0, -1.0, 0, 0),  # the minimum keeps the way back open
        (1.5, -2.0, 3.0, 3.0, 0, 0),
        (0.5, -2.0, 1.6, 0.0, 1, 0),  # clipped below: 0.8 * -2
        (0.9, -2.0, 1.8, 1.8, 0, 0),
        (1.5, 0.0, 0.0, 0.0, 0, 0),
    ],
)
def test_golden_values_of_one_clipped_token(ratio, advantage, loss, slope, low, high):
    some = views([[math.log(ratio)]], [[advantage]])
    value, gradient, _, metrics = loss_of(some, token_loss())
    assert value == pytest.approx(loss)
    assert float(gradient[0, 0]) == pytest.approx(slope)
    assert (metrics["clip_low"], metrics["clip_high"]) == (low, high)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "bounded"),
    [
        (2.0, -2.0, 4.0, 4.0, 0),
        (5.0, -2.0, 6.0, 0.0, 1),  # ends at c = 3: 3 * 2
        (0.5, -2.0, 1.6, 0.0, 0),  # the lower clip as ever
        (5.0, 2.0, -2.56, 0.0, 0),  # not for A > 0
        (5.0, 0.0, 0.0, 0.0, 0),
    ],
)
def test_golden_values_of_the_dual_clip(ratio, advantage, loss, slope, bounded):
    some = views([[math.log(ratio)]], [[advantage]])
    value, gradient, _, metrics = loss_of(some, token_loss(clip=Clip(0.2, 0.28, 3.0)))
    assert value == pytest.approx(loss)
    assert float(gradient[0, 0]) == pytest.approx(slope)
    assert metrics["clip_dual"] == bounded


@pytest.mark.parametrize(
    ("ratio", "expected", "units"),
    [
        ("none", [1, 1, 1, 1], 3),
        ("token", [1, 4, 1, 16], 3),
        ("segment", [2, 2, 1, 16], 2),  # geometric means of 1 and 4, and of 16 alone
        ("sequence", [4, 4, 1, 4], 1),  # the cube root of 1 * 4 * 16
    ],
)
def test_golden_values_of_the_ratios(ratio, expected, units):
    mask, segments = [[1, 1, 0, 1]], [[0, 0, 0, 1]]
    some = views(np.log([[1, 4, 7, 16]]), 1.0, mask, segments)
    ratios = RATIOS[ratio].of(sampled_only(some)).detach()[0]
    assert ratios[some.mask[0]].tolist() == pytest.approx(np.array(expected)[[0, 1, 3]])
    assert RATIOS[ratio].count(some.segments, some.mask).tolist() == [units]


@pytest.mark.parametrize(
    ("averaging", "expected"),
    [
        ("token_mean", -(1 + 2 + 3 + 4 + 5) / 5),
        ("sequence_mean", -((1 + 2 + 3 + 4) / 4 + 5) / 2),
        ("unit_mean", -((1 + 2 + 3) / 3 + 4 + 5) / 3),
        ("constant_length", -(1 + 2 + 3 + 4 + 5) / (2 * BUDGET)),
    ],
)
def test_golden_values_of_the_averagings(averaging, expected):
    # Leaf 0: segments of three tokens and of one; leaf 1: one token. Ratio 1, advantages 1 to 5.
    advantages = [[1, 2, 3, 4], [5, 99, 99, 99]]
    mask, segments = [[1, 1, 1, 1], [1, 0, 0, 0]], [[0, 0, 0, 1], [0, 0, 0, 0]]
    some = views(np.zeros((2, 4)), advantages, mask, segments)
    assert loss_of(some, token_loss("segment", averaging))[0] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", -0.5, 1.0), ("k2", 0.125, -0.5), ("k3", math.exp(0.5) - 1.5, 1 - math.exp(0.5))],
)
def test_golden_values_of_the_kl_estimators(estimator, value, slope):
    some = views([[-1.5]], 0.0, reference_logprobs=[[-1.0]])  # d = 0.5, and dd/dlogp = -1
    total, gradient, _, metrics = loss_of(some, token_loss(kl=KlPenalty(KLS[estimator], 0.1)))
    assert total == pytest.approx(0.1 * value)
    assert float(gradient[0, 0]) == pytest.approx(0.1 * slope)
    assert metrics["kl_reference"] == pytest.approx(math.exp(0.5) - 1.5)  # k3, whichever is trained


@pytest.mark.parametrize(("cap", "weight"), [(None, 1.0), (2.0, math.exp(0.4)), (1.2, 1.2)])
def test_importance_weight_is_capped_on_policy_term_only(cap, weight):
    some = views(
        [[-1.0]],
        3.0,
        old_logprobs=[[-1.0]],
        sampler_logprobs=[[-1.4]],
        reference_logprobs=[[-0.5]],
        entropies=[[0.7]],
    )
    loss = token_loss(kl=KlPenalty(losses.k2, 0.1), entropy_bonus=0.01, importance=truncated(cap))
    value, gradient, at_entropies, metrics = loss_of(some, loss)
    assert value == pytest.approx(-3 * weight + 0.1 * 0.125 - 0.01 * 0.7)
    assert float(gradient[0, 0]) == pytest.approx(-3 * weight - 0.1 * 0.5)
    assert float(at_entropies[0, 0]) == pytest.approx(-0.01)
    assert metrics["importance_weight"] == pytest.approx(weight)
    assert metrics["mismatch_highest"] == pytest.approx(0.4)


def test_weight_below_one_where_the_sampler_was_surer():
    some = views([[-1.0]], 1.0, old_logprobs=[[-1.0]], sampler_logprobs=[[-0.5]])
    value, _, _, metrics = loss_of(some, token_loss(importance=truncated(2.0)))
    assert value == pytest.approx(-math.exp(-0.5))
    assert metrics["mismatch_highest"] == pytest.approx(0.5)


def test_importance_weights_carry_no_gradient():
    old = torch.zeros((1, 1), requires_grad=True)
    some = replace(views([[0.0]], 1.0), old_logprobs=old)
    assert not importance.weights(some, truncated(2.0)).requires_grad


def test_denominators():
    lengths, units = torch.tensor([3, 0, 5]), torch.tensor([2, 0, 1])
    counted = {name: each.denominator(lengths, units) for name, each in AVERAGINGS.items()}
    assert counted == {
        "token_mean": 8.0,
        "sequence_mean": 3.0,
        "unit_mean": 3.0,
        "constant_length": 3 * BUDGET,
    }


def test_a_constant_length_of_nothing_is_refused():
    with pytest.raises(ValueError, match="constant_length of 0 tokens"):
        losses.constant_length(0)


def test_a_kl_term_without_reference_is_refused():
    with pytest.raises(ValueError, match="no reference_logprobs"):
        loss_of(views([[0.0]], 1.0), token_loss(kl=KlPenalty(losses.k3, 0.1)))


# ---------------------------------------------------------------- properties


def parts_of(some, size):
    """Micro-batches of at most ``size`` leaves."""
    columns = [getattr(some, field.name).split(size) for field in fields(Views)]
    return [Views(*part) for part in zip(*columns, strict=True)]


@given(batches(), choices(), st.integers(0, 2**32 - 1))
@some_examples
def test_a_leaf_of_weight_n_counts_as_n_leaves(some, loss, seed):
    times = torch.randint(1, 4, (len(some.mask),), generator=torch.Generator().manual_seed(seed))
    repeated = Views(*(getattr(some, field.name)[repeats(times)] for field in fields(Views)))
    expected = policy_loss(repeated, loss, denominator_of(repeated, loss))[0]
    units = loss.ratio.count(some.segments, some.mask)
    denominator = loss.averaging.denominator(some.mask.sum(-1), units, times.double())
    assert denominator == denominator_of(repeated, loss)
    found, metrics = policy_loss(some, loss, denominator, times.double())
    assert found.item() == pytest.approx(expected.item(), abs=1e-12)
    one, other = (torch.autograd.grad(each, some.logprobs)[0] for each in (found, expected))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert metrics == policy_loss(some, loss, denominator)[1], "no metric is weighted"


def repeats(times):
    return torch.repeat_interleave(torch.arange(len(times)), times)


EXTREMES = {"ratio_highest": max, "ratio_lowest": min, "mismatch_highest": max}


@given(batches(), choices(), st.integers(1, 3))
@some_examples
def test_micro_batches_add_up_to_the_whole_batch(some, loss, size):
    value, gradient, at_entropies, whole = loss_of(some, loss)
    shares = [policy_loss(part, loss, denominator_of(some, loss)) for part in parts_of(some, size)]
    total = sum(share for share, _ in shares)
    assert total.item() == pytest.approx(value, abs=1e-12)
    added = torch.autograd.grad(
        total, (some.logprobs, some.entropies), allow_unused=True, materialize_grads=True
    )
    torch.testing.assert_close(added[0], gradient, rtol=0, atol=1e-12)
    torch.testing.assert_close(added[1], at_entropies, rtol=0, atol=1e-12)
    sums = [
        {name: float(entry) for name, entry in metrics.items()}
        for (_, metrics), part in zip(shares, parts_of(some, size), strict=True)
        if part.mask.any()
    ]
    for name in whole if sums else ():
        combined = EXTREMES.get(name, sum)(entry[name] for entry in sums)
        assert combined == pytest.approx(whole[name], abs=1e-9), name


@given(batches(), choices(), st.sampled_from([7.0, math.nan, math.inf, -math.inf]))
@some_examples
def test_masked_values_are_ignored(some, loss, junk):
    def dirty(field, values):
        if field == "segments":
            return torch.where(some.mask, values, 10**9)
        return torch.where(some.mask, values.detach(), junk).requires_grad_(values.requires_grad)

    spoilt = {f.name: dirty(f.name, getattr(some, f.name)) for f in fields(Views)}
    value, gradient, at_entropies, metrics = loss_of(some, loss)
    other = loss_of(Views(**spoilt | {"mask": some.mask}), loss)
    assert other[0] == value
    assert torch.equal(other[1], gradient)
    assert torch.equal(other[2], at_entropies)
    assert (gradient[~some.mask] == 0).all()
    assert other[3] == metrics


@given(batches(), choices())
@some_examples
def test_padding_behind_a_leaf_changes_nothing(some, loss):
    wider = Views(**{k: torch.nn.functional.pad(v, (0, 3)) for k, v in vars(some).items()})
    value, _, _, metrics = loss_of(some, loss)
    assert loss_of(wider, loss)[0] == pytest.approx(value, abs=1e-12)
    assert loss_of(wider, loss)[3] == pytest.approx(metrics, abs=1e-12)


@given(batches(), choices(ratio=RATIOS["sequence"]))
@some_examples
def test_one_segment_a_leaf_is_the_sequence_ratio(some, loss):
    some = replace(some, segments=torch.zeros_like(some.segments))
    assert_same(loss_of(some, loss), loss_of(some, replace(loss, ratio=RATIOS["segment"])))


@given(batches(), choices(ratio=RATIOS["token"]))
@some_examples
def test_every_token_a_segment_is_the_token_ratio(some, loss):
    places = torch.arange(some.mask.shape[1]).expand_as(some.segments)
    some = replace(some, segments=places)
    assert_same(loss_of(some, loss), loss_of(some, replace(loss, ratio=RATIOS["segment"])))


@given(batches(), choices(averaging=AVERAGINGS["unit_mean"], ratio=RATIOS["sequence"]))
@some_examples
def test_unit_mean_of_leaves_is_the_sequence_mean(some, loss):
    some = replace(some, mask=some.mask | (torch.arange(some.mask.shape[1]) == 0))  # none empty
    assert_same(
        loss_of(some, loss), loss_of(some, replace(loss, averaging=AVERAGINGS["sequence_mean"]))
    )


def assert_same(one, other):
    assert one[0] == pytest.approx(other[0], abs=1e-12)
    torch.testing.assert_close(one[1], other[1], rtol=0, atol=1e-12)
    assert one[3] == pytest.approx(other[3], abs=1e-12)


@given(batches())
@some_examples
def test_ratio_one_gives_the_plain_policy_gradient(some):
    """Where the tokens of a unit have equal advantages; here those of a leaf have."""
    some = replace(
        some,
        old_logprobs=some.logprobs.detach().clone(),
        advantages=some.advantages[:, :1].expand_as(some.advantages),
    )
    plain = -torch.where(some.mask, some.advantages, 0) / max(1, int(some.mask.sum()))
    for ratio in RATIOS:
        gradient = loss_of(some, token_loss(ratio))[1]
        torch.testing.assert_close(gradient, plain, rtol=0, atol=1e-12)


@given(batches(), choices(ratio=RATIOS["none"]))
@some_examples
def test_on_policy_ratio_ignores_the_old_policy(some, loss):
    loss = replace(loss, importance=Importance())
    other = replace(some, old_logprobs=some.old_logprobs - 1.0)
    assert torch.equal(loss_of(some, loss)[1], loss_of(other, loss)[1])


def gradient_at_the_nodes(advantages, averaging):
    """Two leaves of 4 and 2 sampled tokens share the first; old policy = this policy.

    The nodes' log-probabilities are gathered into the leaves' views, as the learner does it.
    """
    nodes = torch.tensor([-0.5, -1.0, -1.5, -0.7, -0.9], dtype=torch.float64, requires_grad=True)
    gather = torch.tensor([[0, 1, 2, 3], [0, 4, 0, 0]])
    mask = [[1, 1, 1, 1], [1, 1, 0, 0]]
    some = replace(views(np.zeros((2, 4)), advantages, mask), logprobs=nodes[gather])
    some = replace(some, old_logprobs=some.logprobs.detach())
    loss = token_loss(averaging=averaging)
    return torch.autograd.grad(policy_loss(some, loss, denominator_of(some, loss))[0], nodes)[0]


PER_LEAF = [[1.0] * 4, [-3.0] * 4]
SHARED_MEAN = [[-1.0, 1.0, 1.0, 1.0], [-1.0, -3.0, 0.0, 0.0]]


def test_soft_and_hard_credit_share_gradient_by_token_mean():
    soft = gradient_at_the_nodes(PER_LEAF, "token_mean")
    hard = gradient_at_the_nodes(SHARED_MEAN, "token_mean")
    torch.testing.assert_close(soft, hard, rtol=0, atol=1e-12)
    assert soft.tolist() == pytest.approx([2 / 6, -1 / 6, -1 / 6, -1 / 6, 3 / 6])


def test_soft_and_hard_credit_differ_under_sequence_mean():
    soft = gradient_at_the_nodes(PER_LEAF, "sequence_mean")
    hard = gradient_at_the_nodes(SHARED_MEAN, "sequence_mean")
    assert float(soft[0]) == pytest.approx(-(1 / 4 - 3 / 2) / 2)
    assert float(hard[0]) == pytest.approx((1 / 4 + 1 / 2) / 2)
    torch.testing.assert_close(soft[1:], hard[1:], rtol=0, atol=1e-12)


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize(("difference", "ratio"), [(30.0, math.exp(20)), (-30.0, math.exp(-20))])
def test_the_log_ratio_is_clamped_to_twenty(difference, ratio):
    some = views([[difference]], -1.0)
    assert float(RATIOS["token"].of(some).detach()[0, 0]) == pytest.approx(ratio)
    value, gradient, _, metrics = loss_of(some, token_loss())
    assert math.isfinite(value)
    assert float(gradient[0, 0]) == 0
    assert math.isfinite(metrics["kl"])


def test_log_ratios_are_clamped_before_their_mean():
    some = views([[50.0, -1.0]], 1.0)
    assert float(RATIOS["sequence"].of(some).detach()[0, 0]) == pytest.approx(math.exp(9.5))


@pytest.mark.parametrize(("difference", "d"), [(30.0, 10.0), (-30.0, -10.0)])
def test_reference_log_ratio_is_clamped(difference, d):
    some = views([[0.0]], 0.0, reference_logprobs=[[difference]])
    value, gradient, _, _ = loss_of(some, token_loss(kl=KlPenalty(losses.k3, 1.0)))
    assert value == pytest.approx(math.exp(d) - d - 1)
    assert float(gradient[0, 0]) == 0


@each_ratio
@pytest.mark.parametrize("impossible", list(itertools.product([False, True], repeat=4))[1:])
def test_probability_zero_keeps_everything_finite(ratio, impossible):
    """By the policy that learns, the one that sampled, the engine or the reference."""
    some = views([[-1.0, -2.0]], 1.0, **{name: [[-1.5, -1.0]] for name in LOGPROBS[1:]})
    for name in itertools.compress(LOGPROBS, impossible):
        spoilt = getattr(some, name).detach().clone()
        spoilt[0, 0] = -math.inf
        some = replace(some, **{name: spoilt.requires_grad_(name == "logprobs")})
    loss = Loss(
        ratio,
        CLIPS["dual"],
        AVERAGINGS["unit_mean"],
        KlPenalty(losses.k3, 0.1),
        0.1,
        truncated(2.0),
    )
    value, gradient, _, metrics = loss_of(some, loss)
    assert math.isfinite(value)
    assert torch.isfinite(gradient).all()
    assert all(map(math.isfinite, metrics.values()))


@each_ratio
@each_averaging
def test_batch_without_sampled_tokens_has_no_loss(ratio, averaging):
    some = views(np.zeros((2, 3)), 1.0, np.zeros((2, 3)), reference_logprobs=np.zeros((2, 3)))
    loss = Loss(ratio, CLIPS["dual"], averaging, KlPenalty(losses.k3, 0.1), 0.1, truncated(2.0))
    value, gradient, _, metrics = loss_of(some, loss)
    assert value == 0
    assert (gradient == 0).all()
    assert metrics.pop("ratio_highest") == metrics.pop("ratio_lowest") == 1
    assert set(metrics.values()) == {0.0}


@each_averaging
def test_leaf_without_tokens_gets_no_gradient(averaging):
    elements = torch.ones((1, 2), requires_grad=True)
    units = torch.zeros((1, 2), dtype=torch.int64)
    averaging.total(elements, torch.zeros((1, 2), dtype=torch.bool), units).backward()
    assert elements.grad.tolist() == [[0.0, 0.0]]


@each_ratio
def test_ratio_is_one_at_observed_tokens(ratio):
    some = views([[3.0, math.nan]], 1.0, np.zeros((1, 2)), [[0, 1]])
    assert ratio.of(sampled_only(some)).tolist() == [[1.0, 1.0]]


def test_a_sampled_nan_is_not_hidden():
    some = views([[math.nan, 0.0]], 1.0)
    assert math.isnan(loss_of(some, token_loss())[0])


# ---------------------------------------------------------------- metrics


def test_loss_metrics():
    ratios = np.array([[1.0, 1.5, 0.5], [0.5, 1.6, 9.0]])
    some = views(
        np.log(ratios),
        [[1.0] * 3, [-1.0] * 3],
        [[1, 1, 1], [1, 1, 0]],
        sampler_logprobs=[[0, 0.3, 0], [0, 0, 5.0]],
        entropies=np.full((2, 3), 0.25),
    )
    metrics = loss_of(some, token_loss(clip=Clip(0.2, 0.28, 1.55), importance=truncated(2.0)))[3]
    counted = [1.0, 1.5, 0.5, 0.5, 1.6]
    assert metrics == pytest.approx(
        {
            "tokens": 5,
            "clip_low": 1,  # 0.5 where A < 0
            "clip_high": 1,  # 1.5 where A > 0
            "clip_dual": 1,  # 1.6 where A < 0
            "kl": sum(ratio - 1 - math.log(ratio) for ratio in counted),
            "entropy": 5 * 0.25,
            "importance_weight": 4 + math.exp(-0.3),
            "importance_masked": 0.0,
            "mismatch_highest": 0.3,
            "ratio_highest": 1.6,
            "ratio_lowest": 0.5,
        }
    )


@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_padding_is_no_extreme_of_the_ratio(ratio):
    metrics = loss_of(views(np.log([[ratio, 1.0]]), 1.0, [[1, 0]]), token_loss())[3]
    assert metrics["ratio_highest"] == metrics["ratio_lowest"] == pytest.approx(ratio)


def test_a_clipped_unit_counts_with_each_of_its_tokens():
    some = views(np.log([[2.0, 2.0, 2.0]]), 1.0, [[1, 0, 1]])
    assert loss_of(some, token_loss("sequence"))[3]["clip_high"] == 2


def test_without_a_clip_nothing_is_clipped():
    metrics = loss_of(views(np.log([[9.0, 0.1]]), [[1.0, -1.0]]), token_loss("none"))[3]
    assert (metrics["clip_low"], metrics["clip_high"], metrics["clip_dual"]) == (0, 0, 0)


@given(batches(), choices())
@examples(20)
def test_metrics_carry_no_gradient(some, loss):
    _, metrics = policy_loss(some, loss, 1.0)
    assert not any(entry.requires_grad for entry in metrics.values())


# ---------------------------------------------------------------- value loss


def value_of(values, old, returns, mask=True, clip=0.5):
    shape = np.shape(values)
    learnt, fixed, targets = (
        torch.tensor(np.broadcast_to(each, shape).copy(), dtype=torch.float64)
        for each in (values, old, returns)
    )
    learnt.requires_grad_()
    where = torch.tensor(np.broadcast_to(mask, shape).copy(), dtype=torch.bool)
    total, metrics = value_loss(learnt, fixed, targets, where, clip)
    (gradient,) = torch.autograd.grad(total, learnt)
    return total.item(), gradient, {name: float(entry) for name, entry in metrics.items()}


@pytest.mark.parametrize(
    ("value", "clip", "loss", "slope", "clipped"),
    [
        (0.3, 0.5, 0.5 * 0.7**2, -0.7, 0),  # within reach of the old value, 0
        (0.9, 0.5, 0.5 * 0.5**2, 0.0, 1),  # moved too far: the clipped value is the worse one
        (-0.9, 0.5, 0.5 * 1.9**2, -1.9, 0),  # too far the wrong way: it may come back
        (0.9, None, 0.5 * 0.1**2, -0.1, 0),
    ],
)
def test_golden_values_of_the_value_loss(value, clip, loss, slope, clipped):
    total, gradient, metrics = value_of([[value]], 0.0, 1.0, clip=clip)
    assert total == pytest.approx(loss)
    assert float(gradient[0, 0]) == pytest.approx(slope)
    assert metrics == pytest.approx({"value_clipped": clipped, "value_error": (value - 1) ** 2})


@given(st.integers(0, 2**32 - 1), st.sampled_from([None, 0.1, 0.5]))
@some_examples
def test_value_loss_is_a_slow_loop_over_its_formula(seed, clip):
    random = np.random.default_rng(seed)
    values, old, returns = random.standard_normal((3, 3, 4))
    mask = random.random((3, 4)) < 0.6
    total, gradient, metrics = value_of(values, old, returns, mask, clip)
    expected = clipped = 0.0
    for v, o, r in zip(values[mask], old[mask], returns[mask], strict=True):
        near = v if clip is None else o + min(clip, max(-clip, v - o))
        expected += 0.5 * max((v - r) ** 2, (near - r) ** 2)
        clipped += (near - r) ** 2 > (v - r) ** 2 + 1e-12
    assert total == pytest.approx(expected)
    assert metrics["value_clipped"] == clipped
    assert metrics["value_error"] == pytest.approx(((values - returns)[mask] ** 2).sum())
    assert (gradient[torch.tensor(~mask)] == 0).all()


@pytest.mark.parametrize("junk", [7.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spoilt", range(3))
@pytest.mark.parametrize("clip", [None, 0.5])
def test_values_under_a_false_mask_change_nothing(junk, spoilt, clip):
    clean = [np.array([[0.3, 0.9]]), np.array([[0.0, 0.0]]), np.array([[1.0, 1.0]])]
    dirty = [each.copy() for each in clean]
    dirty[spoilt][0, 1] = junk
    value, gradient, metrics = value_of(*clean, mask=[[1, 0]], clip=clip)
    other = value_of(*dirty, mask=[[1, 0]], clip=clip)
    assert other[0] == value
    assert torch.equal(other[1], gradient)
    assert other[2] == metrics
