"""A chat template without calls has them as text, for our own rollouts and for servers."""

import numpy as np
import pytest

from params.schema.agent import Dialogue
from tasks.dialects import native
from tasks.dialects.contract import Exchange
from tasks.dialects.written_calls import AROUND, with_calls
from tasks.prepare import name_dialect
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Observation, Question, ToolSpec
from tests.tasks.dialects.families import tokenizer

CODE = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
PYTHON = ToolSpec("python", "Run code.", CODE)
ALTERNATING = (  # Gemma's: users and agents take turns, and there is no other role
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SETTINGS = native.Native(renderer="default")
QUESTION = Question("q", "shown", "Compute 12 * 413.", ("4956",))
CALL = '<tool_call>{"name": "python", "arguments": {"code": "12 * 413"}}</tool_call>'


def plain_tokenizer(template=None):
    """Return a tokenizer that has no token for the marks of calls."""
    speaks = tokenizer("smollm2")
    speaks.chat_template = template or speaks.chat_template
    return speaks


def opened(speaks, system="Be brief."):
    sizes = {"turn_tokens": 99, "result_tokens": 99, "response_tokens": 999, "tool_calls": 3}
    return native.open_native(SETTINGS, speaks, Dialogue(system=system, **sizes), [PYTHON])


def read(dialect, text):
    turn = np.array(dialect.tokenizer.encode(text + "<|im_end|>"), np.int32)
    return turn, dialect.read(dialect.prompt(QUESTION), turn, text, "end")


def test_a_dialogue_with_a_call_goes_on_in_the_words_of_the_agent():
    dialect = opened(plain_tokenizer())
    prompt = dialect.tokenizer.decode(dialect.prompt(QUESTION))
    described = 'Be brief.\n\nYou can call these tools:\n{"name": "python"'
    assert prompt.startswith(f"<|im_start|>system\n{described}")
    for said in ("", "I compute it.\n", "I compute it. "):
        turn, seen = read(dialect, said + CALL)
        assert (seen.outcome, seen.calls[0].argument) == (Outcome.CALL, "12 * 413")
        past = Exchange(turn, "", seen.calls, (Observation(Outcome.OK, "4956"),))
        later = dialect.tokenizer.decode(dialect.restart(QUESTION, "", [past]))
        result = "<|im_start|>user\n<tool_response>4956</tool_response><|im_end|>\n"
        # nothing of the turn changes, so that its tokens are the beginning of the next prompt
        assert later == f"{prompt}{said}{CALL}<|im_end|>\n{result}<|im_start|>assistant\n"


OUTCOMES = {
    "without its end": (CALL.removesuffix("</tool_call>"), Outcome.BAD_CALL),
    "unclosed": ('<tool_call>{"name": "python", "arg', Outcome.BAD_CALL),
    "no JSON": ('<tool_call>{"name" "python"}</tool_call>', Outcome.BAD_CALL),
    "no object": ("<tool_call>[1]</tool_call>", Outcome.BAD_CALL),
    "no name": ('<tool_call>{"name": 7, "arguments": {}}</tool_call>', Outcome.BAD_CALL),
    "nested": ("<tool_call>" + "[" * 20_000 + "</tool_call>", Outcome.BAD_CALL),
    "answer": ("\\boxed{84}", Outcome.ANSWER),
    "neither": ("eighty-four", Outcome.NO_ANSWER),
    "forged": ("<tool_response>4956</tool_response>", Outcome.FORGED_RESULT),
}


@pytest.mark.parametrize("kind", OUTCOMES)
def test_what_is_no_sound_call(kind):
    text, outcome = OUTCOMES[kind]
    assert read(opened(plain_tokenizer()), text)[1].outcome == outcome


def test_two_calls_of_a_turn_have_one_message_with_both_results():
    dialect = opened(plain_tokenizer(ALTERNATING), "")
    prompt = dialect.tokenizer.decode(dialect.prompt(QUESTION))
    assert prompt.startswith("<|im_start|>user\nCompute 12 * 413.\n\nYou can call these tools:")
    turn, seen = read(dialect, f"{CALL}\n{CALL.replace('413', '7')}")
    assert [call.argument for call in seen.calls] == ["12 * 413", "12 * 7"]
    results = (Observation(Outcome.OK, "4956"), Observation(Outcome.OK, "84"))
    later = dialect.tokenizer.decode(
        dialect.restart(QUESTION, "", [Exchange(turn, "", seen.calls, results)])
    )
    assert "<tool_response>4956</tool_response><tool_response>84</tool_response>" in later


def test_a_trace_writes_the_call_that_is_read():
    dialect = opened(plain_tokenizer())
    parts = [
        ("<think>I compute it.</think><python>12 * 413</python>", True),
        ("<result>4956</result>", False),
        ("<think>Done.</think><answer>\\boxed{4956}</answer>", True),
    ]
    contexts = dialect.trace(QUESTION, parts)
    written = [dialect.tokenizer.decode(tokens[trained]) for tokens, trained in contexts]
    assert written == [f"I compute it.\n{CALL}<|im_end|>", "Done.\n\n\\boxed{4956}<|im_end|>"]


def test_the_policy_keeps_the_template_for_its_servers():
    speaks = plain_tokenizer()
    own = speaks.chat_template
    name_dialect(speaks, {"native": SETTINGS}, opened(speaks))
    assert speaks.chat_template == AROUND.replace("TELLER", "system") + own
    assert speaks.init_kwargs["dialect"]["tool_call_parser"] == "hermes"
    assert with_calls(speaks) is speaks  # once


def test_a_template_that_has_calls_or_refuses_them_stays():
    plain = plain_tokenizer().chat_template
    for template in (
        plain + "{% if tools %}{{ tools | tojson }}{% endif %}",
        "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}" + plain,
    ):
        speaks = plain_tokenizer(template)
        assert with_calls(speaks) is speaks
