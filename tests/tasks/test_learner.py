import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from params.schema import Machine, Update
from tasks import checkpoint, learner, losses
from tasks.engines import Request
from tasks.engines.transformers import TransformersEngine
from tasks.learner import token_logprobs
from tasks.packing import Row
from tasks.policy import use_machine

MACHINE = Machine(threads=1, device="cpu", precision="float32")
SETTINGS = Update(
    learning_rate=1e-2,
    warmup_updates=0,
    weight_decay=0.1,
    adam_betas=(0.9, 0.95),
    gradient_clip=1e9,
    epochs=1,
    mini_batches=1,
    micro_batch_tokens=40,
)
AVERAGINGS = {
    "sequence_mean": losses.Averaging(losses.sequence_mean, losses.count_leaves),
    "token_mean": losses.Averaging(losses.token_mean, losses.count_tokens),
}
LOSS = losses.Loss(losses.token_ratio, losses.Clip(0.2, 0.3), AVERAGINGS["sequence_mean"])
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def initial(policy, tokenizer, tmp_path_factory):
    """The folder of a very small policy."""
    use_machine(MACHINE)
    folder = tmp_path_factory.mktemp("initial") / "policy"
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def fresh(folder, settings=SETTINGS):
    """A learner as a new process would have it."""
    checkpoint._resident.clear()
    learning = checkpoint.resident(folder, MACHINE)
    checkpoint.prepare_optimizer(learning, settings)
    return learning


def made_rows(count=6, seed=0, zeros=()):
    """Rows of unequal lengths with observed tokens in their midst; ``zeros`` have no advantage."""
    random = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        length = int(random.integers(6, 15))
        mask = random.random(length) < 0.6
        mask[:2], mask[-1] = False, True
        rows.append(
            Row(
                tokens=random.integers(0, 270, length).astype(np.int32),
                mask=mask,
                old_logprobs=np.where(mask, -5.6 + 0.3 * random.standard_normal(length), 0).astype(
                    "f"
                ),
                advantage=0.0 if i in zeros else float(random.standard_normal()),
            )
        )
    return rows


def run(learning, rows, settings=SETTINGS, loss=LOSS, seed=1):
    return learner.update(learning, rows, loss, settings, TEMPERATURE, MACHINE, seed)


