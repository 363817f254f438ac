"""The program in the Python tool's sandbox: a warm interpreter that forks a process for each call.

Started by python.py as ``python -c <this file> <configuration>``; standard library only, because
the project is not visible inside. Needs Linux 5.14 or newer for everything but ``sandbox: none``.

    warm parent ──fork──► supervisor ──fork──► keeper   pid 1 of the call's namespaces, only waits
    (sees no call)        (one call)   └─fork──► runner   pid 2, runs the model's code, confined

The supervisor enters new namespaces, reads one call from descriptor 0, watches the runner, and
writes one reply to descriptor 1; then it ends, and the warm parent forks the next one from
unchanged memory. The runner has no descriptor but its output, so it can return only its exit status
and its output. When the keeper is killed, the kernel kills all processes that the code has left.

A frame is a 4-byte big-endian length and that many bytes: UTF-8 source in, JSON out.
"""

import ast
import codecs
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import resource
import select
import signal
import site
import socket
import struct
import sys
import time
import traceback
import types
from collections.abc import Sequence
from pathlib import Path

# Modules that models import most, imported once before the first fork. Not threading: it doubles
# the cost of a fork.
WARM = [
    "bisect",
    "cmath",
    "collections",
    "copy",
    "datetime",
    "decimal",
    "fractions",
    "functools",
    "heapq",
    "itertools",
    "math",
    "numbers",
    "operator",
    "random",
    "re",
    "statistics",
    "string",
    "textwrap",
    "typing",
]

# Exit statuses of a runner: unusual numbers, so that the code's own os._exit(0) is none of these.
OK, ERROR, MEMORY = 200, 201, 202
OUTCOMES = {OK: "ok", ERROR: "error", MEMORY: "memory"}  # names of tasks/trees/outcomes.py
TIMEOUT, WALL_TIMEOUT, OUTPUT_LIMIT, KILLED = "timeout", "wall_timeout", "output_limit", "killed"

MEBIBYTE = 2**20
RESERVE = 4 * MEBIBYTE  # beyond the memory limit, to report that it was reached
OPEN_FILES = 64
SCRATCH_FILES = 4096  # in /tmp
INNER_USER = 1000  # user id that the code sees; any but root

# From the headers of Linux; Python 3.11 has no names for them.
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWIPC = 0x20000, 0x2000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEW_ANY = 0x10000000, 0x20000000, 0x7E020080
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC = 1, 2, 4, 8, 0x1000, 0x4000
MNT_DETACH, AT_FDCWD, AT_RECURSIVE = 2, -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
PR_SET_CHILD_SUBREAPER, SECCOMP_MODE_FILTER = 36, 2
ADDR_NO_RANDOMIZE, PERSONALITY_QUERY = 0x0040000, 0xFFFFFFFF
MOUNT_SETATTR = 442

libc = ctypes.CDLL(None, use_errno=True)


def kernel(function: str, *arguments: int | bytes) -> int:
    """Call a C function that returns -1 on failure. Raises OSError with its name."""
    wide = (ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments)
    result = int(getattr(libc, function)(*wide))
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{function}: {os.strerror(code)}")
    return result


def write(file: str, text: str) -> None:
    """Write to a file of the kernel in one system call."""
    descriptor = os.open(file, os.O_WRONLY)
    os.write(descriptor, text.encode())
    os.close(descriptor)


# ---- frames


