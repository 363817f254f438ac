"""Which held-out questions a candidate is asked."""

from flows.stages.evaluate import slice_for
from tasks.ledger.artifacts import Artifact


def candidate(number):
    return Artifact(f"models/{number}", f"digest {number}")


def test_slices_are_disjoint_and_each_is_used():
    starts = [slice_for(candidate(n), None, available=1000, size=90) for n in range(400)]
    assert set(starts) == {90 * number for number in range(11)}
    assert starts == [slice_for(candidate(n), None, 1000, 90) for n in range(400)]
    after = [slice_for(candidate(n), candidate("champion"), 1000, 90) for n in range(400)]
    assert after != starts, "a candidate meets another champion on other questions"


def test_few_questions_are_all_asked():
    assert {slice_for(candidate(n), None, available=170, size=90) for n in range(50)} == {0}
    assert {slice_for(candidate(n), None, available=30, size=90) for n in range(50)} == {0}
