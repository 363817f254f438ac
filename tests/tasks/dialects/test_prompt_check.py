"""Chat templates that leave out a part of the prompt are refused when a dialect is opened."""

import numpy as np
import pytest

from params.schema.agent import Dialogue
from tasks.dialects import native, tags
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Question, ToolSpec
from tests.tasks.dialects.families import tokenizer

CODE = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
PYTHON = ToolSpec("python", "Run code.", CODE)

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
ENDS = "<|im_end|>\n{% endfor %}"
BEGINS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CONTENT = "{{ m.content }}"
PARTS = "{% for part in m.content if part is mapping %}{{ part.text }}{% endfor %}"
FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
)
LATER = "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
DESCRIBES = "{{ tools | tojson }}"
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
)
NO_RESULTS = "{% if m.role != 'tool' %}{{ m.content }}{% endif %}"
NO_TOOL_ROLE = "{% if m.role == 'tool' %}{{ raise_exception('no tool role') }}{% endif %}"
TEMPLATES = {
    "lower": HEAD + "{{ m.content | lower }}" + ENDS + BEGINS,
    "escaped": HEAD + "{{ m.content | e }}" + ENDS + BEGINS,
    "json": HEAD + "{{ m.content | tojson }}" + ENDS + BEGINS,
    "first line": HEAD + "{{ m.content.split('\\n')[0] }}" + ENDS + BEGINS,
    "no spaces": HEAD + "{{ m.content.split() | join(' ') }}" + ENDS + BEGINS,
    "forgets": DESCRIBES
    + HEAD.replace("messages", "messages[-2:]")
    + CONTENT
    + CALLS
    + ENDS
    + BEGINS,
    "calls": HEAD + CONTENT + CALLS + ENDS + BEGINS,
    "calls left out": DESCRIBES + HEAD + CONTENT + ENDS + BEGINS,
    "results left out": DESCRIBES + HEAD + NO_RESULTS + CALLS + ENDS + BEGINS,
    "results refused": DESCRIBES + HEAD + NO_TOOL_ROLE + CONTENT + CALLS + ENDS + BEGINS,
    "calls unread": DESCRIBES
    + HEAD
    + CONTENT
    + CALLS.replace("tool_call>", "act>")
    + ENDS
    + BEGINS,
    "one question": "{% if messages[2:] %}{{ raise_exception('one') }}{% endif %}"
    + HEAD
    + CONTENT
    + ENDS
    + BEGINS,
    "sound": HEAD + CONTENT + ENDS + BEGINS,
    "parts alone": HEAD + PARTS + ENDS + BEGINS,
    "parts asked": HEAD + "{{ m.content[0].text.strip() }}" + ENDS + BEGINS,
    "all refused": "{{ raise_exception('not me') }}",
    "drawn": HEAD
    + "{{ [m.content] | random }}{{ lipsum(1) }}{# |random #} |random"
    + ENDS
    + BEGINS,
    "none": "",
    "thought alone": HEAD + CONTENT + ENDS + "{% if add_generation_prompt %}<think>\n{% endif %}",
    "system left out": LATER + CONTENT + ENDS + BEGINS,
    "system refused": FIRST_SYSTEM + HEAD + CONTENT + ENDS + BEGINS,
    "no header of system": LATER + CONTENT + ENDS,
    "no generation prompt": HEAD + CONTENT + ENDS,
    "no header": "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "with a date": "{{ strftime_now(format='%d %b %Y') }}\n" + HEAD + CONTENT + ENDS + BEGINS,
    "opens a thought": HEAD + CONTENT + ENDS + BEGINS.replace("\n{%", "\n<think>\n{%"),
}
SAID = {
    **dict.fromkeys(
        ("lower", "escaped", "json", "first line", "no spaces"),
        "template changes what a question says: .* becomes .*: let it write contents as they are",
    ),
    "parts alone": "takes contents only as lists of parts, so the prompt lacks the question's text",
    "parts asked": r"contents only as lists of parts \(.* has no attribute 'text'\): let it",
    "system left out": "not have the text of dialogue.system, which .* leave dialogue.system empty",
    "system refused": r"takes no system message \(no system role\): leave dialogue.system empty",
    "all refused": r"refuses a question \(not me\): correct the chat template",
    "no generation prompt": r"agent's turn \('<\|im_start\|>assistant\\n'\).*add {% if",
    "thought alone": r"header of the agent's turn \('<\|im_start\|>assistant\\n'\)",
    "drawn": "uses lipsum and random, so a prompt would be another one each time",
    "none": "has no chat template: put the one that the policy was trained with",
}


def opened(template, dialect=tags, system="Be brief.", specs=(), renderer="default", options=None):
    speaks = tokenizer("qwen2.5")
    speaks.chat_template = TEMPLATES[template]
    sizes = {"turn_tokens": 99, "result_tokens": 99, "response_tokens": 999, "tool_calls": 3}
    kind = dialect.DIALECT
    chosen = {"renderer": renderer, "options": options or {}} if dialect is native else {}
    settings = kind.settings(**chosen)
    return speaks, kind.open(settings, speaks, Dialogue(system=system, **sizes), specs)


