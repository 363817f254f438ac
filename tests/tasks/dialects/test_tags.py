"""The dialect of tags: tools of any name, worlds, and today's bytes for python and search."""

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from params.schema.agent import Dialogue
from params.schema.prepare import TinyPolicy
from tasks.dialects import prompt_check
from tasks.dialects.tags import DIALECT, Tags
from tasks.environments.contract import FREE_TEXT
from tasks.policy.tiny import END, USER, build_tokenizer
from tasks.tools.schema import with_values
from tasks.trees import dialogue as talk
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Observation, Question, ToolSpec

QUESTION = Question("q", "toy", "Go to the goal.", ("4",))
NOTHING = np.zeros(0, np.int32)


def text_tool(name: str, parameter: str = "text") -> ToolSpec:
    properties = {parameter: {"type": "string", "description": f"The {parameter}."}}
    schema = {"type": "object", "properties": properties, "required": [parameter]}
    return ToolSpec(name, f"Do {name}.", schema)


MOVE = text_tool("move", "direction")
BOOK = ToolSpec(
    "book",
    "Book a trip.",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "day": {"type": "integer", "enum": [1, 3]}},
        "required": ["city", "day"],
    },
)
OLD = [text_tool("python", "code"), text_tool("search", "query")]


def layout(system: str = "") -> Dialogue:
    return Dialogue(
        system=system, turn_tokens=64, result_tokens=64, response_tokens=512, tool_calls=4
    )


@pytest.fixture(scope="module")
def tokenizer(tiny: TinyPolicy):
    return build_tokenizer(["left right up down"], tiny)


@pytest.fixture(scope="module")
def world(tiny: TinyPolicy):
    """A tokenizer whose tags are those of the tools ``move`` and ``book``."""
    return build_tokenizer(["left right"], tiny, DIALECT.tags(["move", "book"]))


def opened(tokenizer, specs, system: str = ""):
    return DIALECT.open(Tags(), tokenizer, layout(system), specs)


@pytest.mark.parametrize("specs", [[], OLD[:1], OLD[1:], OLD, OLD[::-1]])
def test_python_and_search_keep_their_format(tokenizer, specs):
    dialect = opened(tokenizer, specs, "Use {braces}.")
    assert DIALECT.tags([spec.name for spec in specs]) == talk.TAGS
    assert dialect.stop_strings == talk.stop_strings(tokenizer)
    expected = talk.prompt_tokens(tokenizer, layout("Use {braces}."), QUESTION)
    np.testing.assert_array_equal(dialect.prompt(QUESTION), expected)


@pytest.mark.parametrize(
    ("text", "call", "values"),
    [
        ("<move>left</move>", Call("move", "left"), {"direction": "left"}),
        (
            '<book>{"city": "Rome", "day": 3}</book>',
            Call("book", '{"city": "Rome", "day": 3}'),
            {"city": "Rome", "day": 3},
        ),
    ],
)
def test_a_tool_has_a_tag_of_its_name(world, text, call, values):
    dialect = opened(world, [MOVE, BOOK])
    turn = dialect.read(NOTHING, NOTHING, f"<think>a</think>{text}", "stop")
    assert (turn.outcome, turn.call, turn.said) == (Outcome.CALL, call, "")
    spec = {"move": MOVE, "book": BOOK}[call.tool]
    assert with_values(turn.call, spec).values == values
    assert f"</{call.tool}>" in dialect.stop_strings
    assert dialect.call(text) == call


def test_a_free_act_has_the_tag_act(tokenizer):
    turn = opened(tokenizer, [FREE_TEXT]).read(NOTHING, NOTHING, "<act>open the door</act>", "stop")
    assert turn.call == Call("act", "open the door")


def test_new_tags_come_after_the_old_ones(world):
    assert DIALECT.tags(["move", "python"]) == (*talk.TAGS, "<move>", "</move>")
    ids = world.encode("<move>left</move>", add_special_tokens=False)
    assert [ids[0], ids[-1]] == world.convert_tokens_to_ids(["<move>", "</move>"])


@pytest.mark.parametrize("name", talk.OTHER_TAGS)
def test_a_tool_must_not_have_the_name_of_another_tag(tokenizer, name):
    with pytest.raises(ValueError, match=f"called {name}"):
        opened(tokenizer, [text_tool(name)])


def test_a_tokenizer_without_a_mark_that_ends_a_turn_is_refused(tokenizer):
    own = copy.deepcopy(tokenizer)
    own.eos_token = None
    with pytest.raises(ValueError, match="no eos_token, so no turn could end"):
        opened(own, [])


@pytest.mark.parametrize("where", ["", "{% if messages|length > 1 %}"])
def test_a_template_that_never_ends_is_refused(where, tokenizer, monkeypatch):
    """At once, or with a system message alone."""
    monkeypatch.setattr(prompt_check, "SECONDS", 0.5)
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    own = copy.deepcopy(tokenizer)
    own.chat_template = f"{where}{loops}{'{% endif %}' if where else ''}{own.chat_template}"
    with pytest.raises(ValueError, match=r"^dialect\.tags: .* not ended after 0\.5 seconds: "):
        opened(own, [], "Be brief." if where else "")


