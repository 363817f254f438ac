"""Token F1, for questions whose answer can be worded in several ways.

Normalisation and F1 are those of SQuAD (1606.05250, section 6.1), the rule for yes and no that of
HotpotQA (1809.09600). Our additions: punctuation is that of any script, and stays where it means
something (the sign and the point of a number, "C++"); text that is written without spaces between
words is compared by character and in order; an answer that changes a number has no partial credit;
"Yes, they are" is "yes"; LaTeX around words is taken off; an answer that normalisation would empty,
such as "The", is compared without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import regex

from tasks.scorers.contract import ScorerKind
from tasks.scorers.plain import unified, unmarked
from tasks.trees.words import UNSPACED

ARTICLES = {"a", "an", "the"}
VERDICTS = (["yes"], ["no"], ["noanswer"])  # share no partial credit with anything

_THOUSANDS = regex.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_LIST = regex.compile(r"(?<=\d),(?=\d)")
_KEPT = (
    r"(?<=\d)[.:/^+-](?=\d)",  # 3.14, 12:30, 3-2
    r"(?<![^\s(\[\p{Sc}])-\p{Sc}?(?=\.?\d)",  # the sign of a number
    r"(?<![\p{L}\p{N}])\.(?=\d)",  # .5
    r"(?<=[\p{L}\p{N}])(?:\++|\#)(?![\p{L}\p{N}])",  # C++, C#
    r"(?<=(?<![\p{L}\p{N}*])\p{L})\*(?![*\p{L}\p{N}])",  # A*
)
_PUNCTUATION = regex.compile(rf"({'|'.join(_KEPT)})|[!-/:-@\[-`{{-~]|\p{{P}}|\p{{Sc}}")
_TOKEN = regex.compile(rf"[-.]*\d[\d.,:/^+-]*|[{UNSPACED}]|[^\s{UNSPACED}]+")
_UNSPACED = regex.compile(rf"[{UNSPACED}]")
_NUMBER = regex.compile(r"-?\.?\d(?:[.,:/^+-]?\d)*")
_VERDICT = regex.compile(r"(yes)\b.*|(no)\s*(?:[,.;:!-].*)?", regex.DOTALL)


def token_f1(answer: str, accepted: Sequence[str]) -> dict[str, float]:
    """Return the best F1 over the accepted forms, with its precision and recall.

    "exact" is 1 where the tokens of that form equal the answer's, in order. Of forms with equal F1
    an exact one is preferred, then the first.
    """
    compared = [_compare(_tokens_against(answer, form), tokens(form)) for form in accepted]
    return max(
        compared,
        key=lambda comparison: (comparison["score"], comparison["exact"]),
        default=_nothing(),
    )


def tokens(text: str) -> list[str]:
    """Return the words of a text without case, articles, and punctuation that means nothing."""
    text = unmarked(text)
    plain = _THOUSANDS.sub(lambda matched: matched[0].replace(",", ""), unified(text))
    plain = _LIST.sub(" ", plain)
    words = _words(_PUNCTUATION.sub(lambda matched: (matched[1] or "").rstrip("$€£¥"), plain))
    return [word for word in words if word not in ARTICLES] or text.casefold().split()


def _words(text: str) -> list[str]:
    """Split at spaces; where a script has none, into characters and numbers."""
    return [
        part
        for word in text.split()
        for part in (_TOKEN.findall(word) if _UNSPACED.search(word) else [word])
    ]


def _tokens_against(answer: str, form: str) -> list[str]:
    """Return the answer's words; the verdict alone where yes or no is asked and elaborated."""
    verdict = _VERDICT.fullmatch(unified(unmarked(answer)).strip())
    if verdict and tokens(form) in VERDICTS:
        return [verdict[1] or verdict[2]]
    return tokens(answer)


def _compare(answer: list[str], gold: list[str]) -> dict[str, float]:
    if answer == gold:
        return {"score": 1.0, "precision": 1.0, "recall": 1.0, "exact": 1.0}
    ordered = any(_UNSPACED.match(word) for word in (*answer, *gold))
    common = _common_in_order(answer, gold) if ordered else _common(answer, gold)
    if not common or answer in VERDICTS or gold in VERDICTS or _changed(answer, gold, ordered):
        return _nothing()
    return {
        "score": 2 * common / (len(answer) + len(gold)),
        "precision": common / len(answer),
        "recall": common / len(gold),
        "exact": 0.0,
    }


def _common(answer: list[str], gold: list[str]) -> int:
    return (Counter(answer) & Counter(gold)).total()


def _common_in_order(answer: list[str], gold: list[str]) -> int:
    """Return the length of the longest common subsequence."""
    lengths = [0] * (len(gold) + 1)
    for ours in answer:
        above = 0
        for column, theirs in enumerate(gold, start=1):
            here = above + 1 if ours == theirs else max(lengths[column], lengths[column - 1])
            above, lengths[column] = lengths[column], here
    return lengths[-1]


def _changed(answer: list[str], gold: list[str], ordered: bool) -> bool:
    """Return whether the answer has another number in the place of the gold answer's.

    A number more or less changes none; where the order of words counts, that of numbers does.
    """
    ours, theirs = (_NUMBER.findall(" ".join(words)) for words in (answer, gold))
    if ordered and Counter(ours) == Counter(theirs):
        return ours != theirs
    return bool(Counter(ours) - Counter(theirs)) and bool(Counter(theirs) - Counter(ours))


def _nothing() -> dict[str, float]:
    return dict.fromkeys(("score", "precision", "recall", "exact"), 0.0)


SCORER = ScorerKind(token_f1, graded=True, lenient=True)
