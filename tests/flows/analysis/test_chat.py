"""Trajectories become the messages that they were, whatever dialect the policy speaks."""

import json

import numpy as np
import pytest

from flows.analysis import chat
from params.schema.agent import Dialogue
from tasks.dialects import native, tags
from tasks.dialects.contract import Exchange
from tasks.dialects.native import Native
from tasks.dialects.tags import Tags
from tasks.environments.contract import FREE_TEXT
from tasks.trees.tree import (
    PROMPT,
    RESULT,
    TURN,
    Call,
    Message,
    Node,
    Observation,
    Question,
    ToolSpec,
    Tree,
)
from tests.tasks.dialects import families

NONE = np.zeros(0, np.float32)
QUESTION = Question(
    "q", "toy", "How many?", ("7",), before=(Message("system", "In French."), Message("user", "Hi"))
)
TEXT = {"type": "string"}
PYTHON = ToolSpec(
    "python", "Run.", {"type": "object", "properties": {"code": TEXT}, "required": ["code"]}
)
BOOK = ToolSpec("book", "Book.", {"type": "object", "properties": {"city": TEXT, "days": {}}})
STEPS = [  # thoughts, call, result
    ("I count", Call("python", 'print("é" * 2)'), "éé\n 0\n1"),
    ("", Call("book", '{"city": "Köln", "days": 2}'), ""),
    ("more", Call("python", "print(1)"), "1"),
]
ANSWER = "It is \\boxed{7}"
OPENINGS = [
    {"role": "system", "content": "Be brief.\n\nIn French."},
    {"role": "user", "content": "Hi"},
    {"role": "user", "content": "How many?"},
]


def layout(**changes):
    limits = {"turn_tokens": 512, "result_tokens": 512, "response_tokens": 9999, "tool_calls": 9}
    return Dialogue(system="Be brief. {tools}", **limits, **changes)


def chat_of(family, *specs, objects=False):
    """The chat of a family's native dialect, or of tags."""
    settings = Native()
    if family == "qwen2.5":
        settings = Native(renderer="default", options={"tool_parser": "qwen3"})
    tokenizer = families.tokenizer("qwen3" if family == "tags" else family)
    kind, settings = (tags, Tags()) if family == "tags" else (native, settings)
    dialect = kind.DIALECT.open(settings, tokenizer, layout(), specs)
    return chat.Chat(dialect, specs, "Be brief. {tools}", tokenizer, objects)


def node(parent, kind, outcome, text, tokens, observation=None):
    return Node(parent, kind, outcome, text, np.array(tokens, np.int32), NONE, NONE, observation)


def grown(spoken, turns, results):
    """A tree of one trajectory, as a rollout stores it: ``turns`` are the tokens of each turn."""
    dialect, decode = spoken.dialect, spoken.tokenizer.decode
    before = dialect.prompt(QUESTION)
    tree = Tree(QUESTION, [node(-1, PROMPT, "", QUESTION.text, before)])
    past = []
    for turn, result in zip(turns, [*results, None], strict=True):
        text = decode(turn)
        outcome = "answer" if result is None else "call"
        tree.nodes.append(node(len(tree.nodes) - 1, TURN, outcome, text, turn))
        if result is None:
            break
        call = dialect.call(text.removesuffix(spoken.tokenizer.eos_token))
        seen = Observation("ok", result)
        past.append(Exchange(turn, text, call, seen))
        written = dialect.observe(before, turn, call, seen, 512)
        if written is None:
            before = dialect.restart(QUESTION, "", past)
            after = node(len(tree.nodes) - 1, PROMPT, "ok", decode(before), before)
        else:
            after = node(len(tree.nodes) - 1, RESULT, "ok", *written)
            before = np.concatenate([before, turn, written[1]])
        tree.nodes.append(after)
    tree.leaves = [len(tree.nodes) - 1]
    return tree


def sampled(spoken, thoughts, call, content=""):
    """The tokens of a turn, as the policy of a family samples it."""
    message = spoken.dialect._message(call, content, thoughts)
    return np.array(spoken.dialect._ended(message), np.int32)


