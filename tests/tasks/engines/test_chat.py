"""A policy of this machine as a chat model."""

import pytest

from params.schema.agent import Dialogue
from tasks.agents.contract import assistant, system, user
from tasks.chat.contract import ChatRequest
from tasks.dialects.tags import Tags, describe, open_tags
from tasks.engines.chat import TOO_LONG, PolicyModel
from tasks.engines.transformers.transformers_engine import TransformersEngine
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Observation, Question

DIALOGUE = Dialogue(system="", turn_tokens=8, result_tokens=20, response_tokens=64, tool_calls=3)


@pytest.fixture(scope="module")
def model(policy, tokenizer):
    engine = TransformersEngine(policy, tokenizer)
    return PolicyModel("tiny", engine, tokenizer, DIALOGUE, in_tags=True, context=256, rows=2)


def request(*messages, seed=0, **others):
    return ChatRequest(messages, max_tokens=8, temperature=1.0, seed=seed, **others)


def test_replies_depend_on_the_request_alone_and_keep_its_order(model):
    requests = [request(user(f"What is {n} times 3?"), seed=n) for n in range(5)]
    replies = model.ask(requests)
    assert len({reply.text for reply in replies}) > 1
    assert model.ask(requests[::-1]) == replies[::-1]
    assert all(reply.finish in ("stop", "length") and not reply.fault for reply in replies)
    assert all(reply.prompt_tokens > 5 and 0 < reply.completion_tokens <= 8 for reply in replies)


def test_a_reply_ends_before_its_stop_string(model):
    (whole,) = model.ask([request(user("What?"), seed=5)])
    mark = whole.text[2:4]
    assert len(mark) == 2
    (cut,) = model.ask([request(user("What?"), seed=5, stop=(mark,))])
    assert whole.text.startswith(cut.text)
    assert mark not in cut.text


def test_a_prompt_without_room_has_a_fault_and_the_others_are_answered(model):
    long, short = model.ask([request(user("word " * 300)), request(user("What?"))])
    assert (long.fault, long.text) == (TOO_LONG, "")
    assert not short.fault
    assert short.completion_tokens > 0


def test_results_in_tags_stand_inside_the_agents_message_as_in_a_rollout(model, tokenizer):
    turn, body = "<think>look</think><search>tower</search>", "Ada </result> built it " * 5
    tokens = model.prompt([user("Who?"), assistant(turn), user(f"<result>\n{body}\n</result>")])
    dialect = open_tags(Tags(), tokenizer, DIALOGUE, [])
    prompt = dialect.prompt(Question("", "", "Who?", ()))
    written = tokenizer.encode(turn, add_special_tokens=False)
    call, seen = Call("search", "tower"), Observation(Outcome.OK, body)
    _, result = dialect.observe(prompt, written, call, seen, DIALOGUE.result_tokens)
    assert tokens.tolist() == [*prompt, *written, *result]
    assert len(result) <= DIALOGUE.result_tokens


def test_a_system_message_is_the_recipes_own_as_in_a_rollout(model, tokenizer):
    told = "Use {tools} For example: <python>print(1)</python><result>1</result>"
    dialect = open_tags(Tags(), tokenizer, DIALOGUE.model_copy(update={"system": told}), [])
    filled = told.replace("{tools}", describe([]))
    tokens = model.prompt([*system(filled), user("Who wrote <result>?")])
    assert tokens.tolist() == dialect.prompt(Question("", "", "Who wrote <result>?", ())).tolist()


def test_other_messages_go_through_the_chat_template(model, tokenizer):
    messages = [user("Who?"), assistant("Thought"), user("Observation: Ada")]
    text = tokenizer.decode(model.prompt(messages))
    assert text == "<|user|>Who?<|assistant|>Thought<|end|><|user|>Observation: Ada<|assistant|>"
