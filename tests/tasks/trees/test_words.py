"""Overlap of texts: what counts as the same words, and that the fast form equals the plain one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.questions import computation
from tasks.recipes import load as settings_of
from tasks.trees.words import normalised_words, overlaps, shared_phrase

QUESTION = "Tom has 12 boxes with 7 red pens each. How many pens does he have in all?"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("What is 2 + 2?", "what  is\n2+2"),
        ("Tom's caf\u00e9", "TOM\u2019S cafe\u0301"),
        ("Stra\u00dfe", "STRASSE"),
        ("It costs $1,000.", "It costs 1000"),
        (r"Find $\dfrac{1}{2} \times x$.", r"Find \(\frac{1}{2}\cdot x\)"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        ("\uff11\uff12 \uff0b \uff13", "12 + 3"),
        ("5 \u2212 3", "5 - 3"),
        ("a well-known and/or ques\u200btion", "a well known and or question"),
        (
            "\u4e2d\u56fd\u7684\u9996\u90fd\uff1f",
            "\u4e2d \u56fd \u7684 \u9996 \u90fd",
        ),
    ],
)
def test_writing_differs_and_words_do_not(left, right):
    assert normalised_words(left) == normalised_words(right)
    assert overlaps([left], [right], 20) == [0]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("Compute 2 + 3.", "Compute 2 - 3."),
        ("Compute 2 + 3.", "Compute 2 + 4."),
        ("Compute 2 * (3 + 4).", "Compute (2 * 3) + 4."),
        ("Compute 2.5 + 1.", "Compute 25 + 1."),
        ("Compute 1/2.", "Compute 12."),
        ("x^2", "x_2"),
        ("???", "!"),
        ("\u4e2d\u56fd", "\u4e2d\u6587"),
    ],
)
def test_different_questions_stay_different(left, right):
    assert overlaps([left], [right], 20) == [None]


def test_words_of_a_text():
    assert normalised_words("Jo's 1,234.5 km-long walk, 3x+1 (\u6771\u4eac)!") == [
        *("jos", "1234.5", "km", "long", "walk", "3", "x", "+", "1", "(", "\u6771", "\u4eac", ")")
    ]


def test_so_many_words_in_a_row_make_an_overlap():
    longer = f"Here is a riddle for you. {QUESTION} Think well."
    assert overlaps([longer], ["Nothing.", QUESTION, QUESTION], 16) == [1]
    changed = longer.replace("7", "8")  # 11 words of the question follow the number
    assert overlaps([changed], [QUESTION], 11) == [0]
    assert overlaps([changed], [QUESTION], 12) == [None]


def test_short_text_is_compared_as_a_whole():
    assert overlaps(["Who wrote it?", "Who wrote it first?"], ["who wrote it"], 8) == [0, None]


def test_first_held_out_text_is_named():
    held_out = ["d e f", "a b c", "c d e"]
    assert overlaps(["a b c d e f", "x a b c", "e f g"], held_out, 3) == [0, 1, None]


@pytest.mark.parametrize("texts", [[], ["a"]])
def test_nothing_overlaps_nothing(texts):
    assert overlaps(texts, [], 3) == [None] * len(texts)


def test_a_common_beginning_of_long_problems_is_no_overlap():
    common = "Let n be a positive integer. Find the sum of all positive integers n such that "
    left, right = (common + " ".join(f"{c}{i}" for i in range(30)) for c in "ab")
    assert overlaps([left], [right], 13) == [None]
    assert overlaps([left], [left.replace("a29", "b29")], 13) == [0]
    short = common + "n divides 12."
    assert overlaps([short], [right], 13) == [0], "it is nearly all of the short one"


def test_a_name_in_chinese_is_no_overlap():
    name = "中华人民共和国国家发展和改革委员会"  # 17 characters
    left = f"{name}的主任是谁，他毕业于哪所大学，后来又在哪里工作？"
    right = f"哪一年成立了{name}，它的前身叫什么名字，现在有多少个司局？"
    assert overlaps([left], [right], 13) == [None]
    assert overlaps([left], [left.replace("工作", "上班")], 13) == [0]
    assert overlaps([f"{name}的主任是谁？"], [f"{name}在哪里？"], 13) == [None], "8.5 words"


def test_the_shared_phrase_is_shown():
    longer = f"Here is a riddle for you. {QUESTION} Think well."
    assert shared_phrase(longer, QUESTION, 8) == " ".join(normalised_words(QUESTION))
    assert shared_phrase("nothing at all", QUESTION, 8) == ""


def test_no_words_are_refused():
    with pytest.raises(ValueError, match="words is 0"):
        overlaps(["a"], ["a"], 0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_generated_questions_do_not_overlap(seed):
    settings = settings_of("tiny").prepare
    problems = computation.generate(settings.questions, seed)
    texts = {split: [each.question.text for each in problems[split]] for split in problems}
    held_out = texts["validation"] + texts["test"]
    assert set(overlaps(texts["train"], held_out, settings.overlap_words)) == {None}


SMALL = st.lists(st.text("abc ", max_size=12), max_size=6)


def half_shared(left, right, words):
    """Whether at least half of the words of ``left`` are in runs that ``right`` has, too."""
    runs = [right[i : i + words] for i in range(len(right) - words + 1)]
    inside = set()
    for start in range(len(left) - words + 1):
        if left[start : start + words] in runs:
            inside.update(range(start, start + words))
    return 2 * len(inside) >= len(left)


@given(SMALL, SMALL, st.integers(1, 4))
def test_equals_the_comparison_of_every_pair(texts, held_out, words):
    def share(left, right):
        left, right = normalised_words(left), normalised_words(right)
        if min(len(left), len(right)) < words:
            return left == right
        return half_shared(left, right, words) or half_shared(right, left, words)

    expected = [
        next((index for index, other in enumerate(held_out) if share(text, other)), None)
        for text in texts
    ]
    assert overlaps(texts, held_out, words) == expected


@given(st.text())
def test_any_text_overlaps_itself(text):
    assert overlaps([text], ["other", text], 13)[0] in (0, 1)
    assert normalised_words(text)
