"""Branches of policies that carry states: at ends, at marks, between them, and at few tokens."""

import numpy as np
import pytest
import torch

from tasks.engines.contract import SamplingRequest
from tasks.engines.transformers.own_cache import OwnPass
from tasks.engines.transformers.transformers_engine import TransformersEngine
from tasks.policy.lean_transformers import transformers
from tasks.policy.small_copy import small_copy

CONFIGS = transformers.models.auto.configuration_auto.CONFIG_MAPPING
ROOM = 200
LAYERS = ["linear_attention", "full_attention"]
FAMILIES = {
    "qwen3_5_text": {"num_hidden_layers": 2, "layer_types": LAYERS},
    "olmo_hybrid": {"num_hidden_layers": 2, "layer_types": LAYERS},
    "nemotron_h": {},
    "falcon_h1": {},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "minimax": {},
    "kimi_linear": {},
    "jamba": {},  # takes a token at a time
    "zaya": {  # a state beside a window
        **{"num_hidden_layers": 2, "layer_types": ["hybrid_sliding", "hybrid"]},
        "sliding_window": 12,
    },
}


class Tokenizer:
    """As much of one as the engine asks for."""

    eos_token_id = -1  # no turn ends by chance


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    config = CONFIGS[request.param](**FAMILIES[request.param])
    return small_copy(config, ROOM).eval()


@pytest.fixture
def fed(monkeypatch):
    """The shapes (rows, tokens) of all passes."""
    shapes = []
    compute = OwnPass.compute

    def counted(self, tokens, *given, **named):
        shapes.append(tokens.shape)
        return compute(self, tokens, *given, **named)

    monkeypatch.setattr(OwnPass, "compute", counted)
    return shapes


def text(length, seed):
    return np.random.default_rng(seed).integers(3, 100, length).astype(np.int32)


class Play:
    """Samples, and keeps what was asked and what was drawn."""

    def __init__(self, session):
        self.session, self.turns = session, []

    def sample(self, contexts, limits):
        requests = [
            SamplingRequest(handle, tokens, len(self.turns) + i, limit)
            for i, ((handle, tokens), limit) in enumerate(zip(contexts, limits, strict=True))
        ]
        samples = self.session.sample(requests)
        self.turns += zip(requests, samples, strict=True)
        return [
            np.concatenate([request.tokens, sample.tokens])
            for request, sample in zip(requests, samples, strict=True)
        ]

    def hold_against(self, engine):
        """Compare all log-probabilities with those of plain passes over whole contexts."""
        only = engine.drawing(ROOM, 1.0, 1.0, []).ids.only
        for request, sample in self.turns:
            row = torch.from_numpy(np.concatenate([request.tokens, sample.tokens])).long()
            with torch.no_grad():
                logits = engine.model(input_ids=row[None], use_cache=False).logits[0].float()
            logprobs = torch.log_softmax(only(logits)[len(request.tokens) - 1 : -1], -1)
            own = logprobs.gather(1, row[len(request.tokens) :, None])[:, 0]
            np.testing.assert_allclose(sample.logprobs, own.numpy(), rtol=0, atol=1e-4)


def engine_of(model, monkeypatch):
    engine = TransformersEngine(model, Tokenizer())
    rows = model.config.get_text_config(decoder=True).vocab_size
    monkeypatch.setattr(engine, "pieces", lambda: ["x"] * rows)
    return engine


def test_branches_report_what_plain_passes_give(model, monkeypatch):
    engine = engine_of(model, monkeypatch)
    with engine.session(16, ROOM, 1.0, 1.0, []) as session:
        play = Play(session)
        long, short = session.open(), session.open()
        prompt, token = text(29, 0), text(1, 1)  # less than a convolution's window
        first, small = play.sample([(long, prompt), (short, token)], [14, 3])
        result = np.concatenate([first, text(9, 2)])
        second, small = play.sample(
            [(long, result), (short, np.concatenate([small, text(1, 3)]))], [14, 3]
        )
        end = np.concatenate([second, text(9, 4)])
        at = [  # tokens of the long path from which branches go on
            end,  # the end
            second,  # the end of a turn
            result,  # a mark: the end of a result
            prompt,  # another: the end of the prompt
            second[: len(result) + 6],  # between marks, within the second turn
            first[: len(prompt) + 5],  # and within the first
            prompt[:11],  # before all marks
        ]
        branches = [(session.fork(long), tokens) for tokens in at]
        branches += [(session.fork(short), small), (session.fork(short), token)]
        ends = play.sample(branches, [6, 4, 5, 3, 6, 2, 4, 5, 1])
        results = (5, 9, 9, 1, 5, 9, 2, 1, 1)  # fed together where they are equally long
        grown = [
            (handle, np.concatenate([tokens, text(length, length)]))
            for (handle, _), tokens, length in zip(branches, ends, results, strict=True)
        ]
        play.sample(grown, [4] * len(grown))
        play.hold_against(engine)
        assert max(abs(float(sample.logprobs.min())) for _, sample in play.turns) > 1


def test_a_branch_is_fed_from_the_last_mark_before_and_once_for_all(model, monkeypatch, fed):
    """GPG: several paths go on from a token within a turn."""
    engine = engine_of(model, monkeypatch)
    with engine.session(8, ROOM, 1.0, 1.0, []) as session:
        play, path = Play(session), session.open()
        [turn] = play.sample([(path, text(29, 0))], [20])
        [turn] = play.sample([(path, np.concatenate([turn, text(9, 1)]))], [20])
        result = len(turn) - len(play.turns[-1][1].tokens)
        mark = turn[: result + 13]
        fed.clear()
        play.sample([(session.fork(path), mark) for _ in range(4)], [1] * 4)
        assert all(rows == 1 for rows, _ in fed)
        assert sum(tokens for _, tokens in fed) == 13
        fed.clear()
        play.sample([(session.fork(path), turn[:result]) for _ in range(2)], [1] * 2)
        assert not fed
        play.hold_against(engine)


def test_results_of_several_paths_are_fed_in_few_passes(model, monkeypatch, fed):
    engine = engine_of(model, monkeypatch)
    with engine.session(8, ROOM, 1.0, 1.0, []) as session:
        play = Play(session)
        paths = [(session.open(), text(length, length)) for length in (20, 31, 8, 26)]
        ends = play.sample(paths, [3, 5, 2, 4])
        grown = [
            (handle, np.concatenate([tokens, text(9, 1)]))
            for (handle, _), tokens in zip(paths, ends, strict=True)
        ]
        fed.clear()
        play.sample(grown, [1] * 4)
        play.hold_against(engine)
    assert {rows for rows, _ in fed} == {4}
    assert sum(tokens for _, tokens in fed) == 10  # the turn's last token, and the result
