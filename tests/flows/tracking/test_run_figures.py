import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flows.tracking import run_figures

ROOT = Path(__file__).parents[3]


def curve_rows(count):
    return [{"iteration": i, "reward": 0.1 * i, "success": i / count} for i in range(count)]


def profile_rows(*iterations):
    return [
        {"iteration": i, "position": p, "mean": 0.1 + 0.01 * i, "standard_error": 0.02}
        for i in iterations
        for p in (2, 1, -1, -2)
    ]


def success_rows(*agents):
    return [
        {"kind": kind, "agent": agent, "success": success, "low": success - 0.1, "high": 0.9}
        for agent in agents
        for kind, success in (("sum", 0.8), ("product", 0.4))
    ]


def legend(axes):
    return names(axes.get_legend())


def names(legend):
    return [text.get_text() for text in legend.get_texts()]


def xs(line):
    return np.asarray(line.get_xdata()).tolist()


def ys(line):
    return np.asarray(line.get_ydata()).tolist()


# the learning curve


def test_learning_curve_shows_values_and_their_mean():
    figure = run_figures.learning_curve(curve_rows(32)[::-1])
    reward, success = figure.axes
    points, mean = reward.get_lines()
    assert xs(points) == list(range(32))
    assert ys(points) == pytest.approx(0.1 * np.arange(32))
    assert ys(mean)[:3] == pytest.approx([0.1, 0.15, 0.2])
    assert ys(success.get_lines()[0])[16] == pytest.approx(50)
    assert reward.get_title(loc="left") == "Learning curve"
    assert (reward.get_ylabel(), success.get_xlabel()) == (
        "mean reward of a trajectory",
        "iteration",
    )
    assert success.get_ylabel().endswith("(%)")
    assert legend(reward) == ["one iteration", "mean of 5 iterations"]


def test_validation_points_lie_where_measured():
    asked = [{"iteration": 2, "success": 0.75, "success_low": 0.7, "success_high": 0.9}]
    axes = run_figures.learning_curve(curve_rows(4), asked).axes[1]
    (points,) = axes.containers
    assert points.get_label().startswith("validation questions")
    assert (xs(points.lines[0]), ys(points.lines[0])) == ([2], [75])
    (low, high) = points.lines[2][0].get_segments()[0][:, 1]
    assert (low, high) == pytest.approx((70, 90))


def test_running_mean_uses_fewer_values_at_the_ends():
    values = np.array([1.0, 3.0, 8.0, 4.0])
    assert run_figures.running_mean(values, 1) == pytest.approx([2, 4, 5, 6])
    assert run_figures.running_mean(values, 0) == values.tolist()
    assert run_figures.running_mean(values, 9) == [4.0] * 4


# entropy around tool results


def test_entropy_of_first_and_last_iteration():
    axes = run_figures.entropy_around_tools(profile_rows(5, 0, 9)).axes[0]
    assert legend(axes) == ["iteration 0", "iteration 9"]
    *lines, mark = axes.get_lines()
    assert [xs(line) for line in lines] == [[-2, -1], [1, 2]] * 2
    assert ys(lines[2]) == pytest.approx([0.19, 0.19])
    assert xs(mark) == [0, 0]
    outline = np.asarray(axes.collections[0].get_paths()[0].vertices)
    assert np.unique(outline[:, 1].round(9)).tolist() == [0.08, 0.12]
    assert [text.get_text() for text in axes.texts] == ["tool result"]
    assert axes.get_ylim()[0] == 0
    assert "ln |V|" in axes.get_ylabel()


def test_entropy_of_a_run_of_one_iteration():
    assert legend(run_figures.entropy_around_tools(profile_rows(0)).axes[0]) == ["iteration 0"]


# success by question kind


