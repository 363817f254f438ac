import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from flows.runs import cache as version
from flows.runs import dvc_command, pipeline
from tasks.ledger import artifacts, keys
from tests import toy_project as toy

ROOT = toy.ROOT


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A toy project without Prefect, as the working folder."""
    folder = tmp_path.resolve()
    toy.create(folder, flows=False)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv(dvc_command.PARENT, raising=False)
    return folder


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.02)


# ---------------------------------------------------------------- what DVC knows


def test_stages_come_in_the_order_of_the_graph_with_what_prefect_needs(project):
    first, later = pipeline.stages("toy")
    assert (first.name, later.name) == ("first@toy", "later@toy")
    assert later.timeout_seconds == 60
    assert (first.retries, first.timeout_seconds) == (0, None)


def test_a_recipe_without_stages_is_an_error_that_says_where_to_add_it(project):
    with pytest.raises(ValueError, match=r"dvc\.yaml has no stage for the recipe 'mine': add it"):
        pipeline.status("mine")


def test_a_meta_key_that_nothing_reads_is_an_error(project):
    text = Path("dvc.yaml").read_text().replace("timeout_seconds", "timeout")
    Path("dvc.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"later@toy: meta has unknown keys \['timeout'\]"):
        pipeline.stages("toy")


def test_a_folder_without_a_dvc_project_is_an_error_that_names_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"DVC cannot read the pipeline of {tmp_path}"):
        pipeline.stages("toy")


def test_status_names_what_would_run_and_why_and_a_changed_value_only_its_reader(project, capfd):
    assert list(pipeline.status("toy")) == ["first@toy", "later@toy"]
    for stage in pipeline.stages("toy"):
        dvc_command.reproduce(stage.name)
    assert pipeline.status("toy") == {}

    toy.write_recipe(project, evaluate__questions=2, cold_start__steps=7)
    assert pipeline.status("toy") == {"later@toy": ["params/toy.yaml evaluate.questions: modified"]}
    capfd.readouterr()
    for stage in pipeline.stages("toy"):
        dvc_command.reproduce(stage.name)
    said = capfd.readouterr().out
    assert "later has run" in said
    assert "first has run" not in said

    Path("data/toy/first").unlink()
    assert pipeline.status("toy")["first@toy"] == ["data/toy/first: deleted"]
    Path("first.py").write_text(Path("first.py").read_text() + "# changed\n")
    assert "first.py: modified" in pipeline.status("toy")["first@toy"]


def test_digests_are_those_of_dvc_lock(project):
    assert pipeline.digests("first@toy") == {}
    dvc_command.reproduce("first@toy")
    # md5 of "first\n"
    assert pipeline.digests("first@toy") == {"data/toy/first": "eb260e9ae827821beceeed4104f0ad89"}
    assert pipeline.digests("later@toy") == {}


# ---------------------------------------------------------------- what was run before


def git(*arguments):
    user = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    ran = subprocess.run(["git", *user, *arguments], capture_output=True, text=True, check=True)
    return ran.stdout.strip()


def commit(message):
    git("add", "--all")
    git("commit", "--quiet", "--message", message)
    return git("rev-parse", "HEAD")


def keep_run(name="runs/toy-20261121-a"):
    """Run the toy's stages and commit them on a branch, as a retraining does."""
    for stage in pipeline.stages("toy"):
        dvc_command.reproduce(stage.name)
    git("checkout", "--quiet", "-B", name)
    return commit("a run")


# ---------------------------------------------------------------- whether anything is new


