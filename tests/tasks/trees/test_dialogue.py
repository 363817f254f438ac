"""How a trajectory is written, read, cut and turned into tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from params.schema.agent import Dialogue
from tasks.policy import tiny
from tasks.policy.tiny import ASSISTANT, USER
from tasks.trees import dialogue as talk
from tasks.trees.dialogue import (
    encode,
    final_answer,
    prompt_tokens,
    read_call,
    read_turn,
    result_tokens,
    trace_tokens,
)
from tasks.trees.outcomes import Outcome, StopReason
from tasks.trees.tree import Call, Message, Observation, Question

# Tags and control tokens, whole, in parts and inside each other, between other texts.
hostile_text = st.lists(
    st.sampled_from(
        [
            *talk.TAGS,
            *(tiny.END, USER, ASSISTANT, "<", ">", "</", "<|", "|>", "result", "answer>"),
            *("end", " ", "a", "7", "\\boxed{7}"),
        ]
    ),
    max_size=12,
).map("".join)


def layout(system: str) -> Dialogue:
    return Dialogue(
        system=system,
        turn_tokens=8,
        result_tokens=8,
        response_tokens=16,
        tool_calls=1,
    )


def asked(text: str, *before: Message) -> Question:
    return Question("q", "toy", text, ("4",), before=before)


# ---- prompts


@pytest.mark.parametrize(
    ("system", "text"),
    [("", f"{USER}2+2?{ASSISTANT}"), ("Be brief.", f"{USER}Be brief.{USER}2+2?{ASSISTANT}")],
)
def test_a_prompt_ends_where_the_agent_begins(tokenizer, system, text):
    tokens = prompt_tokens(tokenizer, layout(system), asked("2+2?"))
    assert tokens.dtype == np.int32
    assert tokenizer.decode(tokens) == text


def test_earlier_messages_follow_one_system_message(tokenizer):
    before = (
        Message("user", "1+1?"),
        Message("system", "Answer."),
        Message("assistant", "2"),
    )
    tokens = prompt_tokens(tokenizer, layout("Be brief."), asked("2+2?", *before))
    talk_so_far = f"{USER}1+1?{ASSISTANT}2{tokenizer.eos_token}{USER}2+2?{ASSISTANT}"
    assert tokenizer.decode(tokens) == f"{USER}Be brief.\n\nAnswer.{talk_so_far}"
    np.testing.assert_array_equal(tokens, encode(tokenizer, tokenizer.decode(tokens)))


@given(texts=st.lists(hostile_text, min_size=3, max_size=3))
def test_only_the_template_writes_added_tokens(tokenizer, texts):
    """Whatever messages quote, it is the same text, and the turns are the template's.

    Tags in the recipe's own message are its own.
    """
    system, example, question = texts
    before = (Message("user", "1+1?"), Message("assistant", example))
    tokens = prompt_tokens(tokenizer, layout("#" + system), asked(question, *before)).tolist()
    added = {t for tag, t in tokenizer.get_added_vocab().items() if tag not in talk.TAGS}
    user, agent = tokenizer.convert_tokens_to_ids([USER, ASSISTANT])
    end = tokenizer.eos_token_id
    assert [t for t in tokens if t in added] == [user, user, agent, end, user, agent]
    told, asked_for = tokens[: tokens.index(user, 1)], tokens[tokens.index(user, 1) :]
    assert added.isdisjoint(told[1:])
    tags = set(tokenizer.convert_tokens_to_ids(talk.TAGS))
    assert tags.isdisjoint(asked_for)
    shown = f"{USER}#{system}{USER}1+1?{ASSISTANT}{example}{tokenizer.eos_token}"
    assert tokenizer.decode(tokens) == f"{shown}{USER}{question}{ASSISTANT}"


def test_prompt_without_added_tokens_is_one_piece(tokenizer):
    """As the policy's own template is, so that a pretrained policy meets what it was trained on."""
    text = " two  spaces\n\n<answer and no tag\n"
    template = f"{USER}{text}{ASSISTANT}"
    expected = tokenizer.encode(template, add_special_tokens=False)
    assert prompt_tokens(tokenizer, layout(""), asked(text)).tolist() == expected


# ---- reading a turn


