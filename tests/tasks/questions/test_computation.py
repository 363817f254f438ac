import ast
import operator
import re
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from params.schema.prepare import ComputationQuestions
from tasks.questions import computation
from tasks.questions.computation import KINDS, ComputationExpert, generate, script
from tasks.questions.sources import taught
from tasks.trees import dialogue as talk
from tasks.trees.tree import Observation, Question

OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
}
RATES = {"wrong_operator": 0.1, "wrong_digit": 0.2, "wrong_answer": 0.05, "missing_call": 0.15}


def sizes(**changes):
    values = {
        "train": 300,
        "validation": 60,
        "test": 150,
        "largest_operand": 99,
        "largest_arithmetic_operand": 499,
        "largest_test_operand": 999,
    }
    return ComputationQuestions(source="computation", **(values | changes))


def expert(traces=1, **rates):
    none = dict.fromkeys(RATES, 0.0)
    return ComputationExpert(kind="computation", traces=traces, **(none | rates))


def material(settings, chosen, seed):
    return taught(computation.material(settings, seed), chosen, None, seed)


def calculate(code):
    """An evaluator of our own: numbers, brackets, + - * % //, and a leading minus."""

    def value(node):
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.UnaryOp):
            return -value(node.operand)
        return OPERATIONS[type(node.op)](value(node.left), value(node.right))

    return value(ast.parse(code, mode="eval").body)


def steps_of(plan):
    """The code of each of the expert's calls; ``{}`` where it hands on the result before."""
    assert {move.tool for move in plan.moves} <= {"python"}
    return tuple(move.argument(["{}"] * number) for number, move in enumerate(plan.moves))


def solve(steps):
    result = ""
    for step in steps:
        result = str(calculate(step.format(result)))
    return result


@pytest.fixture(scope="module")
def problems():
    return generate(sizes(), seed=5)


def every(problems):
    return [problem for entries in problems.values() for problem in entries]


