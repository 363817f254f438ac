"""Write sets of real numbers, however they are described, as intervals.

``x \\ge 2``, ``5 > x \\ge 2``, ``x \\ne 3``, ``x \\in [2,5)``, ``\\{x \\mid x > 2\\}`` and
``\\mathbb{R} \\setminus \\{3\\}`` are such sets.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import regex

REALS = r"(-\infty,\infty)"
_NAME = r"(?:[a-zA-Z]|\\(?:theta|alpha|beta|lambda|mu|phi|omega|gamma))(?:_\{?\w\}?)?'?"
_SIGN = r"<|>|\\le(?![a-z])|\\ge(?![a-z])"
_SIDES = regex.compile(
    rf"(?:(?P<first>[^<>]+?)\s*(?P<left>{_SIGN}))?\s*(?P<name>{_NAME})\s*"
    rf"(?P<right>{_SIGN})\s*(?P<last>[^<>]+)"
)
_TURNED = regex.compile(rf"(?P<first>[^<>]+?)\s*(?P<left>{_SIGN})\s*(?P<name>{_NAME})")
_UNEQUAL = regex.compile(rf"(?P<name>{_NAME})\s*\\n(?:e|eq)(?![a-z])\s*(?P<points>[^<>=]+)")
_EQUAL = regex.compile(rf"(?P<name>{_NAME})\s*=\s*(?P<point>[^<>=,]+)")
_ABSOLUTE = regex.compile(rf"\|\s*(?P<name>{_NAME})\s*\|\s*(?P<sign>{_SIGN})\s*(?P<bound>.+)")
_MEMBER = regex.compile(rf"(?P<name>{_NAME})\s*\\in(?![a-z])\s*(?P<set>.+)")
_BUILT = regex.compile(
    rf"\\?\{{\s*(?P<name>{_NAME})\s*(?:\\in\s*\\mathbb\s*\{{R\}}|\\in\s*\\mathbb R)?\s*"
    r"(?:\\mid(?![a-z])|\\vert(?![a-z])|\||:)\s*(?P<condition>.+?)\\?\}"
)
_ALL_REALS = r"(?:\\mathbb\s*\{?R\}?|\\R(?![a-zA-Z]))"
_REALS = regex.compile(rf"{_ALL_REALS}|\(-\\infty,\s*\+?\\infty\)")
_WITHOUT = regex.compile(
    rf"(?:{_ALL_REALS}|\(-\\infty,\s*\+?\\infty\))\s*(?:\\setminus|\\backslash|-)\s*"
    r"\\?\{(?P<points>[^{}]*(?:\{[^{}]*\}[^{}]*)*?)\\?\}"
)
_FIRST_REAL = regex.compile(rf"(?P<name>{_NAME})\s*\\in\s*{_ALL_REALS}\s*(?:,|;)\s*(?P<rest>.+)")
_EITHER = regex.compile(
    r"\s*(?:,?\s*\\text\s*\{\s*or\s*\}|,?\s*\bor\b|\\cup|\\lor(?![a-z])|\\vee)\s*"
)
_BOTH = regex.compile(
    r"\s*(?:,?\s*\\text\s*\{\s*and\s*\}|,?\s*\band\b|\\land(?![a-z])|\\wedge|\\cap)\s*"
)
_COMMA = regex.compile(rf",\s*(?={_NAME}\s*(?:{_SIGN}|\\ne(?![a-z])))")
_POINTS = regex.compile(r"\s*(?:,\s*\\text\s*\{\s*and\s*\}|\\text\s*\{\s*and\s*\}|\band\b|,)\s*")
_POINT_SET = regex.compile(r"\\\{[^{},]+\\\}")
_FRENCH = regex.compile(r"([\]\[])([^\[\](),]+,[^\[\](),]+)([\]\[])")
_TYPED = (
    (regex.compile(r"\s*>=\s*"), r" \\ge "),
    (regex.compile(r"\s*<=\s*"), r" \\le "),
    (regex.compile(r"\s*!=\s*"), r" \\ne "),
    (regex.compile(r"(?<=[)\]])\s*[Uu]\s*(?=[(\[])"), r"\\cup "),
    (regex.compile(r"(?<![a-zA-Z\\])(?:oo|inf(?:inity)?)(?![a-zA-Z])"), r"\\infty"),
)
_BELOW, _ABOVE = r"(-\infty,", r",\infty)"  # begin and end of a ray
_STRICT = ("<", ">")
_DOWN = (">", r"\ge")

Real = tuple[str, str]  # the variable or "", and the intervals


def real_set(text: str) -> Real | None:
    """Return the variable, if one is named, and the intervals of a set of reals; or None."""
    text = _in_latex(text.strip())
    if matched := _FIRST_REAL.fullmatch(text):
        return real_set(matched["rest"])
    if matched := _BUILT.fullmatch(text):
        inner = real_set(matched["condition"])
        return inner and _named(matched["name"], inner)
    if matched := _MEMBER.fullmatch(text):
        inner = real_set(matched["set"])
        return inner and _named(matched["name"], inner)
    found = _union(text) or _intersection(text) or _single(text)
    return None if found and _POINT_SET.fullmatch(found[1]) else found


def _in_latex(text: str) -> str:
    """Write the signs of a keyboard, which stand between words here, as commands."""
    for pattern, sign in _TYPED:
        text = pattern.sub(sign, text)
    return text


def _named(name: str, inner: Real) -> Real | None:
    return (name, inner[1]) if inner[0] in ("", name) else None


def _parts(pattern: regex.Pattern[str], text: str) -> list[Real] | None:
    """Return the sets between connectives, all of one variable, or None."""
    texts = pattern.split(text)
    if len(texts) < 2:
        return None
    parts = [_intersection(each) or _single(each) for each in texts]
    found = [part for part in parts if part]
    return found if len(found) == len(texts) and len({name for name, _ in found}) == 1 else None


def _union(text: str) -> Real | None:
    parts = _parts(_EITHER, text)
    if not parts or all(_POINT_SET.fullmatch(part) for _, part in parts):
        return None
    return parts[0][0], r"\cup".join(part for _, part in parts)


def _intersection(text: str) -> Real | None:
    """Return what a bound below and a bound above have in common.

    Between two inequalities a comma means "and", where they have numbers in common.
    """
    text = text.strip()
    joined = _BOTH.split(text)
    texts = joined if len(joined) > 1 else _COMMA.split(text)
    unequal = [matched for each in texts if (matched := _UNEQUAL.fullmatch(each.strip()))]
    found = [part for each in texts if not _UNEQUAL.fullmatch(each) and (part := _single(each))]
    names = {name for name, _ in found} | {matched["name"] for matched in unequal}
    if len(texts) < 2 or len(found) + len(unequal) < len(texts) or len(names) != 1:
        return None
    bounds = [part for _, part in found if part != REALS] or [REALS]
    whole = bounds[0] if len(bounds) == 1 else _between(bounds, sure=len(joined) > 1)
    if unequal and whole:
        whole = _without(",".join(matched["points"] for matched in unequal), whole)
    return (names.pop(), whole) if whole else None


def _between(bounds: list[str], sure: bool) -> str | None:
    """Return the numbers between two bounds, or None for none; ``sure``: some are."""
    above, below = sorted(bounds, key=lambda part: part.startswith(_BELOW))[:2]
    if len(bounds) > 2 or not (above.endswith(_ABOVE) and below.startswith(_BELOW)):
        return None
    if r"\cup" in above + below or above.startswith(_BELOW):
        return None
    first, last = above.removesuffix(_ABOVE), below.removeprefix(_BELOW)
    low, high = _value(first[1:]), _value(last[:-1])
    some = sure if low is None or high is None else low < high
    return f"{first},{last}" if some else None


def _single(text: str) -> Real | None:
    text = text.strip()
    if text.startswith("(") and text.endswith(")") and "," not in text:
        text = text[1:-1].strip()
    for read in (_inequality, _turned, _absolute, _unequal, _complement, _interval, _point):
        if found := read(text):
            return found
    return None


def _inequality(text: str) -> Real | None:
    """Read ``1 \\le x < 4``, ``4 > x \\ge 1`` or ``x > 2``."""
    matched = _SIDES.fullmatch(text)
    if not matched or regex.search(_SIGN, matched["last"] + (matched["first"] or "")):
        return None
    right, left = matched["right"], matched["left"]
    if "," in matched["last"] + (matched["first"] or ""):
        return None
    if left is None:
        return matched["name"], _ray(right, matched["last"].strip())
    if (right in _DOWN) != (left in _DOWN):
        return None
    ends = [(matched["first"].strip(), left), (matched["last"].strip(), right)]
    (below, opening), (above, closing) = reversed(ends) if right in _DOWN else ends
    begin = "(" if opening in _STRICT or below == r"-\infty" else "["
    end = ")" if closing in _STRICT or above.lstrip("+") == r"\infty" else "]"
    return matched["name"], f"{begin}{below},{above.lstrip('+')}{end}"


def _ray(sign: str, bound: str) -> str:
    """Return the numbers for which ``x sign bound`` holds."""
    if bound.lstrip("+-") == r"\infty":
        return REALS
    if sign in _DOWN:
        return ("(" if sign in _STRICT else "[") + bound + r",\infty)"
    return r"(-\infty," + bound + (")" if sign in _STRICT else "]")


def _turned(text: str) -> Real | None:
    """Read ``3 < x``."""
    matched = _TURNED.fullmatch(text)
    if not matched or regex.search(rf"{_SIGN}|,", matched["first"]):
        return None
    if regex.fullmatch(_NAME, matched["first"].strip()):  # a < b says nothing of one variable
        return None
    opposite = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}[matched["left"]]
    return matched["name"], _ray(opposite, matched["first"].strip())


def _absolute(text: str) -> Real | None:
    """Read ``|x| < 3``."""
    matched = _ABSOLUTE.fullmatch(text)
    bound = matched["bound"].strip() if matched else ""
    if not matched or (_value(bound) or 0) <= 0:
        return None
    if matched["sign"] not in _DOWN:
        around = "()" if matched["sign"] in _STRICT else "[]"
        return matched["name"], f"{around[0]}-{bound},{bound}{around[1]}"
    opening, closing = ("[", "]") if matched["sign"] == r"\ge" else ("(", ")")
    return matched["name"], rf"(-\infty,-{bound}{closing}\cup{opening}{bound},\infty)"


def _unequal(text: str) -> Real | None:
    matched = _UNEQUAL.fullmatch(text)
    return (matched["name"], _without(matched["points"])) if matched else None


def _complement(text: str) -> Real | None:
    if _REALS.fullmatch(text):
        return "", REALS
    matched = _WITHOUT.fullmatch(text)
    return ("", _without(matched["points"])) if matched else None


def _without(text: str, whole: str = REALS) -> str:
    """Return the reals, or an interval, without some points."""
    points = []
    for point in _POINTS.split(text.strip().removesuffix("\\")):
        size = point.removeprefix(r"\pm").strip()
        points += [f"-{size}", size] if point.startswith(r"\pm") else [point]
    values = [(value, point) for point in points if (value := _value(point)) is not None]
    if len(values) < len(points) and (len(points) > 1 or whole != REALS):  # their order is unknown
        return rf"{whole}\setminus\{{{','.join(points)}\}}"
    first, last = whole[1:-1].split(",")
    low, high = _value(first), _value(last)
    inside = [
        point
        for value, point in sorted(values)
        if (low is None or value > low) and (high is None or value < high)
    ]
    ends = [whole[0] + first, *(inside if values else points), last + whole[-1]]
    return r")\cup(".join(f"{below},{above}" for below, above in pairwise(ends))


def _value(point: str) -> Fraction | None:
    plain = regex.sub(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", point)
    try:
        return Fraction(plain.replace(" ", ""))
    except (ValueError, ZeroDivisionError):
        return None


def _interval(text: str) -> Real | None:
    """Read an interval with its brackets, or a set of one point as a part of a union."""
    if _POINT_SET.fullmatch(text):
        return "", text
    inside = text[1:-1]
    if len(text) < 5 or text[0] not in "([" or text[-1] not in ")]" or not _one_comma(inside):
        return None
    return "", text.replace(r"+\infty", r"\infty")


def _point(text: str) -> Real | None:
    """Read ``x = 1``, which may be a part of a union."""
    matched = _EQUAL.fullmatch(text)
    return (matched["name"], rf"\{{{matched['point'].strip()}\}}") if matched else None


def _one_comma(inside: str) -> bool:
    """Return whether brackets are balanced inside, with one comma outside of them."""
    depth = commas = 0
    for sign in inside:
        depth += (sign in "([{") - (sign in ")]}")
        commas += sign == "," and depth == 0
        if depth < 0:
            return False
    return depth == 0 and commas == 1


def french(text: str) -> str:
    """Write ``]1,4[`` as (1,4)."""
    if not text or (text[0] != "]" and text[-1] != "["):
        return text
    left, right = {"]": "(", "[": "["}, {"[": ")", "]": "]"}
    return _FRENCH.sub(lambda matched: left[matched[1]] + matched[2] + right[matched[3]], text)
