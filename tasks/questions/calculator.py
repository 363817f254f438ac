"""SFT traces from worked solutions with calculator notes, as GSM8K has them (arXiv 2110.14168).

A note such as ``<<16-3-4=9>>`` is a step of a program, and so is an equation without a note, where
it holds. The agent's thought is the author's text with each result replaced by its step's name; it
runs the program once, and copies the output:

    <think>Janet sells 16 - 3 - 4 = step1 duck eggs a day.
    She makes step1 * 2 = step2 every day.</think><python>step1 = 16 - 3 - 4
    step2 = step1 * 2
    print(step2)</python><result>18</result><think>...</think><answer>\\boxed{18}</answer>

So no result comes before the call, and no program only prints a number that the author computed: a
note without an operator (``<<18=18>>``) is no step, but ``<<18*1=18>>`` is one.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType

from tasks.environments import Respond
from tasks.questions.contract import ExpertKind, ExpertSettings, Lesson, Write
from tasks.questions.experts import Dropped, Move, Played, Results, Script, Trace, play
from tasks.questions.faults import Fault
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Question

END_OF_SOLUTION = "####"
LONGEST_EXPRESSION = 100  # characters; deep brackets and chains of signs exhaust the parser
DECIMALS = 6  # printed by a program with decimals in it, so that 0.1 + 0.2 is 0.3

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_CURRENCY = "(?:[$€£¢] ?)?"
_AFTER = r"(?:[$€£¢](?!\d))?"
_WORD = r"(?<![A-Za-z])[A-Za-z]{2,}(?:/[A-Za-z]+)?(?![A-Za-z])"  # one letter may be an unknown
_UNITS = rf"(?:[ -]?(?!plus |minus |times |divided ){_WORD}){{0,3}}"
_OPERAND = rf"\({{0,9}}{_CURRENCY}(?:{_NUMBER})%?{_UNITS}\){{0,9}}"
_OPERATOR = r"(?: ?[-+*/x×÷−–] ?| (?:plus|minus|times|divided by) | ?(?=\())"
_NOTE = re.compile(rf"{_CURRENCY}<<([^<>]*)>>(?:{_CURRENCY}({_NUMBER}){_AFTER})?")
_EQUATION = re.compile(
    rf"(?:([-+*/x×÷−–])[ (]*)?(?<![\w.,])({_OPERAND}(?:{_OPERATOR}{_OPERAND}){{1,20}})"
    rf"(?: ?= ?| equals )({_CURRENCY}(?:{_NUMBER}))(%?)"
)
_MENTION = re.compile(
    rf"(?<![\w.,]){_CURRENCY}({_NUMBER}){_AFTER}(?!\w*(?:st|nd|rd|th)\b)(?=([A-Za-z]?))"
)
_NOISE = re.compile(rf"[$€£¢]|{_WORD}|(?<=\d),(?=\d{{3}})|(?<![\d.,])0+(?=\d)")
_TIMES = re.compile(r"(?<=[\d.)])\s*(?:x\s*(?=[\d.(])|(?=\())")
_SIGNS = {
    **{"plus": "+", "minus": "-", "times": "*", "divided by": "/"},
    **{"−": "-", "–": "-", "×": "*", "÷": "/", "%": "/100"},
}
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
}

# Numbers that a solution may use without a source, and numbers that words of the question give.
_ALWAYS = (1, 2, 100)
_WORDS = {
    **{5: "five", 6: "six", 8: "eight", 9: "nine", 10: "ten", 11: "eleven"},
    3: "three thrice triple third",
    4: "four quarter fourth month monthly",
    7: "seven day daily week weekly",
    12: "twelve dozen foot feet month monthly year yearly",
    24: "day daily",
    30: "month monthly",
    52: "week weekly year yearly",
    60: "minute hour hourly",
    365: "day daily year yearly",
}


_NONE: Mapping[Fraction, str] = MappingProxyType({})


@dataclass(frozen=True)
class Calculation:
    """A calculation in the author's solution."""

    name: str
    start: int  # in the solution, of the text that the step's name replaces
    end: int
    code: str  # numbers, + - * / // and brackets, with at least one operator
    result: Fraction | None  # as the author states it


