"""Records that cannot be used: the remedy of all of them together."""

import pytest

from tasks.questions.faults import Fault
from tasks.questions.unusable import LONG_PROMPT, refuse

LONG = Fault("questions, train-0", LONG_PROMPT, "raise the context to 228", "", "", "train-0")
EMPTY = Fault("a.jsonl, line 1", "is empty", "write it", "", "", "train-1")


@pytest.mark.parametrize(
    ("faults", "remedy", "other"),
    [
        ([LONG], "make room for them as said there", "correct them"),  # there is nothing to correct
        ([LONG, EMPTY], "correct them", "make room"),
    ],
)
def test_prompts_that_are_too_long_want_room(tmp_path, faults, remedy, other):
    with pytest.raises(ValueError, match="raise the context to 228") as caught:
        refuse(faults, tmp_path)
    last = str(caught.value).splitlines()[-1]
    assert last.startswith(remedy) and other not in last
    assert "prepare.faulty to drop" in last
