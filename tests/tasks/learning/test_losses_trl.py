"""Parity with TRL's GRPOTrainer, run here on the same model, tokens, masks and advantages.

Where the definitions part, docs/own-algorithm.md says so, and the tests at the end show it.
"""

import copy
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from tasks.learning import importance, losses, objectives
from tasks.learning.importance import WEIGHTS, Importance
from tasks.learning.losses import KlPenalty, Loss
from tasks.learning.objectives import Clip
from tasks.learning.views import Views, sampled_only

LEAVES, PROMPT, COMPLETION = 6, 4, 11
BUDGET = 9  # response budget; some leaves are longer, some shorter
PAD = 0
TEMPERATURE = 0.8
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


@dataclass(frozen=True)
class Batch:
    """The same leaves for both sides; [leaves, PROMPT] or [leaves, COMPLETION] but for the first"""

    advantages: torch.Tensor  # [leaves]
    prompts: torch.Tensor
    completions: torch.Tensor
    within: torch.Tensor  # bool: the completion, without the padding behind it
    sampled: torch.Tensor  # bool: the completion without tool results
    old_logprobs: torch.Tensor
    sampler_logprobs: torch.Tensor
    reference_logprobs: torch.Tensor

    def part(self, leaves):
        return Batch(**{name: values[leaves] for name, values in vars(self).items()})


@pytest.fixture(scope="module")
def model(policy):
    return copy.deepcopy(policy).train()


def logprobs_of(model, prompts, completions, within):
    """Log-probabilities and entropies (over ln|V|) of the completions, straight from the logits."""
    ids = torch.cat([prompts, completions], dim=1)
    attention = torch.cat([torch.ones_like(prompts), within.long()], dim=1)
    logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits
    every = torch.log_softmax(logits[:, PROMPT - 1 : -1] / TEMPERATURE, dim=-1)
    entropies = -(every.exp() * every).sum(-1) / math.log(every.shape[-1])
    return every.gather(-1, completions[..., None])[..., 0], entropies


@pytest.fixture(scope="module")
def batch(model):
    """Unequal lengths, tool results in the midst, and log-ratios that the clip cuts at both ends.

    Half of the leaves have drifted little as a whole, so a ratio of whole leaves is clipped for
    some of them only.
    """
    random = np.random.default_rng(3)
    shape = (LEAVES, COMPLETION)
    lengths = np.array([11, 3, 7, 1, 10, 5])[:, None]
    within = np.arange(COMPLETION) < lengths
    sampled = within & (random.random(shape) < 0.75)
    sampled[:, 0] = True
    tokens = [torch.tensor(random.integers(1, 270, (LEAVES, n))) for n in (PROMPT, COMPLETION)]
    completions = torch.where(torch.tensor(within), tokens[1], PAD)
    with torch.no_grad():
        new, _ = logprobs_of(model, tokens[0], completions, torch.tensor(within))
    drift = 0.3 * random.standard_normal(shape)
    drift -= (drift * sampled).sum(-1, keepdims=True) / sampled.sum(-1, keepdims=True)
    drift += np.array([1e-4, 0.3, -1e-4, -0.3, 0.2, 2e-4])[:, None]

    def near(values, by):
        noise = torch.tensor(by, dtype=torch.float32)
        return torch.where(torch.tensor(sampled), values + noise, -7.0)

    old = near(new, -drift)
    return Batch(
        torch.tensor([1.3, 0.7, -0.4, -1.1, -0.6, 0.0]),
        tokens[0],
        completions,
        torch.tensor(within),
        torch.tensor(sampled),
        old,
        near(old, 0.4 * random.standard_normal(shape)),
        near(new, 0.5 * random.standard_normal(shape)),
    )


