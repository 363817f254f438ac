import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from dvc.utils import dict_sha256

from flows.runs import dvc_command, earlier_outs, pipeline
from tests import toy_project as toy
from tests.params.edits import REMOVED, edited
from tests.waiting import wait_until

RWLOCK = Path(".dvc/tmp/rwlock")


def test_failed_stage_has_the_last_line_of_output(project, capfd):
    toy.write_stage(project, "first", flows=False, before="sys.exit('the seed is unlucky')")
    with pytest.raises(dvc_command.StageError, match="first@toy"):
        dvc_command.reproduce("first@toy")
    assert capfd.readouterr().err.splitlines()[-1] == "the seed is unlucky"
    assert not Path("dvc.lock").exists()


def test_killed_stage_is_told_from_a_failed_one(project, capfd):
    die = "import os, signal; os.kill(os.getpid(), signal.{})"
    for name in ("SIGKILL", "SIGTERM"):
        toy.write_stage(project, "first", flows=False, before=die.format(name))
        with pytest.raises(dvc_command.KilledError, match="first@toy"):
            dvc_command.reproduce("first@toy")
    toy.write_stage(project, "first", flows=False, before="sys.exit(9)")
    with pytest.raises(dvc_command.StageError) as failed:
        dvc_command.reproduce("first@toy")
    assert not isinstance(failed.value, dvc_command.KilledError)


def test_errors_of_dvc_itself_are_printed(project, capfd):
    Path("first.py").unlink()
    with pytest.raises(dvc_command.StageError):
        dvc_command.reproduce("first@toy")
    assert "failed to reproduce 'first@toy': [Errno 2] No such file" in capfd.readouterr().err


# ---------------------------------------------------------------- outs of an earlier run

OUTS = ("data/toy/later", "reports/toy/table.md")
HALF = "Path('reports/toy').mkdir(exist_ok=True); Path('reports/toy/table.md').write_text('half'); "
ENDS = {  # what the stage does -> whether its process can put the outs back itself
    "sys.exit(1)": True,
    "import os; os.kill(os.getppid(), 9)": False,  # DVC's process
}


@pytest.mark.parametrize("end", ENDS)
def test_earlier_outs_stay_until_there_are_new_ones(ran, capfd, end):
    before = [Path(out).read_bytes() for out in OUTS]
    toy.write_stage(ran, "later", flows=False, before=HALF + end)
    with pytest.raises(dvc_command.StageError):
        dvc_command.reproduce("later@toy")
    if not ENDS[end]:
        assert sorted(earlier_outs.waiting(ran)) == sorted(OUTS)
        assert sorted(earlier_outs.put_back(ran)) == sorted(OUTS)
    assert [Path(out).read_bytes() for out in OUTS] == before
    assert not earlier_outs.waiting(ran)


def test_earlier_outs_go_once_there_are_new_ones(ran, capfd):
    toy.write_stage(ran, "later", flows=False, before="name = 'new'")
    dvc_command.reproduce("later@toy")
    assert not [*ran.glob("*/toy/.*")], "nothing waits after a success"
    assert pipeline.status("toy") == {}


def test_outs_that_another_process_writes_are_left_alone(ran, capfd):
    with dvc_command.open_repository() as repository:
        paths = [str(ran / out) for out in OUTS]
        entry = {"pid": os.getppid(), "cmd": "another run"}
        RWLOCK.write_text(json.dumps({"read": {}, "write": dict.fromkeys(paths, entry)}))
        del repository
    toy.write_stage(ran, "later", flows=False, before="pass  # changed")
    os.utime(RWLOCK)
    with pytest.raises(dvc_command.StageError):
        dvc_command.reproduce("later@toy")
    assert "in use" in capfd.readouterr().err
    assert all(Path(out).exists() for out in OUTS)


# ---------------------------------------------------------------- keys that a recipe leaves out


def without(*keys):
    """Write the toy recipe without some keys, as ``section__key``."""
    recipe = edited(toy.RECIPE, dict.fromkeys(keys, REMOVED))
    Path("params/toy.yaml").write_text(yaml.safe_dump(recipe))


