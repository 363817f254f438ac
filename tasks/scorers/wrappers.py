"""Take off what stands around an answer and means nothing: styles, delimiters, sentences."""

from __future__ import annotations

import html

import regex

_INSIDE = r"(?P<inner>(?:\\.|[^{}\\]|\{(?&inner)\})*)"  # of braces, which may hold braces
_AROUND = (  # a whole answer
    regex.compile(r"\$\$?(?P<inner>(?:[^$]|\\\$)+?)\$?\$", regex.DOTALL),
    regex.compile(r"\\\((?P<inner>.+)\\\)", regex.DOTALL),
    regex.compile(r"\\\[(?P<inner>.+)\\\]", regex.DOTALL),
    regex.compile(rf"\\(?:boxed|fbox|framebox|ensuremath)\s*\{{{_INSIDE}\}}", regex.DOTALL),
    regex.compile(
        r"(?P<mark>\*{1,3}|_{1,3})(?P<inner>[^\s*_](?:.*[^\s*_])?)(?P=mark)", regex.DOTALL
    ),
    regex.compile(r"(?:```|~~~)\w*\s*\n(?P<inner>.+?)\n?\s*(?:```|~~~)", regex.DOTALL),
    regex.compile(r"(?P<mark>`{1,3})(?P<inner>[^`]+)(?P=mark)", regex.DOTALL),
    regex.compile(
        r"<(?P<mark>b|i|u|em|strong|code|p|span|div|mark)(?:\s[^<>]*)?>(?P<inner>.+)</(?P=mark)>"
    ),
    regex.compile(r'"(?P<inner>[^"]+)"|\u201c(?P<inner>[^\u201c\u201d]+)\u201d'),
    regex.compile(r"\u2018(?P<inner>[^\u2018\u2019]+)\u2019|'(?P<inner>[^']+)'"),
    regex.compile(r"\{(?!.*\\(?:over|choose|atop))(?P<inner>[^{},:]+)\}"),
    regex.compile(r"#{1,6}\s+(?P<inner>.+)", regex.DOTALL),
    regex.compile(r"(?:\\therefore|\\implies|\\Rightarrow|\u2234|=>)(?![a-zA-Z])\s*(?P<inner>.+)"),
)
_SENTENCES = (
    regex.compile(
        r"(?:so |thus,? |therefore,? |hence,? )?(?:the )?(?:\*\*)?(?:final |correct |right )?"
        r"(?:answer|result|value|option|choice)(?: is|:|=)(?:\*\*)?\s*:?\s*(?P<inner>.+)",
        regex.IGNORECASE | regex.DOTALL,
    ),
    regex.compile(
        "(?:所以|因此|故|则|即|那么)?[，,]?\\s*(?:[a-zA-Z]的)?\\s*(?:本题|此题)?(?:的)?(?:最终|正确|最后)?(?:的)?"
        "(?:答案|结果|值|解)(?:应该|应)?(?:是|为|等于|：|:|=)+\\s*(?P<inner>.+)"
    ),
    regex.compile("(?:所以|因此|故)?(?:答案)?(?:应)?选(?:择|项)?(?:是|为|：|:)?\\s*(?P<inner>.+)"),
    regex.compile(
        r"(?P<inner>\(?[A-J]\)?) is (?:the )?(?:correct|right)(?: answer| option| choice)?",
        regex.IGNORECASE,
    ),
    regex.compile(r"(?:m\s*)?\\angle\s*\{?[A-Z]{1,3}\}?\s*=\s*(?P<inner>.+)"),
    regex.compile("(?:所以|因此|故)?(?:一共|总共|共有|共|等于|得)\\s*(?P<inner>\\d.*)"),
)
_STYLES = (
    # with the answer in braces
    regex.compile(
        r"\\(?:underline|uline|mathsf|mathtt|mathit|mathnormal|boldsymbol|bm|pmb|mathbf|textbf|"
        rf"mathscr|emph|bbox(?:\[[^\]]*\])?)\s*\{{{_INSIDE}\}}"
    ),
    regex.compile(rf"\\(?:textcolor|colorbox)\s*\{{[^{{}}]*\}}\s*\{{{_INSIDE}\}}"),
    regex.compile(rf"\\color\s*\{{[^{{}}]*\}}\s*\{{{_INSIDE}\}}"),
    regex.compile(rf"\\fcolorbox\s*\{{[^{{}}]*\}}\s*\{{[^{{}}]*\}}\s*\{{{_INSIDE}\}}"),
)
_SWITCHES = (
    regex.compile(
        r"\\(?:tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge|bf|rm|it|"
        r"sf|tt|bfseries|itshape|displaystyle|textstyle|scriptstyle|limits|nolimits|strut|mathstrut)"
        r"(?![a-zA-Z])\s*"
    ),
    regex.compile(r"\\color\s*\{[^{}]*\}\s*"),
    regex.compile(r"\\(?:tag\*?|label|hspace\*?|vspace\*?)\s*\{[^{}]*\}"),
)
_END = regex.compile(  # of a proof
    r"(?:\s|\\q?quad|\\hfill|\\[ ,;:!]|[.,])*(?:\\(?:blacksquare|square|qed|qedsymbol|Box|"
    r"blacklozenge|checkmark)(?![a-zA-Z])|[\u220e\u25a0\u25a1\u2713\u2714\u2705])[\s.]*$"
)
_QUAD = regex.compile(r"\\q?quad(?![a-zA-Z])|\\hfill(?![a-zA-Z])")
_RAISED = regex.compile(r"<su([pb])>([^<>]*)</su\1>")
_ENTITY = regex.compile(r"&(?:[a-zA-Z]+|#\d+);")
_MARKS = regex.compile(r"[\\&<\u220e\u25a0\u25a1\u2713\u2714\u2705]")


def bare(text: str) -> str:
    """Return an answer without styles, delimiters and a sentence that only introduces it."""
    if _MARKS.search(text):
        text = _without_styles(text)
    before = None
    while text != before:
        before = text
        text = text.strip().rstrip(".\u3002").strip()
        for pattern in (*_AROUND, *_SENTENCES):
            matched = pattern.fullmatch(text)
            if matched and balanced(inner := matched["inner"]):
                text = inner
    return text


def _without_styles(text: str) -> str:
    text = _ENTITY.sub(lambda matched: html.unescape(matched[0]), text)
    text = _RAISED.sub(lambda m: f"{'^' if m[1] == 'p' else '_'}{{{m[2]}}}", text)
    text = _END.sub("", text)
    before = None
    while text != before:
        before = text
        for pattern in _STYLES:
            text = pattern.sub(lambda matched: matched["inner"], text)
    for pattern in _SWITCHES:
        text = pattern.sub("", text)
    return _QUAD.sub(" ", text)


def balanced(text: str) -> bool:
    """Return whether no brace closes what it has not opened, or stays open."""
    depth = 0
    for sign in text.replace("\\{", "").replace("\\}", ""):
        depth += (sign == "{") - (sign == "}")
        if depth < 0:
            return False
    return depth == 0


def encloses(text: str, pair: str) -> bool:
    """Return whether the first sign of a text is a bracket that its last sign closes."""
    if not (text.startswith(pair[0]) and text.endswith(pair[1])):
        return False
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign == pair[0]) - (sign == pair[1])
        if not depth:
            return place == len(text) - 1
    return False
