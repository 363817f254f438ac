"""The mirror by DVC's filesystems, a folder, S3 and SSH: what is shared, what a fault costs."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from flows.runs import ledger_mirror, mirror_files
from flows.runs.cache import filesystem
from tasks.ledger import artifacts, substeps
from tasks.ledger.artifacts import Artifact
from tasks.ledger.records import DELIVERED
from tasks.ledger.substeps import SubStep
from tests.flows.runs import mirror_worker, packing, stores

ROOT = Path(__file__).parents[3]
WORKER = Path(mirror_worker.__file__)
computed: list[int] = []


@dataclass(frozen=True)
class Inputs:
    size: int = 1


@substeps.recorded
def verb(step, inputs):
    computed.append(step.iteration)
    (step.out / "table.txt").write_text(f"{inputs.size} {step.iteration}")
    (step.out / "weights").mkdir()
    (step.out / "weights" / "a.bin").write_bytes(b"weights" * 99)
    return {"metrics": {"size": inputs.size}}


class Worker:
    """A worker in a folder of its own, with an opened ledger."""

    def __init__(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        computed.clear()
        self.stack = ExitStack()
        self.open()

    def open(self):
        """Begin the next call: of the same worker, or of another one."""
        self.ledger = self.stack.enter_context(ledger_mirror.opened())

    def close(self):
        self.stack.close()

    @property
    def mirror(self):
        (mirror,) = self.ledger.mirrors
        return mirror

    def step(self, iteration):
        return SubStep("toy", "reinforce", iteration, 7, self.ledger)

    def do(self, iteration, work=verb, **rest):
        """Run a sub-step, and wait until it has been sent."""
        try:
            return work(self.step(iteration), Inputs(), **rest)
        finally:
            self.settle()

    def retire(self, iteration, last=1, every=9, weights=(), small=()):
        self.ledger.retire(self.step(iteration), "verb", last, every, weights, small=small)
        self.settle()

    def settle(self):
        for mirror in self.ledger.mirrors:
            assert not mirror.uploads.wait(600)

    def elsewhere(self):
        """Go on as another worker, which has nothing yet."""
        folder = Path.cwd().parent
        return Worker(folder / f"worker {len(list(folder.iterdir()))}")


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """The folder that is the mirror."""
    monkeypatch.setenv(ledger_mirror.VARIABLE, str(tmp_path / "shared"))
    return tmp_path / "shared"


@pytest.fixture
def worker(shared, monkeypatch):
    """The first worker; the working folder is its own."""
    monkeypatch.chdir(shared.parent)  # and back at the end
    return Worker(shared.parent / "first")


@pytest.fixture(params=["folder", "S3"])
def store(tmp_path, monkeypatch, request):
    """The mirror, a folder or on S3, as a ``Store``."""
    monkeypatch.chdir(tmp_path)
    if request.param == "folder":
        monkeypatch.setenv(ledger_mirror.VARIABLE, str(tmp_path / "shared"))
        return stores.in_folder(tmp_path / "shared")
    endpoint, bucket = request.getfixturevalue("s3"), f"bucket-{uuid.uuid4()}"
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings/config").write_text(stores.remote(endpoint, bucket))
    monkeypatch.setenv("DVC_GLOBAL_CONFIG_DIR", str(tmp_path / "settings"))
    monkeypatch.delenv(ledger_mirror.VARIABLE, raising=False)
    return stores.in_bucket(endpoint, bucket)


@pytest.fixture
def first(store, tmp_path):
    """The first worker of a store; the working folder is its own."""
    return Worker(tmp_path / "first")


def entry(shared, iteration=0):
    (found,) = (shared / "toy" / "reinforce").glob(f"{iteration:04d}-verb-*")
    return found


# ---------------------------------------------------------------- sharing


def test_finished_sub_steps_are_fetched_elsewhere(store, first):
    made = [first.do(i) for i in range(3)]
    other = first.elsewhere()
    assert [other.do(i) for i in range(3)] == made
    assert computed == []
    weights = artifacts.output(made[2], "weights")
    assert Artifact.at(Path(weights.path)) == weights
    other.do(3)
    assert computed == [3]
    assert store.names(store.entry(3)) == [packing.ARCHIVE, "record.json"], "two objects"


def test_equal_sub_steps_have_equal_archives(shared, worker):
    worker.do(0)
    before = (entry(shared) / packing.ARCHIVE).read_bytes()
    shutil.rmtree(entry(shared))
    worker.elsewhere().do(0)
    assert computed == [0]
    assert (entry(shared) / packing.ARCHIVE).read_bytes() == before
    assert list(packing.contents(entry(shared) / packing.ARCHIVE)) == ["table.txt", "weights/a.bin"]


def test_without_a_mirror_nothing_is_shared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(ledger_mirror.VARIABLE, raising=False)
    Worker(tmp_path / "alone").do(0)
    assert [path.name for path in tmp_path.iterdir()] == ["alone"]
    assert [path.name for path in (tmp_path / "alone").iterdir()] == [".beamline"]


def test_default_remote_of_dvc_is_the_default_mirror(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(ledger_mirror.VARIABLE, raising=False)
    Path(".dvc").mkdir()
    remote = f"[core]\n    remote = far\n['remote \"far\"']\n    url = {tmp_path}/remote\n"
    Path(".dvc/config").write_text(remote)
    Worker(tmp_path).do(0)
    assert entry(tmp_path / "remote/ledger").is_dir()


@pytest.mark.parametrize("address", ["carrier-pigeon://coop/ledger", "remote://nowhere/ledger"])
def test_invalid_address_is_refused_and_named(monkeypatch, tmp_path, address):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(ledger_mirror.VARIABLE, address)
    with pytest.raises(ValueError, match=f"{address} cannot be used: .*(pigeon|nowhere)"):
        ledger_mirror.opened().__enter__()


def test_record_is_written_last_and_removed_first(shared, worker):
    order = []

    class Watched:
        def __init__(self, fs):
            self.fs = fs

        def __getattr__(self, name):
            def call(*arguments, **rest):
                if name in ("rm", "rm_file") or (name == "open" and "wb" in arguments):
                    order.append((name, arguments[0].rpartition("/")[2]))
                return getattr(self.fs, name)(*arguments, **rest)

            return call

    fs, root = filesystem(str(shared))()
    worker.mirror.connect = lambda: (Watched(fs), root)
    record = worker.do(0)
    assert order == [("open", packing.ARCHIVE), ("open", "record.json")]
    order.clear()
    worker.retire(3, small=("table",))
    rest = mirror_files.archive_name(b"weights")
    assert order == [("open", rest), ("open", "retired"), ("rm", packing.ARCHIVE)]
    order.clear()
    place = Path(artifacts.output(record, "table").path).parent
    worker.mirror.drop(place)
    assert order == [("rm_file", "record.json"), ("rm", place.name)]
    assert not (shared / "toy" / "reinforce" / place.name).exists()


# ---------------------------------------------------------------- faults in the mirror


def lose_archive(place):
    (place / packing.ARCHIVE).unlink()


def truncate(place):
    content = (place / packing.ARCHIVE).read_bytes()
    (place / packing.ARCHIVE).write_bytes(content[: len(content) // 2])


def lose_file(place):
    packing.change(place / packing.ARCHIVE, {"table.txt": None})


def corrupt(place):
    packing.change(place / packing.ARCHIVE, {"weights/a.bin": b"WEIGHTS" * 99})


def add_file(place):
    packing.change(place / packing.ARCHIVE, {"weights/b.bin": b""})


def cut_record(place):
    text = (place / "record.json").read_text()
    (place / "record.json").write_text(text[: len(text) // 2])


ANYWHERE = [lose_archive, truncate, corrupt]
HARMS = [
    *(("folder", harm) for harm in [*ANYWHERE, lose_file, add_file, cut_record]),
    *(("S3", harm) for harm in ANYWHERE),  # the others are equal bytes from elsewhere
]


@pytest.mark.parametrize(("store", "harm"), HARMS, indirect=["store"])
def test_damaged_entry_is_computed_again_and_mended(store, first, capsys, harm):
    made = first.do(0)
    with store.opened(store.entry()) as place:
        harm(place)
    other = first.elsewhere()
    assert other.do(0)["artifacts"] == made["artifacts"]
    assert computed == [0]
    assert "damaged" in capsys.readouterr().out
    third = other.elsewhere()
    assert third.do(0)["artifacts"] == made["artifacts"]
    assert computed == [], "it was sent again"


ANOTHER = "another key, of somebody else"
KEYS = [("folder", ""), ("folder", ANOTHER), ("S3", ANOTHER)]


@pytest.mark.parametrize(("store", "key"), KEYS, indirect=["store"])
def test_entry_without_a_signature_by_the_key_is_computed_again(store, first, monkeypatch, key):
    monkeypatch.setenv(ledger_mirror.SECRET, key)
    first.open()
    made = first.do(0)
    monkeypatch.setenv(ledger_mirror.SECRET, "the key of this project")
    other = first.elsewhere()
    assert other.do(0)["artifacts"] == made["artifacts"]
    assert computed == [0]
    other.elsewhere().do(0)
    assert computed == [], "it was sent again, and signed"
    assert store.names(store.entry()) == [packing.ARCHIVE, "record.json", "signature"]


def test_entry_without_a_record_does_not_count(shared, worker, capsys):
    worker.do(0)
    (entry(shared) / "record.json").unlink()
    worker.elsewhere().do(0)
    assert computed == [0]
    assert capsys.readouterr().out == ""
    places = Path(".beamline/ledger/toy/reinforce").iterdir()
    assert [place.name for place in places] == [entry(shared).name]


def test_entry_damaged_here_is_fetched_again(shared, worker):
    worker.do(0)
    place = artifacts.ROOT / "toy" / "reinforce" / entry(shared).name
    (place / "table.txt").write_text("damaged")
    worker.do(0)
    assert computed == [0], "the mirror had it whole"
    assert substeps.read(place)


# ---------------------------------------------------------------- an unreachable mirror


@pytest.fixture
def reach(shared):
    """A function that makes the mirror unreachable, or reachable again."""
    hidden = shared.with_name("hidden")

    def set_reachable(reachable):
        if reachable:
            shared.unlink()
            if hidden.exists():
                hidden.rename(shared)
        else:
            if shared.exists():
                shared.rename(hidden)
            shared.write_text("no folder")

    return set_reachable


def test_unreachable_mirror_is_logged_once_and_gets_the_rest(
    shared, worker, reach, monkeypatch, capsys
):
    monkeypatch.setattr(ledger_mirror, "PAUSE", 0)
    worker.do(0)
    reach(False)
    made = [worker.do(i) for i in range(1, 4)]
    assert capsys.readouterr().out.count("is unreachable (") == 1
    reach(True)
    worker.do(4)
    other = worker.elsewhere()
    assert [other.do(i) for i in range(1, 5)][:3] == made
    assert computed == []


def test_unreachable_mirror_is_left_alone_for_a_pause(shared, worker, reach):
    reach(False)
    worker.do(0)
    reach(True)
    worker.do(1)
    assert not shared.exists(), "nothing is sent within the pause"
    worker.close()
    assert entry(shared, 0).is_dir()
    assert entry(shared, 1).is_dir()


def test_next_call_sends_what_the_last_could_not(shared, worker, reach, capsys):
    reach(False)
    worker.do(0)
    worker.close()
    assert "lacks 1 sub-steps" in capsys.readouterr().out
    reach(True)
    worker.open()
    worker.do(0)
    assert computed == [0]
    assert entry(shared, 0).is_dir()


def test_another_mirror_gets_older_sub_steps(shared, worker, monkeypatch):
    worker.do(0)
    other = shared.with_name("other")
    monkeypatch.setenv(ledger_mirror.VARIABLE, str(other))
    worker.open()
    worker.do(0)
    assert entry(other).is_dir()
    assert computed == [0]


def test_mirror_that_lacks_finished_sub_steps_gets_them(shared, worker, capsys):
    for iteration in range(3):
        worker.do(iteration)
    shutil.rmtree(entry(shared, 1))
    mirror = ledger_mirror.of_checkout()
    assert ledger_mirror.undelivered("toy", mirror) == []
    ledger_mirror.forget_lost("*", mirror)
    assert len(ledger_mirror.undelivered("*", mirror)) == 1
    shutil.rmtree(shared)
    ledger_mirror.forget_lost("toy", mirror)
    ledger_mirror.send_missing("toy")
    assert "sending 3 sub-steps" in capsys.readouterr().out
    assert len([entry(shared, iteration) for iteration in range(3)]) == 3
    ledger_mirror.send_missing("toy")
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------- what is dropped


def packed(store, iteration):
    """Return the names of the objects of a sub-step, and of what is in its archives."""
    with store.opened(store.entry(iteration)) as place:
        names = sorted(file.name for file in place.iterdir())
        return names, [
            name for file in sorted(place.glob("*.tar")) for name in packing.contents(file)
        ]


def test_retired_artifacts_leave_the_mirror_but_records_count(store, first):
    made = [first.do(i) for i in range(3)]
    first.retire(2, every=2, weights=("weights",))
    rest = mirror_files.archive_name(b"table")
    assert [packed(store, i) for i in range(3)] == [
        (["record.json", "retired"], []),
        ([rest, "record.json", "retired"], ["weights/a.bin"]),
        ([packing.ARCHIVE, "record.json"], ["table.txt", "weights/a.bin"]),
    ]
    other = first.elsewhere()
    assert [other.do(i) for i in range(3)] == made
    assert computed == []
    assert Path(artifacts.output(made[1], "weights").path).is_dir()
    assert not Path(artifacts.output(made[0], "weights").path).exists()


def test_retired_before_it_is_sent_is_sent_without(store, first):
    with first.mirror.uploads.changed:  # as long as it is held, nothing is taken from the queue
        verb(first.step(0), Inputs())
        first.ledger.retire(first.step(3), "verb", 1, 9, ())
    first.settle()
    assert packed(store, 0) == (["record.json", "retired"], [])


def test_revived_sub_step_is_computed_again(store, first):
    first.do(0)
    first.retire(3)
    first.ledger.revive(first.step(0).folder)
    assert store.paths("toy/reinforce/*") == []
    made = first.do(0)
    assert computed == [0, 0]
    assert Path(artifacts.output(made, "weights").path).is_dir()
    assert packed(store, 0)[1] == ["table.txt", "weights/a.bin"]


def test_retired_while_unreachable_is_sent_as_it_is_later(shared, worker, reach):
    worker.do(0)
    reach(False)
    worker.retire(3)
    reach(True)
    worker.open()
    worker.do(0)
    assert sorted(path.name for path in entry(shared).iterdir()) == ["record.json", "retired"]


# ---------------------------------------------------------------- half-done sub-steps


@substeps.recorded
def slow(step, inputs, *, tool=len):
    """Count to 4 with a checkpoint each; ``tool`` is no part of its key."""
    scratch = step.ledger.scratch(step)
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
        step.ledger.seal(checkpoint)
    (step.out / "made").write_text("4")
    return {}


def scratch_names(store):
    return [path.rpartition("/")[2] for path in store.paths("toy/reinforce/.*.scratch/*")]


def test_half_done_sub_step_continues_at_a_whole_checkpoint(store, first):
    with pytest.raises(RuntimeError, match="cut"):
        first.do(0, slow, tool=lambda _: 4)
    assert scratch_names(store)[-2:] == ["checkpoint-2", "checkpoint-3"]
    (newest,) = store.paths("toy/reinforce/.*.scratch/checkpoint-3")
    with store.opened(newest) as place:
        packing.pack(place / packing.ARCHIVE, {"state.bin": b""})
    other = first.elsewhere()
    other.do(0, slow)
    assert computed == [3, 4], "the damaged one is computed again"
    assert scratch_names(store) == []
    assert [p.rpartition("/")[2][:9] for p in store.paths("toy/reinforce/*")] == ["0000-slow"]


# ---------------------------------------------------------------- two workers, one killed


def kill_worker(folder, *moment):
    """Run a worker in a process that is killed at a moment."""
    folder.mkdir()
    (folder / "policy").write_text("initial")
    ran = subprocess.run(
        [sys.executable, str(WORKER), *moment],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr


def run_worker(folder):
    """Run a worker, here, to its end; return its records."""
    folder.mkdir(exist_ok=True)
    (folder / "policy").write_text("initial")
    with contextlib.chdir(folder):
        mirror_worker.work()
    return (folder / "records.jsonl").read_text()


def kept_records(folder):
    """Return the records in the ledger of a folder: name of the sub-step -> text."""
    found = folder.glob(".beamline/ledger/toy/reinforce/[0-9]*/record.json")
    return {file.parent.name: file.read_text() for file in found}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The records of a worker that is not killed, and has no mirror."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ledger_mirror.VARIABLE, "")
        return run_worker(tmp_path_factory.mktemp("unbroken"))


def test_second_worker_finishes_what_a_killed_one_began(store, tmp_path, unbroken, capsys):
    kill_worker(tmp_path / "first", "update", "1")
    assert run_worker(tmp_path / "second") == unbroken
    lines = [json.loads(line) for line in unbroken.splitlines()]
    assert [line["verb"] for line in lines] == ["rollout", "update"] * 3
    assert "3 earlier sub-steps" in capsys.readouterr().out, "only the one that was cut is lost"
    assert len(store.paths("toy/reinforce/*")) == len(lines)


@pytest.mark.parametrize("moment", ["archive", "record"])
def test_worker_killed_in_the_middle_of_an_upload(store, tmp_path, unbroken, moment, capsys):
    kill_worker(tmp_path / "first", moment, "1")
    had = kept_records(tmp_path / "first")
    [path] = store.paths("toy/reinforce/0001-update-*") or [""]  # S3 shows no upload that was cut
    assert path or (moment == "archive" and store.root.startswith("bucket"))
    assert not path or store.names(path) == [packing.ARCHIVE]
    assert run_worker(tmp_path / "other") == unbroken
    assert "damaged" not in capsys.readouterr().out
    assert run_worker(tmp_path / "first") == unbroken
    assert had.items() <= kept_records(tmp_path / "first").items(), "it computed none of it again"
    for folder in ("first", "other"):
        marks = list((tmp_path / folder).glob(".beamline/ledger/toy/reinforce/*/delivered"))
        assert len(marks) == 6, "all of it is there now"
    capsys.readouterr()
    assert run_worker(tmp_path / "last") == unbroken
    assert capsys.readouterr().out == "", "nothing was computed, and nothing was said"


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
def far(tmp_path, monkeypatch):
    """The folder of a server; the mirror is in it by the credentials of DVC's remote."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(ledger_mirror.VARIABLE, raising=False)
    (tmp_path / "far").mkdir()
    return tmp_path / "far"


