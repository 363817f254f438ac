"""The benchmark of growth: exponents are those of known curves, and a small run is whole."""

import json

import pytest

from benchmarks import scaling as bench


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_exponent_of_a_power_is_found_whatever_its_factor(power):
    x = (4, 8, 16, 32, 64)
    found = bench.curve(x, [0.3 * value**power for value in x], 0.0)
    assert found["exponent"] == found["last"] == power


def test_what_cannot_be_seen_has_no_exponent():
    assert bench.curve((1, 2, 4), [-0.1, 0.0, 0.7], 1.0)["exponent"] == 0


def test_a_constant_cost_weighs_least_at_the_end():
    x = (4, 8, 16, 32, 64)
    found = bench.curve(x, [100 + value**2 for value in x], 0.0)
    assert found["exponent"] < found["last"] < 2


def test_small_run_writes_file_and_picture(tmp_path):
    small = bench.Size(leaves=4, turn=8, questions=1, hidden=16)
    sweeps = {"leaves of a tree": ("leaves", (4, 8)), "vocabulary": ("vocabulary", (512, 4096))}
    found = bench.everything(sweeps, (4, 16), 1, small)
    file, picture = tmp_path / "scaling.json", tmp_path / "scaling.png"
    bench.write(found, file, picture)
    read = json.loads(file.read_text())
    for name, x in (("leaves of a tree", [4, 8]), ("vocabulary", [512, 4096])):
        for part in bench.PARTS:
            assert read["sweeps"][name]["seconds"][part]["x"] == x
            assert min(read["sweeps"][name]["seconds"][part]["y"]) > 0
            assert f"{read['sweeps'][name]['mib'][part]['exponent']:.2f}" in bench.table(found)
    memory = read["sweeps"]["vocabulary"]["mib"]["update"]["y"]
    assert memory[1] > memory[0], "logits of a larger vocabulary take more"
    alone, beaming = (read["beaming"]["tokens"][way] for way in list(bench.WAYS)[:2])
    assert 0.8 < alone["exponent"] < 1.2, "trajectories that share nothing"
    assert all(less < more for less, more in zip(beaming["y"], alone["y"], strict=True))
    assert picture.stat().st_size > 1000
