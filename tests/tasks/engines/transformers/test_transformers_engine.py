"""The engine against a plain forward pass without a cache, and what its sessions promise."""

import copy
import random

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tasks.engines import SamplingRequest
from tasks.engines.transformers import cache
from tasks.engines.transformers import decoder as decoders
from tasks.engines.transformers.cache import RaggedSession
from tasks.engines.transformers.sampling_worker import WorkerSession
from tasks.engines.transformers.transformers_engine import TransformersEngine, grouped_attention
from tasks.policy.tiny import END as END_TOKEN
from tasks.policy.tiny import build_policy
from tasks.trees.outcomes import StopReason
from tests.examples import examples

CONTEXT = 120  # tokens of a session in these tests
STOPS = ("e", "</python>")  # "e" ends many tokens, so turns end at different times


@pytest.fixture(scope="module")
def attentive(policy):
    """The policy with sharper attention: a wrong position or mask shows in every number."""
    model = copy.deepcopy(policy)
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.data.mul_(4)
    return model


@pytest.fixture(scope="module")
def engine(attentive, tokenizer):
    return TransformersEngine(attentive, tokenizer)


@pytest.fixture
def fed(monkeypatch):
    """The shape [rows, tokens] of each pass through the model, as they happen."""
    shapes: list[tuple[int, int]] = []
    logits = RaggedSession.logits

    def watched(session, tokens, last, visible):
        shapes.append(tuple(tokens.shape))
        return logits(session, tokens, last, visible)

    monkeypatch.setattr(RaggedSession, "logits", watched)
    return shapes


def prompt(length: int, seed: int = 0):
    """Token ids that mean nothing; the same for the same arguments."""
    return np.random.default_rng(seed).integers(3, 290, length).astype(np.int32)


def open_session(engine, paths=8, context=CONTEXT, temperature=0.7, top_p=1.0, stop=STOPS):
    return engine.session(paths, context, temperature, top_p, stop)


def sample_once(engine, requests, **setting):
    """Samples of (tokens, seed, max_tokens) triples, side by side in a session of their own."""
    with open_session(engine, **setting) as session:
        return session.sample([SamplingRequest(session.open(), *request) for request in requests])


def assert_equal(ours, theirs):
    """Same tokens; numbers equal to rounding."""
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert ours.stopped == theirs.stopped
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
    np.testing.assert_allclose(ours.entropies, theirs.entropies, atol=1e-5)


def check(engine, request, sample, temperature, top_p, stop):
    """Recompute a turn with ``model(input_ids)``: no cache, no padding, no neighbours.

    The draw is recomputed as an interval of the cumulative distribution that the noise must fall
    into, so that rounding at its edge can't fail the test, nor at the edge of the nucleus.
    """
    length = len(sample.tokens)
    whole = np.concatenate([request.tokens, sample.tokens])
    with torch.no_grad():
        logits = engine.model(torch.tensor(whole, dtype=torch.long)[None]).logits[0]
    rows = logits[len(request.tokens) - 1 : -1].double() / temperature
    logprobs = torch.log_softmax(rows, -1).numpy()
    entropies = -(np.exp(logprobs) * logprobs).sum(-1) / np.log(logprobs.shape[-1])
    at = np.arange(length), sample.tokens
    np.testing.assert_allclose(sample.logprobs, logprobs[at], atol=1e-5)
    np.testing.assert_allclose(sample.entropies, entropies, atol=1e-5)

    noise = np.random.Generator(np.random.Philox(key=request.seed)).random(length, np.float32)
    for token, uniform, row in zip(sample.tokens, noise, np.exp(logprobs), strict=True):
        nuclei = [slow_nucleus(row, top_p + edge) for edge in (0, -1e-6, 1e-6)]
        assert any(drawn_from(kept, token, uniform) for kept in nuclei)

    assert sample.stopped == slow_stop(engine.tokenizer, sample.tokens, request.max_tokens, stop)
    for shorter in range(1, length):
        start = sample.tokens[:shorter]
        assert slow_stop(engine.tokenizer, start, request.max_tokens, stop) is None


