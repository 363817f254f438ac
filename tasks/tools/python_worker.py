"""The program in the Python tool's sandbox: a warm interpreter that forks a process for each call.

Started by python.py as ``python -c <this file> <configuration>``; standard library only, because
the project is not visible inside. Needs Linux 5.14 or newer for everything but ``sandbox: none``.

    supervisor ──fork──► warm parent ──clone──► keeper ──fork──► runner
    (all calls)          (sees no call)         pid 1            pid 2 of the call's namespaces

The supervisor reads calls from descriptor 0 and writes replies to descriptor 1. For each call the
warm parent clones a keeper into new namespaces, from unchanged memory and before the call is there.
The keeper mounts the call's /tmp and /proc, gives up every right, and forks the runner, which runs
the model's code; then it only waits. The runner has no descriptor but its output, so it can return
only its exit status, which the keeper passes on, and its output. When the keeper is killed, the
kernel kills all processes that the code has left. A fork, and the pages that are then copied, cost
more than all namespaces together, so there are two forks a call and no more.

Under ``sandbox: none`` a supervisor of one call is forked, and forks the runner itself.

Descriptor 0 brings first a greeting of GREETING's form, with two descriptors of a control group if
there is one, then frames. A frame is a 4-byte big-endian length and that many bytes: UTF-8 source
in, JSON out.
"""

import ast
import atexit
import codecs
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import re
import resource
import select
import signal
import site
import socket
import struct
import sys
import textwrap
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
MEMORY_LIMIT = OUTCOMES[MEMORY]

MEBIBYTE = 2**20
RESERVE = 4 * MEBIBYTE  # beyond the memory limit, to report that it was reached
OPEN_FILES = 64
BLOCKS = range(0, 480, 16)  # bytes that objects have beside their head: a size of block each
USED = 32  # of each size, more than one turn of the warm parent's loop uses
LINGER = 1.0  # seconds beyond the limit to read what the code has written
LIKELY, LIKELIEST = "900", "1000"  # to be killed when memory ends: a worker, and the code in it
PENDING_SIGNALS = 128  # timers too
SOCKET_BYTES = 2**18  # what the buffers of a socket can hold, by the kernel's default
TICK = 0.01  # seconds between two looks at what the processes of a call use together
GREETING = struct.Struct(">?q")  # whether to build the root; the code's user, or -1 for its own
SCRATCH_FILES = 4096  # in /tmp
INNER_USER = 1000  # user id that the code sees; any but root

# From the headers of Linux; Python 3.11 has no names for them.
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWIPC = 0x20000, 0x2000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_PARENT = 0x10000000, 0x20000000, 0x8000
CLONE = {"x86_64": 56, "aarch64": 220}  # number of the system call
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC = 1, 2, 4, 8, 0x1000, 0x4000
MNT_DETACH, AT_FDCWD, AT_RECURSIVE = 2, -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
PR_SET_CHILD_SUBREAPER, SECCOMP_MODE_FILTER = 36, 2
ADDR_NO_RANDOMIZE, PERSONALITY_QUERY = 0x0040000, 0xFFFFFFFF
MOUNT_SETATTR = 442
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}  # number of the system call
COMPARE, COMPARE_MEMORY = {"x86_64": 312, "aarch64": 272}, 1  # kcmp
SIOCSIFFLAGS, INTERFACE_UP = 0x8914, 1
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")  # per second

SPACES = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWCGROUP
BIRTH = struct.Struct("=4i")  # a keeper's pid, and the descriptors of its code, output and end
READY, STATUS = b"1", struct.Struct("=i")  # what a keeper writes before a call and after it

