"""Run the command of an MCP server, bound what it writes, and end all that it has started.

    python -I -S mcp_guard.py PARENT COMMAND...

What the server writes to its standard output is passed on, a line of at most LINE_BYTES at a time.
Of its standard error the last ERROR_BYTES are kept, and written when it has ended. It ends, with
all processes that it has started, when PARENT does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tasks.extensions import descendants

# Of a message: many times what an agent can read. Longer ones of many small parts take seconds to
# read, in which all other servers wait.
LINE_BYTES = 4 * 2**20
ERROR_BYTES = 64 * 2**10
BLOCK = 2**16
GOODBYE = 0.5  # seconds to read what a server has written before it ended


def pass_on(source: int, target: int) -> str:
    """Write to ``target`` what comes from ``source``; return why it was not all, or ""."""
    length = 0  # of the line that has not ended
    while block := os.read(source, BLOCK):
        first = block.find(b"\n")
        longest = length + (len(block) if first < 0 else first)
        length = longest if first < 0 else len(block) - 1 - block.rfind(b"\n")
        if longest > LINE_BYTES:
            return f"it wrote a line of more than {LINE_BYTES} bytes, and was ended"
        while block:
            block = block[os.write(target, block) :]
    return ""


def keep_last(source: int, kept: bytearray) -> None:
    """Read ``source`` to its end; keep its last bytes."""
    while block := os.read(source, BLOCK):
        kept += block
        del kept[:-ERROR_BYTES]


def main(parent: int, command: list[str]) -> None:
    """Run the command; this process ends with its exit status."""
    descendants.signal_at_parents_end(signal.SIGTERM, parent)
    descendants.adopt_orphans()
    output, errors = os.pipe(), os.pipe()
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        start(guard, command, output[1], errors[1])

    def end_server(*_: object) -> None:
        # It may have ended by itself, when its standard input did: an error here would end this
        # process before the others that the server has started.
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end_server)
    for number in (0, output[1], errors[1]):
        os.close(number)
    kept, why = bytearray(), []

    def relay() -> None:
        with suppress(OSError):  # nobody reads any more
            why.append(pass_on(output[0], 1))
        if any(why):
            os.kill(child, signal.SIGKILL)

    threads = [
        threading.Thread(target=relay, daemon=True),
        threading.Thread(target=keep_last, args=(errors[0], kept), daemon=True),
    ]
    for thread in threads:
        thread.start()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    descendants.end_descendants()
    for thread in threads:
        thread.join(GOODBYE)
    with suppress(OSError):
        os.write(2, b"\n".join([bytes(kept), *(one.encode() for one in why if one)]))
    os._exit(max(status, 0) or (status < 0))


def start(guard: int, command: list[str], output: int, errors: int) -> None:
    """Become the server; never returns."""
    try:
        os.setpgid(0, 0)
        descendants.signal_at_parents_end(signal.SIGKILL, guard)
        os.dup2(output, 1)
        os.dup2(errors, 2)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(errors, f"{command[0]}: {error}".encode())
    finally:
        os._exit(127)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
