import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml
from prefect.context import refresh_global_settings_context

from flows.commands import retrain
from flows.host import disk
from params.schema.recipe import Recipe
from tests import toy_project as toy
from tests.checkout import others_parent
from tests.waiting import wait_until

OTHER_TOOL = "Write <search>words</search>."  # which the recipe lacks
COMMAND = (sys.executable, "-m", "flows.retrain", "toy", "--here")
STAGES = yaml.safe_load((toy.ROOT / "dvc.yaml").read_text())["stages"]


@pytest.fixture
def project(project, empty_store):
    """The toy project with an MLflow store that has no runs yet."""
    (project / ".beamline").mkdir()
    (project / ".beamline/mlflow.db").write_bytes(empty_store)
    return project


def test_a_run_its_tree_in_the_ui_and_the_calls_after_it(project, api, capsys):
    toy.write_recipe(project, dialogue__system=OTHER_TOOL)
    ran = toy.run(project, *COMMAND, PREFECT_API_URL=api)
    assert ran.returncode == 0, ran.stdout
    warned = "retrain: params/toy.yaml: 'dialogue.system' shows the tags <search>, which"
    assert ran.stdout.count(warned) == 1, "what contradicts stops nothing"
    said = [line for line in ran.stdout.splitlines() if "has run" in line]
    assert said == ["first has run", "later has run"]
    table = Path("reports/toy/table.md").read_text()
    assert f"{table}\nto see the run    make ui\nto keep it        git add" in ran.stdout
    assert not Path(".beamline/prefect").exists(), "there was a server already"

    def read(path, **body):
        return httpx.post(f"{api}/{path}", json=body).json()

    named = {"name": {"any_": ["retrain toy"]}}
    parent = read("flow_runs/filter", flow_runs=named, sort="START_TIME_DESC")[0]
    tasks = read("task_runs/filter", flow_runs={"id": {"any_": [parent["id"]]}}, sort="NAME_DESC")
    assert [(task["name"], task["state_type"]) for task in tasks] == [
        ("later@toy", "COMPLETED"),
        ("first@toy", "COMPLETED"),
    ]
    graph = httpx.get(f"{api}/flow_runs/{parent['id']}/graph-v2").json()
    nodes = [(node["kind"], node["label"], node["state_type"]) for _, node in graph["nodes"]]
    assert nodes == [
        ("flow-run", "first / toy: first", "COMPLETED"),
        ("flow-run", "later / toy: later", "COMPLETED"),
    ]
    for _, node in graph["nodes"]:
        [inner] = read("task_runs/filter", flow_runs={"id": {"any_": [node["id"]]}})
        assert inner["state_type"] == "COMPLETED"

    slow = "from flows import retrain; import sys; retrain.main(['toy', '--here']); " + (
        "print({'prefect', 'mlflow', 'torch', 'pandas'} & {*sys.modules})"
    )
    again = toy.run(project, sys.executable, "-c", slow)
    up_to_date = f"nothing to do: toy is up to date\n\n{table}\n"
    assert again.stdout == f"{up_to_date}set()\n", "it needs none of these, and no server"
    assert toy.repro(project, "later@toy") == [], "so it is for DVC itself"

    toy.write_recipe(project, evaluate__questions=2, dialogue__system=OTHER_TOOL)
    by_dvc = toy.run(project, "dvc", "repro", "later@toy", PREFECT_API_URL=api)
    assert "later has run" in by_dvc.stdout
    assert "first has run" not in by_dvc.stdout
    assert retrain.main(["toy", "--here"]) == 0
    assert capsys.readouterr().out.startswith("nothing to do")


@pytest.mark.kills
def test_a_killed_run_leaves_no_process_and_the_next_call_goes_on_to_where_a_stage_fails(project):
    before = "import time; Path('begun').touch(); time.sleep(600)"
    toy.write_stage(project, "later", flows=True, before=before)
    killed = subprocess.Popen(
        COMMAND,
        env=toy.environment(),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_until(Path("begun").exists)
    # the run, the process with the libraries, and server, DVC and stage with a child of it each
    assert len(toy.processes(project)) == 8
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    wait_until(lambda: toy.processes(project) == [])

    before = "raise ValueError('the seed is unlucky')"
    toy.write_stage(project, "later", flows=True, before=before)
    ran = toy.run(project, *COMMAND, **others_parent())
    assert "first has run" not in ran.stdout, "it had ended"
    assert ran.returncode == 1
    assert ran.stdout.splitlines()[-1] == "later toy: the seed is unlucky"
    assert "Traceback" not in ran.stdout
    assert toy.processes(project) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["Ctrl-C", "hang-up"])
