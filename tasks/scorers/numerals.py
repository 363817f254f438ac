"""Read numbers in words, English or Chinese, in groups of digits, and with a magnitude."""

from __future__ import annotations

from fractions import Fraction

import regex

# ---------------------------------------------------------------- groups of digits

_ALONE = r"(?<![\w.,^}]|[\d}] )"  # no digit, index or exponent before it
_GROUPS = (  # 12 000, 1_234_567, 1'234'567, 12,34,567
    regex.compile(rf"{_ALONE}\d{{1,3}}(?: \d{{3}})+(?!\d| \d|\s*[/_]|\s*\\frac)"),
    regex.compile(rf"{_ALONE}\d{{1,3}}(?:\\?_\d{{3}})+(?![\w{{])"),
    regex.compile(rf"{_ALONE}\d{{1,3}}(?:['\u2019]\d{{3}})+(?!\w)"),
    regex.compile(rf"{_ALONE}\d{{1,2}}(?:,\d{{2}})+,\d{{3}}(?![\d,])"),
)
_SPACE_COMMAND = regex.compile(r"(?<=\d)(?:\\[,;:! ]|~|\\thinspace\s)(?=\d{3}(?!\d))")
_NO_DIGIT = regex.compile(r"\D")


def without_groups(text: str) -> str:
    """Write numbers without what separates thousands; commas of three digits stay."""
    text = _SPACE_COMMAND.sub(" ", text)
    for pattern in _GROUPS:
        text = pattern.sub(lambda matched: _NO_DIGIT.sub("", matched[0]), text)
    return text


