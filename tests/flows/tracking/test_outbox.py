import os
import signal

import pytest

from flows.tracking import outbox
from flows.tracking.outbox import Outbox, OutboxMessage


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def kinds(unsent):
    return [outbox.read(file).kind for file in unsent.files()]


def test_messages_are_kept_whole_and_in_order(folder):
    unsent = Outbox(folder / "box")
    assert unsent.files() == []
    messages = [OutboxMessage(str(n), {"n": n, "text": "ü\n"}, b"\n\x00" * n) for n in range(12)]
    for message in messages:
        unsent.add(message)
    assert [outbox.read(file) for file in unsent.files()] == messages
    unsent.files()[0].unlink()
    unsent.add(messages[0])
    assert kinds(unsent) == [*map(str, range(1, 12)), "0"]


def test_processes_that_add_at_once_lose_nothing(folder):
    children = []
    for number in range(8):
        if (pid := os.fork()) == 0:
            for part in range(20):
                Outbox(folder / "box").add(OutboxMessage(f"{number}-{part}", {}))
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    found = kinds(Outbox(folder / "box"))
    assert sorted(found) == sorted(f"{n}-{part}" for n in range(8) for part in range(20))
    for number in range(8):
        own = [kind for kind in found if kind.startswith(f"{number}-")]
        assert own == [f"{number}-{part}" for part in range(20)]


def test_killed_writer_leaves_whole_messages(monkeypatch):
    if (pid := os.fork()) == 0:
        unsent = outbox.create({"name": "run"}, "key")
        unsent.add(OutboxMessage("metrics", {}))
        monkeypatch.setattr(outbox.Path, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        unsent.add(OutboxMessage("end", {}))
        os._exit(1)  # it lived on
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    [folder] = outbox.unsent_runs()
    assert kinds(Outbox(folder)) == ["metrics"]
    assert outbox.read_run(folder) == {"name": "run"}


def test_outbox_has_one_holder():
    unsent = outbox.create({"name": "run"}, "key")
    assert outbox.unsent_runs() == []
    with outbox.hold(unsent.folder) as held:
        assert held is None
    unsent.close()
    assert outbox.unsent_runs() == [unsent.folder]
    with outbox.hold(unsent.folder) as held:
        assert held.run() == {"name": "run"}
        held.remove()
    with outbox.hold(unsent.folder) as held:
        assert held is None
    assert list(outbox.root().iterdir()) == []
