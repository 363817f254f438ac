"""The clock of chat templates: midnight of a day that the recipe names, in plain English.

Templates write a date into the prompt (Llama 3.2, SmolLM3, Granite, gpt-oss), by ``strftime_now``,
which transformers lets them call. With the clock of the machine a prompt would change at midnight,
in another time zone, and with the language of the process.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, date, datetime, time

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December".split()
)
# Formats that depend on language or time zone, as the language "C" has them at midnight.
PLAIN = {
    "%c": "%a %b %e 00:00:00 %Y",
    "%x": "%m/%d/%y",
    "%X": "00:00:00",
    "%r": "12:00:00 AM",
    "%p": "AM",
    "%P": "am",
    "%Z": "",
    "%z": "",
}
DIRECTIVE = re.compile(r"%%|%[a-zA-Z]")


def template_clock(day: date) -> dict[str, Callable[[str], str]]:
    """Return what a template is given as its clock, by name; a value of its own hides ours."""

    def strftime_now(format: str) -> str:  # the name that transformers has, which templates may use
        return formatted(day, format)

    return {"strftime_now": strftime_now}


def formatted(day: date, form: str) -> str:
    """Return midnight of a day in a format of strftime, the same in all languages and zones."""
    names = {
        "%a": DAYS[day.weekday()][:3],
        "%A": DAYS[day.weekday()],
        "%b": MONTHS[day.month - 1][:3],
        "%B": MONTHS[day.month - 1],
        "%h": MONTHS[day.month - 1][:3],
        "%s": str(int(datetime.combine(day, time(), UTC).timestamp())),
    }
    plain = DIRECTIVE.sub(lambda found: PLAIN.get(found[0], found[0]), form)
    plain = DIRECTIVE.sub(lambda found: names.get(found[0], found[0]), plain)
    return datetime.combine(day, time()).strftime(plain)
