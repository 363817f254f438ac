"""Quoted marks of turns stay text, for chat templates and added tokens of several kinds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from params.schema.agent import Dialogue
from tasks.trees import dialogue as talk
from tasks.trees.markers import BREAK, markers
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Message, Observation, Question
from tests.examples import examples

END = "<|end|>"
NAMED = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}<|assistant|>"
)
THINKING = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>"
    "{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}<|start|>assistant\n<think>\n"
)
BRACKETED = (
    "{% for m in messages %}{% if m.role == 'system' %}<<SYS>>\n{{ m.content }}\n<</SYS>>\n\n"
    "{% elif m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} <|end|>{% endif %}{% endfor %}"
)
TOKENS = {
    NAMED: [
        AddedToken("<|user|>", normalized=False),
        AddedToken("<|user|>\n", normalized=False),  # another one goes on
        AddedToken("<|assistant|>", special=True, normalized=False),
        AddedToken("<|system|>", normalized=True, lstrip=True, rstrip=True),
    ],
    THINKING: [
        AddedToken("<|start|>", normalized=False),
        AddedToken("<|start|><", normalized=False),  # would swallow what follows a mark
        *(AddedToken(f"<{slash}think>", normalized=True) for slash in ("", "/")),
        *(AddedToken(f"<{slash}tool_call>", normalized=True) for slash in ("", "/")),
        *(AddedToken(f"<{slash}tool_response>", normalized=True) for slash in ("", "/")),
        AddedToken("unused", single_word=True),
        AddedToken("\u25c1", special=True, normalized=False),  # one character
        AddedToken("  ", normalized=False),  # layout, as of many tokenizers for code
        AddedToken("...", special=True, normalized=True),  # "…" in compatibility form
    ],
    BRACKETED: [AddedToken("<tag>", normalized=True)],
}


def build(template, tokens=None):
    """A byte-level tokenizer with normalisation and added tokens, those of ``TOKENS``."""
    tokens = tokens or TOKENS[template]
    made = Tokenizer(BPE())
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=320,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["[INST]", "[/INST]", "hello world"] * 3, trainer)
    made.add_tokens(tokens)
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=END,
        chat_template=template,
        additional_special_tokens=[t.content for t in tokens if t.special],
    )


@pytest.fixture(scope="module", params=TOKENS, ids=["named", "thinking", "bracketed"])
def added(request):
    return build(request.param)


TEXTS = [token.content for tokens in TOKENS.values() for token in tokens] + [END, *talk.TAGS]
WIDE = {ord("<"): "\uff1c", ord(">"): "\uff1e", ord("|"): "\uff5c"}
hostile = st.lists(
    st.sampled_from(TEXTS)
    | st.sampled_from(TEXTS).map(lambda text: text.translate(WIDE))
    | st.sampled_from(TEXTS).map(str.upper)
    | st.tuples(st.sampled_from(TEXTS), st.integers(1, 8)).map(lambda cut: cut[0][: cut[1]])
    | st.sampled_from(["a", " ", "\n", "\u2026", "<", "|>", "[INST]", BREAK]),
    max_size=8,
).map("".join)


def layout(system):
    return Dialogue(system=system, turn_tokens=8, result_tokens=8, response_tokens=16, tool_calls=1)


def tokens_of(tokenizer, tokens):
    """The added tokens among ``tokens``, without layout."""
    known = tokenizer.added_tokens_decoder
    return [known[t].content for t in tokens.tolist() if t in known and known[t].content.strip()]


def prompt(tokenizer, system, question, *before):
    asked = Question("q", "toy", question, ("4",), before=before)
    return talk.prompt_tokens(tokenizer, layout(system), asked)


@given(texts=st.lists(hostile, min_size=4, max_size=4))
@examples(150)
def test_a_prompt_has_the_added_tokens_of_its_template(added, texts):
    roles = ("system", "user", "assistant")

    def written(*contents):
        before = [Message(role, "b" + text) for role, text in zip(roles, contents, strict=False)]
        return prompt(added, "Be brief.", "b" + contents[-1], *before)

    assert tokens_of(added, written(*texts)) == tokens_of(added, written(*"aaaa"))


@given(text=hostile)
@examples(150)
def test_a_result_has_no_added_tokens_but_its_own(added, text):
    shown, tokens = talk.result_tokens(added, Observation("ok", text), 10_000)
    assert tokens_of(added, tokens) == []
    assert shown.startswith("<result>") and shown.endswith("</result>")
    parts = [("a", True), (f"<result>{text}</result>", False)]
    tokens, _ = talk.trace_tokens(added, np.zeros(0, np.int32), parts, 10_000)
    assert tokens_of(added, tokens) == [END], "as in a trace for training"


def test_a_mark_at_the_edge_of_a_message_stays_whole():
    """The template's token and the message's first letter are a longer added token, too."""
    added = build(THINKING.replace("{{ m.role }}\n", ""), TOKENS[THINKING])
    assert tokens_of(added, prompt(added, "", "< b")) == tokens_of(added, prompt(added, "", "b"))


def test_harmless_text_is_one_piece_with_its_template(added):
    text = " two  spaces\n\n[1] a < b, and x | y\n"
    messages = [{"role": "user", "content": text}]
    rendered = added.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    expected = rendered.removesuffix("<think>")  # which the agent writes itself
    np.testing.assert_array_equal(prompt(added, "", text), talk.encode(added, expected))


def test_quoted_plain_marks_have_other_tokens():
    added = build(BRACKETED)
    mark = added.encode("[INST]", add_special_tokens=False)
    text = " ".join(map(str, prompt(added, "", "a[INST]b").tolist()))
    assert len(mark) == 1
    assert f" {text} ".count(f" {mark[0]} ") == 1, "the template's own"


def test_the_recipe_may_name_its_tags():
    """Only there is a tag that has a token that token."""
    added = build(THINKING)
    own = prompt(added, "Think in <think>.", "a")
    assert tokens_of(added, own).count("<think>") == 1


@pytest.mark.parametrize(
    ("template", "rendered", "reserved"),
    [
        (NAMED, {"<|user|>", "<|assistant|>", "<|system|>"}, set()),
        (
            THINKING,
            {"<|start|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"},
            {"..."},
        ),
        (BRACKETED, {"[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"}, set()),
    ],
    ids=["named", "thinking", "bracketed"],
)
def test_marks_that_an_agent_must_not_write(template, rendered, reserved):
    """An engine stops at those that the template writes; the others are found in the whole turn."""
    added = build(template)
    forged = {*rendered, *reserved, END}
    assert set(talk.stop_strings(added)) == {*talk.STOP_STRINGS, *rendered}
    whole = " ".join([*TEXTS, *sorted(rendered)])
    assert set(talk.forged(added).findall(whole)) == forged
    assert talk.read_turn("<think>a</think>", "end", talk.forged(added))[0] == Outcome.NO_ANSWER
    for mark in forged:
        for stopped in ("stop", "end", "length"):
            said = f"<think>a</think>{mark}<python>1</python>"
            assert talk.read_turn(said, stopped, talk.forged(added)) == (Outcome.FORGED_TURN, None)


def test_a_tokenizer_without_a_template_has_the_marks_of_its_tokens():
    added = build(NAMED)
    added.chat_template = None
    assert set(markers(added).forged.findall("".join(TEXTS))) == {"<|assistant|>", END}
    assert markers(added).rendered == ()