def drawn_from(kept, token, uniform):
    """Return whether the noise falls into the token's interval of the kept probabilities."""
    below, above = kept[:token].sum(), kept[: token + 1].sum()
    return kept[token] > 0 and below - 1e-5 <= uniform * kept.sum() <= above + 1e-5


def slow_nucleus(probabilities, top_p):
    """One token after the other, most likely first, until their mass reaches ``top_p``."""
    kept, mass = np.zeros_like(probabilities), 0.0
    for token in np.argsort(-probabilities, kind="stable"):
        if mass >= top_p:
            break
        kept[token] = probabilities[token]
        mass += probabilities[token]
    return kept


def slow_stop(tokenizer, tokens, max_tokens, stop):
    """Why a turn of these tokens is over; None where it goes on."""
    if tokens[-1] == tokenizer.eos_token_id:
        return StopReason.END
    if any(string in tokenizer.decode(tokens) for string in stop):
        return StopReason.STOP
    return StopReason.LENGTH if len(tokens) >= max_tokens else None


# ---- the numbers are those of a plain forward pass


@pytest.mark.parametrize("top_p", [1.0, 0.8])
@examples(8)
@given(seed=st.integers(0, 2**32))
@example(783)  # a nucleus whose mass is 0.8 to rounding
def test_forked_dialogues_equal_plain_passes(engine, top_p, seed):
    """Several turns; ragged prompts, some equal; branches; paths that wait, end and are replaced.

    ``grown`` remembers what each handle has been through. A fork starts from anywhere in its
    parent's past, as a branch does that restarts after a tool result; some go on differently.
    """
    dice = random.Random(seed)
    turns = []
    with open_session(engine, paths=6, context=150, top_p=top_p) as session:
        grown = {session.open(): prompt(dice.choice([1, 5, 12]), dice.randrange(2))}
        for _ in range(5):
            for handle in list(grown):
                if len(grown) < 6 and dice.random() < 0.5:
                    past = grown[handle][: dice.randint(1, len(grown[handle]))]
                    other = prompt(dice.choice([0, 0, 3]), dice.randrange(99))
                    grown[session.fork(handle)] = np.concatenate([past, other])
            while len(grown) < 4:
                grown[session.open()] = prompt(dice.choice([1, 5, 12]), dice.randrange(2))
            chosen = dice.sample(list(grown), dice.randint(1, len(grown)))
            requests = [
                SamplingRequest(handle, grown[handle], dice.getrandbits(64), dice.randint(1, 12))
                for handle in chosen
            ]
            for request, sample in zip(requests, session.sample(requests), strict=True):
                turns.append((request, sample))
                result = prompt(dice.randint(0, 5), dice.randrange(99))
                turn = [grown[request.handle], sample.tokens, result]
                grown[request.handle] = np.concatenate(turn)
            for handle in dice.sample(list(grown), dice.randint(0, len(grown) - 1)):
                session.close(handle)
                del grown[handle]
    for request, sample in turns:
        check(engine, request, sample, 0.7, top_p, STOPS)


@pytest.mark.parametrize(
    ("config", "build"), [(LlamaConfig, LlamaForCausalLM), (Qwen3Config, Qwen3ForCausalLM)]
)
def test_other_architectures_equal_plain_passes(tokenizer, config, build):
    """The papers train Llama 3.1 and Qwen3 too."""
    torch.manual_seed(0)
    model = build(
        config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
        )
    )
    engine = TransformersEngine(model, tokenizer)
    requests = [(prompt(n), n, 9) for n in (3, 8)]
    for request, sample in zip(requests, sample_once(engine, requests), strict=True):
        check(engine, SamplingRequest(0, *request), sample, 0.7, 1.0, STOPS)


