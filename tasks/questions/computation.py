"""Generated computation questions, and the scripted expert that answers them with the Python tool.

Three kinds of graded difficulty:

- arithmetic: an expression to evaluate; its test numbers are larger than any training number;
- story: a short word problem, where the agent must find the operators;
- chain: two steps, the second on the result of the first, so it takes two calls.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from params.schema.base import Probability
from params.schema.prepare import ComputationQuestions
from tasks.questions.contract import ExpertKind, Lesson, ScriptedExpert, Write
from tasks.questions.experts import Material, Move, Results, Script, draw_flaw, play
from tasks.questions.faults import Fault
from tasks.trees.tree import Question

KINDS = ("arithmetic", "story", "chain")


class ComputationExpert(ScriptedExpert):
    """An expert that answers computation questions with Python."""

    wrong_operator: Probability  # the code has one wrong operator
    wrong_digit: Probability  # the code has one wrong digit
    wrong_answer: Probability  # the answer has one wrong digit
    missing_call: Probability  # no tool call; the answer is 0


@dataclass(frozen=True)
class ComputationQuestion:
    """A question and the code of each step; ``{}`` is the result of the step before."""

    question: Question
    steps: tuple[str, ...]


def generate(settings: ComputationQuestions, seed: int) -> dict[str, list[ComputationQuestion]]:
    """Draw problems by split ("train", "validation", "test"); kinds alternate; no text twice.

    Raises ValueError when the number range holds too few distinct questions.
    """
    taken: set[str] = set()
    return {
        split: list(_distinct(split, size, settings, random.Random(f"{seed}/{split}"), taken))
        for split, size in settings.rows().items()
    }


def _distinct(
    split: str, size: int, settings: ComputationQuestions, draw: random.Random, taken: set[str]
) -> Iterator[ComputationQuestion]:
    for number in range(size):
        kind = KINDS[number % len(KINDS)]
        for _ in range(1000):
            text, steps = MAKERS[kind](draw, *_operands(kind, split, settings))
            if text not in taken:
                break
        else:
            raise ValueError(
                f"prepare.questions: after {number} questions for {split} no new one of kind "
                f"{kind} is found: raise its largest operand or ask for fewer questions"
            )
        taken.add(text)
        answer = str(_evaluate(steps))
        yield ComputationQuestion(Question(f"{split}-{number:05d}", kind, text, (answer,)), steps)


def _operands(kind: str, split: str, settings: ComputationQuestions) -> tuple[int, int]:
    """Return the smallest and largest operand; test arithmetic has larger ones than training."""
    if kind != "arithmetic":
        return 2, settings.largest_operand
    if split == "test":
        return settings.largest_arithmetic_operand + 1, settings.largest_test_operand
    return 2, settings.largest_arithmetic_operand


def _evaluate(steps: Sequence[str]) -> int:
    result = 0
    for step in steps:
        result = eval(step.format(result), {"__builtins__": {}})  # our own templates, no input
    return result


def _arithmetic(draw: random.Random, low: int, high: int) -> tuple[str, tuple[str, ...]]:
    count = draw.randint(2, 3)
    words = [str(draw.randint(low, high))]
    for _ in range(count - 1):
        words += [draw.choice("+-*"), str(draw.randint(low, high))]
    expression = " ".join(words)
    return f"Compute {expression}.", (expression,)


PEOPLE = ("Mia", "Omar", "Lena", "Ravi", "Zoe", "Ivan")
THINGS = ("apples", "books", "coins", "cards", "pens", "shells")
# text, code: a, b, c are numbers, {who} and {what} words
STORIES = (
    ("{who} has {a} {what} and gets {b} more.", "{a} + {b}"),
    ("{who} has {a} boxes of {b} {what}.", "{a} * {b}"),
    ("{who} has {a} boxes of {b} {what} and finds {c} more.", "{a} * {b} + {c}"),
    ("{who} has {a} boxes of {b} {what} and loses {c}.", "{a} * {b} - {c}"),
    ("{who} buys {a} {what}, then {b} bags of {c}.", "{a} + {b} * {c}"),
    ("{who} puts {a} {what} into rows of {b}; the rest stay over. Count the rest.", "{a} % {b}"),
    ("{who} puts {a} {what} into rows of {b}. Count the full rows.", "{a} // {b}"),
)


def _story(draw: random.Random, low: int, high: int) -> tuple[str, tuple[str, ...]]:
    template, code = draw.choice(STORIES)
    a, b, c = (draw.randint(low, high) for _ in range(3))
    if "//" in code or "%" in code:
        a, b = max(a, b), min(a, b)
    words = {"who": draw.choice(PEOPLE), "what": draw.choice(THINGS)}
    ending = "" if "Count" in template else " How many {what}?"
    return (template + ending).format(a=a, b=b, c=c, **words), (code.format(a=a, b=b, c=c),)


# text, code of the second step; {} is the first result
SECOND_STEPS = (
    ("add {c}", "{{}} + {c}"),
    ("take away {c}", "{{}} - {c}"),
    ("double it", "{{}} * 2"),
    ("divide by {c} and keep the rest", "{{}} % {c}"),
    ("divide by {c} and drop the rest", "{{}} // {c}"),
)


def _chain(draw: random.Random, low: int, high: int) -> tuple[str, tuple[str, ...]]:
    a, b, c = (draw.randint(low, high) for _ in range(3))
    word, operator = draw.choice((("times", "*"), ("plus", "+")))
    text, code = draw.choice(SECOND_STEPS)
    return (
        f"Take {a} {word} {b}. Then {text.format(c=c)}.",
        (f"{a} {operator} {b}", code.format(c=c)),
    )


Maker = Callable[[random.Random, int, int], tuple[str, tuple[str, ...]]]
MAKERS: dict[str, Maker] = {"arithmetic": _arithmetic, "story": _story, "chain": _chain}

# ---------------------------------------------------------------- the scripted expert

THOUGHTS = {
    "arithmetic": ("I compute it.",),
    "story": ("I write it down.",),
    "chain": ("First step.", "Second step."),
}
OPERATORS = ("+", "-", "*", "%", "//")


def material(settings: ComputationQuestions, seed: int) -> Material:
    """Draw questions by split; how they are computed is known of the training questions."""
    problems = generate(settings, seed)
    questions = {split: [each.question for each in entries] for split, entries in problems.items()}
    return Material(questions, known=problems["train"])


def write(expert: ComputationExpert, lesson: Lesson) -> tuple[Write, list[Fault]]:
    """Write traces of the first training questions."""
    scripts = [script(problem, expert, lesson.seed) for problem in lesson.known[: expert.traces]]
    return lambda tools: ([played.trace for played in play(scripts, tools)], []), []


def script(problem: ComputationQuestion, expert: ComputationExpert, seed: int) -> Script:
    """Plan how the expert answers one problem, with a flaw at the documented rates.

    wrong_operator: one operator of its code is another one; wrong_digit: one digit of its code is
    another one; wrong_answer: it copies the last result with one digit changed; missing_call: it
    calls no tool and answers 0. A trace has at most one flaw.
    """
    draw = random.Random(f"{seed}/{problem.question.id}")
    flaw = draw_flaw(expert.rates(), draw)
    spoil = {"wrong_operator": _other_operator, "wrong_digit": _other_digit}.get(flaw)
    steps = list(problem.steps)
    if spoil:
        index = draw.randrange(len(steps))
        steps[index] = spoil(steps[index], draw)
    if flaw == "missing_call":
        steps = []
    kind = problem.question.kind
    moves = [_compute(step, _thought(kind, number)) for number, step in enumerate(steps)]
    answer = CONCLUSIONS.get(flaw, _copy)
    return Script(
        problem.question,
        flaw,
        tuple(moves),
        _thought(kind, len(steps)),
        lambda results: answer(results, copy.copy(draw)),  # the same answer at every call
    )


def _compute(step: str, thought: str) -> Move:
    """Return a call of the Python tool; ``{}`` in its code is the result before."""
    return Move(thought, "python", lambda results: step.format(*results[-1:]))


def _thought(kind: str, step: int) -> str:
    """Return the expert's thought before step ``step`` (0, 1, ...), or before its answer."""
    thoughts = THOUGHTS[kind]
    return thoughts[step] if step < len(thoughts) else "Done."


def _copy(results: Results, draw: random.Random) -> str:
    return results[-1]


# Flaw -> the expert's answer, from its results; for other flaws it copies the last result.
CONCLUSIONS: dict[str, Callable[[Results, random.Random], str]] = {
    "missing_call": lambda results, draw: "0",
    "wrong_answer": lambda results, draw: _other_digit(results[-1], draw),
}


def _other_operator(code: str, draw: random.Random) -> str:
    words = code.split()
    positions = [i for i, word in enumerate(words) if word in OPERATORS]
    position = draw.choice(positions)
    words[position] = draw.choice(
        [operator for operator in OPERATORS if operator != words[position]]
    )
    return " ".join(words)


def _other_digit(text: str, draw: random.Random) -> str:
    positions = [i for i, letter in enumerate(text) if letter.isdigit()]
    if not positions:
        return text
    position = draw.choice(positions)
    digit = draw.choice([d for d in "123456789" if d != text[position]])
    return text[:position] + digit + text[position + 1 :]


EXPERT = ExpertKind(ComputationExpert, write, ("computation",), ("python",))
