"""The store as a folder, through DVC's filesystem: what is shared, and what a fault costs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flows.runs import ledger_mirror
from flows.runs.cache import filesystem
from tasks.ledger import artifacts, substeps
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import Step

ROOT = Path(__file__).parents[3]
computed: list[int] = []


@substeps.recorded
def verb(step, folder, *, size=1):
    computed.append(step.iteration)
    (folder / "table.txt").write_text(f"{size} {step.iteration}")
    (folder / "weights").mkdir()
    (folder / "weights" / "a.bin").write_bytes(b"weights" * 99)
    return {"metrics": {"size": size}}


def step(iteration):
    return Step("toy", "reinforce", iteration, 7)


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """The folder of a store that is attached; the working folder is the first worker's."""
    monkeypatch.chdir(worker(tmp_path / "first"))
    computed.clear()
    monkeypatch.setenv(ledger_mirror.VARIABLE, str(tmp_path / "shared"))
    with ledger_mirror.attached():
        yield tmp_path / "shared"


def worker(folder):
    folder.mkdir()
    return folder


def elsewhere(shared, monkeypatch):
    """Go on as another worker, which has nothing yet."""
    monkeypatch.chdir(worker(shared.parent / f"worker {len(list(shared.parent.iterdir()))}"))
    computed.clear()


def entry(shared, iteration=0):
    (found,) = (shared / "toy" / "reinforce").glob(f"{iteration:04d}-verb-*")
    return found


# ---------------------------------------------------------------- sharing


def test_what_one_worker_has_finished_another_one_fetches(shared, monkeypatch):
    first = [verb(step=step(i)) for i in range(3)]
    elsewhere(shared, monkeypatch)
    assert [verb(step=step(i)) for i in range(3)] == first
    assert computed == []
    made = artifacts.output(first[2], "weights")
    assert Artifact.at(Path(made.path)) == made
    verb(step=step(3))
    assert computed == [3]
    assert entry(shared, 3).is_dir()


def test_without_a_store_nothing_is_shared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(ledger_mirror.VARIABLE, raising=False)
    with ledger_mirror.attached():
        verb(step=step(0))
    assert [path.name for path in tmp_path.iterdir()] == [".beamline"]