@pytest.fixture(scope="module")
def peer(model, tokenizer, tmp_path_factory):
    """A GRPOTrainer on the model, from the settings of GRPOConfig."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    folder = str(tmp_path_factory.mktemp("trl"))

    def make(**settings):
        arguments = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            report_to=[],
            per_device_train_batch_size=LEAVES,
            num_generations=2,
            max_completion_length=BUDGET,
            temperature=TEMPERATURE,
            **settings,
        )
        trainer = GRPOTrainer(
            model=copy.deepcopy(model),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": ["?"] * LEAVES}),
            processing_class=tokenizer,
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = arguments.gradient_accumulation_steps
        return trainer

    return make


def gradient_of(value, model):
    value.backward()
    gradient = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return gradient


def of_trl(trainer, batches, generated=None):
    """TRL's loss and gradient, added up over micro-batches; ``generated``: the generation batch."""
    total = 0.0
    everything = generated or batches
    for some in batches:
        total = total + trainer.compute_loss(
            trainer.model,
            {
                "prompt_ids": some.prompts,
                "prompt_mask": torch.ones_like(some.prompts),
                "completion_ids": some.completions,
                "completion_mask": some.within.long(),
                "tool_mask": some.sampled.long(),
                "advantages": some.advantages,
                "old_per_token_logps": some.old_logprobs,
                "ref_per_token_logps": some.reference_logprobs,
                "importance_sampling_ratio": (some.old_logprobs - some.sampler_logprobs)
                .exp()
                .clamp(max=trainer.vllm_importance_sampling_clip_max),
                "num_items_in_batch": sum(each.sampled.sum() for each in everything),
            },
        )
    return total.item(), gradient_of(total, trainer.model)


def views_of(some, logprobs=None, entropies=None):
    """What our loss reads of a batch."""
    logprobs = some.old_logprobs if logprobs is None else logprobs
    return Views(
        logprobs=logprobs,
        old_logprobs=some.old_logprobs,
        advantages=some.advantages[:, None].expand_as(logprobs),
        mask=some.sampled,
        segments=torch.zeros_like(some.completions),
        sampler_logprobs=some.sampler_logprobs,
        entropies=torch.zeros_like(logprobs) if entropies is None else entropies,
        reference_logprobs=some.reference_logprobs,
    )


def of_beamline(model, batches, loss):
    """Our loss and gradient, added up over micro-batches, and the metrics of the last one."""
    total = 0.0
    lengths = torch.cat([some.sampled.sum(-1) for some in batches])
    units = torch.cat([loss.ratio.count(some.sampled.long(), some.sampled) for some in batches])
    for some in batches:
        logprobs, entropies = logprobs_of(model, some.prompts, some.completions, some.within)
        views = views_of(some, logprobs, entropies)
        denominator = loss.averaging.denominator(lengths, units)
        value, metrics = losses.policy_loss(views, loss, denominator)
        total = total + value
    return total.item(), gradient_of(total, model), metrics


def assert_equal(ours, theirs):
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5, abs=1e-6)
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in ours[1].items():
        torch.testing.assert_close(gradient, theirs[1][name], **TOLERANCE, msg=name)
    assert max(float(gradient.abs().max()) for gradient in ours[1].values()) > 1e-2


NARROW, WIDE = (3e-4, 4e-4), (0.2, 0.28)
CASES = {  # TRL's settings; ratio, averaging, clip range of ours
    "grpo": ({"loss_type": "grpo"}, "token", "sequence_mean", WIDE),
    "dr_grpo": ({"loss_type": "dr_grpo"}, "token", "constant_length", WIDE),
    "dapo": ({"loss_type": "dapo"}, "token", "token_mean", WIDE),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        "sequence",
        "unit_mean",
        NARROW,
    ),
}
each_case = pytest.mark.parametrize("case", CASES)


def both(peer, case, clip=None, **settings):
    """TRL's trainer and our loss for one of CASES."""
    given, ratio, averaging, usual = CASES[case]
    low, high = clip or usual
    plain = {"use_bias_correction_kl": False}
    trainer = peer(**given, epsilon=low, epsilon_high=high, **plain | settings)
    delta = settings.get("delta")
    loss = (losses.RATIOS[ratio], Clip(low, high, delta), losses.AVERAGINGS[averaging](BUDGET))
    return trainer, loss


@each_case
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("symmetric", [False, True])
def test_loss_and_gradient_agree(peer, model, batch, case, beta, symmetric):
    low, high = CASES[case][3]
    trainer, parts = both(peer, case, (low, low) if symmetric else (low, high))
    trainer.beta = beta  # set afterwards: as a setting it would load a reference model
    loss = Loss(*parts, kl=KlPenalty(losses.k3, beta) if beta else None)
    *ours, metrics = of_beamline(model, [batch], loss)
    assert_equal(ours, of_trl(trainer, [batch]))
    assert metrics["clip_low"] > 0
    assert metrics["clip_high"] > 0
    assert metrics["clip_low"] + metrics["clip_high"] < metrics["tokens"] / 2