def test_success_has_a_dot_and_an_interval_each():
    axes = run_figures.success_by_kind(success_rows("trained", "cold start")).axes[0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["sum", "product"]
    assert legend(axes) == ["cold start", "trained"]
    cold_start, trained = axes.containers
    assert xs(cold_start[0]) == pytest.approx([80, 40])
    intervals = [segment[:, 0].tolist() for segment in trained[2][0].get_segments()]
    assert np.array(intervals) == pytest.approx(np.array([[70, 90], [30, 90]]))
    assert (np.array(ys(cold_start[0])) < ys(trained[0])).all()
    assert "95 %" in axes.get_xlabel()


def test_champion_is_drawn_between_the_two():
    rows = success_rows("trained", "cold start", "champion")
    axes = run_figures.success_by_kind(rows).axes[0]
    assert legend(axes) == ["cold start", "trained", "champion"]
    cold_start, trained, champion = (np.array(ys(each[0])) for each in axes.containers)
    assert (cold_start < champion).all()
    assert (champion < trained).all()


def test_success_of_one_agent_alone():
    rows = [{"kind": "sum", "agent": "trained", "success": 1.0, "low": 1 + 1e-16, "high": 1.0}]
    assert len(run_figures.success_by_kind(rows).axes[0].containers) == 2


# variants side by side


def variant_rows():
    return [
        {
            **{"variant": name, "success": success, "by_seed": {0: success - 0.02, 5: success}},
            **{"low": success - 0.1, "high": success + 0.05},
        }
        for name, success in (("cold start", 0.4), ("grpo", 0.7), ("arpo", 0.8))
    ]


def test_variants_have_a_dot_and_an_interval_each():
    axes = run_figures.comparison(variant_rows()).axes[0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["cold start", "grpo", "arpo"]
    (dots,) = axes.containers
    assert xs(dots[0]) == pytest.approx([40, 70, 80])
    assert ys(dots[0]) == [0, 1, 2]
    intervals = [segment[:, 0].tolist() for segment in dots[2][0].get_segments()]
    assert np.array(intervals) == pytest.approx(np.array([[30, 45], [60, 75], [70, 85]]))
    assert xs(axes.get_lines()[-1]) == [40, 40]
    assert axes.get_ylim() == (2.5, -0.5), "the first row on top"
    assert axes.get_legend() is None
    assert "95 %" in axes.get_xlabel()


def test_figure_grows_with_its_variants():
    few, many = (run_figures.comparison(variant_rows() * n).get_size_inches()[1] for n in (1, 5))
    assert many > few + 3


# training dynamics


def seed_curve(steps, **measures):
    """The curve of a seed that spends ``steps`` environment steps an iteration."""
    count = len(next(iter(measures.values())))
    return {"environment_steps": [steps * (i + 1) for i in range(count)], **measures}


def dynamics():
    """Two seeds of one variant, at different paces, and one seed of another without steps."""
    return {
        "gagpo": [
            seed_curve(10, success=[0.0, 0.5, 1.0], singleton_share=[0.5, 0.4, 0.3]),
            seed_curve(20, success=[0.2, 0.4, 0.6], singleton_share=[0.1, 0.2, 0.3]),
        ],
        "grpo": [seed_curve(10, success=[0.3, 0.6, 0.9])],
    }


def test_training_curves_have_a_panel_a_measure_and_a_line_a_variant():
    figure = run_figures.training_curves(dynamics(), "environment_steps", "environment steps")
    success, singletons = figure.axes
    assert [line.get_label() for line in success.get_lines()] == ["gagpo", "grpo"]
    assert [line.get_label() for line in singletons.get_lines()] == ["gagpo"], "grpo has none"
    mean = success.get_lines()[0]
    assert (xs(mean)[0], xs(mean)[-1]) == (20, 30), "where both seeds have values"
    assert (ys(mean)[0], ys(mean)[-1]) == pytest.approx((35, 65))
    (band,) = success.collections
    box = band.get_paths()[0].get_extents()
    assert (box.ymin, box.ymax) == pytest.approx((20, 100))
    assert success.get_xlabel() == "environment steps"
    assert "mean of 2 seeds" in figure.get_suptitle()
    assert names(figure.legends[0]) == ["gagpo", "grpo"]
    alone = run_figures.training_curves({"": dynamics()["grpo"]}, "environment_steps", "steps")
    assert not alone.legends and "one seed" in alone.get_suptitle()


def test_training_curves_show_the_extrema_of_the_advantages():
    measures = {"success": [0.5] * 3, "advantage_min": [-2.0] * 3, "advantage_max": [3.0] * 3}
    figure = run_figures.training_curves(
        {"": [seed_curve(10, **measures)]}, "environment_steps", ""
    )
    ends = {axes.get_ylabel(): ys(axes.get_lines()[0])[-1] for axes in figure.axes[1:]}
    assert ends == {"smallest advantage": -2, "largest advantage": 3}


def group_rows():
    return [{"iteration": i, "sizes": {"1": 1 + i, "2": 3}} for i in range(3)]


def test_state_groups_are_shares_that_add_up():
    (axes,) = run_figures.state_groups(group_rows()).axes
    ones, twos = axes.containers
    assert [bar.get_height() for bar in ones] == pytest.approx([25, 40, 50])
    assert [bar.get_y() + bar.get_height() for bar in twos] == pytest.approx([100] * 3)


# branching decisions


def decision_rows():
    """Of each verdict two more than of the one before: two, four, six."""
    verdicts = [(False, 0)] * 2 + [(True, 0)] * 4 + [(True, 2)] * 6
    return [
        {"kind": "entropy", "position": 40 + i, "rise": 0.1 * i - 0.3, "wanted": w, "added": added}
        for i, (w, added) in enumerate(verdicts)
    ]


def test_decisions_are_marked_by_verdict():
    figure = run_figures.decisions(decision_rows()[::-1], threshold=0.05)
    (axes,) = figure.axes
    points = [np.asarray(dots.get_offsets()).tolist() for dots in axes.collections]
    assert [len(found) for found in points] == [2, 4, 6]
    assert points[0] == pytest.approx(np.array([[41, -0.2], [40, -0.3]]))
    colours = {dots.get_facecolor().tobytes() for dots in axes.collections}
    marks = {np.asarray(dots.get_paths()[0].vertices).tobytes() for dots in axes.collections}
    assert len(colours) == len(marks) == 3
    assert names(figure.legends[0]) == [
        "not wanted (2)",
        "wanted, but the budget was spent (4)",
        "branched (6)",
        "branches above 0.05",
    ]
    assert ys(axes.get_lines()[-1]) == [0.05, 0.05]
    assert axes.get_title(loc="left") == "12 branching decisions"


def test_odds_of_a_certain_policy_have_their_digits():
    rows = [{**row, "probability": 0.5 + 0.2 * row["rise"] / 1000} for row in decision_rows()]
    at_marks = [{**row, "probability": None} for row in decision_rows()]
    title = run_figures.decisions([*rows, *at_marks]).axes[0].get_title(loc="left")
    assert title.startswith("24 branching decisions, P 0.")
    low, high = (float(word) for word in title.split()[4:7:2])
    assert 0.4999 <= low <= 0.5 <= high <= 0.5001


def test_decisions_without_a_threshold():
    figure = run_figures.decisions(decision_rows()[-2:])
    assert [ys(line) for line in figure.axes[0].get_lines()] == [[0, 0]]
    assert names(figure.legends[0])[0] == "not wanted (0)"


# seconds of an iteration


def test_seconds_are_ordered_and_labelled():
    axes = run_figures.seconds_by_part({"tools": 0.5, "sampling": 1.5, "update": 0.0}).axes[0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["sampling", "tools", "update"]
    assert [bar.get_width() for bar in axes.containers[0]] == [1.5, 0.5, 0]
    assert [text.get_text() for text in axes.texts] == [
        "1.50 s   75.0 %",
        "0.50 s   25.0 %",
        "0.00 s   0.0 %",
    ]
    assert axes.get_title(loc="left") == "One iteration: 2.00 s"
    assert axes.get_xlabel() == "seconds"


# faults, and files


@pytest.mark.parametrize(
    ("draw", "rows", "message"),
    [
        (run_figures.learning_curve, [], "learning curve: there are no rows"),
        (
            run_figures.learning_curve,
            [{"iteration": 0, "reward": 1}],
            r"row 0 has no value of \['succ",
        ),
        (run_figures.entropy_around_tools, [{"position": 1}], "entropy profile: row 0"),
        (run_figures.success_by_kind, success_rows("pretrained"), "got {'pretrained'}"),
        (run_figures.comparison, [], "comparison: there are no rows"),
        (
            run_figures.comparison,
            [{"variant": "grpo", "success": 1}],
            r"row 0 has no value of \['low",
        ),
        (run_figures.state_groups, [{"iteration": 1}], r"row 0 has no value of \['sizes'\]"),
        (run_figures.decisions, [], "branching decisions: there are no rows"),
        (run_figures.decisions, [{"position": 1, "rise": 0.1, "wanted": True}], r"\['added'\]"),
        (run_figures.seconds_by_part, {}, "positive seconds"),
        (run_figures.seconds_by_part, {"tools": -1, "update": 2}, "positive seconds"),
    ],
)
def test_faulty_rows_are_named(draw, rows, message):
    with pytest.raises(ValueError, match=message):
        draw(rows)


DRAWINGS = {
    "curve": lambda: run_figures.learning_curve(curve_rows(20)),
    "entropy": lambda: run_figures.entropy_around_tools(profile_rows(0, 3)),
    "success": lambda: run_figures.success_by_kind(success_rows("cold start", "trained")),
    "comparison": lambda: run_figures.comparison(variant_rows()),
    "dynamics": lambda: run_figures.training_curves(dynamics(), "environment_steps", "steps"),
    "groups": lambda: run_figures.state_groups(group_rows()),
    "decisions": lambda: run_figures.decisions(decision_rows(), 0.0),
    "seconds": lambda: run_figures.seconds_by_part({"sampling": 2.0, "update": 1.0}),
}


@pytest.mark.parametrize("draw", DRAWINGS.values(), ids=DRAWINGS)
def test_same_rows_give_the_same_bytes(draw, tmp_path):
    figure = draw()
    for name, drawn in (("a", figure), ("b", figure), ("c", draw())):
        run_figures.save(drawn, tmp_path / "plots" / f"{name}.png")
    files = sorted((tmp_path / "plots").iterdir())
    assert [path.name for path in files] == ["a.png", "b.png", "c.png"]
    assert len({path.read_bytes() for path in files}) == 1
    assert files[0].read_bytes().startswith(b"\x89PNG")
    assert b"matplotlib" not in files[0].read_bytes().lower()


def test_failed_save_keeps_the_old_file(tmp_path):
    path = tmp_path / "curve.png"
    path.write_text("old")
    figure = run_figures.learning_curve(curve_rows(3))
    figure.axes[0].set_title(r"$\undefined$")  # drawing this raises
    with pytest.raises(ValueError, match="undefined"):
        run_figures.save(figure, path)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["curve.png"]
    with pytest.raises(ValueError, match=r"curve\.pdf: figures are saved as \.png"):
        run_figures.save(figure, tmp_path / "curve.pdf")


def test_matplotlib_loads_with_the_first_figure():
    program = (
        "import sys\n"
        "from flows.tracking import run_figures\n"
        "assert 'matplotlib' not in sys.modules\n"
        "run_figures.seconds_by_part({'update': 1.0})\n"
        "print('matplotlib.pyplot' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert (result.stdout, result.stderr) == ("False\n", "")
