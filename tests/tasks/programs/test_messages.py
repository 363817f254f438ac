"""Conversations that clients send: results in the order of their calls, or the place of a fault."""

import pytest

from tasks.programs.messages import RefusedError, canonical, messages_of

ASKED = {"role": "user", "content": "Rome or Oslo?"}


def calls(*names):
    made = [{"id": name, "function": {"name": "weather", "arguments": "{}"}} for name in names]
    return {"role": "assistant", "content": None, "tool_calls": made}


def result(name, text="sunny"):
    return {"role": "tool", "tool_call_id": name, "content": text}


def test_results_have_the_order_of_their_calls():
    later = [{"role": "user", "content": "And now?"}, calls("c"), result("c")]
    ordered = [ASKED, calls("a", "b"), result("a", "sunny"), result("b", "snow"), *later]
    ready = [ordered[0], ordered[1], ordered[3], ordered[2], *later]
    assert messages_of(ready) == messages_of(ordered)
    assert canonical(messages_of(ready)) == canonical(messages_of(ordered))


def test_calls_without_ids_stay_as_they_are():
    sent = [ASKED, calls("", ""), result("", "sunny"), result("", "snow")]
    assert [each.content for each in messages_of(sent)[2:]] == ["sunny", "snow"]


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        ([ASKED, calls("a", "b"), result("b")], r"messages\[2\]: there is no result of the call a"),
        ([ASKED, calls("a"), result("c")], r"messages\[2\].tool_call_id is 'c': it names no call"),
        ([ASKED, calls("a"), result("a"), result("a")], "a call has two results"),
        ([{"role": ["user"], "content": "a"}], r"messages\[0\].role is \['user'\]"),
        ([ASKED, {"role": "assistant", "function_call": {"name": "a"}}], "write tool_calls"),
    ],
)
def test_the_place_of_a_fault_is_named(sent, told):
    with pytest.raises(RefusedError, match=told):
        messages_of(sent)