@each_case
def test_the_dual_clip_is_trls_delta(peer, model, batch, case):
    bound = 1 + 2 * CASES[case][3][1]
    trainer, parts = both(peer, case, delta=bound)
    *ours, metrics = of_beamline(model, [batch], Loss(*parts))
    assert_equal(ours, of_trl(trainer, [batch]))
    assert metrics["clip_dual"] > 0


@each_case
def test_truncated_importance_weights_agree(peer, model, batch, case):
    trainer, parts = both(peer, case, vllm_importance_sampling_clip_max=1.1)
    trainer.use_vllm = True  # only makes the loss take the weights
    *ours, metrics = of_beamline(
        model, [batch], Loss(*parts, importance=Importance(WEIGHTS["token"], 1.1))
    )
    assert_equal(ours, of_trl(trainer, [batch]))
    assert metrics["importance_weight"] < metrics["tokens"]


@each_case
def test_accumulated_micro_batches_of_equal_size_agree(peer, model, batch, case):
    trainer, parts = both(peer, case, gradient_accumulation_steps=3)
    thirds = [batch.part(slice(start, start + 2)) for start in (0, 2, 4)]
    assert_equal(of_beamline(model, thirds, Loss(*parts))[:2], of_trl(trainer, thirds))


@pytest.mark.parametrize("name", ["cispo", "sapo"])
def test_other_objectives_agree(peer, model, batch, name):
    trainer = peer(loss_type=name, epsilon_high=1.2, use_bias_correction_kl=False)
    clip, objective, averaging = {
        "cispo": (Clip(math.inf, 0.2), objectives.WEIGHTED, "token_mean"),
        "sapo": (None, objectives.soft(1.0, 1.05), "sequence_mean"),
    }[name]
    loss = Loss(losses.RATIOS["token"], clip, losses.AVERAGINGS[averaging](BUDGET))
    assert_equal(
        of_beamline(model, [batch], replace(loss, objective=objective))[:2],
        of_trl(trainer, [batch]),
    )


def test_luspo_is_a_token_mean_of_sequence_ratios(peer, model, batch):
    """But for the divisor, which is the number of leaves there, and that of tokens here."""
    low, high = NARROW
    trainer = peer(
        loss_type="luspo", importance_sampling_level="sequence", epsilon=low, epsilon_high=high
    )
    parts = losses.RATIOS["sequence"], Clip(low, high), losses.TOKEN_MEAN
    value, gradient, _ = of_beamline(model, [batch], Loss(*parts))
    length = float(batch.sampled.sum()) / LEAVES
    scaled = {name: each * length for name, each in gradient.items()}
    assert_equal((value * length, scaled), of_trl(trainer, [batch]))


@pytest.mark.parametrize("threshold", [0.05, 0.2])
def test_the_negative_mask_agrees(peer, model, batch, threshold):
    """TRL takes pi_old for the sampler where no engine is given, so it is the same here."""
    trainer, parts = both(peer, "grpo", off_policy_mask_threshold=threshold)
    same = replace(batch, sampler_logprobs=batch.old_logprobs)
    *ours, metrics = of_beamline(
        model, [same], Loss(*parts, importance=Importance(negative=threshold))
    )
    assert_equal(ours, of_trl(trainer, [same]))
    assert 0 < metrics["importance_masked"] < metrics["tokens"]


@pytest.mark.parametrize("mode", ["token_mask", "sequence_mask", "sequence_truncate"])
def test_weights_and_masks_are_those_of_trls_modes(batch, mode):
    """TRL has no function for them; what each of its modes does is written out here."""
    mismatch = (batch.old_logprobs - batch.sampler_logprobs) * batch.sampled
    level, kind = mode.split("_")
    total = mismatch.sum(-1, keepdim=True) if level == "sequence" else mismatch
    theirs = total.exp()
    bound = 1.3
    theirs = (
        theirs.clamp(max=bound) if kind == "truncate" else theirs.masked_fill(theirs > bound, 0)
    )
    mask = importance.Bounds(importance.MEASURES[level], 0.0, bound) if kind == "mask" else None
    chosen = Importance(WEIGHTS[level], bound, mask)
    ours = importance.weights(sampled_only(views_of(batch)), chosen)
    torch.testing.assert_close(ours[batch.sampled], theirs.expand_as(ours)[batch.sampled])


