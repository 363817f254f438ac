"""The papers' figures, from plain data."""

import numpy as np
import pytest

from flows.tracking import paper_figures
from tasks.comparison import figure_data


def note(figure):
    return figure.get_supxlabel()


def test_advantages_of_seeds_with_other_numbers_of_updates_share_a_panel():
    seeds = [
        [figure_data.histogram(i, np.array([-9.0, 0.1, 0.1])) for i in own]
        for own in ((1, 3), (2, 4))
    ]
    figure = paper_figures.advantages({"gagpo": seeds, "old": []})
    assert len(figure.axes) == 2
    (line,) = figure.axes[0].get_lines()
    assert line.get_label() == "gagpo, update 2 or 3"
    assert np.asarray(line.get_ydata())[0] == pytest.approx(100 / 3), (
        "the end counts what is beyond"
    )
    assert note(figure) == "12 advantages in 32 bins; 2 seeds"


def test_curves_are_drawn_against_what_was_spent_with_points_and_seeds():
    curves = {
        "a": [{"success": [0.5] * 6, "tool_calls": [10.0 * (i + 1) for i in range(6)]}] * 2,
    }
    figure = paper_figures.curves_by(curves, ["success", "entropy"], "tool_calls", "A title")
    (axes,) = figure.axes
    assert axes.get_xlabel() == "executed tool calls spent in training"
    assert axes.get_lines()[0].get_xdata()[[0, -1]].tolist() == [50, 60]
    assert "12 iterations; 2 seeds" in note(figure)
    with pytest.raises(ValueError, match="nothing to draw"):
        paper_figures.curves_by(curves, ["entropy"], "tool_calls", "A title")


def test_training_dynamics_have_the_spread_and_the_extrema_of_the_advantages():
    """GAGPO's figure 4."""
    curve = {"success": [0.5] * 6, "advantage_min": [-2.0] * 6, "advantage_max": [3.0] * 6}
    curve |= {"advantage_spread": [1.0] * 6}
    figure = paper_figures.curves_by({"gagpo": [curve]}, paper_figures.DYNAMICS, "iteration", "T")
    drawn = {axes.get_ylabel(): axes.get_lines()[0].get_ydata()[-1] for axes in figure.axes}
    assert drawn["smallest advantage"] == pytest.approx(-2)
    assert drawn["largest advantage"] == pytest.approx(3)
    assert len(drawn) == 3


def test_what_gets_credit_of_its_own_is_counted():
    rows = [
        {"kept": True, "advantages": [1.0, 1.0, 2.0], "segments": [0, 0, 1]},
        {"kept": False, "advantages": None, "segments": None},
    ]
    found = {unit: figure_data.credited(rows, unit).tolist() for unit in ("leaf", "step", "token")}
    assert found == {"leaf": [1], "step": [1, 2], "token": [1, 1, 2]}


def test_pass_at_k_is_kept_where_there_are_several_answers():
    row = {"tool_calls": 2, "tool_errors": 0, "response_tokens": 9}
    several = [[{**row, "success": right} for right in (True, False)]] * 2
    assert figure_data.of_answers(several)["pass_at"] == {"1": [0.5, 0.5], "2": [1, 1]}
    assert figure_data.of_answers([own[:1] for own in several])["pass_at"] == {}
