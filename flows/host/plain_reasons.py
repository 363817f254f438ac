"""Say in plain words why a server, a store or a file could not be used."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

from flows.host.addresses import without_password

# the first that is in the chain of causes counts; several of them are an OSError
MEANINGS: dict[type[BaseException], str] = {
    socket.gaierror: "the name of its host is not known",
    ConnectionRefusedError: "nothing answers at its host and port",
    ConnectionResetError: "it closes the connection",
    TimeoutError: "it does not answer in time",
}
# what a library says of an answer -> the same in short
ANSWERS = {
    re.compile(r"too many (\d+) error responses"): r"it answers with the status \1",
    re.compile(r"failed with error code (\d+) != 200"): r"it answers with the status \1",
    re.compile("response body was not in a valid JSON format"): "its answers are no JSON",
}
LONGEST = 300  # characters: one line in a terminal, or three
ADVERTISED = re.compile(r"\s*For more information check: \S+")  # of httpx
NUMBER = re.compile(r"^\[Errno -?\d+\] ")


def plain_reason(error: BaseException) -> str:
    """Return the reason in one line without class names, numbers of errors and passwords."""
    for cause in _causes(error):
        for kind, meaning in MEANINGS.items():
            if isinstance(cause, kind):
                return meaning
    if isinstance(error, OSError) and error.strerror:
        name = f": {error.filename}" if isinstance(error.filename, str) else ""
        return without_password(f"{NUMBER.sub('', error.strerror)}{name}")
    for pattern, meaning in ANSWERS.items():
        if matched := pattern.search(str(error)):
            return matched.expand(meaning)
    lines = ADVERTISED.sub("", str(error)).strip().splitlines()
    line = without_password(NUMBER.sub("", lines[0])) if lines else "it gives no reason"
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} …"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it was raised from, once each."""
    seen: list[BaseException] = []
    while error not in seen:
        yield error
        seen.append(error)
        error = error.__cause__ or error.__context__ or error
