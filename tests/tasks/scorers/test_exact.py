"""Which answers equal an accepted form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.scorers.exact import exact_match

RIGHT, WRONG = {"score": 1.0}, {"score": 0.0}


@pytest.mark.parametrize(
    ("answer", "accepted"),
    [
        ("7", "7"),
        (" 7 ", "7"),
        ("7.", "7"),
        ("+7", "7"),
        ("007", "7"),
        ("-0", "0"),
        ("1,234,567", "1234567"),
        ("1234567", "1,234,567"),
        ("PARIS", "Paris"),
        ("Straße", "STRASSE"),
        ("Paris.", "paris"),
    ],
)
def test_equal_forms(answer, accepted):
    assert exact_match(answer, [accepted]) == RIGHT


@pytest.mark.parametrize(
    ("answer", "accepted"),
    [
        ("7", "8"),
        ("-7", "7"),
        ("7.5", "75"),
        ("7 8", "78"),
        ("7", "seven"),
        ("", "0"),
        ("3,5", "35"),  # a pair, or a decimal comma: thousands come in threes
        ("1,23,4", "1234"),
        ("1, 2", "1, 2, 3"),  # the beginning of a list
        ("1, 2, 3", "1, 2"),
        ("10\u00b2", "102"),  # a power
        ("", "."),  # nothing equals what says nothing
        ("", ""),
        (".", "."),
        (" .", "\u3002"),
    ],
)
def test_different_answers(answer, accepted):
    assert exact_match(answer, [accepted]) == WRONG


def test_any_accepted_form_will_do():
    assert exact_match("NYC", ["New York", "nyc"]) == RIGHT
    assert exact_match("Boston", ["New York", "nyc"]) == WRONG
    assert exact_match("anything", []) == WRONG


@given(st.integers(-(10**12), 10**12))
def test_integer_equals_itself_in_any_notation(number):
    for written in (f"{number}", f"{number:,}", f"{number:+,}", f" {number}. "):
        assert exact_match(written, [str(number)]) == RIGHT
        assert exact_match(written, [str(number + 1)]) == WRONG


@given(st.text())
def test_every_text_that_says_something_equals_itself(text):
    if any(sign.isalnum() for sign in text):
        assert exact_match(text, [text]) == RIGHT
