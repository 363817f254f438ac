"""A written trace is trained as a rollout that says the same: every own token, and once.

For each renderer of the library, a policy says what an expert wrote, and what the rollout stores is
what the cold start learns from. The policy's tokens are those of the library's own rendering of the
whole dialogue, not of the dialect.
"""

from contextlib import contextmanager
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from params.schema.agent import Dialogue
from tasks.dialects import contract, native, tags
from tasks.dialects.family import families as known_families
from tasks.engines import Sample
from tasks.questions.experts import Trace
from tasks.questions.samples import samples_of, trace_table
from tasks.rollouts.rejection import Attempt, as_sampled
from tasks.rollouts.rounds import Setting, grow
from tasks.trees.outcomes import Outcome, StopReason
from tasks.trees.tree import TURN, Observation, Question
from tests.agents import questions_with
from tests.tasks.dialects import families
from tests.tasks.rollouts.test_rounds import budget

QUESTION = Question("q", "toy", "How many?", ("7",))
LAYOUT = Dialogue(
    # some families' templates describe no tools
    **{"system": "Be brief, and use python.", "tool_calls": 9},
    **{"turn_tokens": 999, "result_tokens": 99, "response_tokens": 9999},
)
ENVIRONMENT = questions_with(
    {"python": lambda codes: [Observation("ok", f"result of {code}") for code in codes]}
)
# (renderer, template); the library fetches a vocabulary of its own for gpt-oss
RENDERERS = [
    *((name, "") for name in known_families() if name != "gpt-oss"),
    *(("default", template) for template in ("qwen2.5", "qwen3")),
]
ANEW = ("default", "deepseek-r1")  # they write the whole dialogue as a new prompt after each turn
MARKS_OF_THE_NEXT = ("glm-4.5", "glm-5", "glm-5.1", "glm-5.3")  # they end a turn with one


@cache
def opened(renderer, template):
    tokenizer = families.for_renderer(template or renderer)
    options = {"tool_parser": "qwen3"} if template else {}
    settings = native.Native(renderer=renderer, options=options)
    return tokenizer, native.DIALECT.open(settings, tokenizer, LAYOUT, ENVIRONMENT.specs)


def steps_of(calls):
    return [f"print({number})" for number in range(calls)]


def written(calls, together=1):
    """The parts of a trace of so many turns with calls, as an expert writes it."""
    parts = []
    for number, codes in enumerate(batched(steps_of(calls * together), together)):
        called = "".join(f"<python>{code}</python>" for code in codes)
        parts.append((f"<think>step {number}</think>{called}", True))
        parts += [(f"<result>result of {code}</result>", False) for code in codes]
    return [*parts, ("<think>so</think><answer>It is \\boxed{7}.</answer>", True)]


def batched(values, size):
    return [values[start : start + size] for start in range(0, len(values), size)]


def said(renderer, template, calls, together=1):
    """The tokens of each turn of the same trace: the library's rendering of the whole dialogue."""
    _, dialect = opened(renderer, template)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How many?"},
    ]
    turns = []
    for number, codes in enumerate([*batched(steps_of(calls * together), together), []]):
        thought = f"step {number}" if codes else "so"
        message = {"role": "assistant", "content": "" if codes else "It is \\boxed{7}."}
        if dialect.thinks:
            message["reasoning_content"] = thought
        else:
            message["content"] = "\n\n".join(filter(None, [thought, message["content"]]))
        form = "functions.python:{}" if renderer.startswith("kimi") else "call_{}"
        names = {code: form.format(number * together + i) for i, code in enumerate(codes)}
        if codes:
            message["tool_calls"] = [
                {
                    "id": name,
                    "type": "function",
                    "function": {"name": "python", "arguments": {"text": code}},
                }
                for code, name in names.items()
            ]
        turns.append(turn_of(renderer, template, messages, message))
        result = {"role": "tool", "name": "python"}
        messages.append(message)
        messages += [
            {**result, "tool_call_id": name, "content": f"result of {code}"}
            for code, name in names.items()
        ]
    return turns


def turn_of(renderer, template, messages, message):
    """The tokens of the next turn of a dialogue, with its end."""
    tokenizer, dialect = opened(renderer, template)
    render, tools = dialect.renderer.render_ids, dialect.tools
    before = render(messages, tools=tools, add_generation_prompt=True)
    after = render([*messages, message], tools=tools)
    if renderer == "deepseek-r1":  # its template opens a thought, and drops those of the past
        opening = tokenizer.encode("<think>\n", add_special_tokens=False)
        thought = f"{message['reasoning_content']}\n</think>\n\n"
        own = after[len(before) - len(opening) :]
        assert before == [*after[: len(after) - len(own)], *opening]
        return [*tokenizer.encode(thought, add_special_tokens=False), *own]
    assert after[: len(before)] == before
    own = after[len(before) :]
    ends = [place for place, token in enumerate(own) if token in dialect.ends]
    if ends:  # a template may write more after the end
        return own[: ends[-1] + 1]
    mark = tokenizer.eos_token
    if renderer in MARKS_OF_THE_NEXT:
        mark = "<|observation|>" if message.get("tool_calls") else "<|user|>"
    return [*own, tokenizer.convert_tokens_to_ids(mark)]


