"""Stop strings of requests: what an agent reads ends before them, and what is learned with them."""

import numpy as np
import pytest

from tasks.engines import Sample
from tasks.programs.episodes import before_stop, until_stop
from tasks.trees.outcomes import StopReason
from tests.tasks.dialects import families

TEXT = "I look.\n\u89c2\u5bdf: it is\nObs: 5"  # characters of several tokens


def sampled(tokenizer, text, stopped=StopReason.END):
    tokens = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
    nothing = np.zeros(len(tokens), np.float32)
    return Sample(tokens, nothing, nothing, stopped)


@pytest.mark.parametrize("stop", ["\u89c2\u5bdf", "\u5bdf:", "\nObs", "look.\n", "it is", "I"])
def test_a_stop_string_is_found_in_the_text_of_all_tokens(stop):
    tokenizer = families.for_renderer("qwen3")
    sample = sampled(tokenizer, TEXT + tokenizer.eos_token)
    cut, was_cut = until_stop(sample, tokenizer.decode, [stop, "never"])
    assert (was_cut, cut.stopped) == (True, StopReason.STOP)
    assert stop in tokenizer.decode(cut.tokens)
    assert stop not in tokenizer.decode(cut.tokens[:-1])
    assert before_stop(tokenizer.decode(cut.tokens), [stop]) == TEXT[: TEXT.index(stop)]


def test_the_end_token_ends_a_turn_by_itself():
    tokenizer = families.for_renderer("qwen3")
    sample = sampled(tokenizer, TEXT + tokenizer.eos_token)
    for stops in ((tokenizer.eos_token,), ("never",), ()):
        assert until_stop(sample, tokenizer.decode, stops) == (sample, False)