class UnreadableError(ValueError):
    """A note is no arithmetic."""


class CalculatorExpert(ExpertSettings):
    """Its traces are verified, so none has a flaw."""


def write(expert: CalculatorExpert, lesson: Lesson) -> tuple[Write, list[Fault]]:
    """Write traces from the worked solutions. Raises ValueError for a set without any."""
    solved = list(zip(lesson.questions, lesson.known, strict=True))
    for question, solution in solved:
        if solution is None:
            raise ValueError(
                f"expert.kind is calculator, who needs worked solutions, and the set "
                f"{question.kind} has none: name their field as solution of its row in "
                "params/benchmarks.yaml, or set expert.kind to written"
            )
    return lambda tools: write_traces(solved, tools, lesson.rules.right), []


def write_traces(
    entries: Sequence[tuple[Question, str]],
    tools: Respond,
    right: Callable[[Question, str], bool],
) -> tuple[list[Trace], list[Dropped]]:
    """Write traces for (question, worked solution) pairs whose programs print the right answer.

    ``right`` returns whether an answer to a question is right. Each entry is in one of the two
    lists, in the order of the entries. Reasons of drops: "no_notes" (nor an equation that holds);
    "unreadable_note" and "no_operation" (no note can be used; the first is no arithmetic, or a
    single number); "tool_error" (the program failed; with outcome and text); "wrong_result" (with
    the output and the accepted answers).
    """
    plans = [_plan(question, solution) for question, solution in entries]
    played = iter(play([plan for plan in plans if isinstance(plan, Script)], tools))
    ends = [_judge(next(played), right) if isinstance(plan, Script) else plan for plan in plans]
    return (
        [end for end in ends if isinstance(end, Trace)],
        [end for end in ends if isinstance(end, Dropped)],
    )


def _plan(question: Question, solution: str) -> Script | Dropped:
    text, faults = _clean(solution)
    steps = read_steps(text)
    if not steps:
        reason = next(iter(faults), "no_notes")
        return Dropped(question.id, reason, faults.get(reason, text.rpartition("\n")[2]))
    given = numbers_of(question.text)
    call = Move(thought(text, steps, given), "python", lambda _: program(steps, given))
    return Script(question, "none", (call,), "The program gives the answer.", _copy)


def _judge(played: Played, right: Callable[[Question, str], bool]) -> Trace | Dropped:
    question, seen = played.script.question, played.observations[-1]
    if seen.outcome != Outcome.OK:
        return Dropped(question.id, "tool_error", f"{seen.outcome}: {seen.text.strip()}")
    if not right(question, played.answer):
        gold = " or ".join(question.answers)
        return Dropped(question.id, "wrong_result", f"got {played.answer}, gold {gold}")
    return played.trace


def _copy(results: Results) -> str:
    """Return the program's output, without decimals that are 0 (18.0 as 18)."""
    return results[-1].removesuffix(".0")


# ---------------------------------------------------------------- reading


def _clean(solution: str) -> tuple[str, dict[str, str]]:
    """Return the solution without its final answer and unusable notes, and the first of each kind.

    The number of a note without an operator stays in the text. No tag is left.
    """
    faults: dict[str, str] = {}

    def usable(note: re.Match[str]) -> str:
        try:
            code = read_expression(note[1].rpartition("=")[0])
        except UnreadableError:
            faults.setdefault("unreadable_note", note[0])
            return ""
        if any(isinstance(node, ast.BinOp) for node in ast.walk(ast.parse(code))):
            return note[0]
        faults.setdefault("no_operation", note[0])
        return ""

    text = solution.rpartition(END_OF_SOLUTION)[0] or solution
    text = re.sub("<(?=/?[a-z])", "< ", text.replace(END_OF_SOLUTION, ""))
    text = re.sub("<<([^<>]*)>>", usable, text)
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "\n".join(filter(None, lines)), faults


