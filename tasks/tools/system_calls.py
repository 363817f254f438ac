"""The system calls that code in a sandbox may not make, as a program for Linux's seccomp.

It refuses what outlives a call, what another call or the host can notice, what holds memory beyond
the limits, further namespaces, and interfaces whose only use here is an attack on the kernel.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, audit number
X32 = 0x40000000  # x86's second set of numbers for the same calls

Numbers = tuple[int, int | None]  # of a system call on x86_64 and aarch64
REFUSED: dict[str, Numbers] = {
    # what outlives a process
    "add_key": (248, 217),
    "keyctl": (250, 219),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "request_key": (249, 218),
    "semget": (64, 190),
    "shmget": (29, 194),
    # what others do, and what they notice
    "cachestat": (451, 451),
    "fanotify_init": (300, 262),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "preadv2": (327, 286),  # RWF_NOWAIT tells which files are in memory
    "sysinfo": (99, 179),
    "syslog": (103, 116),
    # memory beyond the limits
    "io_uring_setup": (425, 425),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "sendfile": (40, 71),  # a pipe or a socket counts a byte of a page, and holds the page
    "splice": (275, 76),
    "tee": (276, 77),
    "vmsplice": (278, 75),
    # the kernel, other processes, other namespaces
    "bpf": (321, 280),
    "kcmp": (312, 272),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "setns": (308, 268),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
# They do nothing and return 0: they reach the host's disks and its memory of files.
WITHOUT_EFFECT: dict[str, Numbers] = {
    "fadvise64": (221, 223),
    "fdatasync": (75, 83),
    "flock": (73, 32),
    "fsync": (74, 82),
    "readahead": (187, 213),
    "sync": (162, 81),
    "sync_file_range": (277, 84),
    "syncfs": (306, 267),
}
# As on a kernel without them: programs then do without.
UNKNOWN: dict[str, Numbers] = {
    "clone3": (435, 435),  # its flags are not readable here; libc falls back to clone
    "io_setup": (206, 0),  # one limit for the whole machine
    "landlock_add_rule": (445, 445),
    "landlock_create_ruleset": (444, 444),
    "landlock_restrict_self": (446, 446),
}
CLONE, FCNTL = (56, 220), (72, 25)
MMAP, SETSOCKOPT, SOCKET = (9, 222), (54, 208), (41, 198)
SOCKETPAIR = (53, 199)

# From the headers of Linux, where Python has no names for them.
CLONE_NEW_ANY, CLONE_PARENT = 0x7E020080, 0x8000
MAP_SHARED, MAP_ANONYMOUS = 0x01, 0x20
SOL_SOCKET, BUFFER_SIZES = 1, (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF and those with FORCE
F_SETLK, F_SETLKW, F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ = 6, 7, 1024, 1026, 1031
F_OFD_SETLK, F_OFD_SETLKW = 37, 38

LOAD, EQUAL, GREATER, AT_LEAST, ANY_BIT, ANSWER = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
ALLOW, FAIL = 0x7FFF0000, 0x00050000
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
GRANTED = 0  # instead of an error: the call does nothing and returns 0

Step = tuple[int, int, int, int]  # struct sock_filter: code, jump if true, jump if false, value


@dataclass(frozen=True)
class Test:
    """A condition on the lower 32 bits of an argument of a system call."""

    argument: int
    code: int
    value: int
    wanted: bool = True


@dataclass(frozen=True)
class Rule:
    """A system call that fails with ``error`` if all ``tests`` of its arguments hold."""

    call: Numbers
    tests: tuple[Test, ...]
    error: int = errno.EPERM


def _equal(argument: int, *values: int) -> list[tuple[Test, ...]]:
    return [(Test(argument, EQUAL, value),) for value in values]


RULES = [
    # A child of the supervisor would outlive the call, which waits for its own processes.
    Rule(CLONE, (Test(0, ANY_BIT, CLONE_NEW_ANY | CLONE_PARENT),)),
    # No network: without addresses, a namespace has no counters that the next call could read.
    Rule(SOCKET, (Test(0, EQUAL, socket.AF_UNIX, wanted=False),), errno.ENETUNREACH),
    Rule(SOCKETPAIR, (Test(0, EQUAL, socket.AF_UNIX, wanted=False),), errno.ENETUNREACH),
    *(
        Rule(SETSOCKOPT, (Test(1, EQUAL, SOL_SOCKET), Test(2, EQUAL, option)))
        for option in BUFFER_SIZES
    ),
    # Locks of host files reach other calls. A call is alone, so a lock that does nothing serves it.
    *(
        Rule(FCNTL, tests, GRANTED)
        for tests in _equal(1, F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW)
    ),
    *(Rule(FCNTL, tests) for tests in _equal(1, F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ)),
    # Shared memory without a file can be held without being mapped, where no count finds it.
    Rule(MMAP, (Test(3, ANY_BIT, MAP_SHARED), Test(3, ANY_BIT, MAP_ANONYMOUS)), errno.ENOMEM),
]


def system_call_filter() -> bytes:
    """Return a seccomp program for this machine: an array of struct sock_filter.

    Raises RuntimeError for an architecture without a table.
    """
    name = os.uname().machine
    if name not in ARCHITECTURES:
        raise RuntimeError(f"no table of system calls for {name}, only for {sorted(ARCHITECTURES)}")
    column, architecture = ARCHITECTURES[name]
    tables = ((REFUSED, errno.EPERM), (WITHOUT_EFFECT, GRANTED), (UNKNOWN, errno.ENOSYS))
    rules = [Rule(call, (), error) for table, error in tables for call in table.values()] + RULES
    steps: list[Step] = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (EQUAL, 1, 0, architecture),
        (ANSWER, 0, 0, FAIL | errno.EPERM),
        (LOAD, 0, 0, NUMBER_AT),
        (AT_LEAST, 0, 1, X32),
        (ANSWER, 0, 0, FAIL | errno.EPERM),
    ]
    for rule in rules:
        number = rule.call[column]
        if number is not None:
            steps += _steps(number, rule.tests, rule.error)
    return b"".join(struct.pack("=HBBI", *step) for step in [*steps, (ANSWER, 0, 0, ALLOW)])


def _steps(number: int, tests: Sequence[Test], error: int) -> list[Step]:
    """Return the steps of a rule. They begin and end with the call's number in the register."""
    last = 2 * len(tests) + (2 if tests else 1)  # place of the last step; the first has 0
    steps: list[Step] = [(EQUAL, 0, last, number)]
    for test in tests:
        at = ARGUMENTS_AT + 8 * test.argument
        skipped = last - (len(steps) + 1) - 1  # up to the last step, which loads the number again
        jumps = (0, skipped) if test.wanted else (skipped, 0)
        steps += [(LOAD, 0, 0, at), (test.code, *jumps, test.value)]
    steps.append((ANSWER, 0, 0, FAIL | error))
    return [*steps, (LOAD, 0, 0, NUMBER_AT)] if tests else steps
