"""Write answers of mathematics in one notation, LaTeX, and tell words, options and units apart."""

from __future__ import annotations

import unicodedata

import regex

from tasks.scorers.plain import DASHES, INVISIBLE

SIGNS = str.maketrans(
    {
        **{"\u221e": r"\infty ", "\u00b0": r"^\circ ", "\u00d7": r"\times ", "\u00f7": r"\div "},
        **dict.fromkeys("\u00b7\u22c5\u2219*", r"\cdot "),
        **{"\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u00b1": r"\pm "},
        **{"\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ", "\u2205": r"\emptyset "},
        **{"\u2211": r"\sum ", "\u222b": r"\int ", "\u2261": r"\equiv ", "\u2248": r"\approx "},
        **{"\u211d": r"\mathbb{R}", "\u2124": r"\mathbb{Z}", "\u2115": r"\mathbb{N}"},
        **{"\u211a": r"\mathbb{Q}", "\u2102": r"\mathbb{C}", "\u2026": r"\ldots ", "\u2044": "/"},
    }
)
_GREEK = {
    chr(code): "\\" + unicodedata.name(chr(code)).split()[-1].lower() + " "
    for code in range(0x3B1, 0x3CA)
    if code not in (0x3BF, 0x3C2)  # omicron is an o; final sigma
} | {"\u0394": r"\Delta ", "\u03a3": r"\Sigma ", "\u03a9": r"\Omega ", "\u03bb": r"\lambda "}
_RAISED = regex.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b\u207f]+")
_LOWERED = regex.compile("[\u2080-\u208b]+")
_FRACTION = regex.compile("[\u00bc-\u00be\u2150-\u215e]")
_ROOT = regex.compile("([\u221a\u221b\u221c])\\s*(?:\\{([^{}]*)\\}|\\(([^()]*)\\)|(\\d+|\\w))")
_ROOTS = {"\u221a": r"\sqrt", "\u221b": r"\sqrt[3]", "\u221c": r"\sqrt[4]"}

