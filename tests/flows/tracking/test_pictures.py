import pytest

from flows.tracking import pictures, run_figures


class Log:
    def __init__(self):
        self.files = {}

    def log_file(self, path):
        self.files[path.name] = path.read_bytes()


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Log figures of data; return what was logged, and how often it was drawn."""
    monkeypatch.chdir(tmp_path)
    times = []

    def log(seconds, recipe="toy"):
        def draw():
            times.append(seconds)
            return {"seconds_by_part": run_figures.seconds_by_part(seconds)}

        run = Log()
        pictures.log(run, recipe, "reinforce", seconds, draw)
        return run.files, len(times)

    return log


def test_drawn_once_for_equal_data(drawn, monkeypatch):
    files, times = drawn({"tools": 1.0, "update": 2.0})
    assert list(files) == ["seconds_by_part.png"]
    assert files["seconds_by_part.png"].startswith(b"\x89PNG")
    assert drawn({"update": 2.0, "tools": 1.0}) == (files, times)
    other, times = drawn({"tools": 1.0, "update": 3.0})
    assert (times, other == files) == (2, False)
    assert len(list(pictures.FOLDER.glob("toy/reinforce/*"))) == 1, "the older ones are gone"
    assert drawn({"tools": 1.0, "update": 3.0}, recipe="other")[1] == 3
    monkeypatch.setattr(pictures, "version", lambda _: "another version")
    assert drawn({"tools": 1.0, "update": 3.0})[1] == 4


def test_cut_while_drawing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = run_figures.seconds_by_part({"tools": 1.0})
    run = Log()
    with pytest.raises(AttributeError):
        pictures.log(run, "toy", "reinforce", 1, lambda: {"a": whole, "b": None})
    assert run.files == {}
    pictures.log(run, "toy", "reinforce", 1, lambda: {"b": whole})
    assert list(run.files) == ["b.png"], "what the cut one had drawn is gone"
