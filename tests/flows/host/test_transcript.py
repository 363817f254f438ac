"""What a dialogue looks like in a terminal, and that nobody's text can steer the terminal."""

import io

import numpy as np

from flows.host.transcript import COLOURS, ENDINGS, Transcript
from tasks.engines import Sample
from tasks.trees.outcomes import TURN_OUTCOMES, Outcome
from tasks.trees.tree import Call, Observation

NONE = np.zeros(0, np.float32)
CLEAR = "\x1b[2J\x1b]0;owned\x07\r\u202e"


def shown(text="turn", *, colours=False, **observed):
    """What is printed of a world's start, a turn, an act, and the world's end."""
    stream = io.StringIO()
    transcript = Transcript(lambda tokens: text + "</s>", "</s>", stream, colours)
    seen = Observation(**{"outcome": Outcome.OK, "text": "a hole", **observed})
    transcript.began(None)
    transcript.began(Observation(Outcome.OK, "a lake"))
    transcript.sampled(Sample(np.zeros(1, np.int32), NONE, NONE, "end"))
    transcript.acted(Call("move", "left"), seen)
    transcript.ended(None)
    return stream.getvalue()


def test_blocks_have_labels_and_indented_lines():
    assert shown("one\ntwo", reward=-1.0, actions=("left", "right")) == (
        "world:    a lake\n"
        "agent:    one\n"
        "          two\n"
        "call:     move left\n"
        "result:   a hole\n"
        "actions:  left, right\n"
        "reward:   -1\n"
    )
    assert "result:   (timeout) a hole\n" in shown(outcome=Outcome.TIMEOUT)


def test_control_characters_are_printed_as_escapes():
    printed = shown(CLEAR, actions=(CLEAR,))
    assert all(sign == "\n" or sign.isprintable() for sign in printed)
    assert "\\x1b[2J" in printed


def test_colours_are_on_labels_alone():
    plain, coloured = shown(), shown(colours=True)
    for label, code in COLOURS.items():
        coloured = coloured.replace(f"\x1b[{code}m{label}:", f"{label}:")
    assert coloured.replace("\x1b[0m", "") == plain


def test_each_end_without_an_answer_is_explained():
    explained = set(TURN_OUTCOMES) - {Outcome.CALL, Outcome.ANSWER}
    assert set(ENDINGS) == explained