def test_a_run_of_what_is_here_is_found_until_something_changes(project):
    assert pipeline.already_run("toy") is None
    keep_run()
    assert pipeline.already_run("toy") == "runs/toy-20261121-a"
    for out in ("data", "reports"):
        shutil.rmtree(out)
    Path("dvc.lock").unlink()
    assert pipeline.already_run("toy") == "runs/toy-20261121-a"
    git("worktree", "add", "--quiet", "--detach", ".beamline/runs/next")
    assert pipeline.already_run("toy", Path(".beamline/runs/next")) == "runs/toy-20261121-a"
    assert Path.cwd() == project

    toy.write_recipe(project, cold_start__steps=7)
    assert pipeline.already_run("toy"), "no stage reads it"
    toy.write_recipe(project, evaluate__questions=2)
    assert pipeline.already_run("toy") is None
    toy.write_recipe(project)
    assert pipeline.already_run("toy")

    text = Path("later.py").read_text()
    Path("later.py").write_text(text + "# changed\n")
    assert pipeline.already_run("toy") is None
    Path("later.py").unlink()
    assert pipeline.already_run("toy") is None
    Path("later.py").write_text(text)
    Path("dvc.yaml").write_text(Path("dvc.yaml").read_text().replace("exec python", "python"))
    assert pipeline.already_run("toy") is None


def test_an_older_run_counts_and_those_of_other_recipes_and_other_branches_do_not(project):
    keep_run()
    toy.write_recipe(project, evaluate__questions=2)
    keep_run("runs/toy-20261122-b")
    toy.write_recipe(project)
    assert pipeline.already_run("toy") == "runs/toy-20261121-a"
    git("branch", "-m", "runs/toy-20261121-a", "runs/toy-search-20261121-a")
    assert pipeline.already_run("toy") is None
    git("branch", "-m", "runs/toy-search-20261121-a", "toy-20261121-a")
    assert pipeline.already_run("toy") is None


def test_another_champion_alone_is_nothing_new(project):
    text = Path("dvc.yaml").read_text()
    stage = (
        "  champion:\n    foreach: ${recipes}\n    do:\n"
        "      cmd: mkdir -p data && touch data/champion-${item}\n"
        "      params:\n        - params/${item}.yaml:\n            - champion\n"
        "      outs:\n        - data/champion-${item}\n"
    )
    Path("dvc.yaml").write_text(text + stage)
    keep_run()
    toy.write_recipe(project, champion={"version": 1, "commit": None, "digest": "a" * 32 + ".dir"})
    assert list(pipeline.status("toy")) == ["champion@toy"]
    assert pipeline.already_run("toy") == "runs/toy-20261121-a"


# ---------------------------------------------------------------- folders by their digest


@pytest.fixture
def kept(project):
    """A folder in DVC's cache, and its digest."""
    folder = Path("policy")
    (folder / "inner").mkdir(parents=True)
    (folder / "weights").write_text("w" * 100)
    (folder / "inner/config.json").write_text("{}")
    return folder, version.keep(folder)


def weights(cache):
    """The file of the cache that holds them."""
    files = [path for path in cache.rglob("*") if path.is_file()]
    return next(path for path in files if path.read_text() == "w" * 100)


def dvc(*arguments):
    ran = toy.run(Path.cwd(), "dvc", *arguments)
    assert ran.returncode == 0, ran.stdout


def test_a_kept_folder_has_dvcs_own_digest_and_comes_back_writable(kept, tmp_path):
    folder, digest = kept
    dvc("add", "policy")
    assert digest in Path("policy.dvc").read_text()
    version.restore(digest, tmp_path / "again")
    assert artifacts.digest(tmp_path / "again") == artifacts.digest(folder)
    (tmp_path / "again/weights").write_text("may be changed")
    version.restore(digest, tmp_path / "third")
    assert artifacts.digest(tmp_path / "third") == artifacts.digest(folder)


@pytest.mark.parametrize("lost", ["all", "one file"])
def test_what_the_cache_lacks_comes_from_the_remote(kept, tmp_path, lost):
    digest = kept[1]
    dvc("remote", "add", "--default", "shared", str(tmp_path / "remote"))
    dvc("add", "policy")
    dvc("push", "--quiet")
    cache = Path(".dvc/cache/files/md5")
    if lost == "all":
        shutil.rmtree(cache)
    else:
        weights(cache).unlink()
    version.restore(digest, tmp_path / "again")
    assert (tmp_path / "again/weights").read_text() == "w" * 100
    assert (tmp_path / "again/inner/config.json").read_text() == "{}"


