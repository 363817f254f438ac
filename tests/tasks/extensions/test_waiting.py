"""Whether something can be read, whatever the number of its descriptor."""

import fcntl
import os
import resource

import pytest

from tasks.extensions.waiting import is_readable


@pytest.fixture
def high_pipe():
    """A pipe whose end to read has a number that select.select refuses."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, max(limit, 4096)), most))
    low, writer = os.pipe()
    reader = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1500)
    os.close(low)
    yield reader, writer
    os.close(reader)
    os.close(writer)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


def test_a_high_descriptor_is_waited_for(high_pipe):
    reader, writer = high_pipe
    assert not is_readable(reader, seconds=0.01)
    os.write(writer, b"1")
    assert is_readable(reader) and is_readable(reader, seconds=None)


def test_an_end_is_readable():
    reader, writer = os.pipe()
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        assert is_readable(file)
