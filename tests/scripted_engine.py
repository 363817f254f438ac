"""An engine that says what a script says, and remembers what it was asked and has said."""

from contextlib import contextmanager

import numpy as np

from tasks.engines import Sample
from tasks.trees.markers import encode
from tasks.trees.outcomes import StopReason


class ScriptedEngine:
    """``script(seed)`` returns a turn's text, and whether its end token follows."""

    def __init__(self, tokenizer, script):
        self.tokenizer, self.script = tokenizer, script
        self.drawn = []  # context and turn of each sample
        self.batches = []

    def replicas(self, most):
        return [self]

    def release(self):
        pass

    @contextmanager
    def session(self, paths, context, temperature, top_p, stop):
        yield ScriptedSession(self, context)


class ScriptedSession:
    def __init__(self, engine, context):
        self.engine, self.context, self.handles = engine, context, 0

    def open(self):
        self.handles += 1
        return self.handles

    def sample(self, requests):
        assert len({request.handle for request in requests}) == len(requests)
        self.engine.batches.append(len(requests))
        return [self._sample(request) for request in requests]

    def _sample(self, request):
        assert len(request.tokens) + request.max_tokens <= self.context
        text, ended = self.engine.script(request.seed)
        tokens = encode(self.engine.tokenizer, text)
        if ended:
            tokens = np.append(tokens, np.int32(self.engine.tokenizer.eos_token_id))
        stopped = StopReason.END if ended else StopReason.STOP
        if len(tokens) > request.max_tokens:
            tokens, stopped = tokens[: request.max_tokens], StopReason.LENGTH
        draws = np.random.default_rng(request.seed % 2**63).random(len(tokens))
        self.engine.drawn.append((request.tokens.tolist(), tokens.tolist()))
        return Sample(tokens, -draws.astype(np.float32), draws.astype(np.float32), stopped)
