"""Token F1: values by hand, and what must hold of any text."""

import pytest
import regex
from hypothesis import assume, given
from hypothesis import strategies as st

from tasks.scorers.f1 import token_f1, tokens
from tasks.trees.words import UNSPACED

WORDS = st.lists(
    st.sampled_from(
        ["the", "a", "Yes", "no", "noanswer", "new", "New", "york", "東", "京", "U.S.", "!"]
    ),
    max_size=8,
).map(" ".join)
TEXT = st.text() | WORDS


def f1(answer, *accepted):
    return token_f1(answer, accepted)["score"]


@pytest.mark.parametrize(
    ("answer", "accepted", "score"),
    [
        ("The Eiffel Tower", "eiffel tower!", 1),
        ("U.S.A.", "usa", 1),
        ("New York", "New York City", 0.8),
        ("in New York City", "New York", 2 * (2 / 4 * 1) / (2 / 4 + 1)),
        ("York York", "York", 2 / 3),  # a word counts as often as both have it
        ("Boston", "New York", 0),
        ("", "Boston", 0),
        ("the", "Boston", 0),
        ("1.95 m", "1.95 m", 1),
        ("１９９９", "1999", 1),  # full-width digits
        ("Jose\u0301", "Jos\u00e9", 1),  # an accent of its own
        ("“Drifting”…", "drifting", 1),
        ("東京都", "東京", 0.8),  # by character
        ("東京 都", "東京都", 1),
        ("กรุงเทพ", "กรุงเทพ", 1),
        ("서울 시", "서울시", 0),  # Korean has spaces
        ("iPhone手机", "iphone 手 机", 1),
    ],
)
def test_scores_by_hand(answer, accepted, score):
    assert f1(answer, accepted) == pytest.approx(score)


@pytest.mark.parametrize("verdict", ["yes", "no", "noanswer"])
def test_yes_and_no_earn_nothing_in_part(verdict):
    assert f1(f"{verdict.upper()}.", verdict) == 1
    assert f1(f"probably {verdict}", verdict) == 0
    assert f1(verdict, f"{verdict} it is") == 0


@pytest.mark.parametrize(
    ("answer", "gold", "score"),
    [
        ("Yes, they are.", "yes", 1),
        ("No: it is not", "no", 1),
        ("no one", "no", 0),
        ("Yes, they are", "they are", pytest.approx(0.8)),
        *(("15", "1.5", 0), ("314", "3.14", 0), ("5", "-5", 0), ("C", "C++", 0), ("12", "1, 2", 0)),
        ("海上", "上海", 0.5),
        *(("2胜0负", "0胜2负", 0), ("11月1日", "1月11日", 0), ("6 men", "5 men", 0)),
        ("men", "5 men", pytest.approx(2 / 3)),
    ],
)
def test_what_changes_a_number_or_an_order(answer, gold, score):
    assert f1(answer, gold) == score


def test_the_breakdown():
    assert token_f1("in New York City", ["New York"]) == {
        "score": pytest.approx(2 / 3),
        "precision": 0.5,
        "recall": 1.0,
        "exact": 0.0,
    }
    assert token_f1("York New", ["New York"]) == {
        "score": 1.0,
        "precision": 1.0,
        "recall": 1.0,
        "exact": 0.0,
    }
    assert token_f1("York New", ["New York", "York, New"])["exact"] == 1
    assert set(token_f1("x", []).values()) == {0.0}


@pytest.mark.parametrize("text", ["The", "!!!", "A the", "", " \n"])
def test_answer_of_articles_equals_itself(text):
    assert f1(text, text) == 1
    assert f1("Boston", text) == f1(text, "Boston") == 0


def test_words_that_vanish_are_not_all_the_same():
    assert f1("a", "The") == f1("!!!", "???") == f1("", "!!!") == 0


def slowly(answer, accepted):
    """The definition, with lists that are crossed off."""
    best = 0.0
    for gold in map(tokens, accepted):
        mine = tokens(answer)
        verdicts = (["yes"], ["no"], ["noanswer"])
        if mine == gold:
            return 1.0
        if mine in verdicts or gold in verdicts:
            continue
        left, common = list(gold), 0
        for token in mine:
            if token in left:
                left.remove(token)
                common += 1
        if common:
            precision, recall = common / len(mine), common / len(gold)
            best = max(best, 2 * precision * recall / (precision + recall))
    return best


@given(TEXT, st.lists(TEXT, max_size=4))
def test_a_slow_loop_says_the_same(answer, accepted):
    assert token_f1(answer, accepted)["score"] == pytest.approx(slowly(answer, accepted))


@given(TEXT, st.lists(TEXT, max_size=3))
def test_every_measure_is_a_share(answer, accepted):
    assert all(0 <= value <= 1 for value in token_f1(answer, accepted).values())


@given(TEXT, TEXT)
def test_answer_and_gold_may_change_places(a, b):
    there, back = token_f1(a, [b]), token_f1(b, [a])
    assert (there["score"], there["precision"]) == (back["score"], back["recall"])


@given(TEXT, st.lists(TEXT, max_size=3), TEXT)
def test_another_accepted_form_never_lowers_the_score(answer, accepted, another):
    assert f1(answer, *accepted, another) >= f1(answer, *accepted)


@given(TEXT, st.lists(TEXT, max_size=3))
def test_an_accepted_form_scores_one(answer, others):
    assert token_f1(answer, [*others, answer])["score"] == 1
    assert token_f1(answer, [*others, answer])["exact"] == 1


@given(TEXT, TEXT, st.randoms(use_true_random=False))
def test_the_order_of_words_does_not_matter(answer, gold, random):
    words = tokens(answer)
    assume(not regex.search(rf"[{UNSPACED}]", answer + gold))
    shuffled = random.sample(words, len(words))
    assert f1(" ".join(shuffled), gold) == pytest.approx(f1(" ".join(words), gold))