class Speaker:
    """An engine whose policy says these turns, one after the other."""

    def __init__(self, turns, end):
        self.turns, self.end = iter(turns), end

    def replicas(self, most):
        return [self]

    @contextmanager
    def session(self, *_):
        yield self

    def open(self):
        return 0

    def close(self, handle):
        pass

    def sample(self, requests):
        tokens = np.array(next(self.turns), np.int32)
        stopped = StopReason.END if tokens[-1] == self.end else StopReason.STOP
        none = np.zeros(len(tokens), np.float32)
        return [Sample(tokens, none, none, stopped) for _ in requests]


def rolled_out(renderer, template, turns):
    """The tree of a rollout in which a policy says these turns."""
    tokenizer, dialect = opened(renderer, template)
    rollout = budget(leaves=1, initial=1, branch=1)
    setting = Setting(tokenizer, LAYOUT, rollout, dialect, ENVIRONMENT, "0")
    (tree,) = grow([QUESTION], Speaker(turns, tokenizer.eos_token_id), setting)
    return tree


@pytest.mark.parametrize(("calls", "together"), [(1, 1), (2, 1), (3, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize(("renderer", "template"), RENDERERS)
def test_a_trace_trains_what_a_policy_samples(renderer, template, calls, together):
    _, dialect = opened(renderer, template)
    if together > 1 and renderer == "llama-3":
        with pytest.raises(ValueError, match=r"question q: .* a turn of its own"):
            dialect.trace(QUESTION, written(calls, together))
        return
    turns = said(renderer, template, calls, together)
    tree = rolled_out(renderer, template, turns)
    outcomes = [node.outcome for node in tree.nodes if node.kind == TURN]
    assert outcomes == [Outcome.CALL] * calls + [Outcome.ANSWER]
    check_results(tree, together)

    contexts = dialect.trace(QUESTION, written(calls, together))
    anew = renderer in ANEW or (renderer == "deepseek-v4" and together > 1)
    assert len(contexts) == (calls + 1 if anew else 1)
    trained = np.concatenate([tokens[own] for tokens, own in contexts])
    assert trained.tolist() == [token for turn in turns for token in turn]
    for row, (tokens, own) in zip(as_sampled(Attempt(tree, 0, "")), contexts, strict=True):
        assert tokens.tolist() == row["tokens"].tolist()
        assert own.tolist() == row["trained"].tolist()


def check_results(tree, together):
    """Each call has its own result, in the order of the calls, under a name of its own."""
    results = [result for node in tree.nodes for result in node.results]
    assert len({result.id for result in results}) == len(results)
    assert {(result.tool, result.outcome) for result in results} == {("python", "ok")}
    if together > 1:
        codes = steps_of(len(results))
        assert [result.argument for result in results] == codes
        assert [result.text for result in results] == [f"result of {code}" for code in codes]
    for turn, after in pairwise(tree.nodes):
        if len(turn.results) > 1:
            places = [after.text.rindex(result.text) for result in turn.results]
            assert places == sorted(set(places))


def test_a_table_has_a_row_for_each_context_and_says_where_a_trace_begins():
    _, dialect = opened("default", "qwen2.5")
    traces = [Trace(QUESTION, "none", written(calls)) for calls in (1, 0, 2)]
    table = trace_table([s for trace in traces for s in samples_of(trace, LAYOUT)], dialect)
    assert table.begins == [True, False, True, True, False, False]
    texts = table.table["text"].to_pylist()
    assert texts[0] == texts[1] == "".join(text for text, _ in traces[0].parts)
    left = table.without([id(traces[2])])
    assert left.begins == [True, False, True] and len(left.table) == 3


def test_a_template_that_cannot_be_followed_says_so():
    """It opens a turn with a mark that no turn in it has."""
    tokenizer = families.tokenizer("qwen2.5")
    opening = "<|im_start|>assistant\\n' }}\n{%- endif %}"
    assert opening in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(
        opening, opening.replace("\\n'", "\\n\\n>'")
    )
    settings = native.Native(renderer="default")
    with pytest.raises(ValueError, match=r"^dialect.native.renderer default: .* name the template"):
        native.DIALECT.open(settings, tokenizer, LAYOUT, ENVIRONMENT.specs)


def test_a_users_dialect_may_return_its_only_context_alone():
    class Earlier(tags.TagsDialect):
        def trace(self, *given):
            (context,) = super().trace(*given)
            return context

    tokenizer = families.tokenizer("qwen2.5")
    given = (tokenizer, LAYOUT, ENVIRONMENT.specs)
    now, then = tags.TagsDialect(*given), Earlier(*given)
    (expected,) = now.trace(QUESTION, written(1))
    ((tokens, own),) = contract.contexts_of(then, QUESTION, written(1))
    assert (tokens.tolist(), own.tolist()) == tuple(map(np.ndarray.tolist, expected))