def test_dvcs_default_remote_is_the_store_where_the_environment_names_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(ledger_mirror.VARIABLE, raising=False)
    Path(".dvc").mkdir()
    remote = f"[core]\n    remote = far\n['remote \"far\"']\n    url = {tmp_path}/remote\n"
    Path(".dvc/config").write_text(remote)
    with ledger_mirror.attached():
        verb(step=step(0))
    assert entry(tmp_path / "remote/ledger").is_dir()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("carrier-pigeon://coop/ledger", "no kind of store is called 'carrier-pigeon'"),
        ("remote://nowhere/ledger", "config file error: remote 'nowhere' doesn't exist"),
    ],
)
def test_an_address_that_leads_nowhere_is_refused(monkeypatch, tmp_path, address, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(ledger_mirror.VARIABLE, address)
    with pytest.raises(ValueError, match=f"the store {address} cannot be used: {said}"):
        ledger_mirror.attached().__enter__()


def test_the_record_is_written_last_and_removed_first(shared):
    order = []

    class Watched:
        def __init__(self, fs):
            self.fs = fs

        def __getattr__(self, name):
            def call(*arguments, **rest):
                if name in ("put_file", "rm", "rm_file"):
                    order.append((name, arguments[-1].rpartition("/")[2]))
                return getattr(self.fs, name)(*arguments, **rest)

            return call

    (attached,) = substeps._stores
    fs, root = filesystem(str(shared))()
    attached.connection = (Watched(fs), root)
    record = verb(step=step(0))
    assert order.pop() == ("put_file", "record.json")
    assert {name for _, name in order} == {"table.txt", "a.bin"}
    order.clear()
    place = Path(artifacts.output(record, "table").path).parent
    attached.drop(place)
    assert order == [("rm_file", "record.json"), ("rm", place.name)]
    assert not (shared / "toy" / "reinforce" / place.name).exists()


# ---------------------------------------------------------------- faults in the store


def lose_file(place):
    (place / "table.txt").unlink()


def truncate(place):
    (place / "weights" / "a.bin").write_bytes(b"weights")


def corrupt(place):
    (place / "weights" / "a.bin").write_bytes(b"WEIGHTS" * 99)


def add_file(place):
    (place / "weights" / "b.bin").write_bytes(b"")


def cut_record(place):
    text = (place / "record.json").read_text()
    (place / "record.json").write_text(text[: len(text) // 2])


FAULTS = [lose_file, truncate, corrupt, add_file, cut_record]


@pytest.mark.parametrize("harm", FAULTS)
def test_a_fault_in_the_store_is_noticed_done_again_and_mended(shared, monkeypatch, capsys, harm):
    first = verb(step=step(0))
    harm(entry(shared))
    elsewhere(shared, monkeypatch)
    assert verb(step=step(0))["artifacts"] == first["artifacts"]
    assert computed == [0]
    assert "is damaged: " in capsys.readouterr().out
    elsewhere(shared, monkeypatch)
    assert verb(step=step(0))["artifacts"] == first["artifacts"]
    assert computed == [], "what was done again has been sent"


def test_what_has_no_record_yet_does_not_count(shared, monkeypatch, capsys):
    verb(step=step(0))
    (entry(shared) / "record.json").unlink()
    elsewhere(shared, monkeypatch)
    verb(step=step(0))
    assert computed == [0]
    assert capsys.readouterr().out == ""
    assert [p.name for p in Path(".beamline/ledger/toy/reinforce").iterdir()] == [
        entry(shared).name
    ]


def test_a_fetched_entry_that_is_damaged_here_later_is_fetched_again(shared):
    verb(step=step(0))
    place = artifacts.ROOT / "toy" / "reinforce" / entry(shared).name
    corrupt(place)
    verb(step=step(0))
    assert computed == [0], "the store had it whole"
    assert substeps.read(place)


# ---------------------------------------------------------------- a store that is away


@pytest.fixture
def away(shared):
    """Functions that take the store away, and bring it back."""
    hidden = shared.with_name("hidden")

    def leave():
        if shared.exists():
            shared.rename(hidden)
        shared.write_text("no folder")

    def back():
        shared.unlink()
        if hidden.exists():
            hidden.rename(shared)

    return leave, back


def test_a_store_that_is_away_is_said_once_and_gets_what_it_lacks(
    shared, away, monkeypatch, capsys
):
    leave, back = away
    monkeypatch.setattr(ledger_mirror, "PAUSE", 0)
    verb(step=step(0))
    leave()
    made = [verb(step=step(i)) for i in range(1, 4)]
    said = capsys.readouterr().out
    assert said.count("is away (") == 1
    assert said.count("\n") == 1
    back()
    verb(step=step(4))
    elsewhere(shared, monkeypatch)
    assert [verb(step=step(i)) for i in range(1, 5)][:3] == made
    assert computed == []


def test_a_store_that_was_away_is_not_asked_again_at_once(shared, away):
    leave, back = away
    leave()
    verb(step=step(0))
    back()
    verb(step=step(1))
    assert not shared.exists(), "within the pause nothing is sent"
    substeps._stores[0].flush()
    assert entry(shared, 0).is_dir()
    assert entry(shared, 1).is_dir()


def test_what_a_run_could_not_deliver_the_next_call_of_it_does(shared, away, monkeypatch, capsys):
    leave, back = away
    leave()
    verb(step=step(0))
    substeps._stores[0].flush()
    assert "lacks 1 sub-steps of this run: the next call" in capsys.readouterr().out
    back()
    with ledger_mirror.attached():
        verb(step=step(0))
    assert computed == [0]
    assert entry(shared, 0).is_dir()


def test_another_store_gets_what_an_older_one_has(shared, monkeypatch):
    verb(step=step(0))
    other = shared.with_name("other")
    monkeypatch.setenv(ledger_mirror.VARIABLE, str(other))
    with ledger_mirror.attached():
        verb(step=step(0))
    assert entry(other).is_dir()
    assert computed == [0]


# ---------------------------------------------------------------- what is dropped


def test_what_is_retired_here_leaves_the_store_and_its_record_counts_there(shared, monkeypatch):
    made = [verb(step=step(i)) for i in range(3)]
    substeps.retire(step(2), "verb", last=1, every=2, weights=("weights",))
    there = [sorted(path.name for path in entry(shared, i).iterdir()) for i in range(3)]
    assert there == [
        ["record.json", "retired"],
        ["record.json", "retired", "weights"],
        ["record.json", "table.txt", "weights"],
    ]
    elsewhere(shared, monkeypatch)
    assert [verb(step=step(i)) for i in range(3)] == made
    assert computed == []
    assert Path(artifacts.output(made[1], "weights").path).is_dir()
    assert not Path(artifacts.output(made[0], "weights").path).exists()


def test_what_is_revived_is_made_again_and_not_fetched_as_it_was(shared):
    verb(step=step(0))
    substeps.retire(step(3), "verb", last=1, every=9, weights=())
    substeps.revive(step(0).folder)
    made = verb(step=step(0))
    assert computed == [0, 0]
    assert Path(artifacts.output(made, "weights").path).is_dir()
    assert (entry(shared) / "weights" / "a.bin").exists()


def test_what_was_retired_while_the_store_was_away_is_sent_as_it_is_later(
    shared, away, monkeypatch
):
    leave, back = away
    verb(step=step(0))
    leave()
    substeps.retire(step(3), "verb", last=1, every=9, weights=())
    back()
    with ledger_mirror.attached():
        verb(step=step(0))
    assert sorted(path.name for path in entry(shared).iterdir()) == ["record.json", "retired"]


# ---------------------------------------------------------------- half-done sub-steps


@substeps.recorded
def slow(step, folder, *, fail_at=None, tool=len):
    """Counts to 4 with a checkpoint each; ``tool`` is no part of its key."""
    scratch = substeps.scratch(folder)
    found = [int(p.name.split("-")[1]) for p in scratch.glob("checkpoint-*") if substeps.read(p)]
    for number in range(max(found, default=0) + 1, 5):
        if number == tool(()):
            raise RuntimeError("cut")
        computed.append(number)
        checkpoint = scratch / f"checkpoint-{number}"
        checkpoint.mkdir()
        (checkpoint / "state.bin").write_text(str(number))
        for older in sorted(scratch.glob("checkpoint-*"))[:-2]:
            shutil.rmtree(older)
        substeps.seal(checkpoint)
    (folder / "made").write_text("4")
    return {}


def scratch_names(shared):
    return sorted(p.name for p in shared.glob("toy/reinforce/.*.scratch/*"))


def test_a_half_done_sub_step_goes_on_elsewhere_at_its_newest_whole_checkpoint(shared, monkeypatch):
    with pytest.raises(RuntimeError, match="cut"):
        slow(step=step(0), tool=lambda _: 4)
    assert scratch_names(shared) == ["checkpoint-2", "checkpoint-3"]
    elsewhere(shared, monkeypatch)
    (newest,) = shared.glob("toy/reinforce/.*.scratch/checkpoint-3")
    (newest / "state.bin").write_text("")
    slow(step=step(0))
    assert computed == [3, 4], "the damaged one is done again"
    assert scratch_names(shared) == []
    assert [p.name[:9] for p in (shared / "toy/reinforce").iterdir()] == ["0000-slow"]


# ---------------------------------------------------------------- two workers, one killed

WORKER = """
import os, signal, sys
from pathlib import Path
from flows import reinforce
from flows.runs import ledger_mirror
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact
from tasks.policy.machine import use_machine
from tests.flows import test_reinforce as toy

for name in ("rollout", "reward", "advantage", "update"):
    setattr(reinforce, name, getattr(reinforce, name).fn)
use_machine(toy.SMOKE.machine)
deadly = sys.argv[1] if len(sys.argv) > 1 else None
rename = Path.rename

def die(source, target):
    if deadly and target.name.startswith(deadly):  # the sub-step is about to get its name
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(source, target)

Path.rename = die
row = toy.ROWS["ppo"]
given = {name: Artifact.at(Path(path)) for name, path in
         (("questions", "questions.parquet"), ("corpus", "corpus"))}
tools = lambda calls: [toy.Observation("ok", "1") for _ in calls]
training = reinforce.Training(
    toy.STEP, toy.recipe(), row, Artifact.at(Path("policy")), **given, tools=tools)
with ledger_mirror.attached():
    done = list(reinforce.train(training, 3))
records = [record for iteration in done for record in reinforce.in_order(iteration)]
artifacts.publish_records(records, Path("records.jsonl"))
"""


def start(folder, shared, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if shared:
        environment[ledger_mirror.VARIABLE] = str(shared)
    return subprocess.run(
        [sys.executable, "-c", WORKER, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="module")
def origin(policy, tokenizer, tmp_path_factory):
    """What a worker begins with, and the records of an unbroken run."""
    from tasks.trees.tables import save_questions
    from tasks.trees.tree import Question

    folder = tmp_path_factory.mktemp("origin")
    policy.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    (folder / "corpus").mkdir()
    questions = [Question(str(i), "toy", f"question {i}", ("1",)) for i in range(40)]
    save_questions(questions, folder / "questions.parquet")
    shutil.copytree(folder, folder / "unbroken")
    ran = start(folder / "unbroken", None)
    assert ran.returncode == 0, ran.stderr
    records = (folder / "unbroken" / "records.jsonl").read_text()
    shutil.rmtree(folder / "unbroken")
    return folder, records


def test_a_second_worker_finishes_what_a_killed_one_began_with_the_same_digests(origin, tmp_path):
    folder, unbroken = origin
    cut = "0001-update"
    for name in ("first", "second"):
        shutil.copytree(folder, tmp_path / name)
    killed = start(tmp_path / "first", tmp_path / "shared", cut)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    finished = start(tmp_path / "second", tmp_path / "shared")
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "second" / "records.jsonl").read_text() == unbroken
    lines = [json.loads(line) for line in unbroken.splitlines()]
    at = [f"{line['iteration']:04d}-{line['verb']}" for line in lines].index(cut)
    assert f"is next; {at} sub-steps" in finished.stdout, "only the sub-step that was cut is lost"
    assert len(list((tmp_path / "shared/toy/reinforce").iterdir())) == len(lines)


# ---------------------------------------------------------------- over SSH


class Server:
    """An SFTP server on loopback, in a thread; it shows the folder ``root`` to whom it knows."""

    def __init__(self, root, port=0):
        self.root = root
        self.port = port
        self.loop = None
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        import asyncio

        import asyncssh

        connections = []

        class Door(asyncssh.SSHServer):
            def connection_made(self, connection):
                connections.append(connection)

            def password_auth_supported(self):
                return True

            def validate_password(self, username, password):
                return (username, password) == ("worker", "secret")

        async def serve():
            self.loop, self.ended = asyncio.get_running_loop(), asyncio.Event()
            server = await asyncssh.create_server(
                Door,
                "127.0.0.1",
                self.port,
                reuse_address=True,
                server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
                sftp_factory=lambda channel: asyncssh.SFTPServer(channel, chroot=str(self.root)),
            )
            self.port = server.get_port()
            self.ready.set()
            await self.ended.wait()
            server.close()
            for connection in connections:
                connection.abort()

        asyncio.run(serve())

    def __enter__(self):
        self.thread.start()
        assert self.ready.wait(20)
        return self

    def __exit__(self, *_):
        self.loop.call_soon_threadsafe(self.ended.set)
        self.thread.join(20)


def use_remote(folder, port):
    (folder / ".dvc").mkdir(parents=True)
    (folder / ".dvc/config").write_text(
        f"[core]\n    remote = far\n['remote \"far\"']\n"
        f"    url = ssh://worker@127.0.0.1:{port}/cache\n"
        "    password = secret\n    allow_agent = false\n"
    )


@pytest.fixture
def over_ssh(tmp_path, monkeypatch):
    """A store over SSH, with the credentials of DVC's remote."""
    (tmp_path / "far").mkdir()
    with Server(tmp_path / "far") as server:
        for name in ("first", "second"):
            use_remote(tmp_path / name, server.port)
        monkeypatch.delenv(ledger_mirror.VARIABLE, raising=False)
        yield tmp_path


def test_a_store_over_ssh_is_shared_by_the_credentials_of_dvcs_remote(over_ssh, monkeypatch):
    computed.clear()
    monkeypatch.chdir(over_ssh / "first")
    with ledger_mirror.attached():
        first = [verb(step=step(i)) for i in range(2)]
        substeps.retire(step(1), "verb", last=1, every=9, weights=())
    assert computed == [0, 1]
    assert entry(over_ssh / "far/cache/ledger", 0).is_dir()
    monkeypatch.chdir(over_ssh / "second")
    corrupt(entry(over_ssh / "far/cache/ledger", 1))
    with ledger_mirror.attached():
        assert verb(step=step(0)) == first[0]
        assert computed == [0, 1]
        assert verb(step=step(1))["artifacts"] == first[1]["artifacts"]
    assert computed == [0, 1, 1], "the corrupted one is done again"
    assert (entry(over_ssh / "far/cache/ledger", 1) / "weights/a.bin").read_bytes() == (
        b"weights" * 99
    )


def test_an_ssh_server_that_goes_and_comes_back_costs_a_run_nothing(tmp_path, monkeypatch, capsys):
    (tmp_path / "far").mkdir()
    computed.clear()
    monkeypatch.setattr(ledger_mirror, "PAUSE", 0)
    monkeypatch.delenv(ledger_mirror.VARIABLE, raising=False)
    with Server(tmp_path / "far") as server:
        use_remote(tmp_path / "worker", server.port)
        monkeypatch.chdir(tmp_path / "worker")
        attached = ledger_mirror.attached()
        attached.__enter__()
        verb(step=step(0))
    verb(step=step(1))
    assert capsys.readouterr().out.count("is away (") == 1
    with Server(tmp_path / "far", server.port):
        verb(step=step(2))
        attached.__exit__(None, None, None)
        assert [entry(tmp_path / "far/cache/ledger", i).is_dir() for i in range(3)] == [True] * 3
    assert computed == [0, 1, 2]
