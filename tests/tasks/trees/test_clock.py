"""The clock of chat templates: midnight of a day, in plain English, wherever it is asked."""

import json
import os
import subprocess
import sys
from datetime import date, datetime, time

import pytest

from tasks.trees.clock import formatted

# A machine's clock, and two dialects of policies whose template has a date: their prompts.
SCRIPT = """
import datetime, json, sys

class Faked(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromisoformat(sys.argv[1])

datetime.datetime = Faked  # before any module takes it

from params.schema.agent import Dialogue
from tasks.dialects import native, tags
from tasks.trees.tree import Question
from tests.tasks.dialects.families import tokenizer

room = {"turn_tokens": 9, "result_tokens": 9, "response_tokens": 99, "tool_calls": 3}
dialogue = Dialogue(system="", date=sys.argv[2], **room)
question = Question("q", "toy", "How many?", ("7",))
prompts, plain = {}, {}
for name in ("smollm3", "granite", "llama-3.2", "gpt-oss"):
    speaks = tokenizer(name)
    asked = [{"role": "user", "content": "How many?"}]
    plain[name] = speaks.apply_chat_template(asked, tokenize=False)
    kinds = [(tags, tags.Tags())]
    if name != "gpt-oss":  # whose library fetches its vocabulary
        kinds.append((native, native.Native(renderer="default")))
    if name == "llama-3.2":
        kinds.append((native, native.Native()))
    for number, (kind, settings) in enumerate(kinds):
        dialect = kind.DIALECT.open(settings, speaks, dialogue, [])
        prompts[f"{name} {number}"] = speaks.decode(dialect.prompt(question))
print(json.dumps([prompts, plain]))
"""


@pytest.mark.parametrize("day", [date(2026, 1, 5), date(1999, 12, 31), date(2028, 2, 29)])
def test_a_day_is_midnight_in_every_format(day):
    midnight = datetime.combine(day, time())
    for form in ("%d %b %Y", "%Y-%m-%d", "%A, %B %d", "%a %h %e", "%c", "%x %X", "%r", "%I:%M %p"):
        assert formatted(day, form) == midnight.strftime(form)
    assert formatted(day, "100%% %%b %Z%z %P") == "100% %b  am"
    assert formatted(date(1970, 1, 2), "%s") == "86400", "in no time zone but that of the day"


def prompts_at(now, zone, day="2026-01-05"):
    command = [sys.executable, "-c", SCRIPT, now, day]
    ran = subprocess.run(command, env=os.environ | {"TZ": zone}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_prompts_do_not_change_at_midnight():
    before, as_before = prompts_at("2026-11-27T23:59:59", "UTC")
    after, as_after = prompts_at("2026-11-28T00:00:01", "Asia/Tokyo")
    assert before == after
    assert all(as_before[name] != as_after[name] for name in as_before), "the clock is faked"
    texts = {"smollm3": "05 January 2026", "granite": "January 05, 2026"}
    texts |= {"llama-3.2": "05 Jan 2026", "gpt-oss": "2026-01-05"}
    assert all(texts[name.split()[0]] in prompt for name, prompt in before.items())