def read_exactly(count: int) -> bytes | None:
    """Read ``count`` bytes of descriptor 0, or return None where the other side has closed it."""
    data = bytearray()
    while len(data) < count:
        chunk = os.read(0, count - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def read_frame() -> bytes | None:
    """Read a frame, or return None at the end."""
    head = read_exactly(4)
    return None if head is None else read_exactly(struct.unpack(">I", head)[0])


def write_frame(payload: bytes) -> None:
    """Write a frame to descriptor 1."""
    data = memoryview(struct.pack(">I", len(payload)) + payload)
    while data:
        data = data[os.write(1, data) :]


# ---- the worker's own root


def fix_addresses() -> None:
    """Restart without address randomisation, so that ``print(object())`` is the same in every run.

    Nothing else runs in these processes that code could attack with known addresses. Where the
    machine forbids it, addresses stay random.
    """
    current = libc.personality(ctypes.c_ulong(PERSONALITY_QUERY))
    if current & ADDR_NO_RANDOMIZE:
        return
    with contextlib.suppress(OSError):
        kernel("personality", current | ADDR_NO_RANDOMIZE)
        os.execv(sys.executable, sys.orig_argv)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Call mount(2). Raises OSError with the target."""
    try:
        kernel("mount", source.encode(), target.encode(), kind.encode(), flags, options.encode())
    except OSError as error:
        raise OSError(error.errno, f"mount {kind or source} on {target}: {error}") from None


def restrict(path: str, flags: int, whole_tree: bool) -> None:
    """Add mount flags to a mount, and to the mounts below it if ``whole_tree``."""
    attributes = struct.pack("=4Q", flags, 0, 0, 0)
    recursive = AT_RECURSIVE if whole_tree else 0
    kernel("syscall", MOUNT_SETATTR, AT_FDCWD, path.encode(), recursive, attributes, 32)


def build_root(entries: list[tuple[str, str, str]]) -> None:
    """Move into a new read-only root with ``entries``: (kind, source, target) each."""
    # Opened first: the new root is built over /tmp, which may hide a source.
    sources = [os.open(s, os.O_PATH) if k in ("bind", "device") else -1 for k, s, _ in entries]
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
    for (kind, source, target), descriptor in zip(entries, sources, strict=True):
        place = Path("/tmp" + target)
        folder = place.parent if kind in ("symlink", "device") else place
        folder.mkdir(parents=True, exist_ok=True)
        if kind == "symlink":
            place.symlink_to(source)
        if kind == "device":
            place.touch()
        if kind in ("bind", "device"):
            mount(f"/proc/self/fd/{descriptor}", str(place), "", MS_BIND | MS_REC)
        if kind == "bind":
            restrict(str(place), MS_RDONLY | MS_NOSUID | MS_NODEV, whole_tree=True)
    for descriptor in sources:
        if descriptor >= 0:
            os.close(descriptor)
    mount("proc", "/tmp/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.chdir("/tmp")
    kernel("syscall", PIVOT_ROOT[machine()[0]], b".", b".")
    kernel("umount2", b".", MNT_DETACH)
    os.chdir("/")
    restrict("/", MS_RDONLY, whole_tree=False)
    socket.sethostname("sandbox")


# ---- system calls that the code may not make

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column below, audit number
NUMBERS = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setns": (308, 268),
    "shmget": (29, 194),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
CLONE, CLONE3, PIVOT_ROOT, SOCKET = (56, 220), (435, 435), (155, 41), (41, 198)
LARGEST_FAMILY = socket.AF_INET6  # above it: VSOCK, which a network namespace does not isolate


def machine() -> tuple[int, int]:
    """Return the column in the tables of system calls, and the audit number of the architecture."""
    name = os.uname().machine
    if name not in MACHINES:
        raise RuntimeError(f"no table of system calls for {name}, only for {sorted(MACHINES)}")
    return MACHINES[name]


def system_call_filter() -> bytes:
    """Return a seccomp program of struct sock_filter (code, jump if true, jump if false, value).

    It refuses kernel objects that outlive a process or escape its memory limit (System V and POSIX
    queues, memory files, key rings), further namespaces, other socket families, and interfaces
    whose only use here is an attack on the kernel or on another process.
    """
    load, equal, greater, at_least, any_bit, answer = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38  # EPERM, ENOSYS
    number_at, architecture_at, argument_at = 0, 4, 16
    column, architecture = machine()
    program = [
        (load, 0, 0, architecture_at),
        (equal, 1, 0, architecture),
        (answer, 0, 0, refuse),
        (load, 0, 0, number_at),
        (at_least, 0, 1, 0x40000000),  # x86's second set of numbers for the same calls
        (answer, 0, 0, refuse),
        (equal, 0, 1, CLONE3[column]),  # its flags are not readable here; libc falls back to clone
        (answer, 0, 0, unknown),
    ]
    for numbers in NUMBERS.values():
        program += [(equal, 0, 1, numbers[column]), (answer, 0, 0, refuse)]
    for numbers, test, bound in (
        (CLONE, any_bit, CLONE_NEW_ANY),
        (SOCKET, greater, LARGEST_FAMILY),
    ):
        program += [
            (equal, 0, 4, numbers[column]),
            (load, 0, 0, argument_at),
            (test, 0, 1, bound),
            (answer, 0, 0, refuse),
            (load, 0, 0, number_at),
        ]
    return b"".join(struct.pack("=HBBI", *step) for step in [*program, (answer, 0, 0, allow)])


# ---- one call


def enter_namespaces(config: dict) -> int:
    """Enter namespaces of this call alone; return the keeper's pid."""
    if config["user"] is not None:  # real root: its processes are exempt from RLIMIT_NPROC
        os.setgroups([])
        os.setresgid(config["user"], config["user"], config["user"])
        os.setresuid(config["user"], config["user"], config["user"])
        kernel("prctl", PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root
    user, group = os.getuid(), os.getgid()
    spaces = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWCGROUP
    kernel("unshare", spaces)
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"{INNER_USER} {user} 1")
    write("/proc/self/gid_map", f"{INNER_USER} {group} 1")
    size = config["file_mib"] * MEBIBYTE
    options = f"size={size},nr_inodes={SCRATCH_FILES},mode=1777"
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, options)
    keeper = os.fork()
    if keeper == 0:
        guarded(keep, config)
    return keeper