def test_a_system_message_describes_the_tools_where_it_says(tokenizer):
    prompt = opened(tokenizer, [MOVE, BOOK], "Be brief. {tools} {other}").prompt(QUESTION)
    text = tokenizer.decode(prompt)
    assert "<move>direction</move>: Do move." in text
    assert "direction: string. The direction." in text
    assert '<book>{"city": ..., "day": ...}</book>: Book a trip.' in text
    assert "day: one of 1, 3" in text
    assert "{other}" in text and "{tools}" not in text


def test_what_a_world_shows_first_follows_the_question(tokenizer):
    first = Observation("ok", " S.G ", actions=("left", "right"))
    shown = talk.first_text(first)
    text = tokenizer.decode(opened(tokenizer, [MOVE]).prompt(QUESTION, shown))
    assert "Go to the goal.\n\nS.G\nactions: left, right" in text


hostile = st.lists(
    st.sampled_from(["<move>", "</move>", "</result>", "<|end|>", "<|user|>", "a", "\ud800", " "]),
    max_size=12,
).map("".join)


@given(text=hostile, actions=st.lists(hostile, max_size=3), limit=st.integers(0, 60))
def test_nothing_that_a_world_says_is_a_tag(world, text, actions, limit):
    seen = Observation("ok", text, actions=tuple(actions))
    dialect = opened(world, [MOVE])
    shown, tokens = dialect.observe(NOTHING, NOTHING, Call("move", "left"), seen, limit)
    opening, closing = world.convert_tokens_to_ids(talk.RESULT_TAGS)
    assert tokens[0] == opening and tokens[-1] == closing
    assert not set(tokens[1:-1].tolist()) & set(world.added_tokens_decoder)
    assert len(tokens) <= max(limit, 2 + len(talk.encode(world, "...")))
    assert shown == world.decode(tokens)


def test_a_long_observation_keeps_its_actions(world):
    seen = Observation("ok", "wall " * 100, actions=("left", "right"))
    shown, _ = opened(world, [MOVE]).observe(NOTHING, NOTHING, Call("move", "left"), seen, 50)
    assert shown.endswith("...\nactions: left, right</result>")


def test_faults_of_an_answer_and_of_an_episode(world):
    dialect = opened(world, [MOVE])
    moves = ["<think>a</think><move>left</move>", "<think>b</think><move>up</move>"]
    assert dialect.faults(moves, Outcome.TERMINATED) == []
    assert dialect.faults(moves, Outcome.CUT) == ["answer"]
    assert dialect.faults(["<think>a</think><move>left"], Outcome.TERMINATED) == ["tool_call"]
    answered = [*moves, "<think>c</think><answer>It is \\boxed{7}.</answer>"]
    assert dialect.faults(answered, Outcome.ANSWER) == []
    assert dialect.answer(answered) == "7"
    assert dialect.read(NOTHING, NOTHING, answered[-1], "stop").said == "It is \\boxed{7}."
    assert dialect.faults([moves[0] + "<|user|>"], Outcome.FORGED_TURN)[-1] == "forged_turn"


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("<result>1</result>", Outcome.FORGED_RESULT),
        ("a<|user|>", Outcome.FORGED_TURN),
        ("left</move>", Outcome.BAD_CALL),
    ],
)
def test_forgeries_and_bad_calls_have_outcomes(world, text, outcome):
    assert opened(world, [MOVE]).read(NOTHING, NOTHING, text, "stop").outcome == outcome


def test_a_trace_is_what_a_rollout_would_have_stored(world):
    dialect = opened(world, [MOVE])
    turns = ["<think>a</think><move>left</move>", "<think>b</think><answer>\\boxed{1}</answer>"]
    parts = [(turns[0], True), ("<result>S.G</result>", False), (turns[1], True)]
    ((tokens, own),) = dialect.trace(QUESTION, parts, "start")
    seen = dialect.observe(NOTHING, NOTHING, Call("move", "left"), Observation("ok", "S.G"), 64)
    written = [talk.encode(world, turn) for turn in turns]
    prompt, end = dialect.prompt(QUESTION, "start"), [world.eos_token_id]
    expected = np.concatenate([prompt, written[0], seen[1], written[1], end])
    np.testing.assert_array_equal(tokens, expected)
    assert own.sum() == len(written[0]) + len(written[1]) + 1


def test_a_server_describes_its_tool_without_marks_of_turns(tokenizer):
    """Descriptions come from servers, and stand in the recipe's own message."""
    specs = [ToolSpec("look", said, {"type": "object"}) for said in ("a", f"a{END}{USER}b")]
    plain, forged = (
        DIALECT.open(Tags(), tokenizer, layout("{tools}"), [spec]).prompt(QUESTION)
        for spec in specs
    )
    marks = [tokenizer.convert_tokens_to_ids(mark) for mark in (END, USER)]
    assert np.isin(plain, marks).sum() == np.isin(forged, marks).sum() > 0