def weights(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def gradients(model):
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def plain_gradients(model, rows, averaging):
    """The same gradient from the model's own logits, a row at a time, all of plain torch."""
    model = copy.deepcopy(model)
    model.zero_grad()
    total = torch.zeros(())
    for row in rows:
        tokens = torch.tensor(row.tokens, dtype=torch.long)[None]
        logits = model(input_ids=tokens).logits.float() / TEMPERATURE
        logprobs = torch.log_softmax(logits[0, :-1], -1)[range(len(row.tokens) - 1), tokens[0, 1:]]
        own = torch.tensor(row.mask[1:])
        ratio = (logprobs - torch.tensor(row.old_logprobs[1:]))[own].exp()
        clipped = ratio.clamp(1 - LOSS.clip.low, 1 + LOSS.clip.high)
        terms = -torch.minimum(ratio * row.advantage, clipped * row.advantage)
        total = total + (terms.mean() if averaging == "sequence_mean" else terms.sum())
    counts = len(rows) if averaging == "sequence_mean" else sum(row.sampled for row in rows)
    (total / counts).backward()
    return gradients(model)


# ---------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("chunk", [1, 5, learner.LOGIT_CHUNK])
def test_logprobs_are_those_of_the_models_logits(initial, monkeypatch, chunk):
    monkeypatch.setattr(learner, "LOGIT_CHUNK", chunk)
    model = fresh(initial).model
    random = np.random.default_rng(0)
    tokens = torch.from_numpy(random.integers(0, 270, (3, 12)))
    mask = torch.from_numpy(random.random((3, 12)) < 0.5)
    mask[:, 0] = False
    logprobs, entropies = token_logprobs(model, tokens, mask, TEMPERATURE)
    with torch.no_grad():
        full = torch.log_softmax(model(input_ids=tokens).logits.float() / TEMPERATURE, -1)
    expected = full[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    spread = -(full.exp() * full).sum(-1)[:, :-1] / math.log(full.shape[-1])
    own = mask[:, 1:]
    torch.testing.assert_close(logprobs[:, 1:][own], expected[own], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropies[:, 1:][own], spread[own], rtol=0, atol=1e-5)
    for values in (logprobs, entropies):
        assert values.shape == tokens.shape
        assert (values[~mask] == 0).all()
    assert not entropies.requires_grad


def test_logprobs_of_a_batch_without_sampled_tokens_are_zero(initial):
    tokens = torch.ones(2, 4, dtype=torch.long)
    mask = torch.zeros(2, 4, dtype=torch.bool)
    logprobs, entropies = token_logprobs(fresh(initial).model, tokens, mask, 1.0)
    assert (logprobs == 0).all()
    assert (entropies == 0).all()


def test_a_token_sees_nothing_behind_it(initial):
    model = fresh(initial).model
    tokens = torch.arange(20).reshape(2, 10)
    mask = torch.zeros(2, 10, dtype=torch.bool)
    mask[:, 3:6] = True
    later = tokens.clone()
    later[:, 6:] = 99
    before, after = (token_logprobs(model, t, mask, 1.0)[0].detach() for t in (tokens, later))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_engine_and_the_learner_agree_on_what_was_sampled(initial, temperature):
    learning = fresh(initial)
    engine = TransformersEngine(learning.model, learning.tokenizer)
    prompts = [np.arange(3, 3 + n, dtype=np.int32) for n in (4, 9, 6)]
    with engine.session(3, 40, temperature, 1.0, ("</answer>",)) as session:
        samples = session.sample(
            [Request(session.open(), prompt, 17 + i, 20) for i, prompt in enumerate(prompts)]
        )
    for prompt, sample in zip(prompts, samples, strict=True):
        tokens = torch.from_numpy(np.concatenate([prompt, sample.tokens]).astype(np.int64))[None]
        mask = torch.arange(tokens.shape[1])[None] >= len(prompt)
        logprobs, entropies = token_logprobs(learning.model, tokens, mask, temperature)
        own = slice(len(prompt), None)
        np.testing.assert_allclose(logprobs[0, own].detach(), sample.logprobs, atol=1e-5)
        np.testing.assert_allclose(entropies[0, own], sample.entropies, atol=1e-5)


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("averaging", AVERAGINGS)
@pytest.mark.parametrize("zeros", [(), (1, 4)], ids=["all credited", "two without advantage"])
@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 10_000])
def test_the_gradient_of_an_update_is_that_of_plain_torch(
    initial, averaging, zeros, micro_batch_tokens
):
    learning, rows = fresh(initial), made_rows(zeros=zeros)
    expected = plain_gradients(learning.model, rows, averaging)
    settings = SETTINGS.model_copy(update={"micro_batch_tokens": micro_batch_tokens})
    metrics = run(learning, rows, settings, replace(LOSS, averaging=AVERAGINGS[averaging]))
    for name, gradient in gradients(learning.model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)
    assert metrics["trained_tokens"] == sum(row.sampled for row in rows if row.advantage)
    assert metrics["clip_fraction"] > 0, "some ratios lie outside the clip"


def test_rows_without_advantage_may_skip_the_model(initial):
    skipped, computed = made_rows(zeros=(0, 3)), made_rows(zeros=(0, 3))
    computed = [replace(row, advantage=row.advantage or 1e-30) for row in computed]
    found = []
    for rows in (skipped, computed):
        learning = fresh(initial)
        run(learning, rows)
        found.append(gradients(learning.model))
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-4, atol=1e-7)


def test_a_batch_without_any_advantage_leaves_the_policy_as_it_is(initial):
    learning = fresh(initial)
    before = weights(learning.model)
    metrics = run(learning, made_rows(zeros=range(6)))
    assert same(weights(learning.model), before)
    assert learning.updates == 0
    assert metrics["trained_tokens"] == metrics["gradient_norm"] == 0
    assert np.isfinite(list(metrics.values())).all()


def test_observed_tokens_are_context_and_no_more(initial):
    rows = made_rows()
    noisy = [
        replace(row, old_logprobs=np.where(row.mask, row.old_logprobs, np.float32(-9)))
        for row in rows
    ]
    found = []
    for some in (rows, noisy):
        learning = fresh(initial)
        found.append((run(learning, some), gradients(learning.model)))
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])


def test_gradients_are_clipped_to_their_global_norm(initial):
    learning = fresh(initial)
    metrics = run(learning, made_rows(), SETTINGS.model_copy(update={"gradient_clip": 0.01}))
    norm = torch.stack([g.norm() for g in gradients(learning.model).values()]).norm()
    assert float(norm) == pytest.approx(0.01, rel=1e-3)
    assert metrics["gradient_norm"] > 0.01


def test_a_gradient_that_is_not_finite_is_an_error_before_it_does_harm(initial):
    learning = fresh(initial)
    before = weights(learning.model)
    rows = made_rows()
    rows[2] = replace(rows[2], advantage=math.inf)
    with pytest.raises(
        RuntimeError, match=r"update 1 is (nan|inf): lower reinforce\.update\.learn"
    ):
        run(learning, rows)
    assert same(weights(learning.model), before)
    assert learning.updates == 0