def test_grouped_attention_equals_copied_heads():
    torch.manual_seed(0)
    rows, heads, shared, fed, visible, size = 3, 6, 3, 4, 9, 8
    query = torch.randn(rows, heads, fed, size)
    key, value = torch.randn(2, rows, heads // shared, visible, size)
    mask = torch.rand(rows, 1, fed, visible) < 0.6
    mask[..., 0] = True
    copied = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1), attn_mask=mask
    )
    ours, _ = grouped_attention(None, query, key, value, mask)
    torch.testing.assert_close(ours, copied.transpose(1, 2))


def test_a_session_leaves_the_model_as_it_found_it(attentive, engine):
    attentive.train()
    before = attentive.config._attn_implementation
    with pytest.raises(KeyError), open_session(engine):
        assert not attentive.training
        raise KeyError("in the middle")
    assert attentive.training
    assert attentive.config._attn_implementation == before
    attentive.eval()


@pytest.fixture
def threads():
    """As many as lanes are asked for."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_small_policy_is_sampled_in_workers(engine, attentive, tokenizer, threads):
    first, *others = engine.replicas(3)
    assert first is engine and len(others) == 2
    with open_session(engine) as here, open_session(others[0]) as there:
        assert isinstance(here, RaggedSession) and isinstance(there, WorkerSession)


def test_policy_without_own_pass_is_sampled_here(engine, monkeypatch, threads):
    monkeypatch.setattr(decoders, "SMALL", 1000)
    monkeypatch.setattr(decoders, "MOST_COPIED", 1000)
    assert engine.replicas(2) == [engine, engine]


# ---- rows do not know of each other

RAGGED = [(prompt(4 + 5 * i, i), 100 + i, 3 + 4 * i) for i in range(6)]


@pytest.mark.parametrize("order", [range(6), [5, 3, 0, 4, 1, 2]])
def test_a_row_does_not_depend_on_its_neighbours(engine, order):
    together = sample_once(engine, [RAGGED[i] for i in order])
    for i, sample in zip(order, together, strict=True):
        assert_equal(sample, sample_once(engine, [RAGGED[i]])[0])


@pytest.mark.parametrize("positions", [1, 30, 60])
def test_a_prefill_in_several_passes_gives_the_same(engine, monkeypatch, positions):
    """First turns, then long rows with a short rest beside short rows that are all new."""

    def play():
        with open_session(engine, paths=9) as session:
            handles = [session.open() for _ in RAGGED]
            first = session.sample(
                [SamplingRequest(h, *request) for h, request in zip(handles, RAGGED, strict=True)]
            )
            after = [np.concatenate([RAGGED[i][0], first[i].tokens]) for i in range(6)]
            newcomers = [
                SamplingRequest(session.open(), prompt(20, 50 + i), i, 1 + i) for i in range(3)
            ]
            second = session.sample(
                newcomers + [SamplingRequest(handles[i], after[i], 200 + i, 12) for i in range(6)]
            )
            last = [np.concatenate([after[i], second[3 + i].tokens]) for i in range(6)]
            third = session.sample(
                [SamplingRequest(handles[i], last[i], 300 + i, 12) for i in range(6)]
            )
        return [*first, *second, *third]

    in_one = play()
    monkeypatch.setattr(cache, "FEED_TOKENS", positions)
    for ours, theirs in zip(play(), in_one, strict=True):
        assert_equal(ours, theirs)


def test_late_fork_equals_a_new_path(engine):
    start = prompt(10)
    with open_session(engine) as session:
        parent = session.open()
        (first,) = session.sample([SamplingRequest(parent, start, 1, 8)])
        past = np.concatenate([start, first.tokens, prompt(4, 1)])
        (turn,) = session.sample([SamplingRequest(parent, past, 2, 8)])
        branch = session.fork(parent)
        longer = np.concatenate([past, turn.tokens])
        branched, onward = session.sample(
            [SamplingRequest(branch, past, 3, 8), SamplingRequest(parent, longer, 4, 8)]
        )
    assert_equal(branched, sample_once(engine, [(past, 3, 8)])[0])
    assert_equal(onward, sample_once(engine, [(longer, 4, 8)])[0])


def test_a_fork_outlives_its_parent(engine):
    start = prompt(10)
    with open_session(engine, paths=2) as session:
        parent = session.open()
        session.sample([SamplingRequest(parent, start, 1, 8)])
        branch = session.fork(parent)
        session.close(parent)
        other = session.open()  # takes the parent's row
        session.sample([SamplingRequest(other, prompt(10, 7), 1, 8)])
        (branched,) = session.sample([SamplingRequest(branch, start, 3, 8)])
    assert_equal(branched, sample_once(engine, [(start, 3, 8)])[0])


# ---- what is computed, and what is not


def test_equal_prompts_are_computed_once(engine, fed):
    shared, other = prompt(9), prompt(6, 1)
    samples = sample_once(engine, [(shared, 1, 5), (other, 2, 5), (shared, 3, 5), (shared, 1, 5)])
    assert fed[0] == (2, 9)  # rows, tokens
    assert_equal(samples[0], samples[3])
    assert samples[0].tokens.tolist() != samples[2].tokens.tolist()


def test_paths_are_computed_as_one_until_they_part(engine, fed):
    requests = [(prompt(12), seed, 12) for seed in range(8)]
    turns = [sample.tokens for sample in sample_once(engine, requests, temperature=0.3)]
    assert fed == [(1, 12)] + [
        (len({tuple(turn[:step]) for turn in turns if len(turn) > step}), 1)
        for step in range(1, max(map(len, turns)))
    ]
    assert fed[1][0] < len(requests), "some have drawn the same token"


def test_a_later_turn_feeds_only_what_is_new(engine, fed):
    with open_session(engine, stop=()) as session:
        path = session.open()
        (first,) = session.sample([SamplingRequest(path, prompt(30), 1, 6)])
        fed.clear()
        tokens = np.concatenate([prompt(30), first.tokens, prompt(4, 1)])
        session.sample([SamplingRequest(path, tokens, 2, 1)])
    assert fed == [(1, 1 + 4)]  # the last sampled token was drawn but never fed


def test_a_fork_feeds_nothing_of_what_it_shares(engine, fed):
    with open_session(engine, stop=()) as session:
        path = session.open()
        session.sample([SamplingRequest(path, prompt(30), 1, 6)])
        branch = session.fork(path)
        fed.clear()
        session.sample([SamplingRequest(branch, prompt(30), 2, 1)])
    assert fed == [(1, 1)]


def test_finished_rows_are_dropped(engine, fed):
    lengths = [5, 1, 3, 2]
    samples = sample_once(engine, [(prompt(5, i), i, n) for i, n in enumerate(lengths)], stop=())
    assert [len(sample.tokens) for sample in samples] == lengths
    assert [rows for rows, _ in fed] == [4, 3, 2, 1, 1]  # the prompts, then step by step


# ---- limits


def test_opening_too_many_paths_raises(engine):
    with open_session(engine, paths=2) as session:
        first = session.open()
        session.fork(first)
        with pytest.raises(RuntimeError, match="all 2 paths of this session are in use"):
            session.open()
        with pytest.raises(RuntimeError, match="all 2 paths"):
            session.fork(first)


def test_closed_rows_are_used_again(engine):
    with open_session(engine, paths=2) as session:
        for i in range(5):
            handles = [session.open(), session.open()]
            samples = session.sample(
                [SamplingRequest(h, prompt(4 + i + j, i), j, 6) for j, h in enumerate(handles)]
            )
            for j, sample in enumerate(samples):
                assert_equal(sample, sample_once(engine, [(prompt(4 + i + j, i), j, 6)])[0])
            for handle in handles:
                session.close(handle)


def test_turn_beyond_the_context_is_refused(engine, fed):
    with open_session(engine, context=20) as session:
        fits, too_long = session.open(), session.open()
        with pytest.raises(ValueError, match="may reach 21 tokens, the session has 20"):
            session.sample(
                [
                    SamplingRequest(fits, prompt(3), 1, 4),
                    SamplingRequest(too_long, prompt(11), 1, 10),
                ]
            )
        assert fed == []
        (sample,) = session.sample(
            [SamplingRequest(fits, prompt(10), 1, 10)]
        )  # to the last position
    assert_equal(sample, sample_once(engine, [(prompt(10), 1, 10)])[0])


def test_nothing_to_sample(engine):
    with open_session(engine) as session:
        assert session.sample([]) == []


# ---- randomness and ranges


def test_a_seed_decides_the_tokens(engine):
    one, same, other = sample_once(engine, [(prompt(8), seed, 20) for seed in (5, 5, 6)], stop=())
    assert_equal(one, same)
    assert one.tokens.tolist() != other.tokens.tolist()


def test_logprobs_and_entropies_lie_in_their_ranges(engine):
    for temperature in (0.05, 1.0, 20.0):
        for sample in sample_once(engine, RAGGED, temperature=temperature):
            assert (sample.logprobs <= 0).all()
            assert ((sample.entropies >= 0) & (sample.entropies <= 1)).all()
            assert len(sample.tokens) == len(sample.logprobs) == len(sample.entropies)
            assert sample.tokens.dtype == np.int32
            assert sample.logprobs.dtype == sample.entropies.dtype == np.float32


# ---- where a turn stops


@pytest.fixture(scope="module")
def letters(tiny):
    """A policy over seven characters and their pairs: every short string comes up, cut anyhow."""
    tokenizer = Tokenizer(BPE())
    tokenizer.decoder = Fuse()
    trainer = BpeTrainer(vocab_size=14, special_tokens=[END_TOKEN], show_progress=False)
    tokenizer.train_from_iterator(["<a>b</a> a>b >a<a </a>b"] * 2, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_TOKEN)
    return TransformersEngine(build_policy(tiny, wrapped, seed=1).eval(), wrapped)


@pytest.mark.parametrize("stop", [("<a>",), ("a>",), ("</a>", "b<"), ("a>b", ">a<")])
def test_turn_stops_at_its_first_stop_string(letters, stop):
    requests = [(np.array([1 + i % 5], np.int32), i, 40) for i in range(40)]
    samples = sample_once(letters, requests, paths=40, temperature=1.0, stop=stop)
    for (tokens, seed, most), sample in zip(requests, samples, strict=True):
        check(letters, SamplingRequest(0, tokens, seed, most), sample, 1.0, 1.0, stop)
    assert StopReason.END in {sample.stopped for sample in samples}
    last = [letters.pieces()[s.tokens[-1]] for s in samples if s.stopped == StopReason.STOP]
    assert any(string not in piece for piece in last for string in stop), "one token each"


def test_a_stop_string_before_the_turn_does_not_end_it(engine, tokenizer):
    """Only what is sampled counts: a prompt may quote the tag."""
    quoted = tokenizer.encode("<python>1</python>")
    (sample,) = sample_once(engine, [(np.array(quoted, np.int32), 1, 6)], stop=("</python>",))
    assert len(sample.tokens) == 6
    assert sample.stopped == StopReason.LENGTH


def test_a_stop_string_does_not_reach_over_two_turns(letters):
    """The first turn ends with the first half of the string, the second begins with the rest."""
    half, rest = letters.tokenizer.encode("</"), letters.tokenizer.encode("a>")
    tokens = np.array([*half, *rest[:1]], np.int32)
    samples = sample_once(
        letters, [(tokens, seed, 1) for seed in range(8)], temperature=1.0, stop=("</a>",)
    )
    assert {sample.stopped for sample in samples} <= {StopReason.LENGTH, StopReason.END}
