"""The program in the Python tool's sandbox: a warm interpreter that forks a process for each call.

Started by python.py as ``python -c <this file> <configuration>``; standard library only, because
the project is not visible inside. Needs Linux 5.14 or newer for everything but ``sandbox: none``.

    warm parent ──fork──► supervisor ──fork──► keeper   pid 1 of the call's namespaces, only waits
    (sees no call)        (one call)   └─fork──► runner   pid 2, runs the model's code, confined

The supervisor enters new namespaces, reads one call from descriptor 0, watches the runner, and
writes one reply to descriptor 1; then it ends, and the warm parent forks the next one from
unchanged memory. The runner has no descriptor but its output, so it can return only its exit status
and its output. When the keeper is killed, the kernel kills all processes that the code has left.

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
MEMORY_LIMIT = OUTCOMES[MEMORY]

MEBIBYTE = 2**20
RESERVE = 4 * MEBIBYTE  # beyond the memory limit, to report that it was reached
OPEN_FILES = 64
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
CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000
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
    for kind, _, target in config["root"]:
        if kind == "device":  # it can be written to, but its times stay
            restrict(target, MS_RDONLY, whole_tree=False)
    size = config["file_mib"] * MEBIBYTE
    options = f"size={size},nr_inodes={SCRATCH_FILES},mode=1777"
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, options)
    keeper = os.fork()
    if keeper == 0:
        guarded(keep, config)
    return keeper


def keep(config: dict) -> int:
    """Be pid 1 and reap orphans until killed; confined, since the runner may attack it.

    It waits for each, so that their processor time is added to its own.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    confine(os.open("/dev/null", os.O_WRONLY), os.getppid(), config)
    kernel("prctl", PR_SET_DUMPABLE, 0)  # its memory is closed to the runner
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        signal.sigwait({signal.SIGCHLD})


def confine(output: int, parent: int, config: dict) -> None:
    """Drop every right and descriptor but ``output``, and set the limits."""
    os.setsid()  # kill(0, ...) reaches the process group, across process namespaces
    null = os.open("/dev/null", os.O_RDONLY)
    for descriptor, source in ((0, null), (1, output), (2, output)):
        os.dup2(source, descriptor)
    os.closerange(3, 65536)
    neighbours = 2 if config["namespaces"] else tasks_of_user()  # 2: supervisor and keeper
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
    kernel("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() not in (parent, 0):  # 0: outside of the namespace
        raise RuntimeError("the supervisor ended before its death could be noticed")
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
        return ERROR, traceback.format_exception_only(stop)[-1].rstrip("\n")
    except BaseException as error:
        return ERROR, traceback.format_exception_only(error)[-1].rstrip("\n")
    return OK, ""


def run_code(output: int, parent: int, source: str, config: dict) -> int:
    """Be the runner: confine, run, print the error; return the exit status."""
    write("/proc/self/oom_score_adj", LIKELIEST)
    if config["namespaces"]:
        # Read-only, or the code could make the trainer more likely to be killed than itself.
        flags = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
        mount("proc", "/proc", "proc", flags, "subset=pid")
        os.chdir("/tmp")
    confine(output, parent, config)
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


def watch(reader: int, runner: int, family: "Family", config: dict) -> tuple[str, str | None]:
    """Read the runner's output until it ends; return it, and the outcome that cut it or None."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    deadline = time.monotonic() + config["wall_seconds"]
    end = os.pidfd_open(runner)
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


class Family:
    """The processes of a call, and what they use together. It is made before the runner."""

    def __init__(self, keeper: int | None, config: dict) -> None:
        self.keeper, self.config = keeper, config
        self.entries = os.open("/proc", os.O_RDONLY)  # the runner covers it with its own
        self.others = set(self.everyone()) if keeper else set()
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
        return [int(name) for name in os.listdir(self.entries) if name.isdigit()]  # noqa: PTH208

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
    os.set_blocking(reader, False)  # the code can read its output, too
    killed_before = killed_for_memory(config["events"])
    family = Family(keeper, config)
    supervisor = os.getpid()
    runner = os.fork()
    if runner == 0:
        guarded(run_code, writer, supervisor, payload.decode(errors="replace"), config)
    os.close(writer)
    text, cut = watch(reader, runner, family, config)
    if family.members() != [runner]:
        family.processor_seconds()  # of those, too, that nobody waits for
    os.kill(runner, signal.SIGKILL)
    _, status = os.waitpid(runner, 0)
    end_family(keeper)
    if killed_for_memory(config["events"]) > killed_before:
        cut = cut or MEMORY_LIMIT
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = max(family.seconds, usage.ru_utime + usage.ru_stime)
    outcome = cut or name_outcome(os.waitstatus_to_exitcode(status), used, config)
    write_frame(json.dumps([outcome, text.rstrip("\n")]).encode())
    return 0


def name_outcome(status: int, used: float, config: dict) -> str:
    """Return the outcome of a runner that was not cut; ``used`` is in CPU seconds, of all."""
    if status == -signal.SIGXCPU or used >= config["cpu_seconds"]:
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
    """Set up the worker, then fork a supervisor for each call."""
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
    while True:
        supervisor = os.fork()
        if supervisor == 0:
            kernel("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
            guarded(serve, config)
        if os.waitpid(supervisor, 0)[1] or (config["namespaces"] and sockets_stay()):
            return


if __name__ == "__main__":
    main()