def keep(config: dict) -> int:
    """Be pid 1 and reap orphans until killed; confined, since the runner may attack it."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    confine(os.open("/dev/null", os.O_WRONLY), os.getppid(), config)
    while True:
        signal.pause()


def confine(output: int, parent: int, config: dict) -> None:
    """Drop every right and descriptor but ``output``, and set the limits."""
    os.setsid()  # kill(0, ...) reaches the process group, across process namespaces
    null = os.open("/dev/null", os.O_RDONLY)
    for descriptor, source in ((0, null), (1, output), (2, output)):
        os.dup2(source, descriptor)
    os.closerange(3, 65536)
    write("/proc/self/oom_score_adj", "1000")  # first to be killed when memory ends
    neighbours = 2 if config["namespaces"] else tasks_of_user()  # 2: supervisor and keeper
    memory = config["memory_mib"] * MEBIBYTE
    limit(resource.RLIMIT_AS, memory, memory + RESERVE)
    limit(resource.RLIMIT_CPU, config["cpu_seconds"], config["cpu_seconds"] + 1)  # SIGXCPU, SIGKILL
    limit(resource.RLIMIT_FSIZE, config["file_mib"] * MEBIBYTE)
    limit(resource.RLIMIT_NPROC, config["processes"] + neighbours)
    limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    limit(resource.RLIMIT_CORE, 0)
    kernel("capset", struct.pack("=Ii", 0x20080522, 0), bytes(24))  # no capabilities
    kernel("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    kernel("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() not in (parent, 0):  # 0: outside of the namespace
        raise RuntimeError("the supervisor ended before its death could be noticed")
    if config["namespaces"]:
        steps = system_call_filter()
        buffer = ctypes.create_string_buffer(steps)
        program = struct.pack("@HP", len(steps) // 8, ctypes.addressof(buffer))
        kernel("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program)


def tasks_of_user() -> int:
    """Count the user's processes and threads, as RLIMIT_NPROC does outside a user namespace."""
    tasks = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if process.stat().st_uid == os.getuid():
                tasks += sum(1 for _ in (process / "task").iterdir())
    return tasks


def limit(kind: int, soft: int, hard: int | None = None) -> None:
    """Call setrlimit, never above the present limit of this process."""
    ceiling = resource.getrlimit(kind)[1]
    hard = soft if hard is None else hard
    hard = hard if ceiling == resource.RLIM_INFINITY else min(hard, ceiling)
    resource.setrlimit(kind, (min(soft, hard), hard))


class Output(io.FileIO):
    """A raw output that keeps its last byte, so that the error can start on a new line."""

    last = b"\n"

    def write(self, data, /):
        self.last = bytes(data[-1:]) or self.last
        return super().write(data)


def renew_output() -> tuple[io.TextIOWrapper, Output]:
    """Make one stream for output and errors, which keeps their order; return it and its raw output.

    It is flushed at every line's end, so that a kill loses no line.
    """
    raw = Output(1, "w", closefd=False)
    buffer = io.BufferedWriter(raw)
    stream = io.TextIOWrapper(buffer, "utf-8", errors="backslashreplace", line_buffering=True)
    sys.stdout = sys.__stdout__ = sys.stderr = sys.__stderr__ = stream  # type: ignore[misc]
    return stream, raw