def test_entropy_bonus_agrees_under_token_mean(peer, model, batch):
    trainer, parts = both(peer, "dapo", entropy_coef=0.05)
    loss = Loss(*parts, entropy_bonus=0.05 * math.log(model.config.vocab_size))
    assert_equal(of_beamline(model, [batch], loss)[:2], of_trl(trainer, [batch]))


# ---------------------------------------------------------------- where the definitions part


def test_each_step_has_its_own_denominator(peer, model, batch):
    """TRL's dapo divides each of them by their mean number of tokens."""
    trainer, parts = both(peer, "dapo", gradient_accumulation_steps=1, steps_per_generation=2)
    halves = [batch.part(slice(0, 3)), batch.part(slice(3, 6))]
    tokens = [int(half.sampled.sum()) for half in halves]
    assert tokens[0] != tokens[1]
    for half, own in zip(halves, tokens, strict=True):
        ours, _, _ = of_beamline(model, [half], Loss(*parts))
        theirs, _ = of_trl(trainer, [half], generated=halves)
        assert theirs == pytest.approx(ours * own / (sum(tokens) / 2), rel=1e-5)


def test_kl_term_is_separate_unlike_trl(peer, model, batch):
    trainer, parts = both(peer, "dapo", use_bias_correction_kl=True)
    without = of_beamline(model, [batch], Loss(*parts))[0]
    ours = of_beamline(model, [batch], Loss(*parts, kl=KlPenalty(losses.k3, 0.5)))[0]
    trainer.beta = 0.5
    theirs = of_trl(trainer, [batch])[0]
    new = logprobs_of(model, batch.prompts, batch.completions, batch.within)[0].detach()
    k3 = losses.k3(batch.reference_logprobs - new)[batch.sampled]
    ratio = (new - batch.old_logprobs).exp()[batch.sampled]
    assert ours - without == pytest.approx(0.5 * float(k3.mean()), rel=1e-4)
    assert theirs - without == pytest.approx(0.5 * float((ratio * k3).mean()), rel=1e-4)
    assert float((ratio * k3).mean()) != pytest.approx(float(k3.mean()), rel=1e-2)


def test_entropy_bonus_averages_as_policy_term_unlike_trl(peer, model, batch):
    trainer, parts = both(peer, "grpo", entropy_coef=0.05)
    in_nats = 0.05 * math.log(model.config.vocab_size)
    with_bonus, without = (
        of_beamline(model, [batch], Loss(*parts, entropy_bonus=bonus))[0]
        for bonus in (in_nats, 0.0)
    )
    entropies = logprobs_of(model, batch.prompts, batch.completions, batch.within)[1].detach()
    by_leaf = [e[kept].mean() for e, kept in zip(entropies, batch.sampled, strict=True)]
    by_token = entropies[batch.sampled].mean()
    assert without - with_bonus == pytest.approx(in_nats * float(sum(by_leaf)) / LEAVES, rel=1e-4)
    assert of_trl(trainer, [batch])[0] == pytest.approx(without - in_nats * float(by_token), 1e-5)


def test_dual_clip_within_upper_clip_bounds_unlike_trl(peer, model, batch):
    trainer, parts = both(peer, "grpo", delta=1.1)
    ours = of_beamline(model, [batch], Loss(*parts))[0]
    theirs = of_trl(trainer, [batch])[0]
    assert ours < theirs - 1e-3


def test_log_ratios_are_bounded_unlike_trl(peer, model, batch):
    far = vars(batch) | {"old_logprobs": batch.old_logprobs - 25.0}
    trainer, parts = both(peer, "grpo")
    ours = of_beamline(model, [Batch(**far)], Loss(*parts))[0]
    theirs = of_trl(trainer, [Batch(**far)])[0]
    assert ours == pytest.approx(theirs * math.exp(-5.0), rel=0.5)