def listed(*keys):
    """Have the stage ``first`` read these keys of the recipe, too."""
    lines = "".join(f"            - {key}\n" for key in ("seed", *keys))
    text = Path("dvc.yaml").read_text()
    Path("dvc.yaml").write_text(text.replace("            - seed\n", lines))


def test_keys_that_a_recipe_leaves_out_have_their_defaults(project, capfd):
    listed("judge", "evaluate.panel", "verdict.measure", "start")
    without("judge", "start", "evaluate__panel", "verdict__measure")
    dvc_command.reproduce("first@toy")
    read = {"seed": 3, "judge": None, "evaluate.panel": None, "start": "scratch"}
    read["verdict.measure"] = "success"
    assert pipeline.locked()["first@toy"]["params"] == {"params/toy.yaml": read}
    assert "first@toy" not in pipeline.status("toy")
    toy.write_recipe(project)
    assert "first@toy" not in pipeline.status("toy"), "they are written with the same values"
    toy.write_recipe(project, verdict__measure="score")
    assert pipeline.status("toy")["first@toy"] == ["verdict.measure: success -> score"]


def test_required_key_that_is_missing_is_an_error(project, capfd):
    without("seed")
    with pytest.raises(dvc_command.StageError):
        dvc_command.reproduce("first@toy")
    assert "Parameters 'seed' are missing from 'params/toy.yaml'" in capfd.readouterr().err


def test_called_by_hand_it_prints_what_dvc_prints(project):
    listed("judge")
    without("judge")
    called = [sys.executable, "-m", "flows.runs.dvc_command"]
    for words in (["repro", "first@toy"], ["status", "first@toy"]):
        done = toy.run(project, *called, *words)
        assert done.returncode == 0, done.stdout
    assert "up to date" in done.stdout


# ---------------------------------------------------------------- ends of processes


# Where tests run in the background, SIGINT is ignored, which children inherit.
CALLER = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from flows.runs import dvc_command; dvc_command.reproduce('first@toy')"
)


def begin(project):
    """Call ``reproduce`` in a process group of its own; wait until the stage is running."""
    before = "import time; Path('begun').touch(); time.sleep(60)"
    toy.write_stage(project, "first", flows=False, before=before)
    process = subprocess.Popen(
        [sys.executable, "-c", CALLER],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_until(Path("begun").exists)
    return process


def test_killed_caller_ends_dvc_and_stage_and_next_call_runs(project, capfd):
    process = begin(project)
    assert len(toy.processes(project)) == 3
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: toy.processes(project) == [])
    assert json.loads(RWLOCK.read_text())["write"], "DVC had no time to tidy up"

    before = "import os, shutil; print(shutil.which('python'), os.environ['ASKED'])"
    toy.write_stage(project, "first", flows=False, before=before)
    with subprocess.Popen(["sleep", "60"]) as younger:  # has the id of the killed DVC, say
        locked_by(younger.pid, project / "data/toy/first")
        os.utime(RWLOCK, (time.time() - 3600,) * 2)
        dvc_command.reproduce("first@toy", ASKED="for this")
        younger.kill()
    assert f"{Path(sys.executable).parent / 'python'} for this" in capfd.readouterr().out
    assert Path("data/toy/first").exists()


def test_interrupted_caller_lets_the_stage_end(project):
    process = begin(project)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=600)
    assert toy.processes(project) == []
    # the stage's own KeyboardInterrupt, then the caller's
    assert output.count("KeyboardInterrupt") == 2
    assert not Path("data/toy/first").exists()


def test_process_without_its_parent_exits(project):
    ask = "from flows.host.parents import die_with_parent; die_with_parent(); print('alive')"
    environment = os.environ | {dvc_command.PARENT: str(os.getpid())}
    child = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True)
    assert child.stdout == b"alive\n"
    environment[dvc_command.PARENT] = "1"
    child = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True)
    assert child.returncode == 1
    assert child.stdout == b""