def execute(source: str) -> None:
    """Run ``source`` as the main module; print the value of a last bare expression."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    tree = ast.parse(source, "<code>")
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    exec(compile(tree, "<code>", "exec"), main.__dict__)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "<code>", "eval"), main.__dict__)
        if value is not None:
            print(value)
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()  # wait for its threads, as at the end of any program


def attempt(source: str) -> tuple[int, str]:
    """Run ``source``; return OK, ERROR or MEMORY, and the last line of the traceback or ""."""
    try:
        execute(source)
    except MemoryError:
        return MEMORY, "MemoryError"
    except SystemExit as stop:
        if stop.code in (None, 0):
            return OK, ""
        return ERROR, f"SystemExit: {stop.code}"
    except BaseException as error:
        return ERROR, traceback.format_exception_only(error)[-1].rstrip("\n")
    return OK, ""


def run_code(output: int, parent: int, source: str, config: dict) -> int:
    """Be the runner: confine, run, print the error; return the exit status."""
    if config["namespaces"]:
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "subset=pid")
        os.chdir("/tmp")
    confine(output, parent, config)
    stream, raw = renew_output()
    sys.path.insert(0, "")
    everything = (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2
    status, line = attempt(source)
    resource.setrlimit(resource.RLIMIT_AS, everything)
    try:
        with contextlib.suppress(OSError, ValueError):  # the code may have closed it
            stream.flush()
        if line:
            start = "" if raw.last == b"\n" else "\n"
            os.write(1, f"{start}{line}\n".encode("utf-8", errors="backslashreplace"))
    except MemoryError:
        return MEMORY
    return status


def guarded(life, *arguments) -> None:
    """Call ``life`` in a forked process, and exit with its status in any case."""
    status = 1
    try:
        status = life(*arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def watch(reader: int, runner: int, config: dict) -> tuple[str, str | None]:
    """Read the runner's output until it ends; return it, and the outcome that cut it or None."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    deadline = time.monotonic() + config["wall_seconds"]
    end = os.pidfd_open(runner)
    poll = select.poll()
    for descriptor, events in ((reader, select.POLLIN), (end, select.POLLIN), (0, 0)):
        poll.register(descriptor, events)
    text = ""
    while len(text) <= config["output_characters"]:
        ready = {d for d, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)}
        if not ready:
            return text, WALL_TIMEOUT
        if 0 in ready:
            raise EOFError("the tool's process has ended")
        if reader in ready:
            chunk = os.read(reader, 65536)
            text += decoder.decode(chunk, final=not chunk)
            if not chunk:
                poll.unregister(reader)
        elif end in ready:
            return text, None
    return text[: config["output_characters"]], OUTPUT_LIMIT


def end_family(keeper: int | None) -> None:
    """Kill all processes that the code has left, and wait for their end."""
    if keeper is not None:
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)  # returns when no process of the namespace is left
        return
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while family := children.read_text().split():
        for child in family:  # orphans become our children: we are their subreaper
            os.kill(int(child), signal.SIGKILL)
            os.waitpid(int(child), 0)


def serve(config: dict) -> int:
    """Be the supervisor of one call; return 0, or 1 when no call comes any more."""
    if config["namespaces"]:
        return answer(enter_namespaces(config), config)
    import tempfile

    kernel("prctl", PR_SET_CHILD_SUBREAPER, 1)
    with tempfile.TemporaryDirectory(prefix="call-", ignore_cleanup_errors=True) as scratch:
        os.chdir(scratch)
        return answer(None, config)


def answer(keeper: int | None, config: dict) -> int:
    """Wait for a call, run it, reply; return 0, or 1 at the end of input."""
    payload = read_frame()
    if payload is None:
        return 1
    reader, writer = os.pipe()
    supervisor = os.getpid()
    runner = os.fork()
    if runner == 0:
        guarded(run_code, writer, supervisor, payload.decode(errors="replace"), config)
    os.close(writer)
    text, cut = watch(reader, runner, config)
    os.kill(runner, signal.SIGKILL)
    _, status, usage = os.wait4(runner, 0)
    end_family(keeper)
    used = usage.ru_utime + usage.ru_stime
    outcome = cut or name_outcome(os.waitstatus_to_exitcode(status), used, config)
    write_frame(json.dumps([outcome, text.rstrip("\n")]).encode())
    return 0


def name_outcome(status: int, used: float, config: dict) -> str:
    """Return the outcome of a runner that was not cut; ``used`` is in CPU seconds."""
    if status == -signal.SIGXCPU or (status == -signal.SIGKILL and used >= config["cpu_seconds"]):
        return TIMEOUT
    return OUTCOMES.get(status, KILLED)


# ---- the warm parent


def warm_up(modules: Sequence[str]) -> None:
    """Do once what every call would do otherwise."""
    register = os.register_at_fork
    os.register_at_fork = lambda **_: None  # random would reseed itself in every fork
    for name in modules:
        importlib.import_module(name)
    os.register_at_fork = register
    sys.modules["random"].seed(0)
    os.environ.clear()
    sys.argv[:] = [""]
    # site did not run at start: hooks of packages would slow every fork.
    sys.path += site.getsitepackages()
    site.setquit()
    gc.collect()
    gc.freeze()  # so that no collection writes to memory shared with the forks


def main() -> None:
    """Set up the worker, then fork a supervisor for each call."""
    fix_addresses()
    config = json.loads(sys.argv[1])
    kernel("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    if config["root"]:
        build_root(config["root"])
    elif config["namespaces"] and not Path("/proc/self").exists():
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    warm_up(WARM if config["namespaces"] else [*WARM, "tempfile"])
    while True:
        supervisor = os.fork()
        if supervisor == 0:
            kernel("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
            guarded(serve, config)
        if os.waitpid(supervisor, 0)[1]:
            return


if __name__ == "__main__":
    main()