# ---------------------------------------------------------------- steps and metrics


@pytest.mark.parametrize(
    ("epochs", "mini_batches", "count"), [(1, 1, 6), (3, 1, 6), (2, 3, 7), (1, 9, 4)]
)
def test_a_pass_takes_every_row_once_in_its_mini_batches(initial, epochs, mini_batches, count):
    learning, rows = fresh(initial), made_rows(count)
    settings = SETTINGS.model_copy(update={"epochs": epochs, "mini_batches": mini_batches})
    metrics = run(learning, rows, settings)
    assert metrics["trained_tokens"] == epochs * sum(row.sampled for row in rows)
    assert learning.updates == epochs * min(mini_batches, count)
    assert np.isfinite(list(metrics.values())).all()


def test_on_policy_metrics(initial):
    learning = fresh(initial)
    rows = []
    for row in made_rows():
        tokens = torch.from_numpy(row.tokens.astype(np.int64))[None]
        own = torch.from_numpy(row.mask)[None]
        logprobs, _ = token_logprobs(learning.model, tokens, own, TEMPERATURE)
        rows.append(replace(row, old_logprobs=logprobs[0].detach().numpy()))
    metrics = run(learning, rows)
    assert metrics["clip_fraction"] == 0
    assert metrics["ratio_highest"] == pytest.approx(1, abs=1e-5)
    assert metrics["ratio_lowest"] == pytest.approx(1, abs=1e-5)
    assert metrics["mismatch_highest"] < 1e-5
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["loss"] == pytest.approx(-np.mean([row.advantage for row in rows]), abs=1e-5)
    assert 0.5 < metrics["trained_entropy"] <= 1, "random weights are nearly uniform"


def test_metrics_are_means_over_the_tokens_of_all_steps(initial):
    # learning rate 0: every step sees the same policy, so one step or four must say the same
    still = {"learning_rate": 1e-30, "weight_decay": 0.0}
    one = run(fresh(initial), made_rows(), SETTINGS.model_copy(update=still))
    more = {**still, "epochs": 2, "mini_batches": 2}
    four = run(fresh(initial), made_rows(), SETTINGS.model_copy(update=more))
    for name in (
        "kl",
        "trained_entropy",
        "clip_low",
        "clip_high",
        "clip_fraction",
        "ratio_highest",
    ):
        assert four[name] == pytest.approx(one[name], abs=1e-6), name
    assert four["trained_tokens"] == 2 * one["trained_tokens"]


def rates_of(learning):
    return [group["lr"] for group in learning.optimizer.param_groups]


def test_the_learning_rate_warms_up_and_goes_on_after_a_restart(initial, tmp_path):
    settings = SETTINGS.model_copy(update={"warmup_updates": 4})
    learning = fresh(initial, settings)
    shares = []
    for number in range(6):
        run(learning, made_rows(), settings)
        (rate,) = set(rates_of(learning))
        shares.append(rate / settings.learning_rate)
        if number == 1:
            checkpoint.save(learning, tmp_path)
            learning = fresh(tmp_path / checkpoint.POLICY, settings)
    assert shares == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


def test_weight_decay_is_for_matrices_only(initial):
    learning = fresh(initial)
    decays = {
        weight: group["weight_decay"]
        for group in learning.optimizer.param_groups
        for weight in group["params"]
    }
    for name, weight in learning.model.named_parameters():
        assert decays[weight] == (0.1 if weight.ndim > 1 else 0.0), name


def test_an_update_raises_what_was_good_and_lowers_what_was_bad(initial):
    good, bad = (
        replace(row, advantage=a) for row, a in zip(made_rows(2), (1.0, -1.0), strict=True)
    )
    learning = fresh(initial)

    def total(row):
        tokens = torch.from_numpy(row.tokens.astype(np.int64))[None]
        mask = torch.from_numpy(row.mask)[None]
        return float(token_logprobs(learning.model, tokens, mask, TEMPERATURE)[0].detach().sum())

    before = total(good), total(bad)
    run(learning, [good, bad], SETTINGS.model_copy(update={"learning_rate": 1e-3}))
    assert total(good) > before[0]
    assert total(bad) < before[1]


def test_an_update_needs_its_optimizer_first(initial):
    checkpoint._resident.clear()
    with pytest.raises(AssertionError, match="prepare_optimizer comes first"):
        run(checkpoint.resident(initial, MACHINE), made_rows())
