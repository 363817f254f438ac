"""Folders that wait for a slow network: how many, for how long, and what takes them out."""

import threading
from pathlib import Path

import pytest

from flows.runs.uploads import MOST, UploadQueue

PLACES = [Path(f"ledger/{number}") for number in range(MOST + 2)]


class Network:
    """Sends a folder for each permit, in order; while it is down, none."""

    def __init__(self):
        self.permits, self.sent, self.up = threading.Semaphore(0), [], True

    def send(self, place):
        self.permits.acquire()
        if self.up:
            self.sent.append(place)
        return self.up


@pytest.fixture
def network():
    return Network()


@pytest.fixture
def uploads(network):
    """Uploads of which the first folder is being sent, and MOST others wait."""
    made = UploadQueue(network.send)
    for place in PLACES[: MOST + 1]:
        made.add(place)
    with made.changed:
        made.changed.wait_for(lambda: made.current == PLACES[0])
    return made


def begun(work, *arguments):
    """Start a thread that is expected to wait."""
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    return thread


def test_run_waits_once_too_many_folders_wait(uploads, network):
    adding = begun(uploads.add, PLACES[-1])
    network.permits.release()
    adding.join()
    assert uploads.wait(0) == MOST + 1
    network.permits.release(MOST + 1)
    assert uploads.wait(60) == 0
    assert network.sent == PLACES, "in order"


def test_folder_that_waits_is_added_at_once_and_sent_once(uploads, network):
    uploads.add(PLACES[1])
    network.permits.release(MOST + 1)
    assert uploads.wait(60) == 0
    assert network.sent == PLACES[: MOST + 1]


def test_withdrawn_folder_is_not_sent(uploads, network):
    uploads.withdraw(PLACES[1])
    waiting = begun(uploads.withdraw, PLACES[0])  # it is being sent
    network.permits.release()
    waiting.join()
    network.permits.release(MOST)
    assert uploads.wait(60) == 0
    assert network.sent == [PLACES[0], *PLACES[2 : MOST + 1]]


def test_folders_below_a_withdrawn_one_are_not_sent(uploads, network):
    waiting = begun(uploads.withdraw, Path("ledger"))
    assert uploads.wait(0) == 1, "the one that is being sent"
    network.permits.release()
    waiting.join()
    assert uploads.wait(60) == 0
    assert network.sent == PLACES[:1]


def test_unreachable_network_holds_up_nobody_and_gets_the_rest(uploads, network):
    network.up = False
    network.permits.release(99)
    uploads.add(PLACES[-1])
    assert uploads.wait(60) == 0
    assert list(uploads.unsent) == PLACES
    network.up = True
    uploads.add(Path("ledger/new"))
    assert uploads.wait(60) == 0
    assert network.sent == [Path("ledger/new"), *PLACES]
    assert not uploads.unsent
