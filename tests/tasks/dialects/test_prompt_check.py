"""Chat templates that leave out a part of the prompt are refused when a dialect is opened."""

import pytest

from params.schema.agent import Dialogue
from tasks.dialects import native, tags
from tasks.trees.tree import Question, ToolSpec
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
TEMPLATES = {
    "sound": HEAD + CONTENT + ENDS + BEGINS,
    "parts alone": HEAD + PARTS + ENDS + BEGINS,
    "system left out": LATER + CONTENT + ENDS + BEGINS,
    "system refused": FIRST_SYSTEM + HEAD + CONTENT + ENDS + BEGINS,
    "no generation prompt": HEAD + CONTENT + ENDS,
    "no header": "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "opens a thought": HEAD + CONTENT + ENDS + BEGINS.replace("\\n{%", "\\n<think>\\n{%"),
}
SAID = {
    "parts alone": "does not have the question's text",
    "system left out": "does not have the text of dialogue.system",
    "system refused": r"refuses a system message and a question \(no system role\): if it takes no",
    "no generation prompt": r"header of the agent's turn \('<\|im_start\|>assistant\\n'\)",
}


def opened(template, dialect=tags, system="Be brief.", specs=()):
    speaks = tokenizer("qwen2.5")
    speaks.chat_template = TEMPLATES[template]
    sizes = {"turn_tokens": 99, "result_tokens": 99, "response_tokens": 999, "tool_calls": 3}
    kind = dialect.DIALECT
    settings = kind.settings(renderer="default") if dialect is native else kind.settings()
    return speaks, kind.open(settings, speaks, Dialogue(system=system, **sizes), specs)


@pytest.mark.parametrize("template", SAID)
def test_a_template_that_leaves_out_a_part_is_refused_once_with_the_cause(template):
    with pytest.raises(ValueError, match=rf"^dialect\.tags: the .*{SAID[template]}") as refused:
        opened(template, system="" if template == "parts alone" else "Be brief.")
    assert len(str(refused.value).splitlines()) == 1


def test_a_prompt_that_lacks_several_parts_has_a_line_for_each():
    with pytest.raises(ValueError, match="question") as refused:
        opened("parts alone", native, specs=[PYTHON])
    assert [
        line.partition(" the prompt does not ")[2][:9] for line in str(refused.value).splitlines()
    ] == [
        "have the ",
        "have the ",
        "name the ",
    ]


def test_a_tool_is_described_by_the_template_or_by_the_recipe():
    with pytest.raises(ValueError, match="name the tool python, so no agent would call it"):
        opened("sound", native, specs=[PYTHON])
    opened("sound", native, system="Call python for sums.", specs=[PYTHON])
    opened("sound", specs=[PYTHON])  # in tags, the recipe's system message says all
    opened("sound", system="{tools}", specs=[PYTHON])


@pytest.mark.parametrize("template", ["sound", "no header", "opens a thought"])
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_a_sound_template_is_taken(template, system):
    speaks, dialect = opened(template, system="" if template == "no header" else system)
    text = speaks.decode(dialect.prompt(Question("q", "kind", "How many?", ("7",))))
    assert "How many?" in text
    assert not text.rstrip().endswith("<think>"), "the agent opens its thought itself"