def read_steps(text: str) -> list[Calculation]:
    """Return the calculations of a cleaned solution in order: notes, and equations that hold."""
    steps = list(_equations(text))
    for note in _NOTE.finditer(text):
        written, _, result = note[1].rpartition("=")
        value = _number(result)
        follows = note[2] is not None and _number(note[2]) == value
        end = note.end() if follows else note.start() + note[0].index(">>") + 2
        steps.append(Calculation("", note.start(), end, read_expression(written), value))
    steps.sort(key=lambda step: step.start)
    return [replace(step, name=f"step{i}") for i, step in enumerate(steps, start=1)]


def _equations(text: str) -> Iterator[Calculation]:
    """Return the equations without a note that hold exactly."""
    masked = re.sub("<<[^<>]*>>", lambda note: "\0" * len(note[0]), text)
    for equation in _EQUATION.finditer(masked):
        before, left, right, percent = equation.groups()
        if before:  # an operator: this is the end of a longer expression
            continue
        with contextlib.suppress(UnreadableError, ZeroDivisionError):
            code = read_expression(left.replace("%", "") if percent else left)
            if evaluate(ast.parse(code, mode="eval").body) == _number(right):
                yield Calculation("", equation.start(3), equation.end(3), code, _number(right))


def read_expression(written: str) -> str:
    """Translate arithmetic as people write it to Python: numbers, + - * / // and brackets.

    Currencies, words of two letters or more, and thousands separators are removed; 5% is 5/100, x
    is a multiplication, 2(3+4) is 2*(3+4). Raises UnreadableError for everything else.
    """
    for sign, code in _SIGNS.items():
        written = written.replace(sign, code)
    code = _TIMES.sub("*", _NOISE.sub("", written)).strip()
    if len(code) > LONGEST_EXPRESSION or not re.fullmatch(r"[-+*/(). \d]+", code):
        raise UnreadableError(written)
    try:
        return ast.unparse(_Plain().visit(ast.parse(code, mode="eval")))
    except SyntaxError:
        raise UnreadableError(written) from None