@pytest.mark.parametrize("dialect", [tags, native], ids=["tags", "native"])
@pytest.mark.parametrize("template", SAID)
def test_a_template_that_leaves_out_a_part_is_refused_once_with_the_cause(template, dialect):
    name = dialect.__name__.rpartition(".")[2]
    with pytest.raises(ValueError, match=rf"^dialect\.{name}: the .*{SAID[template]}") as refused:
        opened(template, dialect, specs=[PYTHON])
    assert len(str(refused.value).splitlines()) == 1


UNUSABLE = {
    "forgets": "the policy's chat template leaves out the question, so no agent",
    "calls left out": "the policy's chat template leaves out calls, so no agent could go on",
    "results left out": "the policy's chat template leaves out results of calls, so no agent",
    "results refused": r"refuses a call with its result \(no tool role\): choose the dialect tags",
    "calls unread": "has no parser that reads a call as .*<act>.*: name the policy's family, or",
}


@pytest.mark.parametrize("template", UNUSABLE)
def test_a_template_whose_calls_no_agent_could_make_is_refused_in_one_line(template):
    with pytest.raises(ValueError, match=f"^dialect.native: .*{UNUSABLE[template]}") as refused:
        opened(template, native, specs=[PYTHON])
    assert len(str(refused.value).splitlines()) == 1
    opened(template, specs=[PYTHON])  # in tags, the template writes no calls


def test_a_tokenizer_ends_a_turn_as_its_template_does():
    """An agent of no family would go on after the mark that it was trained to end with."""
    speaks, _ = opened("calls", native)
    speaks.eos_token = "<|endoftext|>"
    sizes = {"turn_tokens": 99, "result_tokens": 99, "response_tokens": 999, "tool_calls": 3}
    remedy = r"its tokenizer with '<\|endoftext\|>': set eos_token .* to '<\|im_end\|>'$"
    with pytest.raises(ValueError, match=remedy):
        native.open_native(
            native.Native(renderer="default"), speaks, Dialogue(system="", **sizes), []
        )


def test_a_template_of_no_family_has_the_parser_that_reads_its_calls():
    """Without one, every call would be read as an answer without a box."""
    speaks, dialect = opened("calls", native, "Call python.", [PYTHON])
    text = '<tool_call>{"name": "python", "arguments": {"code": "7"}}</tool_call>'
    turn = np.array([*speaks.encode(text, add_special_tokens=False), speaks.eos_token_id])
    read = dialect.read(dialect.prompt(Question("q", "k", "How?", ("7",))), turn, text, "end")
    assert (read.outcome, read.calls) == (Outcome.CALL, (Call("python", "7"),))
    with pytest.raises(ValueError, match=r"tool_parser glm does not read a call .* leave it out"):
        opened("calls", native, "Call python.", [PYTHON], options={"tool_parser": "glm"})


def test_a_template_is_judged_before_its_family():
    """``auto`` would say that it is the template of no family."""
    with pytest.raises(ValueError, match="takes no system message"):
        opened("system refused", native, renderer="auto")


def test_a_prompt_that_lacks_several_parts_has_a_line_for_each():
    with pytest.raises(ValueError, match="system") as refused:
        opened("no header of system", native, specs=[PYTHON])
    assert [line[:58] for line in str(refused.value).splitlines()] == [
        "dialect.native: the prompt does not have the text of dialo",
        "dialect.native: the prompt ends before the header of the a",
    ]


def test_a_tool_is_described_by_the_template_or_by_the_recipe():
    with pytest.raises(ValueError, match="tools and writes no calls: take the dialect tags"):
        opened("one question", native, specs=[PYTHON])
    opened("sound", native, specs=[PYTHON])  # it gets both from written_calls.py
    with pytest.raises(ValueError, match=r"no tools; describe them in dialogue.system, or take"):
        opened("calls", native, specs=[PYTHON])
    opened("calls", native, system="Call python for sums.", specs=[PYTHON])
    opened("sound", specs=[PYTHON])  # in tags, the recipe's system message says all
    opened("sound", system="{tools}", specs=[PYTHON])


@pytest.mark.parametrize("template", ["sound", "no header", "opens a thought", "with a date"])
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_a_sound_template_is_taken(template, system):
    speaks, dialect = opened(template, system="" if template == "no header" else system)
    text = speaks.decode(dialect.prompt(Question("q", "kind", "How many?", ("7",))))
    assert "How many?" in text
    assert not text.rstrip().endswith("<think>"), "the agent opens its thought itself"


@pytest.mark.parametrize("kind", [tags, native], ids=["tags", "native"])
def test_a_policy_is_published_with_the_day_that_its_template_shows(kind):
    settings = kind.DIALECT.settings()
    told = {
        template: kind.DIALECT.serving(settings, opened(template, kind)[1]).get("date")
        for template in ("sound", "with a date")
    }
    assert told == {"sound": None, "with a date": "2026-01-01"}