def test_a_folder_that_is_nowhere_is_said_with_a_remedy(kept, tmp_path):
    shutil.rmtree(".dvc/cache")
    with pytest.raises(ValueError, match=r"DVC's cache lacks .*\.dir, and no remote is set: bring"):
        version.restore(kept[1], tmp_path / "again")
    (tmp_path / "remote").mkdir()
    dvc("remote", "add", "--default", "shared", str(tmp_path / "remote"))
    with pytest.raises(ValueError, match=r"cache lacks .*, and its remote does, too: .*dvc push"):
        version.restore(kept[1], tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_damaged_file_of_the_cache_is_not_taken(kept, tmp_path):
    file = weights(Path(".dvc/cache"))
    file.chmod(0o644)
    file.write_text("v" * 100)
    with pytest.raises(ValueError, match="is damaged: remove it"):
        version.restore(kept[1], tmp_path / "again")


def test_what_is_delivered_and_tracked_by_dvc_is_new_once(project):
    dvc_yaml = Path("dvc.yaml").read_text()
    Path("dvc.yaml").write_text(
        dvc_yaml.replace("        - first.py\n", "        - first.py\n        - data/sources\n")
    )
    intake = Path("data/sources/intake/toy")
    intake.mkdir(parents=True)
    Path("data/sources/README.md").touch()
    keep_run()
    assert pipeline.already_run("toy") == "runs/toy-20261121-a"
    (intake / "new.jsonl").write_text("{}")
    dvc("add", str(intake))
    commit("a delivery")
    assert pipeline.already_run("toy") is None
    assert [stage.name for stage in pipeline.stages("toy")] == ["first@toy", "later@toy"]
    keep_run("runs/toy-20261122-b")
    assert pipeline.already_run("toy") == "runs/toy-20261122-b"


# ---------------------------------------------------------------- source


STAGES = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
# They check every section; a stage depends on those that it reads.
LOADING = (Path("params/schema/recipe.py"), Path("tasks/settings.py"))
SHARED = Path("flows/__init__.py")  # runs before every flow


def code_of(stage):
    """The flow of a stage, and what it imports of tasks/ and of the schema's sections."""
    flow = Path("flows", f"{stage}.py")
    found, waiting = set(), [flow]
    while waiting:
        file = waiting.pop()
        elsewhere = file.parts[0] == "flows" and file != flow
        if file not in found and not elsewhere and file not in LOADING:
            found.add(file)
            waiting += [path.relative_to(ROOT) for path in keys.imported_files(ROOT / file)]
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_deps_are_what_a_stage_imports(stage):
    code = code_of(stage)
    deps = [Path(dep) for dep in STAGES[stage]["do"]["deps"]]
    deps = [dep for dep in deps if dep.parts[0] in ("flows", "tasks", "params") and dep != SHARED]
    unlisted = [file for file in code if not any(file.is_relative_to(dep) for dep in deps)]
    assert not unlisted, f"dvc.yaml, {stage}: add the rooms of {unlisted} to deps"
    unused = [dep for dep in deps if not any(file.is_relative_to(dep) for file in code)]
    assert not unused, f"dvc.yaml, {stage}: the flow imports nothing of {unused}"


# ---------------------------------------------------------------- running a stage


def test_a_stage_gets_this_python_first_in_path_and_what_is_asked_for(project, capfd):
    before = "import os, shutil; print(shutil.which('python'), os.environ['ASKED'])"
    toy.write_stage(project, "first", flows=False, before=before)
    dvc_command.reproduce("first@toy", ASKED="for this")
    assert f"{Path(sys.executable).parent / 'python'} for this" in capfd.readouterr().out


def test_a_stage_that_fails_has_the_last_word(project, capfd):
    toy.write_stage(project, "first", flows=False, before="sys.exit('the seed is unlucky')")
    with pytest.raises(dvc_command.StageError, match="first@toy"):
        dvc_command.reproduce("first@toy")
    assert capfd.readouterr().err.splitlines()[-1] == "the seed is unlucky"
    assert not Path("dvc.lock").exists()


def test_what_dvc_itself_has_to_say_is_not_lost(project, capfd):
    Path("first.py").unlink()
    with pytest.raises(dvc_command.StageError):
        dvc_command.reproduce("first@toy")
    assert "failed to reproduce 'first@toy': [Errno 2] No such file" in capfd.readouterr().err


# Where tests run in the background, SIGINT is ignored, which children inherit.
CALLER = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from flows.runs import dvc_command; dvc_command.reproduce('first@toy')"
)


