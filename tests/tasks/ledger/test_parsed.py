import pytest

from tasks.ledger import keys, parsed

SOURCE = """import tasks.trees.tree
from params import overrides

def f():
    'why'
    return 1
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own, and a function that forgets what this process has read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def forget():
        parsed._entries.cache_clear()
        keys._parsed_source.cache_clear()

    forget()
    yield forget
    forget()


def file_of(folder):
    (file,) = (folder / "beamline").glob("parsed-*.tsv")
    return file


def test_another_process_finds_what_was_parsed(cache, tmp_path, monkeypatch):
    made = keys._parsed_source(SOURCE, False)
    assert made[0] == ("tasks.trees.tree", "params", "params.overrides")
    assert made != keys._parsed_source(SOURCE, True), "docstrings count there"
    assert made != keys._parsed_source(SOURCE.replace("1", "2"), False)
    cache()
    monkeypatch.setattr(keys, "_parse", None)  # nothing is parsed
    assert keys._parsed_source(SOURCE, False) == made


def test_other_code_that_parses_finds_nothing(cache, tmp_path, monkeypatch):
    keys._parsed_source(SOURCE, False)
    cache()
    monkeypatch.setattr(keys, "_parser", lambda: "another")
    monkeypatch.setattr(keys, "_parse", lambda *_: ((), "anew"))
    assert keys._parsed_source(SOURCE, False) == ((), "anew")


@pytest.mark.parametrize("length", [1, 20, 40, 60, -1])
def test_a_half_written_line_is_ignored(cache, tmp_path, length):
    made = keys._parsed_source(SOURCE, False)
    file = file_of(tmp_path)
    line = file.read_text()
    file.write_text(line[:length])
    cache()
    assert keys._parsed_source(SOURCE, False) == made, "it is parsed again"
    cache()
    assert keys._parsed_source(SOURCE + "2\n", False)[1] != made[1]
    cache()
    assert keys._parsed_source(SOURCE, False) == made


def test_a_folder_that_cannot_be_written_costs_time_only(cache, tmp_path, monkeypatch):
    made = keys._parsed_source(SOURCE, False)
    cache()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert keys._parsed_source(SOURCE, False) == made
