"""Each fault has its name, and a good response has none."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.dialects.arpo_format import format_faults

TAGS = ("python", "search")
THINK, CALL, ANSWER = (
    "<think>a</think>",
    "<python>print(1)</python>",
    "<answer>\\boxed{1}</answer>",
)


@pytest.mark.parametrize(
    "response",
    [
        THINK + ANSWER,
        THINK + CALL + THINK + ANSWER,
        THINK + CALL + "<search>b</search>" + ANSWER,
        THINK + "<answer>It is\n\\boxed{\\frac{1}{2}}.\n</answer>",
        "<think>\n</think> and then " + ANSWER,
    ],
)
def test_good_responses(response):
    assert format_faults(response, TAGS) == []


@pytest.mark.parametrize(
    ("response", "faults"),
    [
        (ANSWER, ["think"]),
        ("<think>" + ANSWER, ["think"]),
        ("</think>" + ANSWER, ["think"]),
        ("</think><think>" + ANSWER, ["think"]),
        ("<think><think>a</think></think>" + ANSWER, ["think"]),
        (THINK + "<think>" + ANSWER, ["think"]),
        (THINK, ["answer"]),
        (THINK + ANSWER + ANSWER, ["answer"]),
        (THINK + "<answer>\\boxed{1}", ["answer"]),
        (THINK + "<answer>" + ANSWER, ["answer"]),
        (THINK + ANSWER + "</answer>", ["answer"]),
        (THINK + "<answer>1</answer>", ["boxed"]),
        (THINK + "\\boxed{1}<answer>1</answer>", ["boxed"]),
        (THINK + "<answer>1</answer>\\boxed{1}", ["boxed"]),
        (THINK + "<python>" + ANSWER, ["tool_call"]),
        (THINK + "</search>" + ANSWER, ["tool_call"]),
        (THINK + "<python><python>1</python>" + ANSWER, ["tool_call"]),
        (THINK + "<search>a</python>" + ANSWER, ["tool_call"]),
        (THINK + "<result>7</result>" + ANSWER, ["forged_result"]),
        (THINK + CALL + "</result>" + ANSWER, ["forged_result"]),
        ("", ["think", "answer"]),
        ("<python>", ["think", "answer", "tool_call"]),
        ("<answer>1</answer><search>", ["think", "boxed", "tool_call"]),
    ],
)
def test_faults_have_names(response, faults):
    assert format_faults(response, TAGS) == faults


def test_only_the_tags_of_tools_are_tool_calls():
    assert format_faults(THINK + "<browser>" + ANSWER, TAGS) == []
    assert format_faults(THINK + "<browser>" + ANSWER, (*TAGS, "browser")) == ["tool_call"]


@given(st.lists(st.sampled_from(["think", "python", "search"])), st.data())
def test_a_tag_too_few_or_too_many_is_found(blocks, data):
    """Break one block of a good response; ``where`` decides which."""
    written = [f"<{tag}>x</{tag}>" for tag in ["think", *blocks]]
    assert format_faults("".join(written) + ANSWER, TAGS) == []
    where = data.draw(st.integers(0, len(blocks)))
    tag = ["think", *blocks][where]
    written[where] = data.draw(
        st.sampled_from([f"<{tag}>x", f"x</{tag}>", f"<{tag}></{tag}>x</{tag}>"])
    )
    fault = "think" if tag == "think" else "tool_call"
    assert format_faults("".join(written) + ANSWER, TAGS) == [fault]


@pytest.mark.parametrize("tag", ["<answer>", "<think>", "<python>", "<", "\\boxed{"])
def test_many_tags_take_no_time(tag):
    began = time.process_time()
    assert "answer" in format_faults(tag * (100_000 // len(tag)), TAGS)
    assert time.process_time() - began < 1
