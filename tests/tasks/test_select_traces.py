"""The verb that keeps right answers as traces: tables, reasons, ids, other vocabularies."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from params.schema.agent import Agent, Dialogue, EngineSettings
from tasks.dialects import open_dialect
from tasks.dialects.tags import Tags
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tasks.policy.load_model import load_tokenizer
from tasks.policy.tiny import build_tokenizer
from tasks.questions import trace_tables
from tasks.questions.sampled import Sampled
from tasks.select_traces import SelectInputs, rewriting_fault, select_traces
from tasks.trees.outcomes import Outcome
from tasks.trees.tables import read_rows, save_questions, save_trees, write_table
from tasks.trees.tree import PROMPT, RESULT, TURN, Call, Node, Observation, Question, ToolSpec, Tree
from tests.sections import MACHINE, PYTHON

STEP = SubStep("toy", "prepare", 0, 5)
DIALOGUE = Dialogue(system="", turn_tokens=64, result_tokens=16, response_tokens=128, tool_calls=2)
AGENT = Agent(
    dialogue=DIALOGUE,
    tools={"python": PYTHON},
    environment={},
    dialect={"tags": Tags()},
    sources={},
    engine=EngineSettings(kind="transformers", memory=1.0, servers=(), lanes=1),
    machine=MACHINE,
)
EXPERT = Sampled(
    kind="sampled",
    policy=None,
    questions=None,
    attempts=4,
    most=1,
    temperature=1.0,
    top_p=1.0,
    rows=4,
)
QUESTION = Question("q", "toy", "What is 12 times 34?", ("408",))
CALL = "<think>multiply</think><python>print(12*34)</python>"
RIGHT, WRONG = (f"<think>that is it</think><answer>\\boxed{{{n}}}</answer>" for n in (408, 7))
NONE = np.zeros(0, np.float32)

SCHEMA = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
SPECS = [ToolSpec("python", "Run Python.", SCHEMA)]


def grown(tokenizer, *endings):
    """A tree whose leaves call the tool once and then write these answers, as a rollout does."""
    dialect = open_dialect(AGENT.dialect, tokenizer, DIALOGUE, SPECS)
    nodes = [_node(-1, PROMPT, "", QUESTION.text, dialect.prompt(QUESTION))]
    leaves = []
    for ending in endings:
        turn = np.array(tokenizer.encode(CALL), np.int32)
        nodes.append(_node(0, TURN, Outcome.CALL, CALL, turn))
        seen = Observation(Outcome.OK, "408")
        written = dialect.observe(nodes[0].tokens, turn, Call("python", "print(12*34)"), seen, 16)
        nodes.append(_node(len(nodes) - 1, RESULT, Outcome.OK, *written))
        last = np.array(tokenizer.encode(ending), np.int32)
        nodes.append(_node(len(nodes) - 1, TURN, Outcome.ANSWER, ending, last))
        leaves.append(len(nodes) - 1)
    return Tree(QUESTION, nodes, leaves)


def _node(parent, kind, outcome, text, tokens):
    own = np.zeros(len(tokens), np.float32) if kind == TURN else NONE
    return Node(parent, kind, outcome, text, tokens, own, own)


@pytest.fixture
def inputs(policy, tokenizer, tmp_path, monkeypatch):
    """A function that returns what the verb is handed, for answers that a policy gave."""
    monkeypatch.chdir(tmp_path)
    policy.save_pretrained("student")
    tokenizer.save_pretrained("student")
    save_questions([QUESTION], Path("train.parquet"))
    before = [{"question_id": "other", "reason": "too_long", "detail": "300 tokens"}]
    write_table(pa.Table.from_pylist(before, schema=trace_tables.DROPPED), Path("dropped.parquet"))
    Path("gates").mkdir()
    Path("gates/questions.json").write_text("{}")

    def made(*endings, teacher="student", **changes):
        save_trees([grown(load_tokenizer(teacher), *endings)], Path("trees"))
        given = {
            "trees": [Artifact.at(Path("trees"))],
            "expert": EXPERT,
            "agent": AGENT,
            "student": Artifact.at(Path("student")),
            "teacher": Artifact.at(Path(teacher)),
            "questions": Artifact.at(Path("train.parquet")),
            "context": 256,
            "dropped": Artifact.at(Path("dropped.parquet")),
            "gates": Artifact.at(Path("gates")),
        }
        return SelectInputs(**{**given, **changes})

    return made


def select(inputs):
    return select_traces(STEP, inputs, specs=SPECS)


def rows_of(record, name):
    return read_rows(Path(artifacts.output(record, name).path))


def test_right_answers_are_traces_with_the_sampled_ids(inputs, tokenizer, capsys):
    record = select(inputs(WRONG, RIGHT, "<answer>408", RIGHT))
    (trace,) = rows_of(record, "traces")
    nodes = grown(tokenizer, RIGHT).nodes
    assert trace["tokens"] == np.concatenate([node.tokens for node in nodes]).tolist()
    trained = [token for token, own in zip(trace["tokens"], trace["trained"], strict=True) if own]
    assert trained == tokenizer.encode(CALL) + tokenizer.encode(RIGHT)
    assert "<result>408</result>" in trace["text"]
    reasons = [(row["question_id"], row["reason"]) for row in rows_of(record, "dropped")]
    assert reasons[0] == ("other", "too_long")
    assert [reason for _, reason in reasons[1:]] == ["wrong_answer", "broken_format", "duplicate"]
    said = capsys.readouterr().out
    assert "1 traces of 4 attempts at 1 questions" in said
    assert "1 duplicate" in said
    gates = Path(artifacts.output(record, "gates").path)
    assert {file.name for file in gates.iterdir()} == {"questions.json", "traces.json"}


def test_equal_trees_give_equal_traces(inputs):
    first = select(inputs(WRONG, RIGHT))
    again = select_traces(SubStep("again", "prepare", 0, 5), inputs(WRONG, RIGHT), specs=SPECS)
    for name in ("traces", "dropped"):
        assert artifacts.output(first, name).digest == artifacts.output(again, name).digest


def test_nothing_right_is_an_error_with_counts_and_remedy(inputs):
    with pytest.raises(ValueError, match=r"none of the 2 attempts .* 2 wrong_answer.*set prepare"):
        select(inputs(WRONG, WRONG.replace("7", "8")))


def test_a_trace_longer_than_the_context_is_left_out(inputs):
    longer = RIGHT.replace("that is it", "that is it " * 20)
    record = select(
        inputs(longer, RIGHT, context=120, expert=EXPERT.model_copy(update={"most": 2}))
    )
    assert len(rows_of(record, "traces")) == 1
    assert rows_of(record, "dropped")[-1]["reason"] == "too_long"


def test_a_teacher_of_another_vocabulary_is_written_again(inputs, tiny, policy, tokenizer):
    other = build_tokenizer(["another text altogether, with other words"], tiny)
    assert other.get_vocab() != tokenizer.get_vocab()
    policy.save_pretrained("teacher")
    other.save_pretrained("teacher")
    given = inputs(RIGHT, teacher="teacher")
    assert rewriting_fault(given.student, given.teacher, AGENT) == ""
    (trace,) = rows_of(select(given), "traces")
    dialect = open_dialect(AGENT.dialect, tokenizer, DIALOGUE, SPECS)
    parts = [(CALL, True), ("<result>408</result>", False), (RIGHT, True)]
    ((tokens, own),) = dialect.trace(QUESTION, parts)
    assert trace["tokens"] == tokens.tolist()
    assert trace["trained"] == own.tolist()
    fresh = DIALOGUE.model_copy(update={"prompt": "fresh", "prompt_tokens": 64})
    agent = AGENT.model_copy(update={"dialogue": fresh})
    assert "another vocabulary" in rewriting_fault(given.student, given.teacher, agent)
