import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml
from prefect.cli.deploy._models import DeploymentConfig, PrefectYamlModel, WorkPoolConfig

from flows import retrain
from params.schema import Recipe
from tests import toy_project as toy

COMMAND = (sys.executable, "-m", "flows.retrain", "toy", "--here")
STAGES = yaml.safe_load((toy.ROOT / "dvc.yaml").read_text())["stages"]


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.02)


def test_a_run_its_tree_in_the_ui_and_the_calls_after_it(project, api, capsys):
    ran = toy.run(project, *COMMAND, PREFECT_API_URL=api)
    assert ran.returncode == 0, ran.stdout
    said = [line for line in ran.stdout.splitlines() if "has run" in line]
    assert said == ["first has run", "later has run"]
    table = Path("reports/toy/table.md").read_text()
    assert f"{table}\nto see the run    make ui\nto keep it        git add" in ran.stdout
    assert not Path(".beamline/prefect").exists(), "there was a server already"

    def read(path, **body):
        return httpx.post(f"{api}/{path}", json=body).json()

    parent = read("flow_runs/filter", flow_runs={"name": {"any_": ["retrain toy"]}})[0]
    tasks = read("task_runs/filter", flow_runs={"id": {"any_": [parent["id"]]}}, sort="NAME_DESC")
    assert [(task["name"], task["state_type"]) for task in tasks] == [
        ("later@toy", "COMPLETED"),
        ("first@toy", "COMPLETED"),
    ]
    graph = httpx.get(f"{api}/flow_runs/{parent['id']}/graph-v2").json()
    nodes = [(node["kind"], node["label"], node["state_type"]) for _, node in graph["nodes"]]
    assert nodes == [
        ("flow-run", "first / first toy", "COMPLETED"),
        ("flow-run", "later / later toy", "COMPLETED"),
    ]
    for _, node in graph["nodes"]:
        [inner] = read("task_runs/filter", flow_runs={"id": {"any_": [node["id"]]}})
        assert inner["state_type"] == "COMPLETED"

    began = time.monotonic()
    again = toy.run(project, *COMMAND, PREFECT_API_URL="http://127.0.0.1:9/api")  # nobody is there
    assert again.returncode == 0
    assert again.stdout == f"nothing to do: toy is up to date\n\n{table}\n"
    assert time.monotonic() - began < 10

    by_dvc = toy.run(project, "dvc", "repro", "later@toy")
    assert "has run" not in by_dvc.stdout
    assert "Data and pipelines are up to date." in by_dvc.stdout

    toy.write_recipe(project, evaluate__questions=2)
    by_dvc = toy.run(project, "dvc", "repro", "later@toy", PREFECT_API_URL=api)
    assert "later has run" in by_dvc.stdout
    assert "first has run" not in by_dvc.stdout
    assert retrain.main(["toy", "--here"]) == 0
    assert capsys.readouterr().out.startswith("nothing to do")


def test_a_killed_run_leaves_no_process_and_the_next_call_goes_on_to_where_a_stage_fails(project):
    before = "import time; Path('begun').touch(); time.sleep(60)"
    toy.write_stage(project, "later", flows=True, before=before)
    killed = subprocess.Popen(
        COMMAND,
        env=toy.environment(),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_until(Path("begun").exists)
    assert len(toy.processes(project)) == 4  # the run, its server, DVC and the stage
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    wait_until(lambda: toy.processes(project) == [], seconds=5)

    before = "raise ValueError('the seed is unlucky')"
    toy.write_stage(project, "later", flows=True, before=before)
    ran = toy.run(project, *COMMAND)
    assert "first has run" not in ran.stdout, "it had ended"
    assert ran.returncode == 1
    assert ran.stdout.splitlines()[-1] == "later toy: the seed is unlucky"
    assert "Traceback" not in ran.stdout
    assert toy.processes(project) == []


def test_an_interrupted_run_says_so_and_leaves_no_process(project, api):
    before = "import time; Path('begun').touch(); time.sleep(60)"
    toy.write_stage(project, "first", flows=True, before=before)
    process = subprocess.Popen(
        COMMAND,
        env=toy.environment(PREFECT_API_URL=api),
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    wait_until(Path("begun").exists)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "first toy: interrupted\n" in said
    assert said.splitlines()[-1] == "retrain: interrupted; the next call goes on from here"
    assert "Traceback" not in said
    assert toy.processes(project) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["toy"], "retrain: runs in a worktree of their own are still to come: add --here"),
        (["mine", "--here"], "retrain: no recipe 'mine'"),
        (["toy", "--here"], "retrain: params/toy.yaml: unknown key 'evaluate.colour'"),
    ],
)
def test_what_cannot_start_is_said_before_anything_starts(project, capsys, arguments, said):
    toy.write_recipe(project, evaluate__colour="blue")
    assert retrain.main(arguments) == 2
    assert capsys.readouterr().err.startswith(said)
    assert not Path(".beamline").exists()


@pytest.mark.parametrize("stage", STAGES)
def test_the_parameters_of_a_stage_are_sections_of_a_recipe(stage):
    files = STAGES[stage]["do"]["params"]
    sections = next(keys for file in files for path, keys in file.items() if "${item}" in path)
    for section in sections:
        assert section.split(".")[0] in Recipe.model_fields


def test_every_recipe_of_the_pipeline_is_there():
    recipes = yaml.safe_load((toy.ROOT / "dvc.yaml").read_text())["vars"][0]["recipes"]
    assert all((toy.ROOT / "params" / f"{recipe}.yaml").is_file() for recipe in recipes)


def test_prefect_yaml_has_only_keys_that_prefect_reads():
    """Prefect itself ignores the others without a word."""
    content = yaml.safe_load((toy.ROOT / "prefect.yaml").read_text())
    assert set(content) <= set(PrefectYamlModel.model_fields)
    for deployment in content["deployments"]:
        assert set(deployment) <= set(DeploymentConfig.model_fields)
        assert set(deployment["work_pool"]) <= set(WorkPoolConfig.model_fields)
        assert deployment["entrypoint"] == "flows/retrain.py:retrain"
        assert set(deployment["parameters"]) <= set(retrain.retrain.parameters.properties)
