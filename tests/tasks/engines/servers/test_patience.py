"""Pauses before a server is tried again."""

import email.utils
import time

import pytest

from tasks.engines.servers.client import ServerFailedError
from tasks.engines.servers.fleet import Fleet
from tasks.engines.servers.patience import PATIENCE, retry_after


def test_pauses_grow_to_the_longest():
    pauses = [PATIENCE.pause(failures) for failures in (1, 2, 3, 7, 8, 10**6)]
    assert pauses == [1, 2, 4, 60, 60, 60]


def test_a_server_may_ask_for_a_longer_pause_up_to_the_longest():
    assert PATIENCE.pause(1, retry_after(" 30 ")) == 30
    assert PATIENCE.pause(1, retry_after("86400")) == PATIENCE.longest_pause
    assert PATIENCE.pause(4, retry_after("2")) == 8


def test_a_date_counts_from_now():
    assert 80 < retry_after(email.utils.formatdate(time.time() + 90)) <= 91


@pytest.mark.parametrize(
    "header", ["", "soon", "-5", "1e9", "NaN", "Sun, 06 Nov 1994 08:49:37 GMT"]
)
def test_other_headers_ask_for_nothing(header):
    assert retry_after(header) == 0


def test_long_number_is_bounded():
    assert PATIENCE.pause(1, retry_after("9" * 4000)) == PATIENCE.longest_pause


def test_large_weights_take_longer():
    assert PATIENCE.of_weights(0) == PATIENCE.call
    assert PATIENCE.of_weights(32 * 10**9) == PATIENCE.call + 3200


def test_server_that_fails_with_turns_is_left_out_longer_where_others_sample():
    fleet = Fleet(["http://127.0.0.1:9", "http://127.0.0.1:10"], "transformers")
    failing, other = fleet.servers

    def pause(others):
        fleet.up = {failing, *others}
        fleet._take_down(failing, ServerFailedError(failing.name, "hangs"))
        return fleet._due(failing) - time.monotonic()

    pauses = [pause([other]) for _ in range(13)]
    assert pauses[0] == pytest.approx(1, abs=0.5) and pauses[9] == pytest.approx(512, abs=9)
    assert pauses[12] == pytest.approx(PATIENCE.longest_absence, abs=9)
    fleet.up.clear()  # it is needed now
    assert fleet._due(failing) - time.monotonic() <= PATIENCE.longest_pause