def test_an_interrupted_run_says_so_and_leaves_no_process(project, api, number):
    before = "import time; Path('begun').touch(); time.sleep(600)"
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
    os.killpg(process.pid, number)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "first toy: interrupted\n" in said
    assert said.splitlines()[-1] == "retrain: interrupted; the next call goes on from here"
    assert "Traceback" not in said
    assert toy.processes(project) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["toy", "--here", "--set", "seed=4"], "retrain: --set changes a worktree's recipe"),
        (["toy"], "retrain: there is no commit yet that could be run"),
        (["mine", "--here"], "retrain: no recipe 'mine'"),
        (["toy", "--here"], "retrain: params/toy.yaml: unknown key 'evaluate.colour'"),
    ],
)
def test_what_cannot_start_is_said_before_anything_starts(project, capsys, arguments, said):
    toy.write_recipe(project, evaluate__colour="blue")
    assert retrain.main(arguments) == 2
    assert capsys.readouterr().err.startswith(said)
    assert [path.name for path in Path(".beamline").iterdir()] == ["mlflow.db"]


def test_a_device_that_is_not_here_is_said_before_anything_starts(project, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    toy.write_recipe(project, machine__device="cuda")
    toy.commit(project)
    for arguments in (["toy", "--here"], ["toy"]):
        assert retrain.main(arguments) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("retrain: params/toy.yaml: 'machine.device' = 'cuda': torch ")
    assert not Path("dvc.lock").exists() and not Path(".beamline/runs").exists()


def test_a_pipe_among_the_inputs_is_refused_before_it_is_read(project, capsys):
    Path("data/sources/toy").mkdir(parents=True)
    os.mkfifo("data/sources/toy/train.jsonl")
    Path("data/sources/toy/kernel.jsonl").symlink_to("/proc/kmsg")
    Path("params/mine.yaml").symlink_to("/proc/kmsg")
    Path("own").mkdir()
    Path("own/tool.py").symlink_to("/dev/zero")
    assert retrain.main(["toy", "--here"]) == 2
    assert [line.partition(" is ")[0] for line in capsys.readouterr().err.splitlines()] == [
        "retrain: data/sources/toy/kernel.jsonl",
        "data/sources/toy/train.jsonl",
        "params/mine.yaml",
        "own/tool.py",
    ]


def test_files_in_use_and_a_missing_repository_are_said_with_a_remedy(project, capsys):
    lock = Path(".dvc/tmp/rwlock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    holder = {"pid": os.getpid(), "cmd": "beamline retrain toy --here"}
    everything = {str(project): holder}
    lock.write_text(json.dumps({"read": {}, "write": everything}))
    assert retrain.main(["toy", "--here"]) == 2
    said = capsys.readouterr().err
    assert f"in use (process {os.getpid()}): wait until it has ended, or run as a commit" in said
    lock.unlink()
    Path(".git").rename("elsewhere")
    for arguments in (["toy", "--here"], ["toy"]):
        assert retrain.main(arguments) == 2
        assert "is in no git repository" in capsys.readouterr().err


# ---------------------------------------------------------------- a run as a commit

RUN = COMMAND[:-1]


def begin(project, *changes, **environment):
    """Start a run in a process group of its own."""
    return subprocess.Popen(
        [*RUN, *changes],
        env=toy.environment(**environment),
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def worktrees(project):
    return sorted(path for path in (project / ".beamline/runs").glob("*") if path.is_dir())


def state(project):
    """What a run must leave as it is: the user's files, branch and index."""
    files = {
        path: path.read_bytes()
        for path in project.rglob("*")
        if path.is_file() and not {".git", ".beamline", "cache", "tmp"} & set(path.parts)
    }
    return files, toy.git(project, "status", "--porcelain"), toy.git(project, "branch", "--show")


def test_two_runs_side_by_side_become_commits_and_the_checkout_stays_as_it_is(project, api):
    before = "import time; time.sleep(2)"
    toy.write_stage(project, "later", flows=True, before=before)
    base = toy.commit(project)
    Path("notes.txt").write_text("of the user, untracked\n")
    was = state(project)
    two = begin(project, "--set", "evaluate.questions=2", PREFECT_API_URL=api)
    changes = ("evaluate.questions=3", "seed=4", "algorithm.clip.low=0.1")
    three = begin(project, "--set", *changes, PREFECT_API_URL=api)
    said = [process.communicate(timeout=600)[0] for process in (two, three)]
    assert (two.returncode, three.returncode) == (0, 0), said
    assert state(project) == was
    assert worktrees(project) == []
    assert toy.git(project, "worktree", "list").count("\n") == 0
    for text, questions, seed in zip(said, (2, 3), (3, 4), strict=True):
        branch = text.splitlines()[-1]
        assert branch.startswith("runs/toy-")
        assert "make ui" not in text
        assert toy.git(project, "rev-parse", f"{branch}^") == base
        changed = toy.git(project, "diff", "--name-only", base, branch).splitlines()
        table = ["params/algorithms.yaml"] if seed == 4 else []
        assert changed == ["dvc.lock", *table, "params/toy.yaml", "reports/toy/table.md"]
        recipe = yaml.safe_load(toy.git(project, "show", f"{branch}:params/toy.yaml"))
        assert (recipe["evaluate"]["questions"], recipe["seed"]) == (questions, seed)
        locked = yaml.safe_load(toy.git(project, "show", f"{branch}:dvc.lock"))["stages"]
        assert set(locked) == {"first@toy", "later@toy"}
        message = toy.git(project, "log", "-1", "--format=%B", branch)
        assert f"Set: evaluate.questions={questions}" in message.splitlines()
        assert message.startswith("Run of toy\n")
    store = sqlite3.connect(".beamline/mlflow.db")
    names = [name for (name,) in store.execute("select name from runs")]
    assert sum(name.startswith("toy ") for name in names) == 2, "in the checkout's own store"


@pytest.mark.kills
def test_a_killed_run_goes_on_in_its_worktree_and_an_equal_one_is_nothing_new(project, api):
    before = "import time; Path('begun').touch(); time.sleep(0 if Path('go').exists() else 600)"
    toy.write_stage(project, "later", flows=True, before=before)
    toy.commit(project)
    killed = begin(project, PREFECT_API_URL=api)
    wait_until(lambda: any((place / "begun").exists() for place in worktrees(project)))
    [place] = worktrees(project)
    assert toy.processes(place), "the stages run in the worktree"
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    wait_until(lambda: toy.processes(place) == [])

    (place / "go").touch()
    others = {"PREFECT_API_URL": api, **others_parent()}
    other = toy.run(project, *RUN, "--set", "seed=4x", **others)
    assert "params/toy.yaml: 'seed' = '4x'" in other.stdout
    ran = toy.run(project, *RUN, **others)
    assert ran.returncode == 0, ran.stdout
    assert "first has run" not in ran.stdout, "it had ended"
    branch = ran.stdout.splitlines()[-1]
    assert branch == f"runs/{place.name}"
    assert worktrees(project) == []
    assert list(Path(".beamline/runs").iterdir()) == []

    again = toy.run(project, *RUN, **others)
    assert again.stdout.splitlines()[-2:] == [f"nothing new since {branch}", branch]
    assert toy.git(project, "branch", "--list", "runs/*").count("runs/") == 1


def test_a_failed_run_goes_on_and_what_was_cut_after_its_commit_only_ends(
    project, api, monkeypatch, capfd, tmp_path
):
    """It fails in a stage, then in the registry, then in the push to the default remote."""
    remote = tmp_path / ".beamline/remote"
    toy.set_remote(project, str(remote))
    remote.write_text("no folder")
    toy.write_stage(project, "later", flows=True, before="raise ValueError('unlucky')")
    toy.commit(project)
    monkeypatch.setenv("PREFECT_API_URL", api)
    refresh_global_settings_context()
    assert retrain.main(["toy"]) == 1
    [place] = worktrees(project)
    said = capfd.readouterr().err
    assert "later toy: unlucky" in said
    assert f"retrain: the run is unfinished in {place}; the same call goes on there" in said

    toy.write_stage(place, "later", flows=True)
    followed = []

    def cut(recipe, commit):
        followed.append((recipe, commit))
        raise RuntimeError("the registry is away")

    with monkeypatch.context() as patch:
        patch.setattr(retrain, "after_commit", cut)
        assert retrain.main(["toy"]) == 1
    [(recipe, commit)] = followed
    assert recipe == "toy"
    branch = f"runs/{place.name}"
    assert toy.git(project, "rev-parse", branch) == commit

    capfd.readouterr()
    assert retrain.main(["toy"]) == 1
    assert worktrees(project) == [place]
    said = capfd.readouterr()
    assert f"{branch} is there, but dvc push failed" in said.err
    assert "Running stage" not in said.out

    remote.unlink()
    assert retrain.main(["toy"]) == 0
    said = capfd.readouterr().out
    assert said.splitlines()[-1] == branch
    assert "Running stage" not in said
    assert toy.git(project, "rev-parse", branch) == commit
    assert worktrees(project) == []
    pushed = [path for path in remote.rglob("*") if path.is_file()]
    assert any("runs" in path.parts for path in pushed), "the memory of runs"
    assert {path.read_text() for path in pushed if "files" in path.parts} == {"first\n", "later\n"}

    later = remote.with_name("later")
    toy.set_remote(project, str(later))
    toy.write_stage(project, "later", flows=True)
    toy.commit(project, "another remote, and the code of the run")
    assert retrain.main(["toy"]) == 0
    assert f"nothing new since {branch}" in capfd.readouterr().out
    sent = {path.read_text() for path in later.glob("files/md5/*/*")}
    assert sent == {"first\n", "later\n"}, "a remote that is set later gets earlier runs"


def test_changed_and_unknown_files_are_refused_with_a_remedy(project, capsys):
    toy.commit(project)
    toy.write_recipe(project, seed=9)
    Path("first.py").unlink()
    Path("reports/toy").mkdir(parents=True)  # what runs write is no such change
    assert retrain.main(["toy"]) == 2
    said = capsys.readouterr().err
    assert "these files differ from the last commit: commit them, stash them" in said
    assert said.splitlines()[1:] == ["   D first.py", "   M params/toy.yaml"]
    toy.run(project, "git", "checkout", "--quiet", ".")

    Path("params/mine.yaml").write_text(Path("params/toy.yaml").read_text())
    for arguments, remedy in {
        ("mine",): "params/mine.yaml is in no commit yet: git add and commit it",
        ("toy", "--set", "seed"): "--set seed: write it as section.key=value",
        ("toy", "--set", "evaluate.questions=-1"): "params/toy.yaml: 'evaluate.questions' = -1",
        ("your", "--set", "seed=1"): "no recipe 'your'",
    }.items():
        assert retrain.main(list(arguments)) == 2
        assert capsys.readouterr().err.startswith(f"retrain: {remedy}"), arguments
    assert [path.name for path in Path(".beamline").iterdir()] == ["mlflow.db"]


def test_the_headline_of_a_run_is_the_success_of_the_trained_agent(tmp_path):
    file = tmp_path / "metrics.json"
    assert retrain.headline(file) == ""
    file.write_text('{"success": {"trained": {"mean": 0.731, "low": 0.7, "high": 0.75}}}')
    assert retrain.headline(file) == "success 73.1 % [70.0, 75.0]"


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        (["verdict@tiny"], "verdict"),
        (["evaluate@tiny", "reinforce@tiny"], "reinforce"),
        (["cold_start@tiny", "prepare@tiny"], "prepare"),
    ],
)
def test_disk_is_checked_for_the_first_stage_that_runs_and_all_behind_it(changed, first):
    stages = retrain.from_the_first_of(changed)
    assert stages == disk.STAGES[disk.STAGES.index(first) :]


@pytest.mark.parametrize("stage", STAGES)
def test_the_parameters_of_a_stage_are_sections_of_a_recipe(stage):
    files = STAGES[stage]["do"]["params"]
    sections = next(keys for file in files for path, keys in file.items() if "${item}" in path)
    for section in sections:
        assert section.split(".")[0] in Recipe.model_fields


def test_every_recipe_of_the_pipeline_is_there():
    recipes = yaml.safe_load((toy.ROOT / "dvc.yaml").read_text())["vars"][0]["recipes"]
    assert all((toy.ROOT / "params" / f"{recipe}.yaml").is_file() for recipe in recipes)
