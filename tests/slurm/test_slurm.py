"""The recipe smoke under deploy/slurm, on a real cluster of one machine."""

import re
import sys
from pathlib import Path

import pytest

from tests.checkout import call, checkout

RUN = "deploy/slurm/run.sbatch"
VENV = str(Path(sys.executable).parents[1])


def submitted(folder, slurm, *arguments, **variables):
    """Wait for a job; its exit status, and its output."""
    command = ["sbatch", "--wait", *arguments]
    done = call(folder, *command, VENV=VENV, OMP_NUM_THREADS="1", **(slurm | variables))
    (job,) = re.findall(r"Submitted batch job (\d+)", done.stdout)
    return done.returncode, (folder / f"slurm-{job}.log").read_text()


@pytest.fixture
def project(tmp_path):
    checkout(tmp_path)
    return tmp_path


@pytest.mark.parametrize("processes", [1, 2])
def test_smoke_under_slurm(project, slurm, processes):
    recipe = project / "params/smoke.yaml"
    recipe.write_text(recipe.read_text().replace("processes: 1", f"processes: {processes}"))
    status, output = submitted(project, slurm, RUN, "smoke")
    assert status == 0, output
    assert "success" in (project / "reports/smoke/table.md").read_text()
    started = (project / ".beamline/learners.log").exists()
    assert started == (processes > 1)
    status, output = submitted(project, slurm, RUN, "smoke")
    assert status == 0 and "nothing to do" in output


def test_dry_run_shows_servers_and_starts_nothing(project, slurm):
    status, output = submitted(project, slurm, RUN, "tiny-vllm", DRY="1")
    assert "beamline retrain tiny-vllm --here" in output
    assert not (project / "data/tiny-vllm").exists()
    status, output = submitted(project, slurm, RUN, "tiny-vllm", DRY="1", SERVERS="1")
    assert status == 2 and "one has to learn" in output