def test_mirror_over_ssh_is_shared(far, tmp_path):
    with Server(far) as server:
        for name in ("first", "second"):
            use_remote(tmp_path / name, server.port)
        worker = Worker(tmp_path / "first")
        first = [worker.do(i) for i in range(2)]
        worker.retire(1)
        assert computed == [0, 1]
        assert entry(far / "cache/ledger", 0).is_dir()
        corrupt(entry(far / "cache/ledger", 1))
        other = Worker(tmp_path / "second")
        assert other.do(0) == first[0]
        assert computed == []
        assert other.do(1)["artifacts"] == first[1]["artifacts"]
        assert computed == [1], "the corrupted one is computed again"
        other.close()
        worker.close()
    kept = packing.contents(entry(far / "cache/ledger", 1) / packing.ARCHIVE)
    assert kept["weights/a.bin"] == b"weights" * 99


def test_ssh_server_may_go_and_come_back(far, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ledger_mirror, "PAUSE", 0)
    with Server(far) as server:
        use_remote(tmp_path / "worker", server.port)
        worker = Worker(tmp_path / "worker")
        worker.do(0)
    worker.do(1)
    assert capsys.readouterr().out.count("is unreachable (") == 1
    with Server(far, server.port):
        worker.do(2)
        worker.close()
        assert [entry(far / "cache/ledger", i).is_dir() for i in range(3)] == [True] * 3
    assert computed == [0, 1, 2]


def test_mark_has_no_password_and_outlives_it(shared, worker):
    def mirror(address):
        return ledger_mirror.RemoteMirror(address, filesystem(str(shared)))

    def push(mirror, place):
        mirror.push(place)
        mirror.flush()

    record = worker.do(0)
    place = Path(artifacts.output(record, "table").path).parent
    push(mirror("ssh://worker:first@host/ledger"), place)
    assert (place / DELIVERED).read_text() == "ssh://worker@host/ledger"
    shutil.rmtree(entry(shared))
    push(mirror("ssh://worker:second@host/ledger"), place)
    assert not list(shared.glob("toy/reinforce/*")), "it is there already"
    push(mirror("ssh://worker:second@elsewhere/ledger"), place)
    assert entry(shared).is_dir()
