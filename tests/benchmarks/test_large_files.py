"""The benchmark of large files: its questions are sound, and memory and time are found."""

from benchmarks import large_files as bench


def test_small_file_is_prepared_and_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "TESTS", 20)
    found = bench.measure_apart(1500, tmp_path)
    assert found["kept"] == 1300, "all but those for validation"
    assert found["seconds"] > 0 and found["peak_mib"] > 0
    assert not list(tmp_path.iterdir()), "the folder of the measurement is gone"
    assert "| 1,500 |" in bench.table([found])