# ---------------------------------------------------------------- English

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_SCALES = {"trillion": 10**12, "billion": 10**9, "million": 10**6, "thousand": 10**3}
MAGNITUDES = _SCALES | {"hundred": 100, "dozen": 12}
_PARTS = {  # name of a part -> its denominator
    **{"half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6},
    **{"seventh": 7, "eighth": 8, "ninth": 9, "tenth": 10, "twelfth": 12, "twentieth": 20},
    **{"hundredth": 100, "thousandth": 1000, "millionth": 10**6},
}


def _names() -> dict[str, int]:
    """Return the numbers below a thousand by name, without "and"."""
    names = {name: value for value, name in enumerate(_ONES)}
    for ten, name in enumerate(_TENS, 2):
        names |= {f"{name} {one}": 10 * ten + value for value, one in enumerate(_ONES[1:10], 1)}
        names[name] = 10 * ten
    hundreds = {f"{_ONES[n]} hundred": 100 * n for n in range(1, 10)}
    small = {name: value for name, value in names.items() if value}
    for name, value in hundreds.items():
        names |= {f"{name} {rest}": value + more for rest, more in small.items()}
    return names | hundreds


_NAMES = _names()
_JOINT = regex.compile(r"(?<=(?:hundred|thousand|illion) )and (?=\w)")
_A = regex.compile(rf"\ban? (?={'|'.join((*MAGNITUDES, *_PARTS))})")
_MINUS = regex.compile(r"(?:minus|negative) ")
_PART = regex.compile(rf"(?:(?P<whole>.+) and )?(?P<count>.+) (?P<part>{'|'.join(_PARTS)})s?")
_DIGITS = r"\d+(?:,\d{3})*(?:\.\d+)?"
_MAGNITUDE = regex.compile(
    rf"(?P<sign>-?)\\?\$?(?P<count>{_DIGITS})[ -]?(?P<name>{'|'.join(MAGNITUDES)})s?\b"
    rf"(?! and| \d)(?P<rest>.*)",
    regex.IGNORECASE,
)
_COUNTED = regex.compile(
    rf"(?P<count>-?{_DIGITS}) (?P<part>{'|'.join(_PARTS)})s?", regex.IGNORECASE
)
_NOUNS = regex.compile(r"(?: [^\W\d_]+){0,3}")
NO_NOUNS = frozenset(  # what changes a number that it follows
    "and or to plus minus times over by more less fewer greater than squared cubed factorial "
    "percent point mod modulo except without not if per half".split()
) | {*MAGNITUDES, *_PARTS, *(f"{name}s" for name in (*MAGNITUDES, *_PARTS))}


def cardinal(text: str) -> int | None:
    """Return the value of "two hundred and five" or "twenty-one", or None."""
    rest = _JOINT.sub("", _A.sub("one ", " ".join(text.replace("-", " ").split())))
    total = 0
    for scale, value in _SCALES.items():
        before, found, after = rest.partition(scale)
        if found:
            if not (count := _NAMES.get(before.strip())):
                return None
            total, rest = total + count * value, after.strip()
            if not rest:
                return total
    last = _NAMES.get(rest)
    return None if last is None or (total and not last) else total + last


def _english(text: str) -> Fraction | None:
    """Return the value of number words: a cardinal, a fraction, decimals, each with a sign."""
    plain = " ".join(text.casefold().replace("-", " ").split())
    if matched := _MINUS.match(plain):
        value = _english(plain[matched.end() :])
        return None if value is None else -value
    if (whole := cardinal(plain)) is not None:
        return Fraction(whole)
    before, point, after = plain.partition(" point ")
    if point:
        digits = [_NAMES.get(word, 10) for word in after.split()]
        whole = cardinal(before)
        if whole is None or max(digits) > 9:
            return None
        return Fraction(f"{whole}.{''.join(map(str, digits))}")
    if not (matched := _PART.fullmatch(_A.sub("one ", plain))):
        return None
    whole, count = cardinal(matched["whole"] or "zero"), cardinal(matched["count"])
    return None if whole is None or not count else whole + Fraction(count, _PARTS[matched["part"]])


# ---------------------------------------------------------------- Chinese

_HAN = {sign: value for value, sign in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2}
_LARGE = {"亿": 10**8, "万": 10**4}
_HAN_SMALL = {"千": 1000, "百": 100, "十": 10}
_FIGURE = "[一二两三四五六七八九]"
_BELOW_MYRIAD = regex.compile(
    rf"(?:({_FIGURE})千)?(零)?(?:({_FIGURE})百)?(零)?(?:({_FIGURE}?)(十))?(零)?({_FIGURE})?"
)
_HAN_NUMERAL = regex.compile(r"负?[零〇一二两三四五六七八九十百千万亿点分之]+")
_HAN_MAGNITUDE = regex.compile(
    r"(?P<count>-?\d+(?:,\d{3})*(?:\.\d+)?)\s*(?P<name>十|百|千|万|百万|千万|亿|十亿|百亿|万亿)"
    r"(?![克米瓦卡帕赫伏])(?P<rest>.*)"
)


def _han_integer(text: str) -> int | None:
    if regex.fullmatch("[零〇一二三四五六七八九]{2,}", text) or text in _HAN:  # digit by digit
        return int("".join(str(_HAN[sign]) for sign in text))
    total = 0
    for sign, value in _LARGE.items():
        before, found, after = text.rpartition(sign) if sign == "亿" else text.partition(sign)
        if found:
            count = _han_integer(before)
            if not count:
                return None
            total, text = total + count * value, after.lstrip("零")
            if not text:
                return total
    below = _below_myriad(text)
    return None if below is None else total + below


def _below_myriad(text: str) -> int | None:
    matched = _BELOW_MYRIAD.fullmatch(text)
    if not matched or not text:
        return None
    thousands, _, hundreds, _, tens, ten, zero, ones = matched.groups()
    if ones and not ten and (thousands or hundreds) and "零" not in text:
        return None  # said for 150: 一百五
    values = [_HAN.get(sign or "", 0) for sign in (thousands, hundreds, tens, ones)]
    values[2] = values[2] or int(bool(ten))
    return (
        None
        if zero and ten and not ones
        else sum(value * 10**power for value, power in zip(values, (3, 2, 1, 0), strict=True))
    )


def _chinese(text: str) -> str | None:
    """Return a Chinese numeral as a number, a fraction or a percentage, or None."""
    sign, text = ("-", text[1:]) if text.startswith("负") else ("", text)
    below, parts, above = text.partition("分之")
    if parts:
        denominator, numerator = (_han_integer(each) for each in (below, above))
        if below == "百":
            return None if numerator is None else rf"{sign}{numerator}\%"
        return (
            rf"{sign}\frac{{{numerator}}}{{{denominator}}}" if numerator and denominator else None
        )
    whole, point, decimals = text.partition("点")
    value = _han_integer(whole)
    if value is None or (point and not all(each in _HAN for each in decimals)):
        return None
    return f"{sign}{value}" + (point and "." + "".join(str(_HAN[each]) for each in decimals))


# ---------------------------------------------------------------- answers


def written(value: Fraction) -> str:
    """Return a number as digits, or as a fraction where it has no end of decimals."""
    if value.denominator == 1:
        return str(value.numerator)
    places = next((n for n in range(1, 13) if (value * 10**n).denominator == 1), None)
    if places is None:
        sign = "-" if value < 0 else ""
        return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"
    digits = str(abs(int(value * 10**places))).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"


def in_digits(text: str) -> str:
    """Write the number at the beginning of an answer in digits; what may follow are nouns.

    ``two apples``, ``2.5 million dollars``, ``3 thirds`` and ``十八`` have one; text without a
    number, or with more than nouns after it, stays as it is.
    """
    number, percent, rest = text.partition(r"\%")
    for read in (_with_magnitude, _counted_parts, _in_english, _in_chinese):
        if not rest and (found := read(number.strip())) is not None:
            return found + percent
    return text


def _with_magnitude(text: str) -> str | None:
    matched = _MAGNITUDE.fullmatch(text)
    if matched and _are_nouns(matched["rest"]):
        factor = MAGNITUDES[matched["name"].casefold()]
        count = Fraction(matched["count"].replace(",", ""))
        return matched["sign"] + written(count * factor) + matched["rest"]
    matched = _HAN_MAGNITUDE.fullmatch(text)
    if not matched:
        return None
    factor = 1
    for sign in matched["name"]:
        factor *= (_HAN_SMALL | _LARGE)[sign]
    return written(Fraction(matched["count"].replace(",", "")) * factor) + matched["rest"]


def _counted_parts(text: str) -> str | None:
    matched = _COUNTED.fullmatch(text)
    if not matched:
        return None
    count = Fraction(matched["count"].replace(",", ""))
    return written(count / _PARTS[matched["part"].casefold()])


def _in_english(text: str) -> str | None:
    words = text.split()
    if not words or len(text) > 120 or not text.isascii() or not words[0][0].isalpha():
        return None
    for end in range(len(words), max(0, len(words) - 4), -1):
        rest = "".join(f" {word}" for word in words[end:])
        if _are_nouns(rest) and (value := _english(" ".join(words[:end]))) is not None:
            return written(value) + rest
    return None


def _are_nouns(text: str) -> bool:
    return bool(_NOUNS.fullmatch(text)) and not NO_NOUNS & set(text.casefold().split())


def _in_chinese(text: str) -> str | None:
    matched = _HAN_NUMERAL.match(text)
    if not matched:
        return None
    rest = text[matched.end() :].strip()
    value = _chinese(matched[0])
    return value + rest if value and (not rest or rest in MEASURES) else None


# Chinese units and measure words -> the unit as we write it; of what is counted, and money, none
MEASURES = {
    **dict.fromkeys("个只人名位件条张支页棵朵本次种辆台头块箱颗粒根片道题层元家间座面岁", ""),
    **dict.fromkeys(("美元", "人民币", "块钱", "元钱", "个人", "岁"), ""),
    **{"米": "m", "厘米": "cm", "毫米": "mm", "分米": "dm", "千米": "km", "公里": "km"},
    **{"克": "g", "千克": "kg", "公斤": "kg", "毫克": "mg", "吨": "t", "斤": "jin"},
    **{"升": "l", "毫升": "ml", "秒": "s", "秒钟": "s", "分钟": "min", "小时": "h", "度": "deg"},
    **{"天": "day", "日": "day", "周": "week", "月": "month", "个月": "month", "年": "year"},
    **{"角": "jiao", "分": "fen", "倍": "times", "对": "pair", "双": "pair", "打": "dozen"},
    **{f"平方{name}": f"{unit}^2" for name, unit in (("米", "m"), ("厘米", "cm"), ("千米", "km"))},
    **{f"立方{name}": f"{unit}^3" for name, unit in (("米", "m"), ("厘米", "cm"), ("分米", "dm"))},
}