def test_the_splits_have_their_sizes_kinds_and_ids(problems):
    assert {split: len(entries) for split, entries in problems.items()} == {
        "train": 300,
        "validation": 60,
        "test": 150,
    }
    for split, entries in problems.items():
        assert Counter(p.question.kind for p in entries) == dict.fromkeys(KINDS, len(entries) // 3)
        assert all(p.question.id.startswith(split) for p in entries)
    assert len({p.question.id for p in every(problems)}) == 510


def test_no_text_occurs_twice_within_or_across_splits(problems):
    assert len({p.question.text for p in every(problems)}) == 510
    few = generate(sizes(largest_operand=12), seed=5)  # most stories of the test would be known
    assert len({p.question.text for p in every(few)}) == 510


def test_the_answers_are_right(problems):
    for problem in every(problems):
        assert problem.question.answers == (solve(problem.steps),)


def operands(problem):
    return [int(number) for number in re.findall(r"\d+", problem.question.text)]


def test_arithmetic_tests_have_larger_numbers(problems):
    def of(split):
        return [n for p in problems[split] if p.question.kind == "arithmetic" for n in operands(p)]

    assert {2 <= n <= 499 for n in of("train") + of("validation")} == {True}
    assert {500 <= n <= 999 for n in of("test")} == {True}


def test_stories_and_chains_keep_their_range(problems):
    others = [p for p in every(problems) if p.question.kind != "arithmetic"]
    assert max(n for p in others for n in operands(p)) <= 99


# What a person reads in the words, independent of the code that stands beside them.
STORIES: dict[str, Callable[..., int]] = {
    r"has (\d+) \w+ and gets (\d+) more\. How many": lambda a, b: a + b,
    r"has (\d+) boxes of (\d+) \w+\. How many": lambda a, b: a * b,
    r"has (\d+) boxes of (\d+) \w+ and finds (\d+) more\. How many": lambda a, b, c: a * b + c,
    r"has (\d+) boxes of (\d+) \w+ and loses (\d+)\. How many": lambda a, b, c: a * b - c,
    r"buys (\d+) \w+, then (\d+) bags of (\d+)\. How many": lambda a, b, c: a + b * c,
    r"puts (\d+) \w+ into rows of (\d+); the rest stay over. Count the rest": lambda a, b: a % b,
    r"puts (\d+) \w+ into rows of (\d+). Count the full rows": lambda a, b: a // b,
}
FIRST = {"times": operator.mul, "plus": operator.add}
SECOND: dict[str, Callable[..., int]] = {
    r"add (\d+)\.": lambda r, c: r + c,
    r"take away (\d+)\.": lambda r, c: r - c,
    r"double it()\.": lambda r, _: 2 * r,
    r"divide by (\d+) and keep the rest\.": lambda r, c: r % c,
    r"divide by (\d+) and drop the rest\.": lambda r, c: r // c,
}


def read_aloud(text):
    """The answer that the words of a question ask for."""
    if text.startswith("Compute "):
        return calculate(text.removeprefix("Compute ").removesuffix("."))
    if text.startswith("Take "):
        parts = re.fullmatch(r"Take (\d+) (\w+) (\d+)\. Then (.*)", text)
        assert parts
        first, rest = FIRST[parts[2]](int(parts[1]), int(parts[3])), parts[4]
        return next(
            solve(first, int(found[1] or 0))
            for words, solve in SECOND.items()
            if (found := re.fullmatch(words, rest))
        )
    return next(
        solve(*map(int, found.groups()))
        for words, solve in STORIES.items()
        if (found := re.search(words, text))
    )


def test_the_answer_is_what_the_words_ask_for(problems):
    wrong = [
        p.question
        for p in every(problems)
        if (str(read_aloud(p.question.text)),) != p.question.answers
    ]
    assert wrong == []


def test_a_chain_takes_two_calls_and_the_others_one(problems):
    for problem in every(problems):
        calls = 2 if problem.question.kind == "chain" else 1
        assert len(problem.steps) == calls
        assert ["{}" in step for step in problem.steps] == [False, True][:calls]


def test_problems_depend_on_the_seed():
    few = sizes(train=30, validation=6, test=15)
    assert generate(few, seed=1) == generate(few, seed=1)
    assert generate(few, seed=1) != generate(few, seed=2)


def test_more_tests_keep_training_questions():
    few, more = (generate(sizes(test=count), seed=1) for count in (15, 60))
    assert few["train"] == more["train"]
    assert few["test"] == more["test"][:15]


@pytest.mark.parametrize(
    ("changes", "split"),
    [
        ({"largest_arithmetic_operand": 2, "train": 60}, "train"),
        ({"largest_arithmetic_operand": 499, "largest_test_operand": 500, "test": 150}, "test"),
    ],
)
def test_too_small_range_is_an_error(changes, split):
    said = f"prepare.questions: .* questions for {split} .* kind arithmetic .* raise its largest"
    with pytest.raises(ValueError, match=said):
        generate(sizes(**changes), seed=0)


# ---------------------------------------------------------------- the expert


def test_flaws_come_at_their_rates(problems):
    wrong = expert(**RATES)
    scripts = [script(p, wrong, seed) for seed in range(20) for p in problems["train"]]
    counts = Counter(plan.flaw for plan in scripts)
    assert set(counts) == {"none", *RATES}
    for flaw, rate in [*RATES.items(), ("none", 1 - sum(RATES.values()))]:
        error = (rate * (1 - rate) / len(scripts)) ** 0.5
        assert counts[flaw] / len(scripts) == pytest.approx(rate, abs=4 * error)


def test_a_plan_depends_on_seed_and_question_only(problems):
    wrong = expert(**RATES)

    def plans(problems, seed):
        made = [script(problem, wrong, seed) for problem in problems]
        return [(plan.question, plan.flaw, steps_of(plan), plan.answer(["407"])) for plan in made]

    before = plans(problems["train"], 1)
    assert plans(problems["train"][::-1], 1)[::-1] == before
    assert plans(problems["train"], 2) != before


def test_flawless_expert_gives_right_answers(problems):
    for problem in every(problems):
        plan = script(problem, expert(), 0)
        assert (plan.question, plan.flaw) == (problem.question, "none")
        assert steps_of(plan) == problem.steps
        assert plan.answer(["?", solve(problem.steps)]) == problem.question.answers[0]


def words_that_differ(problem, plan):
    """Per step: the words of the right code and of the plan's where they part."""
    return [
        (right, wrong)
        for good, bad in zip(problem.steps, steps_of(plan), strict=True)
        for right, wrong in zip(good.split(), bad.split(), strict=True)
        if right != wrong
    ]


def test_a_wrong_operator_is_one_other_operator(problems):
    for problem in every(problems):
        plan = script(problem, expert(wrong_operator=1), 0)
        ((right, wrong),) = words_that_differ(problem, plan)
        assert {right, wrong} <= set(computation.OPERATORS)
        assert plan.answer(["7"]) == "7"
        calculate(steps_of(plan)[-1].format(3))


def test_a_wrong_digit_is_one_other_digit_in_its_place(problems):
    for problem in every(problems):
        plan = script(problem, expert(wrong_digit=1), 0)
        ((right, wrong),) = words_that_differ(problem, plan)
        assert len(wrong) == len(right)
        assert [
            a.isdigit() and b.isdigit() for a, b in zip(right, wrong, strict=True) if a != b
        ] == [True]
        assert plan.answer(["7"]) == "7"


@given(st.integers(-(10**6), 10**6), st.integers(0, 99))
def test_wrong_answer_has_one_other_digit(result, seed):
    problem = computation.ComputationQuestion(
        Question("q", "arithmetic", "", (str(result),)), ("1 + 1",)
    )
    plan = script(problem, expert(wrong_answer=1), seed)
    assert steps_of(plan) == problem.steps
    answer = plan.answer([str(result)])
    assert sum(a != b for a, b in zip(answer, str(result), strict=True)) == 1
    assert int(answer) != result


def test_result_without_digits_stays_as_wrong_answer(problems):
    plan = script(problems["train"][0], expert(wrong_answer=1), 0)
    assert plan.answer(["NameError"]) == "NameError"


def test_a_missing_call_answers_zero_without_a_call(problems):
    for problem in every(problems):
        plan = script(problem, expert(missing_call=1), 0)
        assert plan.moves == ()
        assert plan.answer([]) == "0"


@pytest.mark.parametrize("flaw", ["wrong_operator", "wrong_digit"])
def test_spoiled_code_runs_and_mostly_errs(problems, flaw):
    missed = [
        solve(steps_of(script(problem, expert(**{flaw: 1.0}), 0))) != problem.question.answers[0]
        for problem in every(problems)
    ]
    assert sum(missed) / len(missed) > 0.8


def test_thought_precedes_each_step_and_answer(problems):
    for problem in every(problems):
        plan = script(problem, expert(), 0)
        assert plan.thought == "Done."
        assert "Done." not in [move.thought for move in plan.moves]


# ---------------------------------------------------------------- questions and traces together

FEW = {"train": 30, "validation": 3, "test": 6}


class Calculator:
    """A tool without a sandbox, for code that the tests trust; it counts its rounds."""

    def __init__(self):
        self.rounds = []

    def __call__(self, calls):
        self.rounds.append(len(calls))
        return [Observation("ok", f"{calculate(call.argument)}\n") for call in calls]


def written(seed=7, **rates):
    traces, dropped = material(sizes(**FEW), expert(30, **rates), seed).write_traces(Calculator())
    assert dropped == []
    return traces


def whole(trace):
    return "".join(text for text, _ in trace.parts)


def test_material_has_questions_and_no_documents():
    made = material(sizes(**FEW), expert(), seed=7)
    problems = generate(sizes(**FEW), seed=7)
    assert made.questions == {
        split: [problem.question for problem in entries] for split, entries in problems.items()
    }
    assert (made.documents, made.dropped) == ([], [])


def test_flawless_traces_show_calls_and_answer():
    traces = written()
    assert len(traces) == 30
    for trace in traces:
        text = whole(trace)
        assert trace.flaw == "none"
        assert talk.final_answer(text) == trace.question.answers[0]
        calls = 2 if trace.question.kind == "chain" else 1
        assert len(re.findall("<python>.*?</python><result>-?[0-9]+</result>", text)) == calls
        assert [own for _, own in trace.parts] == [True, False] * calls + [True]
        assert text.count("<think>") == text.count("</think>") == calls + 1


def test_second_call_uses_the_first_result():
    for trace in written():
        if trace.question.kind == "chain":
            first, second = re.findall("<python>(.*?)</python><result>", whole(trace))
            assert second.split()[0] == str(calculate(first))


def test_a_missing_call_goes_straight_to_an_answer():
    for trace in written(missing_call=1):
        assert (trace.flaw, len(trace.parts)) == ("missing_call", 1)
        assert talk.final_answer(whole(trace)) == "0"


def test_a_wrong_answer_differs_from_the_last_result():
    for trace in written(wrong_answer=1):
        last = re.findall("<result>(.*?)</result>", whole(trace))[-1]
        assert last == trace.question.answers[0] != talk.final_answer(whole(trace))


def test_expert_answers_first_training_questions():
    made = material(sizes(**FEW), expert(24, **RATES), seed=7)
    traces, _ = made.write_traces(Calculator())
    assert [trace.question for trace in traces] == made.questions["train"][:24]


def test_all_calls_of_a_round_run_together():
    tools = Calculator()
    material(sizes(**FEW), expert(30), seed=7).write_traces(tools)
    assert tools.rounds == [30, 10], "then the second calls of the chains"


def test_traces_that_are_written_twice_are_equal():
    made = material(sizes(**FEW), expert(30, **RATES), seed=7)
    assert made.write_traces(Calculator()) == made.write_traces(Calculator())


def test_equal_seeds_give_equal_traces():
    assert written(seed=3, **RATES) == written(seed=3, **RATES)
    assert written(seed=3, **RATES) != written(seed=4, **RATES)