def begin(project, caller=CALLER):
    """Call ``reproduce`` in a process group of its own; wait until the stage is in its middle."""
    before = "import time; Path('begun').touch(); time.sleep(60)"
    toy.write_stage(project, "first", flows=False, before=before)
    process = subprocess.Popen(
        [sys.executable, "-c", caller],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_until(Path("begun").exists)
    return process


def test_a_killed_caller_takes_dvc_and_the_stage_with_it_and_the_next_call_runs(project, capfd):
    process = begin(project)
    assert len(toy.processes(project)) == 3
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: toy.processes(project) == [])
    assert json.loads(Path(".dvc/tmp/rwlock").read_text())["write"], "DVC had no time to tidy up"

    toy.write_stage(project, "first", flows=False)
    dvc_command.reproduce("first@toy")
    assert "first has run" in capfd.readouterr().out


def test_an_interrupted_caller_lets_the_stage_end_and_leaves_nothing(project):
    process = begin(project)
    os.kill(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=20)
    assert toy.processes(project) == []
    # the stage's own KeyboardInterrupt, then the caller's
    assert said.count("KeyboardInterrupt") == 2
    assert not Path("data/toy/first").exists()


def test_a_process_whose_parent_has_gone_before_it_asked_exits(project):
    ask = "from flows.runs.dvc_command import die_with_parent; die_with_parent(); print('alive')"
    environment = os.environ | {dvc_command.PARENT: str(os.getpid())}
    child = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True)
    assert child.stdout == b"alive\n"
    environment[dvc_command.PARENT] = "1"
    child = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True)
    assert child.returncode == 1
    assert child.stdout == b""


def test_locks_of_the_dead_are_dropped_and_those_of_the_living_stay(project):
    rwlock = Path(".dvc/tmp/rwlock")
    alive = {"pid": os.getpid(), "cmd": "dvc repro"}
    dead = {"pid": 2**22 + 1, "cmd": "dvc repro"}  # above the kernel's largest process id
    rwlock.write_text(json.dumps({"read": {"a": [alive, dead]}, "write": {"b": dead, "c": alive}}))
    dvc_command._mend_rwlock(rwlock.parent)
    assert json.loads(rwlock.read_text()) == {"read": {"a": [alive]}, "write": {"c": alive}}


def test_a_lock_whose_process_id_has_come_again_does_not_block(project, capfd):
    dvc_command.reproduce("first@toy")
    rwlock = Path(".dvc/tmp/rwlock")
    with subprocess.Popen(["sleep", "60"]) as younger:
        held = {"pid": younger.pid, "cmd": "dvc repro"}
        rwlock.write_text(json.dumps({"write": {str(project / "data/toy/first"): held}}))
        os.utime(rwlock, (time.time() - 3600,) * 2)
        Path("data/toy/first").unlink()
        dvc_command.reproduce("first@toy")
        younger.kill()
    assert Path("data/toy/first").exists()


def test_a_half_written_lock_does_not_block(project):
    Path(".dvc/tmp/rwlock").write_text('{"write": {"')
    dvc_command.reproduce("first@toy")
    assert Path("data/toy/first").exists()