def test_lock_file_is_replaced_as_a_whole(project):
    """A hard link keeps what the file held: it is never emptied, by a stage nor by a commit."""
    lock, before = Path("dvc.lock"), Path("before")

    def commit():
        with dvc_command.open_repository() as repository:
            repository.commit("first@toy", force=True)

    dvc_command.reproduce("first@toy")
    for number, write in enumerate((lambda: dvc_command.reproduce("first@toy"), commit)):
        os.link(lock, before)
        text = before.read_text()
        toy.write_stage(project, "first", flows=False, before=f"{number}")
        write()
        assert before.read_text() == text != lock.read_text()
        before.unlink()
    with pytest.raises(AttributeError), dvc_command.modified(lock) as content:
        content["stages"] = None
        content["stages"].clear()
    assert "first@toy" in pipeline.locked()
    assert not list(Path().glob("*.partial"))


def test_damaged_lock_file_names_the_remedy(project):
    for damaged in ("stages:", "stages: {first", "a text"):
        Path("dvc.lock").write_text(damaged)
        with pytest.raises(ValueError, match="git checkout"):
            pipeline.status("toy")


def test_damaged_entry_of_the_run_cache_is_passed_over(project, capfd):
    """A kill while DVC writes an entry leaves its first lines, under a temporary name."""
    dvc_command.reproduce("first@toy")
    (whole,) = (path for path in Path(".dvc/cache/runs").rglob("*") if path.is_file())
    text = whole.read_text()
    half = text[: text.index("outs:")]
    moved = yaml.safe_load(text)  # whole, but what it restores lies elsewhere
    moved["outs"][0]["path"] = "data/toy/elsewhere"
    elsewhere = dict_sha256(moved, exclude=["size", "nfiles"]), yaml.safe_dump(moved)
    damages = (".left.tmp", half), ("0" * 64, half), ("1" * 64, "a text: {"), elsewhere
    for name, damaged in damages:
        whole.with_name(name).write_text(damaged)
    os.utime(whole, (time.time() - 3600,) * 2)
    for path in (Path("dvc.lock"), Path("data/toy/first")):
        path.unlink()
    dvc_command.reproduce("first@toy")
    assert "is cached" in capfd.readouterr().out
    assert not Path("data/toy/elsewhere").exists()
    whole.write_text(half)
    Path("dvc.lock").unlink()
    dvc_command.reproduce("first@toy")
    assert "is cached" not in capfd.readouterr().out
    assert whole.read_text() == text


# ---------------------------------------------------------------- stale locks


def locked_by(pid, path):
    RWLOCK.write_text(json.dumps({"write": {str(path): {"pid": pid, "cmd": "dvc repro"}}}))


def test_locks_of_ended_processes_are_dropped(project):
    alive = {"pid": os.getpid(), "cmd": "dvc repro"}
    dead = {"pid": 2**22 + 1, "cmd": "dvc repro"}  # above the kernel's largest process id
    RWLOCK.write_text(json.dumps({"read": {"a": [alive, dead]}, "write": {"b": dead, "c": alive}}))
    assert dvc_command.dead_locks() == ["a", "b"]
    dvc_command.free_locks()
    assert json.loads(RWLOCK.read_text()) == {"read": {"a": [alive]}, "write": {"c": alive}}
    assert dvc_command.dead_locks() == []


def test_lock_older_than_its_process_is_dropped(project):
    with subprocess.Popen(["sleep", "60"]) as younger:
        locked_by(younger.pid, "a")
        assert dvc_command.dead_locks() == []
        os.utime(RWLOCK, (time.time() - 3600,) * 2)
        assert dvc_command.dead_locks() == ["a"]
        younger.kill()


def test_half_written_list_of_locks_is_emptied(project):
    RWLOCK.write_text('{"write": {"')
    assert dvc_command.dead_locks()
    with dvc_command.open_repository() as repository:
        assert repository.index.stages
    assert json.loads(RWLOCK.read_text()) == {"read": {}, "write": {}}
