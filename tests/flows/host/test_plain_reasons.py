import socket

import pytest

from flows.host.plain_reasons import plain_reason


def raised_from(cause):
    error = ValueError("Cannot connect to host x:9")
    error.__cause__ = cause
    return error


REASONS = {
    "the name of its host is not known": raised_from(socket.gaierror(-2, "Name")),
    "nothing answers at its host and port": raised_from(ConnectionRefusedError()),
    "Not a directory: a/b": NotADirectoryError(20, "Not a directory", "a/b"),
    "Server error '500' for url 'x'": ValueError(
        "Server error '500' for url 'x'\nFor more information check: https://developer.invalid"
    ),
    "it answers with the status 500": OSError("Max retries (too many 500 error responses)"),
    "its answers are no JSON": ValueError("the response body was not in a valid JSON format. <x>"),
    "it gives no reason": RuntimeError(),
}


@pytest.mark.parametrize("expected", REASONS)
def test_reason(expected):
    assert plain_reason(REASONS[expected]) == expected
