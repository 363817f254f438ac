"""Pauses before a server is tried again."""

import email.utils
import time

import pytest

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
