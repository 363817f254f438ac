"""The page of a run in a browser: what it shows, how to walk it, that it is safe and offline."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest

from flows.commands import page as command
from flows.pages import forest, page_file
from flows.tracking.alarms import Alarm
from params import recipe_files
from tasks import recipes
from tasks.trees.tree import PROGRAM, CallResult, Observation
from tests.page.conftest import RECIPE

AGENTS = ("cold start", "trained")
HOSTILE = (
    "</script><img src=x onerror=\"document.title='hacked'\"><!-- <b>&amp;\u2028\u2029"
    "\u202e\u05d0\u0000\u001b " + "é漢🙂" + "W" * 3000
)
SHOWN = HOSTILE
for sign in "\u202e\u0000\u001b\u2028\u2029":
    SHOWN = SHOWN.replace(sign, f"⟨U+{ord(sign):04X}⟩")


@pytest.fixture(scope="module")
def file(written, grown):
    """Three iterations of three questions, of which one is about a frog."""
    texts = {1: "How many legs has a frog?"}
    trees = [
        [grown(f"q{number}{i}", texts.get(i, "What is 2+2?")) for i in range(3)]
        for number in range(3)
    ]
    links = {"run": "http://127.0.0.1:5000/#/run", "traces": "http://127.0.0.1:5000/#/t="}
    return written(trees, links=links)


def test_opens_offline_without_a_complaint(opened, file):
    shown = opened(file).drawn("curves")
    assert shown.requests() == []
    assert shown.complaints() == []
    assert "60.0 [50.0, 70.0]" in shown.text("results")
    recipe = shown.run("return document.getElementById('recipe').textContent")
    assert recipe == recipe_files.resolve(RECIPE).text()
    assert shown.place() == {"iteration": "2", "question": "q20", "leaf": "0"}
    for figure in ("intervals", "curves", "icicle"):
        marks = "return document.querySelectorAll(`#${arguments[0]} svg path`).length"
        assert shown.run(marks, figure) > 0


def test_keys_walk_questions_leaves_iterations_and_tints(opened, file):
    shown = opened(file).drawn("icicle")
    shown.press("ArrowDown", question="q21", leaf=0).press("ArrowRight", leaf=1)
    assert "Leaf 1: cut, reward -1" in shown.text("leaf")
    assert "legs has a frog" in shown.text("conversation")
    shown.press("ArrowRight", leaf=2).press("ArrowLeft", leaf=1).press("ArrowUp", question="q20")
    shown.press("[", iteration=1, question="q10")
    shown.press("t")
    assert shown.run("return document.getElementById('measure').value") == "advantage"
    shown.press("/")
    assert shown.run("return document.activeElement.id") == "search"
    shown.run("document.activeElement.blur()")
    shown.press("ArrowUp")
    assert shown.place()["question"] == "q10", "there is none above the first"


def test_search_by_text_reward_and_outcome(opened, file):
    shown = opened(file).drawn("icicle")
    listed = (
        "return [...document.querySelectorAll('#questions button')].map(b => b.dataset.question)"
    )
    shown.type("search", "FROG")
    assert shown.run(listed) == ["1"]
    shown.until("return location.hash.includes('q21')")
    shown.type("search", "")
    shown.type("outcome", "cut")
    shown.press("ArrowRight", leaf=1).press("ArrowRight")
    assert shown.place()["leaf"] == "1", "the only leaf that was cut"
    shown.type("reward-from", "0.5")
    assert shown.run(listed) == []
    shown.type("outcome", "")
    assert len(shown.run(listed)) == 3


@pytest.mark.parametrize("iteration", [0, 1])
def test_address_opens_a_leaf(opened, file, iteration):
    shown = opened(file, f"#iteration={iteration}&question=q{iteration}1&leaf=2").drawn("icicle")
    assert shown.place() == {"iteration": str(iteration), "question": f"q{iteration}1", "leaf": "2"}
    assert f"iteration {iteration}, question 2 of 3, leaf 2 of 4" in shown.text("where")
    assert "boxed{2}" in shown.text("conversation")
    shown.run(f"location.hash = '#iteration=2&question=q2{iteration}&leaf=1'")
    where = f"iteration 2, question {iteration + 1}"
    shown.until("return document.getElementById('where').textContent.includes(arguments[0])", where)


def test_siblings_stand_beside_each_other_and_calls_in_cards(opened, file):
    shown = opened(file, "#iteration=0&question=q00&leaf=0").drawn("icicle")
    rows = shown.run(
        "return [...document.querySelectorAll('.siblings')].map(row => "
        "[...row.children].map(one => one.classList.contains('chosen')))"
    )
    assert rows == [[True, False], [True, False, False]]
    card = shown.run("return document.querySelector('.call').textContent")
    assert card.startswith("python · ok2+2")
    shown.run(
        "document.querySelectorAll('.siblings')[1].children[2].querySelector('button').click()"
    )
    shown.until("return location.hash.endsWith('leaf=3')")
    assert "ΔH = 0.25 − 0.1 = +0.15; P = 0.5 + 0.2 × ΔH = 0.53, P > 0.5; 2 branches" in shown.text(
        "decisions"
    )


def test_each_call_of_a_turn_has_a_card(opened, written, grown):
    tree = grown("q00")
    results = (
        CallResult("call_0", "python", "ok", "2+2", "4"),
        CallResult("call_1", "search", "no_results", HOSTILE, "nothing"),
    )
    tree.nodes[1] = replace(tree.nodes[1], results=results)
    shown = opened(written([[tree]]), "#iteration=0&question=q00&leaf=0").drawn("icicle")
    cards = shown.run(
        "return [...document.querySelectorAll('.call')].map(card => "
        "[...card.children].map(part => part.textContent))"
    )
    assert cards == [["python · ok", "2+2", "4"], ["search · no_results", SHOWN, "nothing"]]
    assert "python + search" in shown.text("icicle")


def test_what_a_program_returned_stands_behind_its_last_answer(opened, written, grown):
    tree = grown("q00")
    told = {"answer": HOSTILE, "reward": 0.5, "parts": {}}
    said = Observation("ok", "", info={PROGRAM: told})
    tree.nodes[tree.leaves[0]] = replace(tree.nodes[tree.leaves[0]], observation=said)
    shown = opened(written([[tree]]), "#iteration=0&question=q00&leaf=0").drawn("icicle")
    assert shown.complaints() == []
    cards = "return [...document.querySelectorAll('.call')].at(-1).children"
    role, returned = (part.text for part in shown.run(cards))
    assert role == "program · answer"
    assert returned == f"answer: {SHOWN}\nreward: 0.5"


def test_tints_follow_the_values(opened, file):
    shown = opened(file, "#iteration=0&question=q00&leaf=1").drawn("icicle")  # node 3 is clipped
    of_node = (
        "return [...document.querySelectorAll('.sibling.chosen .token')]"
        ".map(one => parseFloat((one.style.backgroundColor.match(/[\\d.]+(?=\\))/) ?? [0])[0]))"
    )
    sizes = {}
    for name in ("entropy", "advantage", "gap", "ratio", "clipped"):
        shown.run("showTint(arguments[0])", name)
        sizes[name] = shown.run(of_node)
    assert len(set(sizes["entropy"])) > 3, "each token has a tint of its own"
    assert min(sizes["ratio"]) > 0.6 and set(sizes["clipped"]) == {0.65}
    entropies = shown.run("return view.block.questions[0].nodes[3].entropy")
    order = np.argsort(entropies, kind="stable")
    assert np.all(np.diff(np.array(sizes["entropy"])[order]) >= -2e-3)
    other = of_node.replace(".chosen", ":not(.chosen)")
    assert set(shown.run(other)) == {0}, "no token of node 1 is clipped"
    shown.run("showTint('ratio')")
    assert max(shown.run(other)) < 0.05, "its ratios are near 1"
    shown.run("showTint('advantage')")
    shown.press("ArrowRight", leaf=2)
    growing = shown.run(of_node)  # over both turns of the leaf
    assert np.all(np.diff(growing) >= 0) and growing[0] < growing[-1] == 0.65


SYSTEM = "[system]\nAnswer with the tool.[end]\n" * 20


@pytest.fixture(scope="module")
def certain(written, grown, tokenizer):
    """A run of a large policy: long prompts, entropies near 0 but for a few, small rises."""
    tree = grown("q00", said=("first\nthen", "2+2"))
    nodes = [replace(one, entropies=one.entropies * 0.02) for one in tree.nodes]
    whole = tokenizer.encode(SYSTEM + tree.question.text, add_special_tokens=False)
    nodes[0] = replace(nodes[0], tokens=np.array(whole, np.int32))
    values = {"initial_entropy": 0.00412, "entropy": 0.00432, "rise": 0.0002}
    (decision,) = tree.decisions
    return written(
        [[replace(tree, nodes=nodes, decisions=[replace(decision, **values, probability=0.50004)])]]
    )


def test_tints_of_a_certain_policy_tell_its_tokens_apart(opened, certain):
    shown = opened(certain, "#iteration=0&question=q00&leaf=0").drawn("icicle")
    strengths = shown.run(
        "return view.block.questions[0].nodes.filter(isTurn).flatMap((node) => "
        "valuesOf(node, 'entropy').map((value) => strengthOf(value, 'entropy', 1)))"
    )
    assert np.percentile(strengths, (50, 75, 90)) == pytest.approx((0.25, 0.5, 0.75), abs=0.05)
    ends = [entry for entry in shown.text("legend").split(") ") if "%" in entry]
    assert [end.split("(")[1].removesuffix(")").strip() for end in ends] == [
        *("50 %", "75 %", "90 %", "99 %")
    ]


def test_small_rises_are_shown_with_their_digits(opened, certain):
    shown = opened(certain, "#iteration=0&question=q00&leaf=0").drawn("icicle")
    assert "0.00432 − 0.00412 = +0.0002; P = 0.5 + 0.2 × ΔH = 0.50004, P > 0.5" in shown.text(
        "decisions"
    )
    assert "dH 0.0002 to 0.0002, P 0.5 to 0.5" in shown.text("rises")
    rows = (
        "return [...document.querySelectorAll('#rises th[scope=row]')].map(one => one.textContent)"
    )
    labels = shown.run(rows)
    assert (labels[0], labels[-1]) == ("decisions after tool results", "AUC of H after the result")


def test_a_long_prompt_does_not_hide_what_follows(opened, certain):
    shown = opened(certain, "#iteration=0&question=q00&leaf=0").drawn("icicle")
    widths = shown.run(
        "return [...document.querySelectorAll('#icicle path.surface')]"
        ".map(one => one.getBoundingClientRect()).map(box => [Math.round(box.top), box.width])"
    )
    top = min(height for height, _ in widths)
    (prompt,) = [width for height, width in widths if height == top]
    below = sorted({height for height, _ in widths})[1]
    assert sum(width for height, width in widths if height == below) == pytest.approx(prompt, 0.05)
    assert "[system]" not in shown.text("conversation")
    shown.run("document.querySelector('.prompt').open = true")
    text = shown.until("return document.querySelector('.prompt pre')?.textContent")
    assert text.startswith(SYSTEM) and text.endswith("What is 2+2?")


def test_a_token_that_ends_a_line_can_be_seen(opened, certain):
    shown = opened(certain, "#iteration=0&question=q00&leaf=0").drawn("icicle")
    marked = "return [...document.querySelectorAll('.token.line')].map(one => one.textContent)"
    lines = shown.run(marked)
    assert lines and all("\n" in line for line in lines)
    mark = "return getComputedStyle(document.querySelector('.token.line'), '::before').content"
    assert shown.run(mark) == '"↵"'


@pytest.mark.parametrize(("width", "rows"), [(390, 4), (800, 2), (1300, 1)])
def test_curves_stand_below_each_other_in_a_narrow_window(emulated, opened, file, width, rows):
    emulated(width)
    shown = opened(file).drawn("curves")
    tops = (
        "return [...document.querySelectorAll('#curves text')]"
        ".filter(one => /^x[0-9]*title/.test(one.getAttribute('class')))"
        ".map(one => Math.round(one.getBoundingClientRect().top))"
    )
    assert len(set(shown.run(tops))) == rows
    assert shown.run("return document.documentElement.scrollWidth") <= width
    cut = "return [...document.querySelectorAll('main table, main .figure, main select')]"
    ends = shown.run(f"{cut}.map(one => one.getBoundingClientRect().right)")
    assert max(ends) <= width, "nothing is cut at the right"


def test_refused_acts_of_a_world_are_drawn_by_reason(opened, written, grown):
    """A column's name is the world's own word, and only a text here."""
    curve = "iteration,reward,success,refused,refused_again,refused_locked\n0,1,0.5,0.4,0.1,0.3\n"
    shown = opened(written([[grown("q00")]], curve=curve)).drawn("curves")
    drawn = "return document.getElementById('curves').data.map(one => [one.name, one.y[0]])"
    lines = dict(shown.run(drawn))
    assert lines["refused: locked"] == 0.3 and lines["refused: again"] == 0.1
    assert lines["refused acts, and by reason (dotted)"] == 0.4
    assert shown.complaints() == []


def test_hostile_texts_are_shown_and_do_nothing(opened, written, grown):
    said = (HOSTILE, HOSTILE)
    for with_tokenizer in (True, False):
        file = written([[grown(HOSTILE[:200], HOSTILE, said)]], with_tokenizer)
        shown = opened(file).drawn("curves")
        assert shown.run("return document.title") == f"{RECIPE}: run"
        assert shown.run("return document.images.length") == 0
        assert shown.complaints() == []
        assert shown.requests() == []
        for place in ("conversation", "questions"):
            assert SHOWN[:60] in shown.text(place)
        conversation = shown.text("conversation")
        assert conversation.count(SHOWN) >= 4, "the question, a turn, a call and its result"
        assert shown.run("return document.documentElement.scrollWidth <= innerWidth"), "it wraps"


def test_very_long_turns_are_drawn_in_portions(opened, written, grown):
    code = "1+" * 80_000  # of a token each; more than a call of JavaScript takes as arguments
    for with_tokenizer in (True, False):
        file = written([[grown("q", code, (code, code))]], with_tokenizer)
        shown = opened(file, "#iteration=0&question=q&leaf=1").drawn("icicle").drawn("curves")
        assert shown.complaints() == []
        before = len(shown.text("conversation"))
        assert 10_000 < before < 3 * len(code)
        buttons = "return document.querySelectorAll('#conversation .more').length"
        assert shown.run(buttons) >= 3, "of the question, the turn and the result"
        shown.run("[...document.querySelectorAll('#conversation .more')].at(-1).click()")
        assert len(shown.text("conversation")) > before


def test_blocks_that_do_not_fit_are_left_out(opened, written, grown, monkeypatch):
    trees = [[grown(f"q{number}", leaves=3)] for number in range(5)]
    sizes = map(len, re.findall(r'id="block-\d+">([^<]*)<', written(trees).read_text()))
    monkeypatch.setattr(page_file, "MOST_BYTES", int(2.5 * max(sizes)))
    shown = opened(written(trees), "#iteration=1&question=q1&leaf=0").drawn("icicle")
    assert shown.run("return here()") == [0, 4]
    assert "1 (not in this page)" in shown.text("iteration")
    assert "--iteration 1" in shown.text("note")
    chosen = opened(written(trees, numbers=[1])).drawn("icicle")
    assert chosen.run("return here()") == [1]
    monkeypatch.setattr(page_file, "MOST_EVALUATED", 1)
    answers = {agent: [single(grown(f"q{i}"), 2) for i in range(5)] for agent in AGENTS}
    cut = opened(written(trees, agents=answers), "#iteration=evaluation").drawn("icicle")
    assert "The page has 1 of the 5 questions" in cut.text("note")


def test_spread_numbers_begin_everywhere():
    numbers = [*range(10, 60)]
    ordered = page_file.spread(numbers)
    assert sorted(ordered) == numbers and ordered[:2] == [59, 10]
    assert max(np.diff(sorted(ordered[:8]))) <= 13
    assert page_file.spread([3]) == [3] and page_file.spread([3, 4]) == [4, 3]


def test_values_are_packed():
    assert forest.packed([1.0, 1.0], "ratio") == 1000
    assert forest.packed([0.12344, float("inf")], "ratio")[0] == 123
    assert forest.packed([0.1238, float("inf")], "ratio")[0] == 124, "rounded, not cut"
    assert forest.packed([0.00012, 0.1], "entropy") == [12, 10_000], "of a policy that is certain"
    assert forest.packed([], "gap") == []


# ---------------------------------------------------------------- what people look at first


ALARMED = "iteration,reward,success,kl,groups_without_spread\n" + "".join(
    f"{number},0.5,0.5,0.01,{float(number in (3, 4))}\n" for number in range(6)
)


@pytest.fixture(scope="module")
def evaluated(written, grown):
    """A run with an alarm, whose second question got worse, third got better, by its evaluation."""
    answers = {"q0": (2, 2), "q1": (2, 3), "q2": (1, 2)}  # before and after; 2 is right
    before, after = (
        [single(grown(name), values[place]) for name, values in answers.items()] for place in (0, 1)
    )
    trees = [[grown(f"t{number}{i}", leaves=4 - i) for i in range(2)] for number in range(2)]
    return written(trees, curve=ALARMED, agents={"cold start": before, "trained": after})


def single(tree, answer):
    """The tree with one leaf alone, which gives this answer."""
    nodes = [*tree.nodes[:3], tree.nodes[3 + answer]]
    return replace(tree, nodes=nodes, leaves=[3], decisions=[])


def test_opens_where_rewards_differ_most_and_a_branch_started(opened, written, grown):
    """The last iteration has no spread; the one before has two questions with one, one branched."""
    flat, unbranched, branched = (grown(name) for name in ("flat", "unbranched", "branched"))
    flat = replace(flat, leaves=flat.leaves[2:3] * 2)
    unbranched = replace(unbranched, decisions=[])
    tables = written([[unbranched, branched], [flat]])
    shown = opened(tables).drawn("icicle")
    assert shown.place() == {"iteration": "0", "question": "branched", "leaf": "0"}
    alike = replace(branched, leaves=branched.leaves[2:3] * 2)
    shown = opened(written([[alike, unbranched]])).drawn("icicle")
    assert shown.place()["question"] == "unbranched", "a branch without a difference tells nothing"


def test_before_and_after_stand_side_by_side(opened, evaluated):
    shown = opened(evaluated).drawn("icicle")
    links = "return [...document.querySelectorAll('#changes a')].map(one => one.textContent)"
    assert shown.run(links) == ["1 question got worse", "1 question got better"]
    shown.run("document.querySelector('#changes a').click()")
    shown.until("return location.hash.includes('question=q1')")
    names = "return [...document.querySelectorAll('#questions .name')].map(one => one.textContent)"
    shown.until("return view.block.iteration === 'evaluation' && location.hash.includes('leaf=0')")
    assert shown.run(names) == ["q1 · worse", "q2 · better", "q0 · as before"]
    titles = "return [...document.querySelectorAll('.columns h3')].map(one => one.textContent)"
    assert shown.run(titles) == [
        "cold start: right, score 1, answer",
        "trained: not right, score 0, answer",
    ]
    turns = "return [...document.querySelectorAll('.columns > div')].map(one => one.textContent)"
    before, after = shown.run(turns)
    assert "boxed{2}" in before and "boxed{3}" in after and "python · ok" in before
    shown.press("ArrowRight", leaf=1)
    assert "Leaf trained: answer" in shown.text("leaf")


def test_answers_stand_alone_where_the_trees_are_gone(opened, written, grown):
    before, after = ((single(grown("q0"), answer),) for answer in (3, 2))
    file = written([[grown("t0")]], agents={"cold start": before, "trained": [*after]})
    shown = opened(file, "#iteration=evaluation&question=q0&leaf=0").drawn("icicle")
    assert shown.complaints() == []
    turns = "return [...document.querySelectorAll('.columns > div')].map(one => one.textContent)"
    before, after = shown.run(turns)
    assert before.endswith("assistant3") and "boxed{2}" in after


def test_alarms_stand_above_the_curves_and_in_them(opened, evaluated):
    shown = opened(evaluated).drawn("curves")
    assert "alarm no_spread in iteration 4" in shown.text("alarms")
    marks = shown.run("return document.getElementById('curves').layout.shapes.map(one => one.x0)")
    assert set(marks) == {4}
    titles = "return document.getElementById('curves').layout.annotations.map(one => one.text)"
    assert {"KL from the sampling policy", "share of groups without spread", "no_spread"} <= set(
        shown.run(titles)
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_accessible_in_the_light_and_in_the_dark(opened, emulated, evaluated, scheme):
    for width in (1280, 390):
        emulated(width, scheme=scheme)
        for place in ("", "#iteration=evaluation&question=q1&leaf=1"):
            shown = opened(evaluated, place).drawn("icicle").drawn("curves")
            assert shown.violations() == [], (width, place)
    back = "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    assert (max(shown.run(back)) < 64) == (scheme == "dark")
    drawn = shown.run("return document.getElementById('curves').layout.plot_bgcolor")
    assert drawn == ("#1c2229" if scheme == "dark" else "#ffffff")


def test_training_that_goes_on_says_so(opened, written, grown, monkeypatch, tmp_path):
    """Only some iterations have their trees in it, and none of the results of an earlier run."""
    folder = written([[grown(f"q{number}")] for number in range(3)]).parents[2]
    monkeypatch.chdir(folder)
    tables = {
        name: table.filter(pc.greater(table["iteration"], 0))
        for name, table in forest.open_tables(RECIPE).items()
    }
    curve = {"iteration": [0.0, 1.0, 2.0], "success": [0.1, 0.2, 0.3]}
    recipe = recipes.load(RECIPE, Path("params"))
    alarm = Alarm("no_spread", 1, "all answers are equal")
    shown = opened(page_file.write_live(RECIPE, recipe, tables, curve, [alarm])).drawn("curves")
    assert "Training goes on: 3 iterations so far." in shown.text("live")
    assert shown.run("return here()") == [1, 2]
    assert shown.text("results") == "This run has no evaluation yet."
    assert "no_spread" in shown.text("alarms")
    assert shown.complaints() == [] and shown.violations() == []


# ---------------------------------------------------------------- two runs


@pytest.fixture(scope="module")
def beside(written, grown):
    """The page of a run beside that of another checkout, which has one question less."""
    runs = []
    for number, (rate, names, answer) in enumerate(
        [("1.0e-4", ("t0", "t1", "t2"), 2), ("2.0e-4", ("t0", "t2"), 3)]
    ):
        trees = [[grown(name, said=(f"run {number}", "2+2")) for name in names]]
        agents = {"cold start": [single(grown("q0"), 1)], "trained": [single(grown("q0"), answer)]}
        folder = written(trees, agents=agents, curve=ALARMED if number else "").parents[2]
        text = (folder / "params/tiny.yaml").read_text()
        changed = re.sub(r"learning_rate: 1.0e-3", f"learning_rate: {rate}", text)
        assert changed != text
        (folder / "params/tiny.yaml").write_text(changed)
        runs.append(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(runs[0])
        return runs[0] / command.write_against(RECIPE, str(runs[1]))


def test_two_runs_stand_beside_each_other_by_question(opened, beside):
    shown = opened(beside).drawn("icicle").drawn("curves")
    assert shown.complaints() == [] and shown.requests() == [] and shown.violations() == []
    assert "learning_rate: 0.0002 -> 0.0001" in shown.text("changed")
    assert "1 question got better" in shown.text("changes")
    assert "Paired over the questions that both were asked: 1." in shown.text("verdict")
    assert "alarm no_spread in iteration 4" in shown.text("alarms")
    shown.run("location.hash = '#iteration=0&question=t2&leaf=1'")
    shown.until("return view.block.iteration === 0 && location.hash.includes('t2')")
    listed = "return view.block.questions.map(one => one.id)"
    assert shown.run(listed) == ["t0", "t2"], "t1 was asked in one of them alone"
    columns = "return [...document.querySelectorAll('.columns > div')].map(one => one.textContent)"
    other, own = shown.run(columns)
    assert "<think>run 1" in other and "run 0" not in other
    assert "<think>run 0" in own and "run 1" not in own
    trees = "return view.block.questions[1].nodes.filter(node => node.parent === 0).length"
    assert shown.run(trees) == 4, "two turns of each tree below one prompt"


def test_runs_without_a_common_question_are_refused(written, grown, monkeypatch, capsys):
    one, other = (written([[grown(name)]]).parents[2] for name in ("q0", "q1"))
    monkeypatch.chdir(one)
    assert command.main([RECIPE, "--against", str(other)]) == 2
    assert "were asked no common question" in capsys.readouterr().err
    subprocess.run(("git", "init", "--quiet"), cwd=one, check=True)
    assert command.main([RECIPE, "--against", "smok"]) == 2
    said = capsys.readouterr().err
    assert "there is no recipe or folder smok, and 'smok' names no commit here" in said
    assert command.main([RECIPE, "--against", RECIPE]) == 2
    assert f"{RECIPE} is this run itself" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main([RECIPE, "--against", str(other), "--comparison"])