libc = ctypes.CDLL(None, use_errno=True)
python = ctypes.PyDLL(None, use_errno=True)  # holds the interpreter's lock


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
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV)
    Path("/tmp").chmod(0o755)
    # As bubblewrap makes them: a listing shows the order.
    for parent in sorted({str(folder) for *_, t in entries for folder in Path("/tmp" + t).parents}):
        Path(parent).mkdir(exist_ok=True)
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
        if kind == "device":
            restrict(str(place), MS_NOSUID, whole_tree=False)
        if kind == "cover":
            mount("tmpfs", str(place), "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, "mode=0755")
    for descriptor in sources:
        if descriptor >= 0:
            os.close(descriptor)
    mount("proc", "/tmp/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.chdir("/tmp")
    kernel("syscall", PIVOT_ROOT[os.uname().machine], b".", b".")
    kernel("umount2", b".", MNT_DETACH)
    os.chdir("/")
    restrict("/", MS_RDONLY, whole_tree=False)
    socket.sethostname("sandbox")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:  # as bubblewrap does
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", INTERFACE_UP))


def be_greeted() -> tuple[bool, int | None, int | None]:
    """Read the greeting, and join the control group if it brings one.

    Return whether to build the root; the user of the code, None for that of the worker; and a
    descriptor of the group's events, or None.
    """
    with socket.socket(fileno=os.dup(0)) as channel:
        data, descriptors, _, _ = socket.recv_fds(channel, GREETING.size, 2)
    build, user = GREETING.unpack(data)
    events = None
    if descriptors:
        members, events = descriptors
        try:
            os.write(members, b"0")
        except OSError:  # this user may make a group, and not move a process into it
            events = None
        os.close(members)
    return build, None if user < 0 else user, events


# ---- one call


def become(user: int | None) -> None:
    """Be the code's user for good: as root, its processes are exempt from RLIMIT_NPROC."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        kernel("prctl", PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root
        kernel("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)  # forgotten with the user


def clone(flags: int) -> int:
    """Fork with further flags of clone(2), which os.fork does not take. Raises OSError."""
    python.PyOS_BeforeFork()
    child = python.syscall(*map(ctypes.c_ulong, (CLONE[os.uname().machine], flags, 0, 0, 0, 0)))
    code = ctypes.get_errno()
    if child == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    if child < 0:
        raise OSError(code, f"clone: {os.strerror(code)}")
    return child


def breed(down: int, up: int, config: dict) -> int:
    """Be the warm parent: clone a keeper for each call; return 0 when no more are wanted.

    A keeper becomes the supervisor's child. A message tells the supervisor its pid, and the numbers
    here of the descriptors that the supervisor opens before it answers. What happens here is the
    same for each call, so that each call starts from the same memory.
    """
    kernel("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    null = os.open("/dev/null", os.O_RDWR)
    keep_only(null, null, 2, down, up)
    (down, up), user, group = (3, 4), os.getuid(), os.getgid()
    while True:
        (code, to_code), (from_output, output), (from_end, end) = os.pipe(), os.pipe(), os.pipe()
        keeper = clone(SPACES | CLONE_PARENT | signal.SIGCHLD)
        if keeper == 0:
            guarded(keep, code, output, end, user, group, config)
        os.write(up, BIRTH.pack(keeper, to_code, from_output, from_end))
        if not os.read(down, 1):
            return 0
        for descriptor in (code, to_code, from_output, output, from_end, end):
            os.close(descriptor)
        if not os.read(down, 1):
            return 0


def keep(code: int, output: int, end: int, user: int, group: int, config: dict) -> int:
    """Be pid 1 of a call: prepare it, fork the runner, pass on its status, reap until killed.

    It is confined like the runner, which may attack it, and cannot be read by it. It waits for each
    orphan, so that their processor time is added to its own.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    furnish(user, group, config)
    keep_only(os.open("/dev/null", os.O_RDONLY), output, output, code, end)
    code, end = 3, 4
    confine(1, config)  # 1: itself
    kernel("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel("prctl", PR_SET_DUMPABLE, 0)
    runner = os.fork()
    if runner == 0:
        guarded(run_confined, code)
    for descriptor in (1, 2, code):
        os.dup2(0, descriptor)
    os.write(end, READY)
    while True:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == runner:
                    os.write(end, STATUS.pack(ended[1]))
        signal.sigwait({signal.SIGCHLD})


def furnish(user: int, group: int, config: dict) -> None:
    """Fill this process's new namespaces: its user, its /tmp and its /proc."""
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"{INNER_USER} {user} 1")
    write("/proc/self/gid_map", f"{INNER_USER} {group} 1")
    write("/proc/self/oom_score_adj", LIKELIEST)
    for kind, _, target in config["root"]:
        if kind == "device":  # it can be written to, but its times stay
            restrict(target, MS_RDONLY, whole_tree=False)
    size = config["file_mib"] * MEBIBYTE
    options = f"size={size},nr_inodes={SCRATCH_FILES},mode=1777"
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, options)
    # Read-only, or the code could make the trainer more likely to be killed than itself.
    mount("proc", "/proc", "proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "subset=pid")
    os.chdir("/tmp")


def keep_only(*descriptors: int) -> None:
    """Make these the descriptors 0, 1, 2, ... of this process, and close all others."""
    copies = [fcntl.fcntl(each, fcntl.F_DUPFD, len(descriptors)) for each in descriptors]
    for place, copy in enumerate(copies):
        os.dup2(copy, place)
    os.closerange(len(descriptors), 65536)


def confine(neighbours: int, config: dict) -> None:
    """Drop every right and set the limits; ``neighbours`` other tasks of the user are there."""
    os.setsid()  # kill(0, ...) reaches the process group, across process namespaces
    memory = config["memory_mib"] * MEBIBYTE
    limit(resource.RLIMIT_AS, memory, memory + RESERVE)
    limit(resource.RLIMIT_CPU, config["cpu_seconds"], config["cpu_seconds"] + 1)  # SIGXCPU, SIGKILL
    limit(resource.RLIMIT_FSIZE, config["file_mib"] * MEBIBYTE)
    limit(resource.RLIMIT_NPROC, config["processes"] + neighbours)
    limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    limit(resource.RLIMIT_CORE, 1)  # 0 would still start a handler of core dumps on the host
    limit(resource.RLIMIT_MEMLOCK, 0)
    limit(resource.RLIMIT_SIGPENDING, PENDING_SIGNALS)
    kernel("capset", struct.pack("=Ii", 0x20080522, 0), bytes(24))  # no capabilities
    kernel("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if config["namespaces"]:
        steps = bytes.fromhex(config["filter"])
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


# ---- what is meant by a text that is no Python, as chats write it

BLANKS = "\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000"
INVISIBLE = "\ufeff\u200b-\u200f\u2060\u00ad"
UNPRINTED = re.compile(  # outside of strings and comments, where any character may stand
    r"(?P<kept>#[^\n]*|\'\'\'(?:\\.|[^\\])*?\'\'\'|\"\"\"(?:\\.|[^\\])*?\"\"\"|"
    r"'(?:\\.|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\")"
    f"|(?P<space>[{BLANKS}])|[{INVISIBLE}]",
    re.DOTALL,
)
FENCED = re.compile(  # a block of Markdown; of the last one, the end may be missing
    r"^[ \t]*(?:[-*+>]|\d+[.)])?[ \t]*(?P<fence>```+|~~~+)[ \t]*(?P<language>[\w+#.-]*)[^\n]*\n"
    r"(?P<code>.*?)(?:^[ \t]*(?P=fence)[ \t\r]*$|\Z)",
    re.MULTILINE | re.DOTALL,
)
FENCE_LINE = re.compile(r"^[ \t]*(?:```+|~~~+)[ \t]*\w*[ \t\r]*$\n?", re.MULTILINE)
INLINE = re.compile(r"\s*(?P<ticks>`+)(?:py\w*\s)?(?P<code>[^`\n]+)(?P=ticks)\s*")
INDENTED = re.compile(r"(?:(?: {4}|\t)[^\n]*(?:\n|\Z)|[ \t\r]*\n)+")  # a block, too, in Markdown
LANGUAGES = ("", "python", "py", "python3", "py3", "ipython", "ipython3", "pycon", "code")


def printed_space(found: re.Match) -> str:
    """Return what a character stands for that Python's grammar does not know."""
    return found["kept"] or (" " if found["space"] else "")


def unfenced(text: str) -> str:
    """Return the Python of a text in Markdown. Raises SyntaxError where its blocks hold none."""
    if inline := INLINE.fullmatch(text):
        return inline["code"]
    blocks = list(FENCED.finditer(text))
    code = [block["code"] for block in blocks if block["language"].lower() in LANGUAGES]
    if blocks and not code:
        raise SyntaxError(f"the code is a block of {blocks[0]['language']}: send Python")
    if not "".join(code).strip():  # of a block, the end alone
        return FENCE_LINE.sub("", text)
    return "\n".join(map(textwrap.dedent, code))


def parse(source: str) -> ast.Module:
    """Parse ``source``, or what is meant by it: the code in a block, with plain spaces.

    Raises SyntaxError.
    """
    try:
        return ast.parse(source, "<code>")
    except SyntaxError:
        code = unfenced(UNPRINTED.sub(printed_space, source))
        if code == source and not INDENTED.fullmatch(source):
            raise
    return ast.parse(textwrap.dedent(code), "<code>")


def execute(source: str) -> None:
    """Run ``source`` as the main module; print the value of a last bare expression."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    tree = parse(source)
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
        return ERROR, traceback.format_exception_only(stop)[-1].rstrip("\n")
    except BaseException as error:
        return ERROR, traceback.format_exception_only(error)[-1].rstrip("\n")
    return OK, ""


def run_confined(code: int) -> int:
    """Be the runner of a keeper, which has confined both; wait for the code, run it."""
    os.setsid()
    kernel("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel("prctl", PR_SET_DUMPABLE, 1)  # the keeper's memory is closed, its own is not
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    kept = used_places()
    with open(code, "rb", closefd=False) as file:
        source = file.read()
    os.closerange(3, 65536)
    status = run_code(source)
    del kept
    return status


def used_places() -> list:
    """Return objects in the places that the warm parent has used and freed since the last call.

    It frees them in another order than it takes them, so the address of a new object would tell how
    many calls came before. The collection starts the collector's count anew, for the same reason.
    """
    gc.collect()
    kept: list = [bytes(size) for size in BLOCKS for _ in range(USED)]
    for number in range(USED):
        kept += [{}, [], set(), float(number), *(tuple(range(size)) for size in range(1, 9))]
    return kept


def run_here(output: int, parent: int, payload: bytes, config: dict) -> int:
    """Be the runner without namespaces: confine, run the code."""
    write("/proc/self/oom_score_adj", LIKELIEST)
    keep_only(os.open("/dev/null", os.O_RDONLY), output, output)
    confine(tasks_of_user(), config)
    kernel("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise RuntimeError("the supervisor ended before its death could be noticed")
    return run_code(payload)


def run_code(payload: bytes) -> int:
    """Run the code, print the error; return the exit status."""
    source = payload.decode(errors="replace")
    stream, raw = renew_output()
    sys.path.insert(0, "")
    everything = (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2
    status, line = attempt(source)
    resource.setrlimit(resource.RLIMIT_AS, everything)
    try:
        with contextlib.suppress(Exception):  # the code may have closed or replaced them
            atexit._run_exitfuncs()
            for each in (sys.stdout, sys.stderr, stream):
                each.flush()
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


def watch(reader: int, end: int, family: "Family", config: dict) -> tuple[str, str | None]:
    """Read the runner's output until ``end`` can be read, which is when the runner has ended.

    Return the output, and the outcome that cut it or None.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    deadline = time.monotonic() + config["wall_seconds"]
    poll = select.poll()
    for descriptor, events in ((reader, select.POLLIN), (end, select.POLLIN), (0, 0)):
        poll.register(descriptor, events)
    text = ""
    while len(text) <= config["output_characters"]:
        ready = {d for d, _ in poll.poll(TICK * 1000)}
        if 0 in ready:
            raise EOFError("the tool's process has ended")
        if excess := family.exceeded_limit():
            return text, excess
        if time.monotonic() >= deadline + (LINGER if end in ready else 0):
            return text, None if end in ready else WALL_TIMEOUT
        if reader in ready:
            with contextlib.suppress(BlockingIOError):  # the code has read it back
                chunk = os.read(reader, 65536)
                text += decoder.decode(chunk, final=not chunk)
                if not chunk:
                    poll.unregister(reader)
        elif end in ready:
            return text, None
    return text[: config["output_characters"]], OUTPUT_LIMIT


# ---- what the processes of a call use together


def processes(entries: int) -> list[int]:
    """Return the processes in /proc, of which ``entries`` is a descriptor."""
    return [int(name) for name in os.listdir(entries) if name.isdigit()]


class Family:
    """The processes of a call, and what they use together.

    With a keeper, these are all of the worker's processes but ``others``; without one, the
    descendants of this process. ``entries`` is a descriptor of /proc.
    """

    def __init__(self, entries: int, keeper: int | None, others: set[int], config: dict) -> None:
        self.entries, self.keeper, self.config = entries, keeper, config
        self.others = others
        self.seconds = self.held = 0.0  # processor time seen so far; what processes had last
        self.next_clock = self.next_memory = time.monotonic() + TICK

    def exceeded_limit(self) -> str | None:
        """Return the outcome of a limit that is exceeded, or None; look at most every TICK."""
        now = time.monotonic()
        if now >= self.next_clock:
            self.next_clock = now + TICK
            if self.processor_seconds() >= self.config["cpu_seconds"]:
                return TIMEOUT
        if now >= self.next_memory:
            most = self.config["memory_mib"] * MEBIBYTE
            if self.memory_bytes(most) > most:
                time.sleep(TICK / 2)  # by then, a child shares no memory that it does not keep
                if self.memory_bytes(most) > most:
                    return MEMORY_LIMIT
            self.next_memory = now + max(TICK, 4 * (time.monotonic() - now))
        return None

    # -------- which

    def everyone(self) -> list[int]:
        """Return the processes of the worker."""
        return processes(self.entries)

    def members(self) -> list[int]:
        """Return the processes of the call, without the keeper."""
        if self.keeper:
            return [process for process in self.everyone() if process not in self.others]
        found, waiting = [], [os.getpid()]
        while waiting:
            process = waiting.pop()
            for task in self.tasks(process):
                text = self.read(f"{process}/task/{task}/children")
                waiting += [int(child) for child in text.split()]
            found.append(process)
        return found[1:]

    def tasks(self, process: int) -> list[str]:
        """Return the threads of a process; none if it has ended."""
        with contextlib.suppress(OSError):
            folder = os.open(f"{process}/task", os.O_RDONLY, dir_fd=self.entries)
            try:
                return os.listdir(folder)  # noqa: PTH208
            finally:
                os.close(folder)
        return []

    def read(self, name: str) -> str:
        """Return the text of a file of /proc; "" if it cannot be read, or its process has ended."""
        with contextlib.suppress(OSError):
            file = os.open(name, os.O_RDONLY, dir_fd=self.entries)
            with os.fdopen(file, encoding="utf-8", errors="replace") as text:
                return text.read()
        return ""

    # -------- processor time

    def processor_seconds(self) -> float:
        """Return the processor time until now.

        A process has its own time and that of the children it has waited for. The time of a child
        that nobody waits for is in no process any more, so what has been seen is kept.
        """
        held = self.held_seconds()
        if held < self.held:  # lost, or on its way from a child to its parent
            held = self.held_seconds()
        self.seconds += max(0.0, held - self.held)
        self.held = held
        return self.seconds

    def held_seconds(self) -> float:
        """Return the processor time of the processes and of those that they have waited for."""
        ticks = 0
        for process in [*self.members(), *([self.keeper] if self.keeper else [])]:
            fields = self.read(f"{process}/stat").rpartition(")")[2].split()
            ticks += sum(int(field) for field in fields[11:15])
        return ticks / CLOCK_TICKS

    # -------- memory

    def memory_bytes(self, enough: int) -> int:
        """Return the memory that the processes hold together, without files.

        What they share is counted once where the sum would be more than ``enough`` otherwise.
        """
        living = [task for process in self.members() if (task := self.living_task(process))]
        sizes = {task: self.sizes(task) for task in living}
        total = self.socket_bytes() + sum(page + table for page, table in sizes.values())
        if total <= enough:
            return total
        distinct: list[int] = []
        for task in living:
            if not any(same_memory(task, other) for other in distinct):
                distinct.append(task)
        return self.socket_bytes() + sum(
            self.share(task, sizes[task][0]) + sizes[task][1] for task in distinct
        )

    def living_task(self, process: int) -> int | None:
        """Return a thread of a process that has not ended: the first may end before the others."""
        for task in (process, *map(int, self.tasks(process))):
            if "\nVmRSS:" in self.read(f"{task}/status"):
                return task
        return None

    def sizes(self, task: int) -> tuple[int, int]:
        """Return the bytes of a process's pages, shared ones included, and of their tables."""
        found = kibibytes(self.read(f"{task}/status"))
        pages = sum(found.get(name, 0) for name in ("RssAnon", "RssShmem", "VmSwap"))
        return pages * 1024, found.get("VmPTE", 0) * 1024

    def share(self, task: int, otherwise: int) -> int:
        """Return the bytes of a process's pages, of shared ones its part.

        Return ``otherwise`` where the process hides them.
        """
        found = kibibytes(self.read(f"{task}/smaps_rollup"))
        if "Pss_Anon" not in found:
            return otherwise
        return sum(found.get(name, 0) for name in ("Pss_Anon", "Pss_Shmem", "SwapPss")) * 1024

    def socket_bytes(self) -> int:
        """Return what the buffers of the call's sockets can hold."""
        if not self.keeper:
            return 0
        used = self.read("self/net/sockstat").partition("sockets: used ")[2].split()
        return int(used[0]) * SOCKET_BYTES if used else 0


def kibibytes(text: str) -> dict[str, int]:
    """Return the sizes in a file of /proc: name -> KiB."""
    words = (line.split() for line in text.splitlines() if line.endswith(" kB"))
    return {line[0].rstrip(":"): int(line[-2]) for line in words}


def same_memory(one: int, other: int) -> bool:
    """Return whether two processes have one memory, as after vfork; False where none can tell."""
    call = COMPARE[os.uname().machine]
    return bool(libc.syscall(call, one, other, COMPARE_MEMORY, 0, 0) == 0)


def killed_for_memory(events: int | None) -> int:
    """Return how many processes of a control group the kernel has killed, from its events."""
    if events is None:
        return 0
    words = os.pread(events, 4096, 0).decode().split()
    return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0


def end_children() -> None:
    """Kill all processes that the code has left, and wait for their end."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while family := children.read_text().split():
        for child in family:  # orphans become our children: we are their subreaper
            os.kill(int(child), signal.SIGKILL)
            os.waitpid(int(child), 0)


# ---- the supervisor


def serve(config: dict) -> int:
    """Be the supervisor without namespaces, of one call; return 0, or 1 when no call comes."""
    import tempfile

    kernel("prctl", PR_SET_CHILD_SUBREAPER, 1)
    with tempfile.TemporaryDirectory(prefix="call-", ignore_cleanup_errors=True) as scratch:
        os.chdir(scratch)
        payload = read_frame()
        if payload is None:
            return 1
        reader, writer = os.pipe()
        killed_before = killed_for_memory(config["events"])
        family = Family(os.open("/proc", os.O_RDONLY), None, set(), config)
        supervisor = os.getpid()
        runner = os.fork()
        if runner == 0:
            guarded(run_here, writer, supervisor, payload, config)
        os.close(writer)
        text, cut = watch(reader, os.pidfd_open(runner), family, config)
        if family.members() != [runner]:
            family.processor_seconds()  # of those, too, that nobody waits for
        os.kill(runner, signal.SIGKILL)
        _, status = os.waitpid(runner, 0)
        end_children()
        used = max(family.seconds, seconds_of(resource.getrusage(resource.RUSAGE_CHILDREN)))
        reply(text, cut, status, used, killed_before, config)
        return 0


def supervise(config: dict) -> int:
    """Be the supervisor of all calls in namespaces; return 0 when no call comes any more.

    Raises EOFError where the warm parent or a keeper has ended by itself.
    """
    become(config["user"])
    entries = os.open("/proc", os.O_RDONLY)
    others = set(processes(entries))
    (from_up, up), (down, to_down) = os.pipe(), os.pipe()
    warm = os.fork()
    if warm == 0:
        guarded(breed, down, up, config)
    os.close(up)
    os.close(down)
    while True:
        message = os.read(from_up, BIRTH.size)
        if not message:
            raise EOFError("the warm parent has ended")
        keeper, *numbers = BIRTH.unpack(message)
        modes = (os.O_WRONLY, os.O_RDONLY | os.O_NONBLOCK, os.O_RDONLY)
        code, reader, end = (
            os.open(f"/proc/{warm}/fd/{n}", mode) for n, mode in zip(numbers, modes, strict=True)
        )
        os.write(to_down, b"1")
        family = Family(entries, keeper, {*others, warm, keeper}, config)
        if not answer(family, keeper, code, reader, end) or sockets_stay():
            return 0
        os.write(to_down, b"1")


def answer(family: "Family", keeper: int, code: int, reader: int, end: int) -> bool:
    """Wait for a call, run it below the keeper, reply; return False at the end of input."""
    payload = read_frame()
    if payload is None:
        return False
    killed_before = killed_for_memory(family.config["events"])
    ready = os.read(end, len(READY)) == READY
    over = select.poll()  # select.select refuses descriptors from 1024 on
    over.register(end, select.POLLIN)
    if not ready or over.poll(0):
        raise EOFError(f"a keeper has ended before its call: {os.read(reader, 65536)!r}")
    with contextlib.suppress(BrokenPipeError), open(code, "wb") as file:
        file.write(payload)
    text, cut = watch(reader, end, family, family.config)
    if family.members():
        family.processor_seconds()  # of those, too, that nobody waits for
    ended = b"" if cut else os.read(end, STATUS.size)
    os.kill(keeper, signal.SIGKILL)
    _, _, usage = os.wait4(keeper, 0)  # returns when none of the namespace is left
    os.close(reader)
    os.close(end)
    (status,) = STATUS.unpack(ended or STATUS.pack(signal.SIGKILL))
    used = max(family.seconds, seconds_of(usage))
    reply(text, cut, status, used, killed_before, family.config)
    return True


def seconds_of(usage: resource.struct_rusage) -> float:
    """Return the processor time."""
    return usage.ru_utime + usage.ru_stime


def reply(
    text: str, cut: str | None, status: int, used: float, killed_before: int, config: dict
) -> None:
    """Write the outcome and the text of a call, whose processes have all ended."""
    if killed_for_memory(config["events"]) > killed_before:
        cut = cut or MEMORY_LIMIT
    outcome = cut or name_outcome(os.waitstatus_to_exitcode(status), used, config)
    write_frame(json.dumps([outcome, text.rstrip("\n")]).encode())


def name_outcome(status: int, used: float, config: dict) -> str:
    """Return the outcome of a runner that was not cut; ``used`` is in CPU seconds, of all."""
    if status == -signal.SIGXCPU or used >= config["cpu_seconds"]:
        return TIMEOUT
    return OUTCOMES.get(status, KILLED)


# ---- start


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


def sockets_stay() -> bool:
    """Return whether the last call has left sockets that do not go away.

    Sockets that are on their way through each other are freed by a collection of the kernel, which
    begins when another one is closed.
    """
    for _ in range(50):
        if Path("/proc/self/net/unix").read_text().count("\n") <= 1:  # the head of the table
            return False
        for each in socket.socketpair():
            each.close()
        time.sleep(0.001)
    return True


def main() -> None:
    """Set up the worker, then answer calls until no more come."""
    fix_addresses()
    config = json.loads(sys.argv[1])
    kernel("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    build, config["user"], config["events"] = be_greeted()
    if build:
        build_root(config["root"])
    elif config["namespaces"] and not Path("/proc/self").exists():
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    write("/proc/self/oom_score_adj", LIKELY)
    warm_up(WARM if config["namespaces"] else [*WARM, "tempfile"])
    if config["namespaces"]:
        sys.exit(supervise(config))
    while True:
        supervisor = os.fork()
        if supervisor == 0:
            kernel("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
            guarded(serve, config)
        if os.waitpid(supervisor, 0)[1]:
            return


if __name__ == "__main__":
    main()