@pytest.mark.parametrize(
    ("text", "stopped", "outcome", "call"),
    [
        ("<python>1+1</python>", StopReason.STOP, Outcome.CALL, Call("python", "1+1")),
        (
            "<think>a</think><search>b c</search>",
            StopReason.STOP,
            Outcome.CALL,
            Call("search", "b c"),
        ),
        ("<python>a\nb\n</python>\n", StopReason.STOP, Outcome.CALL, Call("python", "a\nb\n")),
        (
            "<python>if a < b: c</python>",
            StopReason.STOP,
            Outcome.CALL,
            Call("python", "if a < b: c"),
        ),
        ("<python></python>", StopReason.STOP, Outcome.CALL, Call("python", "")),
        ("<python>a<python>b</python>", StopReason.STOP, Outcome.CALL, Call("python", "b")),
        ("<search>a<python>b</python>", StopReason.STOP, Outcome.CALL, Call("python", "b")),
        (
            "<python>a<search>b</python>",
            StopReason.STOP,
            Outcome.CALL,
            Call("python", "a<search>b"),
        ),
        ("</python>", StopReason.STOP, Outcome.BAD_CALL, None),
        ("<search>a</python>", StopReason.STOP, Outcome.BAD_CALL, None),
        ("<answer>\\boxed{1}</answer>", StopReason.STOP, Outcome.ANSWER, None),
        ("no answer was opened</answer>", StopReason.STOP, Outcome.ANSWER, None),
        ("that is all<|end|>", StopReason.END, Outcome.NO_ANSWER, None),
        ("<python>1</python", StopReason.LENGTH, Outcome.CUT, None),
        ("", StopReason.LENGTH, Outcome.CUT, None),
        ("<think>a</think><result>", StopReason.STOP, Outcome.FORGED_RESULT, None),
        ("</result>", StopReason.STOP, Outcome.FORGED_RESULT, None),
        ("<python>print('<result>", StopReason.STOP, Outcome.FORGED_RESULT, None),
        ("<python>1</python><result>1</result>", StopReason.STOP, Outcome.FORGED_RESULT, None),
        (
            "<result>1</result><answer>\\boxed{1}</answer>",
            StopReason.STOP,
            Outcome.FORGED_RESULT,
            None,
        ),
        ("<result>1<|end|>", StopReason.END, Outcome.FORGED_RESULT, None),
        ("<result>1", StopReason.LENGTH, Outcome.FORGED_RESULT, None),
        ("<results> result <resul", StopReason.LENGTH, Outcome.CUT, None),
    ],
)
def test_how_a_turn_ended(text, stopped, outcome, call):
    assert read_turn(text, stopped) == (outcome, call)


def test_a_turn_stops_at_every_tag_that_ends_it():
    ends = {"</python>", "</search>", "</answer>", "<result>", "</result>"}
    assert set(talk.STOP_STRINGS) == ends


def test_tags_that_a_tiny_policy_has_tokens_for():
    """Another tag changes the vocabulary of every tiny policy."""
    names = [tag.strip("</>") for tag in talk.TAGS]
    assert names == [n for n in ("think", "python", "search", "result", "answer") for _ in "12"]


# ---- answers


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<answer>\\boxed{7}</answer>", "7"),
        ("<answer>\\boxed{ 7 }</answer>", "7"),
        ("<answer>\\boxed{\\frac{1}{2}}</answer>", "\\frac{1}{2}"),
        ("<answer>\\boxed{{a}{b{c}}}</answer>", "{a}{b{c}}"),
        ("<answer>\\boxed{}</answer>", ""),
        ("<answer>\\boxed{1} or \\boxed{2}</answer>", "2"),
        ("<answer>\\boxed{1}</answer><answer>\\boxed{2}</answer>", "2"),
        ("\\boxed{1}<answer>\\boxed{2}</answer>", "2"),
        ("<answer>\\boxed{1}</answer>\\boxed{2}", "1"),  # the box is not in an answer
        ("", None),
        ("\\boxed{1}", None),
        ("<answer>1</answer>", None),
        ("<answer>\\boxed{1</answer>", None),
        ("<answer>\\boxed{\\frac{1}{2}</answer>", None),
        ("\\boxed{1}<answer>2</answer>", None),
        ("<answer>1</answer>\\boxed{2}", None),
        ("<answer>\\boxed{1}</answer><answer>2</answer>", None),
    ],
)
def test_the_answer_is_the_last_box_of_the_last_answer(response, answer):
    assert final_answer(response) == answer


nested = st.recursive(
    st.text("ab \\", max_size=3),
    lambda inner: st.lists(inner, max_size=3).map(lambda parts: "{" + "".join(parts) + "}"),
)


@given(nested)
def test_a_box_of_balanced_braces_gives_what_it_holds(held):
    assert final_answer(f"<answer>so {{\\boxed{{{held}}}}} it is</answer>") == held.strip()


# ---- tool results

words = st.text() | st.lists(st.sampled_from(["12", "\n", " ", "é", "e\u0301", "apples"])).map(
    "".join
)


@given(text=words, spare=st.integers(0, 12))
def test_a_result_keeps_its_tags_within_the_limit(tokenizer, text, spare):
    least = len(encode(tokenizer, "<result>...</result>"))
    whole = len(encode(tokenizer, f"<result>{text.strip()}</result>"))
    shown, tokens = result_tokens(tokenizer, Observation("ok", text), least + spare)
    assert shown == tokenizer.decode(tokens)
    assert shown.startswith("<result>")
    assert shown.endswith("</result>")
    assert len(tokens) <= least + spare
    assert tokens.dtype == np.int32
    if whole <= least + spare:
        assert shown == f"<result>{text.strip()}</result>"
    else:
        kept = len(tokens) - least
        assert kept == spare
        assert shown.endswith("...</result>")
        np.testing.assert_array_equal(
            tokens[1 : 1 + kept], encode(tokenizer, text.strip())[:kept], "not the beginning"
        )


