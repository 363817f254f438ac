"""What counts as an answer that stands in a turn, and what only looks like it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.scorers.lenient import MOST_NUMBERS, last_number_is, stands_in

STANDS = [
    ("The answer is 84.", "84"),
    ("It is 84.0, I think", "84"),
    ("84", "84.0"),
    ("1,234 apples", "1234"),
    ("1{,}234", "1234"),
    ("12 000 of them", "12,000"),
    ("**84** (that is $84, or 84%)", "84"),
    ("12*7=84", "84"),
    ("12/4 = 3", "3"),
    ("10 -3", "3"),
    ("it is -84", "-84"),
    ("it is -$84", "-84"),
    (r"\boxed{84}</answer>", "84"),
    ("one half is 1/2", "0.5"),
    ("0.50", r"\frac{1}{2}"),
    ("x^2 + 1.", "x^2+1"),
    (r"so $\frac{a}{b}$", r"\frac{a}{b}"),
    ("<answer>Lisbon</answer>", "Lisbon"),
    (r"\boxed{The New  York}", "new york"),
    ("It is C++.", "C++"),
    ("Yes, they are", "yes"),
    ("nothing says so: yes", "yes"),
]
DOES_NOT = [
    ("84", "8"),
    ("1984, or 84th, or x84, or 84.5", "84"),
    ("at 12:30, or 2^30", "30"),
    ("12/4", "3"),
    ("12/4", "4"),
    ("it is 84", "-84"),
    ("it is -84", "84"),
    ("-x^2+1, or x^2+12, or 2x^2+1, or x^2+1 - 3", "x^2+1"),
    ("Lisbonne", "Lisbon"),
    ("York, new", "New York"),
    ("no. Or yes?", "yes"),
    ("", "84"),
    ("the number", "84"),
]


@pytest.mark.parametrize(("turn", "form"), STANDS)
def test_an_answer_counts_in_whatever_form(turn, form):
    assert stands_in(turn, ["another", form]) is True


@pytest.mark.parametrize(("turn", "form"), DOES_NOT)
def test_a_part_of_a_number_a_word_or_a_formula_is_none(turn, form):
    assert stands_in(turn, [form]) is False


def test_a_turn_that_tries_many_numbers_proves_nothing():
    numbers = [str(number) for number in range(MOST_NUMBERS + 1)]
    assert stands_in(" ".join(numbers[:-1]), ["7"])
    assert not stands_in(" ".join(numbers), ["7"])
    assert stands_in("7 " * 100, ["7"]), "equal ones count once"
    assert stands_in(" ".join([*numbers, "Lisbon"]), ["Lisbon"])


def test_the_last_number_is_what_most_evaluations_take():
    assert last_number_is("1 and 2, so 84 apples", ["84", "x"])
    assert not last_number_is("84 of 90", ["84"])
    assert not last_number_is("no number", ["84"])
    assert last_number_is("84", ["Lisbon"]) is None


@pytest.mark.parametrize("forms", [["B"], ["(A)", "a"], ["."], []])
def test_an_option_stands_anywhere_and_has_no_lenient_score(forms):
    assert stands_in("A or B", forms) is None


@given(number=st.integers(-(10**9), 10**9), comma=st.booleans())
def test_every_number_is_found_in_a_sentence(number, comma):
    written = f"{number:,}" if comma else str(number)
    assert stands_in(f"So the result is {written}.", [str(number)])
    assert last_number_is(f"3 times: {written}", [f"{number}.0"])
    assert not stands_in(f"So the result is {written}1.", [str(number)])


@pytest.mark.parametrize("text", ["1" * 10**5, "1," * 10**5, "-" * 10**5, "( " * 10**5, "\ud800"])
@pytest.mark.parametrize("form", ["7", "x^2+1", "((x+1))", "Lisbon"])
def test_no_text_takes_long_or_raises(text, form):
    assert stands_in(text, [form]) is False
