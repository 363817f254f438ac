"""Token F1, for questions whose answer can be worded in several ways.

Normalisation and F1 are those of SQuAD (1606.05250, section 6.1), the rule for yes and no that of
HotpotQA (1809.09600). Our additions: text that is written without spaces between words is compared
by character; punctuation is that of any script; an answer that normalisation would empty, such as
"The", is compared without it.
"""

from __future__ import annotations

import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

import regex

from tasks.trees.words import UNSPACED

ARTICLES = {"a", "an", "the"}
VERDICTS = (["yes"], ["no"], ["noanswer"])  # share no partial credit with anything

_PUNCTUATION = regex.compile(rf"[{regex.escape(string.punctuation)}\p{{P}}]")
_TOKEN = regex.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")


def token_f1(answer: str, accepted: Sequence[str]) -> dict[str, float]:
    """Return the best F1 over the accepted forms, with its precision and recall.

    "exact" is 1 where the tokens of that form equal the answer's, in order. Of forms with equal F1
    an exact one is preferred, then the first.
    """
    answer_tokens = tokens(answer)
    compared = [_compare(answer_tokens, tokens(form)) for form in accepted]
    return max(compared, key=lambda made: (made["score"], made["exact"]), default=_nothing())


def tokens(text: str) -> list[str]:
    """Return the words of a text without case, punctuation and articles.

    Compatibility forms (full-width letters, composed accents) are unified first (NFKC).
    """
    text = unicodedata.normalize("NFKC", text).casefold()
    words = [word for word in _TOKEN.findall(_PUNCTUATION.sub("", text)) if word not in ARTICLES]
    return words or text.split()


def _compare(answer: list[str], gold: list[str]) -> dict[str, float]:
    if answer == gold:
        return {"score": 1.0, "precision": 1.0, "recall": 1.0, "exact": 1.0}
    common = (Counter(answer) & Counter(gold)).total()
    if not common or answer in VERDICTS or gold in VERDICTS:
        return _nothing()
    return {
        "score": 2 * common / (len(answer) + len(gold)),
        "precision": common / len(answer),
        "recall": common / len(gold),
        "exact": 0.0,
    }


def _nothing() -> dict[str, float]:
    return dict.fromkeys(("score", "precision", "recall", "exact"), 0.0)