_WRAPPED = (  # around a whole answer
    regex.compile(r"\$\$?((?:[^$]|\\\$)+?)\$?\$", regex.DOTALL),
    regex.compile(r"\\\((.+)\\\)|\\\[(.+)\\\]", regex.DOTALL),
    regex.compile(r"\\(?:boxed|fbox)\s*\{(.*)\}", regex.DOTALL),
    regex.compile(r"\*\*(.+)\*\*|__(.+)__", regex.DOTALL),
)
_SENTENCE = regex.compile(
    r"(?:so |thus,? |therefore,? |hence,? )?(?:the )?(?:final |correct )?(?:answer|result|value)"
    r"(?: is|:|=)\s*:?\s*(.+)",
    regex.IGNORECASE | regex.DOTALL,
)
_LAYOUT = (
    (regex.compile(r"\\(?:left|right|bigg?[lr]?|Bigg?[lr]?|displaystyle)(?![a-zA-Z])"), ""),
    (regex.compile(r"(?<=\d)(?:,\s*\\!|\\,|(?<!\\)\\ |\{,\}|,)(?=\d{3}(?!\d))"), ","),  # thousands
    (regex.compile(r"(?<!\\)\\[,;:! ]|~"), " "),
    (regex.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (
        regex.compile(r"\\(?:mathrm|textrm|textit|mbox|operatorname)\s*(?=\{)"),
        r"\\text",
    ),
    (regex.compile(r"\\(?:mathbf|boldsymbol|bm|textbf)\s*\{([^{}]*)\}"), r"\1"),
    (regex.compile(r"\.\.\."), r"\\ldots "),
    (regex.compile(r"\(\s*(?:\\text\s*\{\s*mod\s*\}|\\bmod|mod)\s*(\w+)\s*\)"), r"\\pmod{\1}"),
    (
        regex.compile(
            r"[(\[]\s*\\begin\{array\}\{[^{}]*\}(.*?)\\end\{array\}\s*[)\]]", regex.DOTALL
        ),
        r"\\begin{pmatrix}\1\\end{pmatrix}",
    ),
    (regex.compile(r"\\(?:leq|leqslant)(?![a-z])"), r"\\le"),
    (regex.compile(r"\\(?:geq|geqslant)(?![a-z])"), r"\\ge"),
    (regex.compile(r"\\varnothing(?![a-z])"), r"\\emptyset"),
    (regex.compile(r"\s*(?:\\?%|\bper ?cent\b)"), r"\\%"),
    (regex.compile(r"(?:\\degree(?:s)?|\^\s*\{\\circ\s*\}|(?<=\d)\s*degrees?\b)"), r"^\\circ"),
    (regex.compile(r"(?<![\\a-zA-Z])(sqrt|pi|infty|sin|cos|tan|log|ln)(?![a-zA-Z])"), r"\\\1"),
    (regex.compile(r"\\sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (regex.compile(r"\\frac\s*(\d)\s*(\d)(?!\d)"), r"\\frac{\1}{\2}"),
    (regex.compile(r"\^\\circ\s*(?:\\text\s*\{\s*)?([CFK])\b\}?"), r"\\text{deg\1}"),
    (regex.compile(r"\\(?:pounds|euro|\$)|[\u00a3\u20ac\u00a5$]"), ""),
    (regex.compile(r"\\([&#_])"), r"\1"),
)


def latex(text: str) -> str:
    """Return an answer as plain LaTeX: without a sentence, delimiters, Unicode signs and layout."""
    text = INVISIBLE.sub("", text).strip()
    text = _unwrapped(text)
    if not text.isascii():
        text = _ascii(text)
    for pattern, plain in _LAYOUT:
        text = pattern.sub(plain, text)
    return _in_the_open(" ".join(text.split()).rstrip(". "))


def _in_the_open(text: str) -> str:
    r"""Take the command off an answer that is all ``\text{...}`` and no words, such as a number."""
    matched = _TEXT.fullmatch(text)
    if not matched or _WORDS.fullmatch(matched[1]):
        return text
    return matched[1].strip().rstrip(". ")


def _unwrapped(text: str) -> str:
    """Take off delimiters around the whole answer, and a sentence that only introduces it."""
    before = None
    while text != before:
        before = text
        text = text.strip().rstrip(".\u3002").strip()
        for pattern in (*_WRAPPED, _SENTENCE):
            if matched := pattern.fullmatch(text):
                inner = next(group for group in matched.groups() if group is not None)
                if _balanced(inner):
                    text = inner
    return text


def _balanced(text: str) -> bool:
    depth = 0
    for sign in text.replace("\\{", "").replace("\\}", ""):
        depth += (sign == "{") - (sign == "}")
        if depth < 0:
            return False
    return depth == 0


def _ascii(text: str) -> str:
    """Write Unicode signs as LaTeX commands."""
    text = _FRACTION.sub(lambda matched: _fraction(matched[0]), text)
    text = _RAISED.sub(lambda matched: f"^{{{_plain(matched[0])}}}", text)
    text = _LOWERED.sub(lambda matched: f"_{{{_plain(matched[0])}}}", text)
    text = _ROOT.sub(
        lambda matched: _ROOTS[matched[1]] + f"{{{matched[2] or matched[3] or matched[4]}}}", text
    )
    text = text.translate(SIGNS).translate(DASHES)
    text = "".join(_GREEK.get(sign, sign) for sign in text)
    return unicodedata.normalize("NFKC", text).translate(DASHES)


def _plain(signs: str) -> str:
    return unicodedata.normalize("NFKC", signs).translate(DASHES)


def _fraction(sign: str) -> str:
    above, below = _plain(sign).split("\u2044")
    return rf"\frac{{{above}}}{{{below}}}"


# ---------------------------------------------------------------- kinds of answers

_OPTION = regex.compile(r"\(?([A-Z])\)?[.:)]?")
_TEXT = regex.compile(r"\\text\s*\{([^{}]*)\}")
_WORDS = regex.compile(r"[\p{L}' -]+")
_BASE = regex.compile(r"([0-9A-Fa-f]+)_\{?(\d+|\\text\{[a-z]+\})\}?")
_CLOCK = regex.compile(r"\d+(?::\d+)+(?:am|pm)?")

UNITS = {  # name -> how we write it
    **dict.fromkeys(("centimeter", "centimetre", "cm"), "cm"),
    **dict.fromkeys(("millimeter", "millimetre", "mm"), "mm"),
    **dict.fromkeys(("kilometer", "kilometre", "km"), "km"),
    **dict.fromkeys(("meter", "metre", "m"), "m"),
    **dict.fromkeys(("inch", "inche", "in"), "in"),
    **dict.fromkeys(("foot", "feet", "ft"), "ft"),
    **dict.fromkeys(("yard", "yd"), "yd"),
    **dict.fromkeys(("mile", "mi"), "mi"),
    **dict.fromkeys(("gram", "g"), "g"),
    **dict.fromkeys(("kilogram", "kg"), "kg"),
    **dict.fromkeys(("milligram", "mg"), "mg"),
    **dict.fromkeys(("pound", "lb"), "lb"),
    **dict.fromkeys(("ounce", "oz"), "oz"),
    **dict.fromkeys(("liter", "litre", "l"), "l"),
    **dict.fromkeys(("milliliter", "millilitre", "ml"), "ml"),
    **dict.fromkeys(("second", "sec", "s"), "s"),
    **dict.fromkeys(("minute", "min"), "min"),
    **dict.fromkeys(("hour", "hr", "h"), "h"),
    **dict.fromkeys(("dollar", "usd"), ""),  # currencies are dropped, as their signs are
    **dict.fromkeys(("euro", "eur"), ""),
    **dict.fromkeys(("degree", "deg"), "deg"),
    **{"mph": "mi/h", "kph": "km/h", "kmh": "km/h"},
}


CLOCK = ("am", "pm")


def option(text: str) -> str | None:
    """Return the letter of an answer that is one option of a multiple choice, or None."""
    matched = _OPTION.fullmatch(without_text(text).strip())
    return matched[1] if matched else None


def without_text(text: str) -> str:
    r"""Return the answer with the content of ``\text{...}`` in the open."""
    return " ".join(_TEXT.sub(r" \1 ", text).split())


def words(text: str) -> str | None:
    """Return the words of an answer that is text, without case and punctuation, or None.

    Three Latin letters in the order of the alphabet, such as "abc", and fewer are variables, unless
    they stand in ``\\text`` or are yes, no or a like word.
    """
    plain = " ".join(without_text(text).casefold().replace("-", " ").strip(" .,;:!?").split())
    if not _WORDS.fullmatch(plain):
        return None
    letters = plain.replace(" ", "")
    in_text = text.startswith("\\text")
    product = letters.isascii() and (len(letters) < 3 or list(letters) == sorted(set(letters)))
    return None if product and not in_text and plain not in ("no", "or") else plain


def in_base(text: str) -> tuple[str, str] | None:
    """Return the digits and the base of a number such as ``101_2``, or None."""
    matched = _BASE.fullmatch(text.replace(" ", ""))
    return (matched[1].lower(), matched[2]) if matched else None


def brackets(text: str) -> str:
    """Return the brackets around a whole tuple or interval with a comma, or ""."""
    text = text.strip()
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]":
        return ""
    depth, comma = 0, False
    for index, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        comma |= sign == "," and depth == 1
        if depth == 0 and index < len(text) - 1:
            return ""
    return text[0] + text[-1] if comma else ""


def is_interval(text: str) -> bool:
    """Return whether the answer is an interval or a union of intervals."""
    return all(brackets(part) for part in text.split(r"\cup"))


def clock(text: str) -> str | None:
    """Return a ratio such as 3:2 or a time of day such as 3:45 PM in one form, or None."""
    plain = "".join(without_text(text).casefold().replace(".", "").split())
    return plain if _CLOCK.fullmatch(plain) else None


def is_list(text: str) -> bool:
    """Return whether the answer is a list: a comma outside of all brackets."""
    depth = 0
    for sign in text.replace("\\{", "(").replace("\\}", ")"):
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            return True
    return False


_UNIT = regex.compile(
    r"(?P<value>.+?)\s*\\text\s*\{(?P<name>[^{}]*[\p{L}][^{}]*)\}\s*(?:\^\s*\{?(?P<power>\d)\}?)?"
)
_BARE_UNIT = regex.compile(
    r"(?P<value>-?[\d.,]*\d|-?\\frac\{\d+\}\{\d+\})(?P<space>\s*)"
    r"(?P<name>\p{L}[\p{L} /.]*)(?:\^\s*\{?(?P<power>\d)\}?)?"
)
_DEGREES = regex.compile(r"(?P<value>[-\d.,/ ]+|-?\\frac\{\d+\}\{\d+\})\s*\^\\circ")
_ANGLE = regex.compile(r"(?<![\w.])(\d+(?:\.\d+)?)\s*\^\\circ")
_SQUARE = regex.compile(r"\b(?:square|sq\.?) (\w+)")
_CUBIC = regex.compile(r"\b(?:cubic|cu\.?) (\w+)")


_SIDES = regex.compile(
    r"(?:(?P<below>[^<>]+?)\s*(?P<left><|\\le(?![a-z])))?\s*(?P<name>[a-zA-Z])\s*"
    r"(?P<right><|>|\\le(?![a-z])|\\ge(?![a-z]))\s*(?P<above>[^<>]+)"
)
NO_BOUND = r"-\infty"
_EITHER = regex.compile(r"\s*(?:\\text\s*\{\s*or\s*\}|\bor\b|\\cup)\s*")


def interval(text: str) -> str | None:
    """Return the interval, or union of intervals, that inequalities of one variable describe."""
    parts = [_one_interval(part.strip()) for part in _EITHER.split(text)]
    return r"\cup".join(part for part in parts if part) if all(parts) else None


def _one_interval(text: str) -> str | None:
    """Return the interval of ``1 \\le x < 4`` or ``x > 2``, or None."""
    matched = _SIDES.fullmatch(text)
    if not matched or "\\le" in matched["above"] or "\\ge" in matched["above"]:
        return None
    above = matched["above"].strip()
    closed = matched["right"] not in "<>"
    if matched["right"] in (">", "\\ge"):
        return None if matched["below"] else ("[" if closed else "(") + above + r",\infty)"
    begin = "(" if matched["left"] in (None, "<") else "["
    end = "]" if closed else ")"
    return f"{begin}{(matched['below'] or NO_BOUND).strip()},{above}{end}"


def angles_in_radians(text: str) -> str:
    """Write degrees inside a formula as multiples of pi: ``\\sin 30^\\circ``."""
    return _ANGLE.sub(r"(\1\\pi/180)", text)


def with_unit(text: str) -> tuple[str, str] | None:
    r"""Return value and unit of an answer such as ``5\text{ cm}^2`` or ``15 apples``, or None."""
    if matched := _DEGREES.fullmatch(text):
        return matched["value"], "deg"
    matched = _UNIT.fullmatch(text)
    bare = None if matched else _BARE_UNIT.fullmatch(text)
    if bare and (bare["space"] or len(bare["name"]) > 1) and _is_unit(bare["name"]):
        matched = bare
    if not matched:
        return None
    name = matched["name"].strip().casefold().replace(".", "")
    name = _CUBIC.sub(r"\1^3", _SQUARE.sub(r"\1^2", name)).replace(" per ", "/")
    if matched["power"]:
        name = f"{name}^{matched['power']}"
    parts = [_unit(part) for part in regex.split(r"([/^ ])", name)]
    return matched["value"].strip(), "".join(parts)


def _is_unit(name: str) -> bool:
    """Return whether bare letters after a number are a unit or a word, and no variables."""
    plain = name.strip(" .").casefold()
    return len(plain) > 3 or plain.removesuffix("s") in UNITS or plain.replace(".", "") in CLOCK


def _unit(single: str) -> str:
    for form in (single, single.removesuffix("s")):
        if form in UNITS:
            return UNITS[form]
    return single.removesuffix("s") if len(single) > 3 else single
