"""Which questions have labels, and what for."""

from collections import Counter

import pytest

from tasks.trees.labels import Labels

LABELS = Labels(seed=3, share=0.1, held_out=0.4)
QUESTIONS = [f"question {number}" for number in range(20_000)]


def test_roles_have_their_shares():
    counts = Counter(map(LABELS.role, QUESTIONS))
    assert counts["train"] / 20_000 == pytest.approx(0.06, rel=0.1)
    assert counts["calibrate"] / 20_000 == pytest.approx(0.02, rel=0.15)
    assert counts["judge"] / 20_000 == pytest.approx(0.02, rel=0.15)


def test_a_larger_share_keeps_the_labels_and_roles_of_a_smaller_one():
    more = LABELS.model_copy(update={"share": 0.3})
    for question in QUESTIONS[:3000]:
        if role := LABELS.role(question):
            assert more.role(question) == role


def test_the_seed_decides_and_all_questions_can_have_labels():
    other = LABELS.model_copy(update={"seed": 4})
    assert [LABELS.role(q) for q in QUESTIONS] != [other.role(q) for q in QUESTIONS]
    every = LABELS.model_copy(update={"share": 1.0})
    assert all(every.role(question) for question in QUESTIONS)
