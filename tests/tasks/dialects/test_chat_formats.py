"""Conversations of programs in the formats of families: every message stands where it was sent."""

import copy

import numpy as np
import pytest

from params.schema.agent import Dialogue
from tasks.dialects.chats import open_chat
from tasks.dialects.native import Native
from tasks.dialects.tags import Tags
from tasks.programs.messages import messages_of
from tests.tasks.dialects import families

LAYOUT = Dialogue(
    system="Be brief.", turn_tokens=40, result_tokens=40, response_tokens=99, tool_calls=1
)
FAMILIES = ("qwen3", "llama-3", "glm-4.5", "qwen3.5", "gemma-4")
SAID = [
    {"role": "system", "content": "Be polite."},
    {"role": "user", "content": "Rome?"},
    {"role": "assistant", "content": "Sunny."},
    {"role": "system", "content": "From now on in <|im_end|> French."},
    {"role": "user", "content": "Oslo?"},
]
IN_ORDER = (
    "Be brief.",
    "Be polite.",
    "Rome?",
    "Sunny.",
    "From now on in <|im_end|> French.",
    "Oslo?",
)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", ["tags", "native"])
def test_a_later_system_message_stays_in_its_place(name, kind):
    gemma = name == "gemma-4"
    tokenizer = families.tokenizer(name) if gemma else families.for_renderer(name)
    section = {"tags": Tags()} if kind == "tags" else {"native": Native(renderer=name)}
    chat = open_chat(section, tokenizer, LAYOUT, [])
    messages = messages_of(SAID)
    if (name, kind) == ("qwen3.5", "native"):
        with pytest.raises(ValueError, match="System message must be at the beginning"):
            chat.prompt(messages)
        return
    text = tokenizer.decode(chat.prompt(messages))
    assert [text.count(part) for part in IN_ORDER] == [1] * len(IN_ORDER)
    assert sorted(IN_ORDER, key=text.index) == list(IN_ORDER)
    turn = np.array(tokenizer.encode("Sunny.", add_special_tokens=False), np.int32)
    following = chat.extend(chat.prompt(messages[:2]), turn, messages[3:])
    if following is not None:  # else a new prompt is written
        later = tokenizer.decode(following)
        assert later.index(IN_ORDER[-2]) < later.index(IN_ORDER[-1])


@pytest.mark.parametrize("kind", ["tags", "native"])
def test_a_call_of_a_tool_that_was_not_offered_is_a_text(kind):
    tokenizer = families.for_renderer("qwen3")
    section = {"tags": Tags()} if kind == "tags" else {"native": Native(renderer="qwen3")}
    chat = open_chat(section, tokenizer, LAYOUT, [])
    prompt = chat.prompt(messages_of(SAID[:2]))
    said = {
        "tags": "<python>7</python>",
        "native": '<tool_call>\n{"name": "remove", "arguments": {}}\n</tool_call>',
    }[kind]
    turn = np.array(tokenizer.encode(f"{said}<|im_end|>", add_special_tokens=False), np.int32)
    reply = chat.reply(prompt, turn, said, "end", 0)
    assert (reply.message.content, reply.message.calls) == (said, ())


def test_a_template_that_drops_it_is_refused():
    tokenizer = copy.deepcopy(families.for_renderer("qwen3"))
    tokenizer.chat_template = (
        "{%- for m in messages %}{%- if m.role != 'system' or loop.first %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
    )
    chat = open_chat({"tags": Tags()}, tokenizer, LAYOUT, [])
    with pytest.raises(ValueError, match="leaves out a system message"):
        chat.prompt(messages_of(SAID))
    turn = np.array(tokenizer.encode("Sunny.", add_special_tokens=False), np.int32)
    first = messages_of(SAID[:2])
    assert chat.extend(chat.prompt(first), turn, messages_of(SAID)[3:]) is None
