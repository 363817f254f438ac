import pytest

from flows.tracking import curve_file, paper_figures

HEAD = "iteration,success,tool_calls,episode_steps,validation_success\n"
TRAINED = ["0,0.25,3,1.5,0.1\n", "1,0.5,4,2,\n"]
VALIDATED = "2,,,,0.3\n"  # the last policy: asked, but no iteration has begun with it


@pytest.fixture
def curve(tmp_path):
    """Read a file with these lines as the curve of a training."""

    def read(*lines):
        file = tmp_path / "curve.csv"
        file.write_text("".join(lines))
        return curve_file.of_training(curve_file.read(file))

    return read


@pytest.mark.parametrize(
    ("lines", "success", "drawn"),
    [
        ([HEAD, *TRAINED], [0.25, 0.5], {"success_by_calls", "episode_length"}),
        ([HEAD, *TRAINED, VALIDATED], [0.25, 0.5], {"success_by_calls", "episode_length"}),
        ([HEAD, VALIDATED, *TRAINED], [0.25, 0.5], {"success_by_calls", "episode_length"}),
        ([HEAD, TRAINED[0]], [0.25], {"success_by_calls", "episode_length"}),
        ([HEAD, TRAINED[0], "1,nan,4,inf\n"], [0.25, None], {"success_by_calls", "episode_length"}),
        ([HEAD, TRAINED[0], "1,0.5,,2,\n"], [0.25, 0.5], {"success_by_calls", "episode_length"}),
        ([HEAD, "0,,3,1,\n", "1,,4,1,\n"], None, {"episode_length"}),
        (["iteration,success,reward\n", "0,0.5,1\n", "1,"], [0.5], set()),
        ([HEAD, VALIDATED], None, set()),
        ([HEAD], None, set()),
        ([], None, set()),
    ],
)
def test_curves_of_all_kinds_are_read_and_drawn(curve, lines, success, drawn):
    trained = curve(*lines)
    read = trained.get("success")
    assert (read and [None if value != value else value for value in read]) == success
    assert not [name for name in trained if name.startswith("validation")]
    numbers = [1.0, 2.0][: len(trained.get("iteration", ()))]
    figures = paper_figures.of_run({**trained, "iteration": numbers} if numbers else {})
    assert figures.keys() == drawn


def test_a_word_for_a_number_is_named(curve):
    with pytest.raises(ValueError, match=r"curve\.csv, line 3: 'success' is 'half'"):
        curve(HEAD, TRAINED[0], "1,half,4,2,\n")


def test_missing_file_has_no_curve(tmp_path):
    assert curve_file.read(tmp_path / "curve.csv") == {}