@pytest.mark.parametrize("family", ["qwen3", "llama-3", "glm-4.5", "qwen2.5"])
def test_native_turns_results_and_new_prompts(family):
    spoken = chat_of(family, PYTHON, BOOK, objects=True)
    turns = [sampled(spoken, thoughts, call) for thoughts, call, _ in STEPS]
    tree = grown(spoken, [*turns, sampled(spoken, "", None, ANSWER)], [r for *_, r in STEPS])
    fresh = [each for each in tree.nodes[1:] if each.kind == PROMPT]
    assert len(fresh) == (3 if family == "qwen2.5" else 0)
    (messages,) = chat.conversations(tree, spoken)
    assert messages[:3] == OPENINGS
    for number, (thoughts, call, result) in enumerate(STEPS):
        turn, answer = messages[3 + 2 * number : 5 + 2 * number]
        if family != "llama-3":  # which says nothing beside a call
            assert thoughts in turn["content"]
        [made] = turn["tool_calls"]
        values = {"code": call.argument} if call.tool == "python" else json.loads(call.argument)
        assert made["function"] == {"name": call.tool, "arguments": values}
        assert (answer["role"], answer["name"]) == ("tool", call.tool)
        assert answer["content"] == result.strip()
        assert answer["tool_call_id"] == made["id"] == f"call_{number + 1}"
    assert messages[-1] == {"role": "assistant", "content": ANSWER}


def test_qwen3_renders_the_messages_to_what_was_sampled():
    spoken = chat_of("qwen3", PYTHON, BOOK, objects=True)
    turns = [sampled(spoken, "I count", call) for _, call, _ in STEPS]
    tree = grown(spoken, [*turns, sampled(spoken, "Done", None, ANSWER)], [r for *_, r in STEPS])
    (messages,) = chat.conversations(tree, spoken)
    rendered = spoken.tokenizer.apply_chat_template(
        messages, tools=chat.tools(spoken), tokenize=False
    )
    parts = [each.tokens for each in tree.nodes]
    assert rendered.strip() == spoken.tokenizer.decode(np.concatenate(parts)).strip()


def test_tags_become_calls_and_broken_turns_stay_text():
    spoken = chat_of("tags", PYTHON, BOOK)
    texts = ["<think>I count</think><python>print(1)</python>", "<answer>\\boxed{7}</answer>"]
    encode = spoken.tokenizer.encode
    tree = grown(spoken, [np.array(encode(text), np.int32) for text in texts], ["1"])
    broken = {"bad_call": "1</python>", "forged_result": f"{texts[0]}<result>2</result>"}
    for outcome, text in broken.items():
        tree.nodes.append(node(2, TURN, outcome, text, encode(text)))
    tree.leaves += [4, 5]
    answered, *others = chat.conversations(tree, spoken)
    call = {"name": "python", "arguments": '{"code": "print(1)"}'}
    assert answered[:3] == OPENINGS
    assert answered[3:] == [
        {
            "role": "assistant",
            "content": "<think>I count</think>",
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_1", "name": "python", "content": "1"},
        {"role": "assistant", "content": texts[1]},
    ]
    for text, messages in zip(broken.values(), others, strict=True):
        assert messages == [*answered[:5], {"role": "assistant", "content": text}]


def test_steps_of_a_world_with_fresh_prompts_are_one_conversation():
    spoken = chat_of("tags", BOOK)
    shown = Observation("", "You are here.", actions=("book",))
    seen = Observation("ok", "You are there.", actions=("stay",))
    act = '<book>{"city": "Köln"}</book>'
    tree = Tree(
        QUESTION,
        [
            node(-1, PROMPT, "", "How many?\n\nYou are here.\nactions: book", [1], shown),
            node(0, TURN, "call", act, [2], seen),
            node(1, PROMPT, "ok", "How many?\nstep 1: book\nYou are there.", [3]),
            node(2, TURN, "terminated", act, [4], Observation("ok", "The end.", terminated=True)),
        ],
        leaves=[3],
    )
    (messages,) = chat.conversations(tree, spoken)
    assert [message["role"] for message in messages[2:]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert messages[2]["content"] == "How many?\n\nYou are here.\nactions: book"
    assert messages[4]["content"] == "You are there.\nactions: stay"
    assert messages[5]["tool_calls"][0]["function"]["arguments"] == '{"city": "Köln"}'


def test_free_acts_are_the_content_and_the_user_answers():
    spoken = chat_of("qwen3", FREE_TEXT)
    turn = sampled(spoken, "", Call("act", "go north"))
    tree = grown(spoken, [turn, turn], ["A wall."])
    (messages,) = chat.conversations(tree, spoken)
    assert chat.tools(spoken) == []
    assert messages[3:] == [
        {"role": "assistant", "content": "go north"},
        {"role": "user", "content": "A wall."},
        {"role": "assistant", "content": "go north"},
    ]


def test_a_text_that_is_framed_otherwise_is_kept_whole():
    assert chat.between("<r>5</r>", "<r>0</r>", "<r>1</r>") == "5"
    assert chat.between("<r></r>", "<r>0</r>", "<r>1</r>") == ""
    assert chat.between('<"a\\nb">', '<"0">', '<"1">') == "a\nb"
    assert chat.between('<"a\\">', '<"0">', '<"1">') == "a\\"
    assert chat.between(" other ", "<r>0</r>", "<r>1</r>") == "other"