@given(limit=st.integers(-3, 20), text=words)
def test_a_result_says_when_it_can_not_keep_the_limit(tokenizer, text, limit):
    """A limit too small for tags and mark is kept or visibly passed; the tags stay whole."""
    shown, tokens = result_tokens(tokenizer, Observation("ok", text), limit)
    least = len(encode(tokenizer, "<result>...</result>"))
    assert len(tokens) <= max(limit, least)
    assert shown.startswith("<result>")
    assert shown.endswith("</result>")


# ---- the agent's own words


@pytest.mark.parametrize(
    ("turn", "call"),
    [
        ("", None),
        ("<think>a</think><python>1</python>", Call("python", "1")),
        ("<search>a</search>.", Call("search", "a")),
        ("<search>never closed", None),
    ],
)
def test_call_that_a_turn_ends_with(turn, call):
    assert read_call(turn) == call


@pytest.mark.parametrize(
    ("text", "ended"),
    [("<answer>1</answer>.", Outcome.ANSWER), ("<python>1</python>.\n", Outcome.CALL)],
)
def test_token_may_extend_past_its_tag(text, ended):
    assert read_turn(text, StopReason.STOP)[0] == ended


@given(said=hostile_text)
def test_quoted_tags_in_a_result_stay_text(tokenizer, said):
    """The result's own two tags are the only tokens of the vocabulary that mean something."""
    text, tokens = result_tokens(tokenizer, Observation("ok", said), limit=10_000)
    meaning = set(tokenizer.get_added_vocab().values())
    found = [token for token in tokens.tolist() if token in meaning]
    assert found == tokenizer.convert_tokens_to_ids(list(talk.RESULT_TAGS))
    assert text == f"<result>{said.strip()}</result>"


@given(said=hostile_text, spare=st.integers(0, 40))
def test_a_cut_through_a_quoted_tag_keeps_the_limit(tokenizer, said, spare):
    least = len(encode(tokenizer, "<result>...</result>"))
    text, tokens = result_tokens(tokenizer, Observation("ok", said), least + spare)
    assert len(tokens) <= least + spare
    body = text.removeprefix("<result>").removesuffix("</result>")
    assert body == said.strip() or said.strip().startswith(body.removesuffix("..."))


def test_result_without_tags_is_one_piece(tokenizer):
    _, tokens = result_tokens(tokenizer, Observation("ok", "a < b\n12 apples"), limit=40)
    assert tokens[1:-1].tolist() == encode(tokenizer, "a < b\n12 apples").tolist()


def test_half_a_character_is_replaced(tokenizer):
    text, _ = result_tokens(tokenizer, Observation("ok", "a\ud800b\ufdd0c"), limit=40)
    assert text == "<result>a?b\ufffdc</result>"


# ---- traces

TURN_1 = "<think>multiply</think><python>print(12*34)</python>"
RESULT = "<result>408</result>"
TURN_2 = "<think>that is it</think><answer>\\boxed{408}</answer>"


def test_only_the_agents_own_tokens_are_marked(tokenizer):
    prompt = prompt_tokens(tokenizer, layout(""), asked("12*34?"))
    tokens, own = trace_tokens(
        tokenizer, prompt, [(TURN_1, True), (RESULT, False), (TURN_2, True)], limit=24
    )
    assert tokens.shape == own.shape
    assert tokenizer.decode(tokens[own]) == TURN_1 + TURN_2 + tokenizer.eos_token
    assert tokenizer.decode(tokens[~own]) == tokenizer.decode(prompt) + RESULT
    assert tokens[-1] == tokenizer.eos_token_id
    assert own.dtype == np.bool_


@given(codes=st.lists(words, max_size=3), results=st.lists(words, min_size=3, max_size=3))
def test_a_trace_has_the_tokens_of_a_rollout(tokenizer, codes, results):
    """Turns and results are tokenised apart, so that training meets what sampling produces."""
    prompt = prompt_tokens(tokenizer, layout(""), asked("12*34?"))
    parts, pieces = [], [prompt]
    for code, result in zip(codes, results, strict=False):
        turn = f"<think>a</think><python>{code}</python>"
        shown, tokens = result_tokens(tokenizer, Observation("ok", result), 10_000)
        parts += [(turn, True), (shown, False)]
        pieces += [encode(tokenizer, turn), tokens]
    parts.append((TURN_2, True))
    pieces += [encode(tokenizer, TURN_2), np.array([tokenizer.eos_token_id], np.int32)]
    tokens, own = trace_tokens(tokenizer, prompt, parts, limit=10_000)
    np.testing.assert_array_equal(tokens, np.concatenate(pieces))
    assert own.sum() == sum(len(piece) for piece in pieces[1::2]) + 1
