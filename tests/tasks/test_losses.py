import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks import losses
from tasks.losses import Averaging, Clip, Loss, Views, policy_loss

SEQUENCE = Averaging(losses.sequence_mean, losses.count_leaves)
TOKEN = Averaging(losses.token_mean, losses.count_tokens)
AVERAGINGS = {"sequence_mean": SEQUENCE, "token_mean": TOKEN}
CLIP = Clip(0.2, 0.28)

each_averaging = pytest.mark.parametrize("averaging", AVERAGINGS.values(), ids=list(AVERAGINGS))


def views(logprobs, old, advantages, mask):
    return Views(
        torch.tensor(logprobs, dtype=torch.float64, requires_grad=True),
        torch.tensor(old, dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        torch.tensor(mask, dtype=torch.bool),
    )


def denominator_of(some, averaging):
    return averaging.denominator(some.mask.sum(-1))


def loss_of(some, averaging, clip=CLIP):
    """Loss, gradient at the log-probabilities, metrics."""
    value, metrics = policy_loss(
        some, Loss(losses.token_ratio, clip, averaging), denominator_of(some, averaging)
    )
    (gradient,) = torch.autograd.grad(value, some.logprobs)
    return value.item(), gradient, {name: float(entry) for name, entry in metrics.items()}


@st.composite
def batches(draw):
    """Leaves of unequal lengths, observed tokens in their midst, ratios on both sides of the clip.

    Every leaf has at least one sampled token, as a rollout's leaves have.
    """
    leaves, tokens = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mask = random.random((leaves, tokens)) < draw(st.sampled_from([0.3, 0.7, 1.0]))
    mask[np.arange(leaves), random.integers(tokens, size=leaves)] = True
    old = -3 * random.random((leaves, tokens))
    spread = draw(st.sampled_from([0.0, 0.1, 0.5, 2.0]))
    new = old + spread * random.standard_normal((leaves, tokens))
    advantages = np.repeat(random.standard_normal((leaves, 1)), tokens, axis=1)
    return views(new, old, advantages, mask)


def slow_loss(some, averaging, clip):
    """PPO's formula, a token at a time; algorithms section 4."""
    rows = []
    for leaf in range(some.mask.shape[0]):
        terms = []
        for token in range(some.mask.shape[1]):
            if some.mask[leaf, token]:
                log_ratio = float(
                    some.logprobs[leaf, token].detach() - some.old_logprobs[leaf, token]
                )
                ratio = math.exp(min(20.0, max(-20.0, log_ratio)))
                clipped = min(1 + clip.high, max(1 - clip.low, ratio))
                advantage = float(some.advantages[leaf, token])
                terms.append(-min(ratio * advantage, clipped * advantage))
        rows.append(terms)
    if averaging is SEQUENCE:
        return sum(sum(terms) / len(terms) for terms in rows) / len(rows)
    return sum(map(sum, rows)) / sum(map(len, rows))


@given(batches(), st.sampled_from(list(AVERAGINGS.values())))
def test_the_slow_loop_of_the_formula_gives_the_same_loss(some, averaging):
    assert loss_of(some, averaging)[0] == pytest.approx(slow_loss(some, averaging, CLIP), abs=1e-12)


@given(batches(), st.sampled_from(list(AVERAGINGS.values())))
@settings(max_examples=30)
def test_the_gradient_is_the_slope_of_the_slow_loop(some, averaging):
    gradient = loss_of(some, averaging)[1]
    step = 1e-6
    for place in np.ndindex(*some.mask.shape):
        nudge = torch.zeros_like(some.logprobs)
        nudge[place] = step
        up, down = (
            slow_loss(replace(some, logprobs=some.logprobs + sign * nudge), averaging, CLIP)
            for sign in (1, -1)
        )
        assert float(gradient[place]) == pytest.approx((up - down) / (2 * step), abs=1e-6)


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
def test_golden_values_of_one_token(ratio, advantage, loss, slope, low, high):
    some = views([[math.log(ratio)]], [[0.0]], [[advantage]], [[True]])
    value, gradient, metrics = loss_of(some, TOKEN)
    assert value == pytest.approx(loss)
    assert float(gradient[0, 0]) == pytest.approx(slope)
    assert (metrics["clip_low"], metrics["clip_high"]) == (low, high)


def test_golden_values_of_both_averagings():
    # Leaf 0: two sampled tokens at ratio 1, A = 1; leaf 1: one at ratio 1.1, A = -2, one observed.
    some = views(
        [[0.0, 0.0], [math.log(1.1), 5.0]],
        [[0.0] * 2] * 2,
        [[1.0] * 2, [-2.0] * 2],
        [[1, 1], [1, 0]],
    )
    assert loss_of(some, SEQUENCE)[0] == pytest.approx((-1 + 2.2) / 2)
    assert loss_of(some, TOKEN)[0] == pytest.approx((-1 - 1 + 2.2) / 3)


@each_averaging
@pytest.mark.parametrize("junk", [7.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["logprobs", "old_logprobs", "advantages"])
def test_what_stands_at_observed_positions_changes_nothing(averaging, junk, field):
    random = np.random.default_rng(0)
    mask = np.array([[0, 1, 1, 0, 1], [0, 0, 1, 1, 0]], bool)
    clean = {
        "logprobs": -random.random((2, 5)),
        "old": -random.random((2, 5)),
        "advantages": random.standard_normal((2, 5)),
    }
    dirty = {name: values.copy() for name, values in clean.items()}
    dirty[field.removesuffix("_logprobs")][~mask] = junk
    value, gradient, metrics = loss_of(views(**clean, mask=mask), averaging)
    same_value, same_gradient, same_metrics = loss_of(views(**dirty, mask=mask), averaging)
    assert same_value == value
    assert torch.equal(same_gradient, gradient)
    assert (same_gradient[~torch.tensor(mask)] == 0).all()
    assert same_metrics == metrics


@given(batches(), st.sampled_from(list(AVERAGINGS.values())), st.integers(1, 4))
def test_micro_batches_add_up_to_the_gradient_of_the_whole_batch(some, averaging, size):
    value, gradient, _ = loss_of(some, averaging)
    denominator = denominator_of(some, averaging)
    loss = Loss(losses.token_ratio, CLIP, averaging)
    total = torch.zeros((), dtype=torch.float64)
    sums: dict[str, float] = {}
    fields = [some.logprobs, some.old_logprobs, some.advantages, some.mask]
    for part in zip(*(entry.split(size) for entry in fields), strict=True):
        share, metrics = policy_loss(Views(*part), loss, denominator)
        total = total + share
        for name in ("tokens", "clip_low", "clip_high", "kl"):
            sums[name] = sums.get(name, 0.0) + float(metrics[name])
    (added,) = torch.autograd.grad(total, some.logprobs)
    assert total.item() == pytest.approx(value, abs=1e-12)
    torch.testing.assert_close(added, gradient, rtol=0, atol=1e-12)
    whole = loss_of(some, averaging)[2]
    assert sums == pytest.approx({name: whole[name] for name in sums}, abs=1e-12)


@given(batches(), st.sampled_from(list(AVERAGINGS.values())))
def test_at_ratio_one_the_gradient_is_that_of_reinforce(some, averaging):
    on_policy = replace(some, old_logprobs=some.logprobs.detach().clone())
    gradient = loss_of(on_policy, averaging)[1]
    weights = on_policy.mask.double()
    if averaging is SEQUENCE:
        weights = weights / weights.sum(-1, keepdim=True) / len(weights)
    else:
        weights = weights / weights.sum()
    reinforce = -(weights * on_policy.advantages * on_policy.logprobs).sum()
    (expected,) = torch.autograd.grad(reinforce, on_policy.logprobs)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


@given(batches())
def test_padding_behind_a_leaf_changes_nothing(some):
    wider = Views(*(torch.nn.functional.pad(entry, (0, 3)) for entry in vars(some).values()))
    for averaging in AVERAGINGS.values():
        assert loss_of(some, averaging)[0] == pytest.approx(loss_of(wider, averaging)[0], abs=1e-12)


@pytest.mark.parametrize(("difference", "ratio"), [(30.0, math.exp(20)), (-30.0, math.exp(-20))])
def test_the_log_ratio_is_clamped_to_twenty(difference, ratio):
    some = views([[difference]], [[0.0]], [[-1.0]], [[True]])
    assert float(losses.token_ratio(some)[0, 0].detach()) == pytest.approx(ratio)
    value, gradient, metrics = loss_of(some, TOKEN)
    assert math.isfinite(value)
    assert float(gradient[0, 0]) == 0
    assert math.isfinite(metrics["kl"])


def test_an_infinite_log_ratio_of_a_sampled_token_stays_finite():
    # the policy that learns finds a token impossible that was once sampled
    some = views([[-math.inf]], [[-1.0]], [[1.0]], [[True]])
    value, gradient, _ = loss_of(some, TOKEN)
    assert math.isfinite(value)
    assert torch.isfinite(gradient).all()


def test_metrics_are_sums_over_sampled_tokens_and_extremes():
    ratios = np.array([[1.0, 1.5, 0.5], [0.5, 1.5, 9.0]])
    some = views(np.log(ratios), np.zeros((2, 3)), [[1.0] * 3, [-1.0] * 3], [[1, 1, 1], [1, 1, 0]])
    metrics = loss_of(some, TOKEN)[2]
    counted = [1.0, 1.5, 0.5, 0.5, 1.5]
    assert metrics == pytest.approx(
        {
            "tokens": 5,
            "clip_low": 1,  # 0.5 where A < 0
            "clip_high": 1,  # 1.5 where A > 0
            "kl": sum(ratio - 1 - math.log(ratio) for ratio in counted),
            "ratio_highest": 1.5,
            "ratio_lowest": 0.5,
        }
    )


def test_metrics_carry_no_gradient():
    some = views([[0.3]], [[0.0]], [[1.0]], [[True]])
    _, metrics = policy_loss(some, Loss(losses.token_ratio, CLIP, TOKEN), 1.0)
    assert not any(entry.requires_grad for entry in metrics.values())


def test_denominators_count_leaves_or_their_sampled_tokens():
    lengths = torch.tensor([3, 0, 5])
    assert losses.count_leaves(lengths) == 3.0
    assert losses.count_tokens(lengths) == 8.0
