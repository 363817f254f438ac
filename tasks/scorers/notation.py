"""Write answers of mathematics in one notation, LaTeX, and tell words, options and units apart."""

from __future__ import annotations

import functools
import unicodedata

import regex

from tasks.scorers import numerals, printed, ranges, wrappers
from tasks.scorers.plain import DASHES, INVISIBLE
from tasks.trees.words import compatible

SIGNS = str.maketrans(
    {
        **{"\u221e": r"\infty ", "\u00b0": r"^\circ ", "\u00d7": r"\times ", "\u00f7": r"\div "},
        **dict.fromkeys("\u00b7\u22c5\u2219*", r"\cdot "),
        **{"\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u00b1": r"\pm "},
        **{"\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ", "\u2205": r"\emptyset "},
        **{"\u2211": r"\sum ", "\u222b": r"\int ", "\u2261": r"\equiv ", "\u2248": r"\approx "},
        **{"\u211d": r"\mathbb{R}", "\u2124": r"\mathbb{Z}", "\u2115": r"\mathbb{N}"},
        **{"\u2147": "e ", "\u2148": "i ", "\u2149": "i ", "\u2030": r"\cdot 10^{-3}"},
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

_FUNCTIONS = "arcsin arccos arctan sinh cosh tanh sin cos tan cot sec csc ln log exp".split()
_LAYOUT = (
    (regex.compile(r"\\(?:left|right|bigg?[lr]?|Bigg?[lr]?)(?![a-zA-Z])"), ""),
    (regex.compile(r"(?<=\d)(?:,\s*\\!|\\,|(?<!\\)\\ |\{,\}|,)(?=\d{3}(?!\d))"), ","),  # thousands
    (regex.compile(r"(?<!\\)\\[,;:! ]|(?<!~)~(?!~)"), " "),
    (regex.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (
        regex.compile(
            r"\\(?:mathrm|textrm|textit|textsf|texttt|textup|textnormal|textsc|mbox|operatorname\*?)"
            r"\s*(?=\{)"
        ),
        r"\\text",
    ),
    (regex.compile(r"(?<=[a-zA-Z])\s*\\text\s*\{\s*([ei])\s*\}"), r" \1"),
    (regex.compile(r"\\text\s*\{\s*([ei])\s*\}"), r"\1"),
    (regex.compile(rf"\\text\s*\{{\s*({'|'.join(_FUNCTIONS)})\s*\}}"), r"\\\1 "),
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
    (regex.compile(r"\\neq(?![a-z])|\\not\s*="), r"\\ne "),
    (regex.compile(r"\\varnothing(?![a-z])|\\\{\s*\\\}"), r"\\emptyset"),
    (regex.compile(r"\s*(?:\\?%|\bper ?cent\b)"), r"\\%"),
    (
        regex.compile(
            r"(?:\\degree(?:s)?|\^\s*\{\\circ\s*\}|(?<=\d)\s*degrees?\b|(?<=\d)\s*\\text\s*\{\s*degrees?\s*\})"
        ),
        r"^\\circ",
    ),
    (regex.compile(r"(?<![\\a-zA-Z])(sqrt|pi|infty|sin|cos|tan|log|ln)(?![a-zA-Z])"), r"\\\1"),
    (regex.compile(r"\\frac\s*(\d)\s*(\d)(?!\d)"), r"\\frac{\1}{\2}"),
    (regex.compile(r"\^\\circ\s*(?:\\text\s*\{\s*)?([CFK])\b\}?"), r"\\text{deg\1}"),
    (regex.compile(r"\\(?:pounds|euro|\$)|[\u00a3\u20ac\u00a5$]"), ""),
    (regex.compile(r"\\([&#_])"), r"\1"),
)


_BARE_LOG = regex.compile(r"(?<![a-zA-Z])log(?![a-zA-Z0-9]|\s*_)")
_BRACED = regex.compile(r"(\^|\\sqrt)\s*\(")
_STARS = regex.compile(r"\s*\*\*\s*(-?\d+(?:\.\d+)?|-?\w)?")
_HAN_JOINTS = (
    (regex.compile(r"(?<=[\d})])\s*或\s*(?=[\d\\(-])"), " or "),
    (regex.compile(r"(?<=[\d})])\s*[、和与及]\s*(?=[\d\\(-])"), ","),
)


def has_log(text: str) -> bool:
    """Return whether a text has a logarithm without a base."""
    return bool(_BARE_LOG.search(text))


@functools.lru_cache(4096)  # of gold answers, which are compared with many answers
def latex(text: str, natural: bool = True) -> str:
    """Return an answer as plain LaTeX: without a sentence, delimiters, Unicode signs and layout.

    natural: ``log(2)`` is Python's natural logarithm. Where the text that it is compared with has a
    ``log`` without a base, too, it means the same.
    """
    text = wrappers.bare(INVISIBLE.sub("", text))
    text = printed.in_latex(text, natural)
    text = _STARS.sub(lambda matched: f"^{{{matched[1]}}}" if matched[1] else "^", text)
    if not text.isascii():
        for pattern, plain in _HAN_JOINTS:
            text = pattern.sub(plain, text)
        text = _ascii(text)
    for pattern, plain in _LAYOUT:
        text = pattern.sub(plain, text)
    text = _without_parentheses(" ".join(text.split()).rstrip(". "))
    return _in_the_open(ranges.french(_read(numerals.without_groups(text))))


def _read(text: str) -> str:
    """Write numbers in words as digits, and phrases for sets as sets."""
    plain = without_text(text)
    if "\\" not in plain.replace("\\%", ""):
        read = numerals.in_digits(plain)
        text = text if read == plain else read
    for pattern, sign in _PHRASES:
        if matched := pattern.fullmatch(plain):
            return matched.expand(sign)
    return text


def _without_parentheses(text: str) -> str:
    """Write exponents and roots with braces: ``x^(n+1)``, ``sqrt(x(x+1))``."""
    start = 0
    while matched := _BRACED.search(text, start):
        depth, start = 0, matched.end()
        for place in range(matched.end() - 1, len(text)):
            depth += (text[place] == "(") - (text[place] == ")")
            if not depth:
                inside = text[matched.end() : place]
                text = f"{text[: matched.start()]}{matched[1]}{{{inside}}}{text[place + 1 :]}"
                break
    return text


def _in_the_open(text: str) -> str:
    r"""Take the command off an answer that is all ``\text{...}`` and no words, such as a number."""
    matched = _TEXT.fullmatch(text)
    if not matched or _WORDS.fullmatch(matched[1]):
        return text
    return matched[1].strip().rstrip(". ")


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
    return compatible(text).translate(DASHES)


def _plain(signs: str) -> str:
    return compatible(signs).translate(DASHES)


def _fraction(sign: str) -> str:
    above, below = _plain(sign).split("\u2044")
    return rf"\frac{{{above}}}{{{below}}}"


# ---------------------------------------------------------------- kinds of answers

_PHRASES = (
    (
        regex.compile(
            "(?:there (?:is|are) |(?:the |this )?(?:equation|system|inequality|problem) has |"
            "(?:it )?has )?no solutions?(?: exists?)?|(?:the )?(?:empty|null) set|none|"
            "无解|空集|没有解|\u00f8",
            regex.IGNORECASE,
        ),
        r"\\emptyset",
    ),
    (
        regex.compile(
            "(?:[a-z] (?:is|can be) )?(?:all |any |the )(?:reals?|real (?:numbers?|values?|x))",
            regex.IGNORECASE,
        ),
        r"\\mathbb{R}",
    ),
    (
        regex.compile(
            r"all (?:real numbers|reals|real x)(?: x)?,? (?:except|other than|but)(?: for)? (.+)",
            regex.IGNORECASE,
        ),
        r"\\mathbb{R}\\setminus\\{\1\\}",
    ),
)
_OPTION = regex.compile(r"(?:(?i:option|choice) )?\(?([A-Z])\)?[.:)]?")
_OPTION_TEXT = regex.compile(
    r"(?:(?i:option|choice) )?(?:[(\[]([A-J])[)\]]\.?|([A-J])[.:)])\s*(.+)"
)
_OTHER_OPTION = regex.compile(r"\s*(?:and|or|&|,|/)|.*(?<![A-Za-z\\])[A-J](?![A-Za-z])")
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
    **dict.fromkeys(("radian", "rad"), "rad"),
    **{"mph": "mi/h", "kph": "km/h", "kmh": "km/h"},
}


CLOCK = ("am", "pm")


def option(text: str) -> str | None:
    """Return the letter of an answer that is one option of a multiple choice, or None."""
    matched = _OPTION.fullmatch(without_text(text).strip())
    return matched[1] if matched else None


def option_with_text(text: str) -> tuple[str, str] | None:
    """Return letter and text of an answer such as ``C. 12`` that names one option, or None."""
    matched = _OPTION_TEXT.fullmatch(without_text(text).strip())
    if not matched or _OTHER_OPTION.match(matched[3]):
        return None
    return matched[1] or matched[2], matched[3].strip()


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


def printed_list(answer: str, gold: str) -> str | None:
    """Return the items of an answer that is a list as Python prints it, or None.

    ``[1, 2]`` is no list where the gold answer is an interval or a pair, or is in such brackets.
    """
    if not wrappers.encloses(answer, "[]"):
        return None
    items = answer[1:-1]
    if wrappers.encloses(items.strip(), "[]"):
        return None
    if wrappers.encloses(gold, "()"):  # three coordinates or more are no interval
        return f"({items})" if gold.count(",") > 1 else None
    return None if wrappers.encloses(gold, "[]") or ranges.real_set(gold) else items


def clock(text: str) -> str | None:
    """Return a ratio such as 3:2 or a time of day such as 3:45 PM in one form, or None."""
    plain = "".join(without_text(text).casefold().replace(".", "").split())
    return plain if _CLOCK.fullmatch(plain) else None


def is_set(text: str) -> bool:
    """Return whether the answer is a set of several, in braces."""
    return text.startswith(r"\{") and text.endswith(r"\}") and is_list(text[2:-2])


def is_list(text: str) -> bool:
    """Return whether the answer is a list: a comma outside of all brackets."""
    return len(_items(text)) > 1


def repeats(text: str) -> bool:
    """Return whether the answer is a list, or a set, that has the same item twice."""
    items = [each.strip() for each in _items(text[2:-2] if is_set(text) else text)]
    thousands = all(len(item) == 3 and item.isdigit() for item in items[1:])
    return not thousands and len(set(items)) < len(items)


def _items(text: str) -> list[str]:
    """Return what stands between commas outside of all brackets."""
    items, depth = [""], 0
    for sign in text.replace("\\{", "(").replace("\\}", ")"):
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            items.append("")
        else:
            items[-1] += sign
    return items


_UNIT = regex.compile(
    r"(?P<value>.+?)\s*\\text\s*\{(?P<name>[^{}]*[\p{L}][^{}]*)\}\s*(?:\^\s*\{?(?P<power>\d)\}?)?"
)
_BARE_UNIT = regex.compile(
    r"(?P<value>-?[\d.,]*\d|-?\\frac\{\d+\}\{\d+\})(?P<space>\s*)"
    r"(?P<name>\p{L}[\p{L} /.]*)(?:\^\s*\{?(?P<power>\d)\}?)?"
)
_DEGREES = regex.compile(r"(?P<value>[-\d.,/ ]+|-?\\frac\{\d+\}\{\d+\})\s*\^\\circ")
_ANGLE = regex.compile(r"(?<![\w.])(\d+(?:\.\d+)?)\s*\^\\circ")
_EXPONENT = regex.compile(
    r"(?<![\w.])(\d+\.\d+|\d+(?=[eE](?:\+|-?\d\d)))[eE]\+?(-?\d+)(?![\d.])|^(-?\d+)[eE]\+?(-?\d+)$"
)
_TRIGONOMETRY = regex.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_SQUARE = regex.compile(r"\b(?:square|sq\.?) (\w+)")
_CUBIC = regex.compile(r"\b(?:cubic|cu\.?) (\w+)")


def has_degrees(text: str) -> bool:
    """Return whether an answer is an angle in degrees, or a list of such, and no formula of one."""
    return "^\\circ" in text and not _TRIGONOMETRY.search(text)


def angles_in_radians(text: str) -> str:
    """Write degrees inside a formula as multiples of pi: ``\\sin 30^\\circ``."""
    return _ANGLE.sub(r"(\1\\pi/180)", text)


def powers_of_ten(text: str) -> str:
    """Write ``1.5e-3`` as a product; 2e-1, unless it is the whole answer, may mean 2e less 1."""
    return _EXPONENT.sub(r"\1\3\\times 10^{\2\4}", text)


def with_unit(text: str) -> tuple[str, str] | None:
    r"""Return value and unit of an answer such as ``5\text{ cm}^2`` or ``15 apples``, or None."""
    if matched := _DEGREES.fullmatch(text):
        return matched["value"], "deg"
    matched = _UNIT.fullmatch(text)
    bare = None if matched else _BARE_UNIT.fullmatch(text)
    if bare and _is_unit(bare["name"], bool(bare["space"])):
        matched = bare
    if not matched:
        return None
    name = matched["name"].strip().casefold().replace(".", "")
    if name.split()[0] in numerals.NO_NOUNS:
        return None
    name = _CUBIC.sub(r"\1^3", _SQUARE.sub(r"\1^2", name)).replace(" per ", "/")
    if matched["power"]:
        name = f"{name}^{matched['power']}"
    parts = [_unit(part) for part in regex.split(r"([/^ ])", name)]
    return matched["value"].strip(), "".join(parts)


def _is_unit(name: str, spaced: bool) -> bool:
    """Return whether bare letters after a number are a unit or a word, and no variables."""
    plain = name.strip(" .").casefold()
    if plain in numerals.MEASURES:
        return True
    if not spaced and len(name) == 1:
        return False
    return len(plain) > 3 or plain.removesuffix("s") in UNITS or plain.replace(".", "") in CLOCK


def _unit(single: str) -> str:
    if single in numerals.MEASURES:
        return numerals.MEASURES[single]
    for form in (single, single.removesuffix("s")):
        if form in UNITS:
            return UNITS[form]
    return single.removesuffix("s") if len(single) > 3 else single