class _Plain(ast.NodeTransformer):
    """Keep arithmetic, write 100.00 as 100; raise UnreadableError for other nodes."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        allowed = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.UAdd, ast.USub, *_OPERATIONS)
        if not isinstance(node, allowed):
            raise UnreadableError(type(node).__name__)
        return super().generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        value = Fraction(str(node.value))
        return ast.Constant(value.numerator if value.denominator == 1 else node.value)


def evaluate(tree: ast.AST) -> Fraction:
    """Return the exact value of an expression; raise ZeroDivisionError as Python does."""
    match tree:
        case ast.Constant(value):
            return Fraction(str(value))
        case ast.UnaryOp(operation, operand):
            return -evaluate(operand) if isinstance(operation, ast.USub) else evaluate(operand)
        case ast.BinOp(left, operation, right):
            return _OPERATIONS[type(operation)](evaluate(left), evaluate(right))
    raise UnreadableError(type(tree).__name__)


def _number(text: str) -> Fraction | None:
    """Return the number that a text is, with or without currency and thousands separators."""
    matched = re.fullmatch(rf"\s*(-?){_CURRENCY}({_NUMBER})\s*", text)
    return Fraction(matched[1] + matched[2].replace(",", "")) if matched else None


# ---------------------------------------------------------------- writing


def numbers_of(question: str) -> set[Fraction]:
    """Return the numbers in a question, as digits or as words such as "twice" and "week"."""
    stated = {Fraction(digits.replace(",", "")) for digits in re.findall(_NUMBER, question)}
    words = {word.removesuffix("s") for word in re.findall("[a-z]+", question.casefold())}
    implied = [number for number in _WORDS if words & set(_WORDS[number].split())]
    return stated | {Fraction(number) for number in (*_ALWAYS, *implied)}


def program(steps: Sequence[Calculation], given: Collection[Fraction]) -> str:
    """Write one line a step, then print the last one; round it if there are decimals.

    ``given``: the numbers in the question, which stand for a step's result only where that result
    is used nowhere else.
    """
    lines = []
    for step, names in zip(steps, _links(steps, given), strict=True):
        code = ast.unparse(_Link(names).visit(ast.parse(step.code)))
        lines.append(f"{step.name} = {code}")
    last = steps[-1].name
    noisy = any("." in line for line in lines)
    return "\n".join([*lines, f"print(round({last}, {DECIMALS}))" if noisy else f"print({last})"])


class _Link(ast.NodeTransformer):
    """Replaces the result of an earlier step by its name."""

    def __init__(self, names: Mapping[Fraction, str]) -> None:
        self.names = names

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        name = self.names.get(Fraction(str(node.value)))
        return ast.Name(name) if name else node


def thought(text: str, steps: Sequence[Calculation], given: Collection[Fraction]) -> str:
    """Return the author's text with each result, and each mention of it, as its step's name.

    A number in the question stays, unless the step's line of the program has a name there.
    A result that comes before its calculation is replaced too: "He needs 6 because 2 * 3 = 6".
    """
    ever = _names(steps[::-1], given)  # the first step of each result
    pieces, offset = [], 0
    for index, (step, linked) in enumerate(zip(steps, _links(steps, given), strict=True)):
        repeated_operands = {step.result} & _operands(step)  # as in 1 * 1000 = 1000
        later = {result: name for result, name in ever.items() if result not in repeated_operands}
        names = later | _names(steps[:index], given)
        before, because, after = text[offset : step.start].rpartition(" because ")
        lines, newline, claim = before.rpartition("\n")
        pieces += [_hide(lines, names), newline, _hide(claim, names | _names([step], ()))]
        space = " " if text[step.end : step.end + 1].isalpha() else ""
        pieces += [because, _hide(after, names, linked), step.name + space]
        offset = step.end
    return "".join([*pieces, _hide(text[offset:], _names(steps, given))])


def _hide(text: str, names: Mapping[Fraction, str], last: Mapping[Fraction, str] = _NONE) -> str:
    """Replace all mentions of the numbers in ``names``, and the last one of those in ``last``."""
    once = dict(last)
    for mention in reversed([*_MENTION.finditer(text)]):
        value = Fraction(mention[1].replace(",", ""))
        name = once.pop(value, None) or names.get(value)
        if name:
            text = text[: mention.start()] + name + " " * bool(mention[2]) + text[mention.end() :]
    return text


def _links(steps: Sequence[Calculation], given: Collection[Fraction]) -> list[dict[Fraction, str]]:
    """Return for each step: the numbers in it that are earlier results -> the names of those steps.

    Of two steps with the same result the later counts. A number in the question stands for a result
    only where that result is used nowhere else.
    """
    operands = [_operands(step) for step in steps]
    links = []
    for index, operands_of_step in enumerate(operands):
        names = _names(steps[:index], given)
        links.append({number: names[number] for number in operands_of_step & names.keys()})
    for index, step in enumerate(steps):
        if step.result is None or any(step.name in names.values() for names in links):
            continue
        uses = (i for i in range(index + 1, len(steps)) if step.result in operands[i])
        for first in itertools.islice(uses, 1):
            links[first].setdefault(step.result, step.name)
    return links


def _operands(step: Calculation) -> set[Fraction]:
    constants = (node for node in ast.walk(ast.parse(step.code)) if isinstance(node, ast.Constant))
    return {Fraction(str(node.value)) for node in constants}


def _names(steps: Sequence[Calculation], given: Collection[Fraction]) -> dict[Fraction, str]:
    """Return result -> the last step that has it, for results that the question does not give."""
    pairs = ((step.result, step.name) for step in steps)
    return {result: name for result, name in pairs if result is not None and result not in given}


EXPERT = ExpertKind(CalculatorExpert, write, ("benchmarks",), ("python",), solutions=True)
