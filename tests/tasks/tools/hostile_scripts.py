"""Hostile code for the Python tool: what each script does, and the one answer that it may get.

The answer is a regular expression. Every script gets the same answer in both sandboxes, and leaves
nothing for the call after it, which LOOK_AROUND asks.
"""

from __future__ import annotations

from dataclasses import dataclass

# What a call can see of the world. It must be the same before and after every script.
LOOK_AROUND = """
import builtins, math, os, random, resource, signal, socket, sys, threading
print(os.getpid(), os.getppid(), os.getuid(), os.getcwd(), os.umask(0o22), os.nice(0))
print(sorted(os.listdir('/tmp')), sorted(os.listdir('/')), sorted(os.listdir('/dev')))
print(sorted(int(name) for name in os.listdir('/proc') if name.isdigit()))
print(sorted(os.listdir('/proc/self/fd'))[:3], dict(os.environ), sys.argv, len(sys.path))
print([resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith('RLIMIT')])
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getitimer(signal.ITIMER_REAL))
print([s for s in signal.valid_signals() if signal.getsignal(s) == signal.SIG_IGN])
print(threading.active_count(), os.getpriority(os.PRIO_USER, 0), os.sched_getscheduler(0))
print(len(dir(builtins)), math.pi, random.random(), hash('a'), sys.getrecursionlimit())
print(socket.gethostname(), os.statvfs('/tmp').f_bfree, os.statvfs('/tmp').f_ffree)
names = ('snmp', 'snmp6', 'netstat', 'unix', 'tcp', 'tcp6', 'udp', 'raw', 'dev', 'route')
for name in names:
    path = f'/proc/self/net/{name}'
    print(name, open(path).read() if os.path.exists(path) else None)
import ctypes, ctypes.util
for option in (3, 8, 21, 30, 38, 39):  # dumpable, keepcaps, seccomp, timerslack, ...
    print(ctypes.CDLL(None).prctl(option, 0, 0, 0, 0))
"""

CALL = "import ctypes, errno\nlibc = ctypes.CDLL(None, use_errno=True)\n"
REFUSED = r"-1 EPERM"


def system_call(*arguments: object) -> str:
    """Return a script that makes a system call and prints the result and the error's name."""
    listed = ", ".join(map(str, arguments))
    return f"{CALL}print(libc.syscall({listed}), errno.errorcode.get(ctypes.get_errno()))"


@dataclass(frozen=True)
class Script:
    """Hostile code, and the outcome and the text (a regular expression) that it gets."""

    code: str
    text: str
    outcome: str = "ok"


FILES = {
    "write to the root": Script(
        "open('/x', 'w')", r"OSError: .*Read-only file system: '/x'", "error"
    ),
    "write to /usr": Script(
        "open('/usr/bin/x', 'w')", r"OSError: .*Read-only file system: .*", "error"
    ),
    "write to the interpreter": Script(
        "import os; open(os.__file__, 'a')", r"(OSError|PermissionError): .*", "error"
    ),
    "write to /dev": Script("open('/dev/x', 'w')", r"OSError: .*Read-only .*", "error"),
    "write to /proc": Script(
        "open('/proc/self/comm', 'w').write('x')", r"OSError: .*Read-only .*", "error"
    ),
    "read /etc/passwd": Script("open('/etc/passwd')", r"FileNotFoundError: .*", "error"),
    "read /root": Script(
        "import os, sys\n"
        "print([p for p in ('/root', '/home') if os.path.isdir(p)\n"
        "       and any(not sys.prefix.startswith(f'{p}/{n}') for n in os.listdir(p))])",
        r"\[\]",
    ),
    "read /sys": Script("open('/sys/kernel/mm/ksm/run')", r"FileNotFoundError: .*", "error"),
    "read /var": Script("import os; os.listdir('/var')", r"FileNotFoundError: .*", "error"),
    "read the kernel's memory": Script("open('/dev/mem')", r"FileNotFoundError: .*", "error"),
    "read the kernel's log": Script("open('/dev/kmsg')", r"FileNotFoundError: .*", "error"),
    "read the sources of others": Script(
        "import os; [p for p in ('/usr/src', '/usr/local/src', '/srv') if os.path.exists(p)]",
        r"\[\]",
    ),
    "the times of a device": Script("import os; os.utime('/dev/null')", r"OSError: .*", "error"),
    "leave by a link": Script(
        "import os; os.symlink('/etc/passwd', 'x'); open('x')", r"FileNotFoundError: .*", "error"
    ),
    "leave by dots": Script(
        "open('/tmp/' + '../' * 40 + 'etc/shadow')", r"FileNotFoundError: .*", "error"
    ),
    "leave by a root of its own": Script(
        "import os; os.chroot('/tmp')", r"PermissionError: .*", "error"
    ),
    "leave by the supervisor's root": Script(
        "import os\n"
        "for p in (0, 1):\n"
        "    try: print(os.listdir(f'/proc/{p}/root/etc'))\n"
        "    except OSError as error: print(type(error).__name__)",
        r"FileNotFoundError\n(FileNotFoundError|PermissionError)",
    ),
    "leave by a working directory": Script(
        "import os; print(os.path.exists('/proc/1/cwd/etc'), os.path.exists('/proc/2/cwd/etc'))",
        r"False False",
    ),
    "mount": Script(CALL + "libc.mount(b'x', b'/tmp', b'tmpfs', 0, b'')", r"-1"),
    "unmount": Script(CALL + "libc.umount2(b'/tmp', 2)", r"-1"),
    "make writable": Script(CALL + "libc.mount(b'', b'/', b'', 0x1020, b'')", r"-1"),
    "make a device": Script(
        "import os, stat; os.mknod('x', stat.S_IFBLK | 0o666, os.makedev(254, 0))",
        r"PermissionError: .*",
        "error",
    ),
    "a program with another's rights": Script(
        "import os, shutil, subprocess\n"
        "shutil.copy('/bin/sh', 'sh'); os.chmod('sh', 0o6755)\n"
        "print(subprocess.run(['./sh', '-c', 'id -u'], capture_output=True, text=True).stdout)",
        r"1000",
    ),
    "give a file away": Script(
        "import os; open('x', 'w'); os.chown('x', 0, 0)", r"(OSError|PermissionError): .*", "error"
    ),
    "fill /tmp": Script(
        "for i in range(9): open(str(i), 'wb').write(bytes(2 ** 20))",
        r"OSError: .*No space left on device",
        "error",
    ),
    "too many files": Script(
        "for i in range(9999): open(str(i), 'w').close()", r"OSError: .*No space left.*", "error"
    ),
    "a large file": Script(
        "open('x', 'wb').write(bytes(3 * 2 ** 20))", r"OSError: .*File too large", "error"
    ),
    "a file with a hole": Script(
        "open('x', 'wb').truncate(2 ** 40)", r"OSError: .*File too large", "error"
    ),
    "open a file by its handle": Script(system_call(304, -100, 0, 0), r"-1 (EPERM|EFAULT|ENOSYS)"),
}

ENVIRONMENT = {
    "the environment": Script("import os; dict(os.environ)", r"\{\}"),
    "the first environment": Script(
        "open('/proc/self/environ').read()", "PYTHONHASHSEED=0\0PWD=/\0LC_CTYPE=C.UTF-8\0"
    ),
    "the keeper's environment": Script(
        "try: print(open('/proc/1/environ').read())\nexcept OSError as error: print('no')",
        "(PYTHONHASHSEED=0\0PWD=/\0LC_CTYPE=C.UTF-8\0|no)",
    ),
    "the command line": Script(
        "import json; c = open('/proc/self/cmdline').read().split('\\0')\n"
        "print([w for w in c if '/work' in w or '/home' in w or 'beamline/' in w])",
        r"\[\]",
    ),
    "the user": Script("import os; os.getresuid(), os.getresgid()", r"\(\(1000, 1000, 1000\), .*"),
    "another user": Script("import os; os.setuid(0)", r"PermissionError: .*|OSError: .*", "error"),
    "capabilities": Script(
        "[l.split()[1] for l in open('/proc/self/status') if l.startswith('Cap')][:3]",
        r"\['0{16}', '0{16}', '0{16}'\]",
    ),
    "no new rights": Script(
        "[l.split()[1] for l in open('/proc/self/status') if l[:4] in ('NoNe', 'Secc')][:2]",
        r"\['1', '2'\]",
    ),
    "the host's name": Script("import os; os.uname().nodename", r"sandbox"),
    "rename the host": Script(
        "import socket; socket.sethostname('x')", r"PermissionError: .*", "error"
    ),
    "control groups": Script("open('/proc/self/cgroup').read().count('..')", r"0"),
    "what the machine does": Script(system_call(99, "ctypes.create_string_buffer(200)"), REFUSED),
    "the load": Script("import os; os.getloadavg()", r"OSError: .*", "error"),
    "the kernel's messages": Script(
        CALL + "print(libc.klogctl(3, ctypes.create_string_buffer(99), 99))", r"-1"
    ),
}

NETWORK = {
    "connect": Script(
        "import socket; socket.create_connection(('127.0.0.1', 80))",
        r"OSError: .*Network is unreachable",
        "error",
    ),
    "listen": Script(
        "import socket; socket.create_server(('127.0.0.1', 0))",
        r"OSError: .*Network is unreachable",
        "error",
    ),
    "send a datagram": Script(
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('::1', 9))",
        r"OSError: .*Network is unreachable",
        "error",
    ),
    "IPv6": Script(
        "import socket; socket.socket(socket.AF_INET6)", r"OSError: .*unreachable", "error"
    ),
    "a raw socket": Script(
        "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
        r"OSError: .*unreachable",
        "error",
    ),
    "the kernel's sockets": Script(
        "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        r"OSError: .*unreachable",
        "error",
    ),
    "the kernel's ciphers": Script(
        "import socket; socket.socket(socket.AF_ALG)", r"OSError: .*unreachable", "error"
    ),
    "the hypervisor": Script(
        "import socket; socket.socket(socket.AF_VSOCK)", r"OSError: .*unreachable", "error"
    ),
    "Bluetooth": Script("import socket; socket.socket(31)", r"OSError: .*unreachable", "error"),
    "a name": Script(
        "import socket; socket.gethostbyname('example.com')", r"socket.gaierror: .*", "error"
    ),
    "a page": Script(
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:1')",
        r"urllib.error.URLError: .*unreachable.*",
        "error",
    ),
    "the host's abstract sockets": Script(
        "import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0/tmp/.X11-unix/X0')",
        r"ConnectionRefusedError: .*",
        "error",
    ),
    "an abstract socket stays inside": Script(
        "import socket; s = socket.socket(socket.AF_UNIX); s.bind('\\0note'); s.listen(); 'bound'",
        r"bound",
    ),
    "counters of the network": Script(
        "print(sum(int(w) for l in open('/proc/self/net/udp') for w in [1]),\n"
        "      open('/proc/self/net/tcp').read().count('\\n'))",
        r"1 1",
    ),
}

PROCESSES = {
    "a fork bomb": Script(
        "import os\nwhile True: os.fork()", r"(.|\n)*BlockingIOError: (.|\n)*", "error"
    ),
    "a bomb of threads": Script(
        "import threading, time\n"
        "for _ in range(99): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        r"RuntimeError: can't start new thread",
        "error",
    ),
    "a daemon": Script(
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.closerange(0, 99)\n"
        "        time.sleep(99)\n"
        "    os._exit(0)\n"
        "print('left')",
        r"left",
    ),
    "orphans": Script(
        "import os, time\nfor _ in range(4):\n    if os.fork() == 0: time.sleep(99)\nprint('left')",
        r"left",
    ),
    "a sibling of the runner": Script(system_call(56, "0x8000 | 17", 0, 0, 0, 0), REFUSED),
    "a new user namespace": Script(CALL + "print(libc.unshare(0x10000000))", r"-1"),
    "a new process namespace": Script(system_call(56, "0x20000000 | 17", 0, 0, 0, 0), REFUSED),
    "clone by a structure": Script(
        system_call(435, "ctypes.create_string_buffer(88)", 88), r"-1 ENOSYS"
    ),
    "enter a namespace": Script(system_call(308, 0, 0), REFUSED),
    "trace the keeper": Script(system_call(101, 16, 1, 0, 0), REFUSED),
    "read the keeper's memory": Script(
        "open('/proc/1/mem', 'rb')", r"PermissionError: .*", "error"
    ),
    "write the keeper's memory": Script(system_call(311, 1, 0, 0, 0, 0, 0), REFUSED),
    "steal a descriptor": Script(system_call(438, 0, 0, 0), REFUSED),
    "compare processes": Script(system_call(312, 1, 2, 0, 0, 0), REFUSED),
    "who else there is": Script(
        "import os; sorted(int(p) for p in os.listdir('/proc') if p.isdigit())", r"\[1, 2\]"
    ),
    "a higher priority": Script(
        "import os; os.nice(-5)", r"(OSError|PermissionError): .*", "error"
    ),
    "real time": Script(
        "import os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(9))",
        r"PermissionError: .*",
        "error",
    ),
    "higher limits": Script(
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 ** 40, 2 ** 40))",
        r"ValueError: not allowed to raise maximum limit",
        "error",
    ),
    "a core dump": Script("import os; os.abort()", r"", "killed"),
    "an error in an error": Script(
        "import sys\nclass Bad:\n    def __str__(self): raise ValueError\nsys.exit(Bad())",
        r"SystemExit: .*",
        "error",
    ),
    "words at the end": Script(
        "import atexit, sys\natexit.register(print, 'bye')\n"
        "sys.stdout = open(1, 'w', closefd=False); print('hello')",
        r"hello\nbye",
    ),
    "leave without a word": Script("import os; os._exit(200)", r""),
    "a forged reply": Script(
        "import os, struct\n"
        "for d in range(64):\n"
        "    try: os.write(d, struct.pack('>I', 9) + b'[\"ok\",\"\"]') if d not in (1, 2) else 0\n"
        "    except OSError: pass\n"
        "print('tried')",
        r"tried",
    ),
}

SIX_HOLD = (
    "import os, time\n"
    "for _ in range(6):\n"
    "    if os.fork() == 0:\n"
    "        x = bytearray(40 * 2 ** 20)\n"
    "        for i in range(0, len(x), 4096): x[i] = 1\n"
    "        time.sleep(5); os._exit(0)\n"
    "time.sleep(5); print('held')"
)
MEMORY = {
    "a large array": Script("x = bytearray(10 ** 9)", r"MemoryError", "memory"),
    "a list that grows": Script(
        "x = []\nwhile True: x.append(' ' * 10 ** 6)", r"MemoryError", "memory"
    ),
    "six processes": Script(
        SIX_HOLD,
        r"",
        "memory",
    ),
    "processes that hide their memory": Script(
        CALL + "libc.prctl(4, 0, 0, 0, 0)\n" + SIX_HOLD,
        r"",
        "memory",
    ),
    "a process whose first thread ends": Script(
        CALL + "import os, threading, time\n"
        "def hold():\n"
        "    time.sleep(0.2); x = bytearray(60 * 2 ** 20)\n"
        "    for i in range(0, len(x), 4096): x[i] = 1\n"
        "    time.sleep(4)\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0: threading.Thread(target=hold).start(); libc.syscall(60, 0)\n"
        "time.sleep(4); print('held')",
        r"",
        "memory",
    ),
    "tables of pages": Script(
        CALL + "import time\n"
        "libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_ulong] * 6\n"
        "n = 0\n"
        "for i in range(24000):\n"
        "    at = (i + 1000) << 30\n"
        "    if libc.mmap(at, 4096, 1, 0x100022, 2 ** 64 - 1, 0) == at: ctypes.string_at(at, 1)\n"
        "time.sleep(2); print('held')",
        r"",
        "memory",
    ),
    "a file of zeros as shared memory": Script(
        "open('/dev/zero', 'r+b')", r"FileNotFoundError: .*", "error"
    ),
    "pages in sockets": Script(
        "import os; os.splice(0, os.pipe()[1], 1)", r"PermissionError: .*", "error"
    ),
    "programs of a large parent": Script(
        "import subprocess\n"
        "x = bytearray(80 * 2 ** 20)\n"
        "for i in range(0, len(x), 4096): x[i] = 1\n"
        "for i in range(100): subprocess.run(['/bin/true'])\n"
        "print('fine')",
        r"fine",
    ),
    "pages in pipes": Script(system_call(278, 1, 0, 0, 0), REFUSED),
    "large pipes": Script(
        "import fcntl, os; fcntl.fcntl(os.pipe()[1], 1031, 2 ** 20)",
        r"PermissionError: .*",
        "error",
    ),
    "buffers of sockets": Script(
        "import socket\n"
        "held, sent = [], 0\n"
        "try:\n"
        "    while True:\n"
        "        held += socket.socketpair()\n"
        "        held[-1].setblocking(False)\n"
        "        try:\n"
        "            while True: sent += held[-1].send(bytes(2 ** 16))\n"
        "        except BlockingIOError: pass\n"
        "except OSError as error: print(error.errno, sent < 2 ** 24)",
        r"24 True",
    ),
    "larger buffers of sockets": Script(
        "import socket; socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 9)",
        r"PermissionError: .*",
        "error",
    ),
    "a file in memory": Script("import os; os.memfd_create('x')", r"PermissionError: .*", "error"),
    "a secret file in memory": Script(system_call(447, 0), REFUSED),
    "shared memory": Script(
        "import mmap; mmap.mmap(-1, 4096)", r"OSError: .*Cannot allocate.*", "error"
    ),
    "System V's shared memory": Script(system_call(29, 0, 4096, 0o1666), REFUSED),
    "pages that stay": Script(
        CALL + "b = ctypes.create_string_buffer(2 ** 20)\n"
        "print(libc.mlock(b, 2 ** 20), libc.mlockall(3))",
        r"-1 -1",
    ),
    "rings of the kernel": Script(system_call(425, 8, "ctypes.create_string_buffer(120)"), REFUSED),
    "a lower score": Script(
        "open('/proc/self/oom_score_adj', 'w').write('0')", r"OSError: .*Read-only .*", "error"
    ),
    "the score": Script("open('/proc/self/oom_score_adj').read().strip()", r"1000"),
    "no end of recursion": Script("def f(): return f()\nf()", r"RecursionError: .*", "error"),
}

PERSISTENCE = {
    "a note in /tmp": Script("open('/tmp/note', 'w').write('x')", r"1"),
    "a note in /dev/shm": Script("open('/dev/shm/note', 'w').write('x')", r"1"),
    "changed modules": Script(
        "import math, builtins, random, sys\n"
        "math.pi = 3; builtins.x = 1; random.seed(9); sys.path.clear(); sys.setrecursionlimit(99)",
        r"",
    ),
    "a key ring": Script(system_call(248, "b'user'", "b'x'", "b'y'", 1, -3), REFUSED),
    "a queue of messages": Script(system_call(68, 0, 0o1666), REFUSED),
    "a POSIX queue": Script(system_call(240, "b'/x'", 0o102, 0o666, 0), REFUSED),
    "a semaphore": Script(system_call(64, 0, 1, 0o1666), REFUSED),
    "byte code": Script(
        "import os, sys, py_compile\npy_compile.compile(os.__file__)",
        r"OSError: .*Read-only .*",
        "error",
    ),
    "a handler of core dumps": Script(
        "import resource; resource.getrlimit(resource.RLIMIT_CORE)", r"\(1, 1\)"
    ),
}

SIGNALS = {
    "all processes": Script("import os; os.kill(-1, 9)", r"ProcessLookupError: .*", "error"),
    "the keeper": Script("import os; os.kill(1, 9); 'sent'", r"sent"),
    "its own group": Script("import os; os.kill(0, 9)", r"", "killed"),
    "ignore all": Script(
        "import signal\n"
        "for s in signal.valid_signals() - {9, 19, 32, 33}:\n"
        "    signal.signal(s, signal.SIG_IGN)\n"
        "while True: pass",
        r"",
        "timeout",
    ),
    "block all": Script(
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
        "while True: pass",
        r"",
        "timeout",
    ),
    "stop": Script("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", r"", "wall_timeout"),
    "no parent's death": Script(
        CALL + "import time\nlibc.prctl(1, 0, 0, 0, 0)\ntime.sleep(99)", r"", "wall_timeout"
    ),
    "an alarm": Script(
        "import signal, time; signal.setitimer(signal.ITIMER_REAL, 0.05); time.sleep(3)",
        r"",
        "killed",
    ),
    "queued signals": Script(
        CALL + "import os, signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {40})\n"
        "n = 0\n"
        "while libc.sigqueue(os.getpid(), 40, None) == 0: n += 1\n"
        "print(n < 200)",
        r"True",
    ),
}

DESCRIPTORS = {
    "sockets on their way through each other": Script(
        "import socket\n"
        "s = socket.socket(socket.AF_UNIX); s.bind('\\0a message'); s.listen()\n"
        "a, b = socket.socketpair()\n"
        "socket.send_fds(a, [b'x'], [a.fileno(), b.fileno(), s.fileno()]); print('sent')",
        r"sent",
    ),
    "read back what was written": Script(
        "import os, time\n"
        "r = os.open('/proc/self/fd/1', os.O_RDONLY | os.O_NONBLOCK)\n"
        "end = time.monotonic() + 0.6\n"
        "for _ in range(50_000):\n"  # below the limit of the output, however fast the machine is
        "    os.write(1, b'x')\n"
        "    try: os.read(r, 10)\n"
        "    except BlockingIOError: pass\n"
        "    if time.monotonic() > end: break",
        r"x*",
    ),
    "what is open": Script(
        "import os; sorted(os.listdir('/proc/self/fd'))[:3]", r"\['0', '1', '2'\]"
    ),
    "inherited descriptors": Script(
        "import os\n"
        "for d in range(3, 99):\n"
        "    try: os.fstat(d); print(d)\n"
        "    except OSError: pass",
        r"",
    ),
    "no end of descriptors": Script(
        "import os\nfds = []\ntry:\n    while True: fds.append(os.dup(0))\n"
        "except OSError as e: print(e.errno, len(fds) < 64)",
        r"24 True",
    ),
    "close all": Script("import os; os.closerange(0, 99); print(1)", r"", "killed"),
    "read the input": Script("import os; os.read(0, 9)", r"b''"),
    "descriptors in flight": Script(
        "import os, socket\n"
        "a, b = socket.socketpair()\n"
        "n = 0\n"
        "try:\n"
        "    while n < 999: socket.send_fds(a, [b'x'], [0]); n += 1\n"
        "except OSError: pass\n"
        "print(n < 200)",
        r"True",
    ),
    "the output is a pipe alone": Script(
        "import os; os.lseek(1, 0, 0)", r"OSError: .*Illegal seek", "error"
    ),
    "flood the output": Script(
        "import os\nwhile True: os.write(1, b'x' * 9 + b'\\n')", r"(x{9}\n)+x*", "output_limit"
    ),
}

LOCKS = {
    "flock of a program": Script(
        "import fcntl, sys; fcntl.flock(open(sys.executable, 'rb'), fcntl.LOCK_EX); 'nothing'",
        r"nothing",
    ),
    "flock of a device": Script(
        "import fcntl; fcntl.flock(open('/dev/null'), fcntl.LOCK_EX); 'nothing'", r"nothing"
    ),
    "fcntl's lock of a device": Script(
        "import fcntl; fcntl.lockf(open('/dev/null', 'w'), fcntl.LOCK_EX); 'nothing'", r"nothing"
    ),
    "who locks": Script(
        "import fcntl, struct\n"
        "asked = struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 0, 0)\n"
        "fcntl.fcntl(open('/dev/null', 'w'), fcntl.F_GETLK, asked)[0] == fcntl.F_UNLCK",
        r"True",
    ),
    "a lease": Script(
        "import fcntl; fcntl.fcntl(open('/bin/sh', 'rb'), 1024, fcntl.F_RDLCK)",
        r"PermissionError: .*",
        "error",
    ),
    "watch a folder": Script(
        "import fcntl, os; fcntl.fcntl(os.open('/usr/bin', 0), 1026, 2 ** 31 - 1)",
        r"(PermissionError|OverflowError): .*",
        "error",
    ),
    "watch a program": Script(CALL + "print(libc.inotify_init1(0))", r"-1"),
    "watch everything": Script(system_call(300, 0, 0), REFUSED),
    "what is in memory": Script(
        "import os, sys\n"
        "f = os.open(sys.executable, os.O_RDONLY)\n"
        "os.preadv(f, [bytearray(9)], 0, os.RWF_NOWAIT)",
        r"PermissionError: .*",
        "error",
    ),
    "what is in memory, by count": Script(system_call(451, 0, 0, 0, 0), REFUSED),
    "SQLite's log": Script(
        "import sqlite3; d = sqlite3.connect('x.db')\n"
        "print(d.execute('pragma journal_mode=wal').fetchall())\n"
        "d.execute('create table t (x)'); d.execute('insert into t values (7)'); d.commit()\n"
        "sqlite3.connect('x.db').execute('select * from t').fetchall()",
        r"\[\('wal',\)\]\n\[\(7,\)\]",
    ),
    "AIO, of which the machine has a limit": Script(
        system_call(206, 9, "ctypes.create_string_buffer(8)"), r"-1 ENOSYS"
    ),
    "the host's disks": Script("import os; os.sync(); 'nothing'", r"nothing"),
    "a lock inside serves": Script(
        "import sqlite3; d = sqlite3.connect('x.db'); d.execute('create table t (x)')\n"
        "d.execute('insert into t values (7)'); d.commit()\n"
        "d.execute('select * from t').fetchall()",
        r"\[\(7,\)\]",
    ),
}

TIME = {
    "an endless loop": Script("while True: pass", r"", "timeout"),
    "a loop in the kernel": Script(
        "import os\nzero = os.open('/dev/urandom', 0)\nwhile True: os.read(zero, 2 ** 20)",
        r"",
        "timeout",
    ),
    "one long sum": Script("9 ** 9 ** 9", r"", "timeout"),
    "a chain of forks": Script(
        "import os, time\n"
        "def burn():\n"
        "    end = time.process_time() + 0.3\n"
        "    while time.process_time() < end: pass\n"
        "reader, writer = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    for _ in range(20):\n"
        "        burn()\n"
        "        if os.fork(): os._exit(0)\n"
        "    os._exit(0)\n"
        "os.close(writer); os.read(reader, 1); print('done')",
        r"",
        "timeout",
    ),
    "children that nobody waits for": Script(
        "import os, signal, time\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "for _ in range(20):\n"
        "    if (pid := os.fork()) == 0:\n"
        "        end = time.process_time() + 0.3\n"
        "        while time.process_time() < end: pass\n"
        "        os._exit(0)\n"
        "    try: os.waitpid(pid, 0)\n"
        "    except ChildProcessError: pass\n"
        "print('done')",
        r"",
        "timeout",
    ),
    "side by side": Script(
        "import os, time\n"
        "for _ in range(4):\n"
        "    if os.fork() == 0:\n"
        "        end = time.process_time() + 0.6\n"
        "        while time.process_time() < end: pass\n"
        "        os._exit(0)\n"
        "for _ in range(4): os.wait()\n"
        "print('done')",
        r"",
        "timeout",
    ),
    "steady output": Script(
        "import time\nwhile True: print(end='x', flush=True); time.sleep(0.004)",
        r"x+",
        "wall_timeout",
    ),
    "sleep": Script("import time; time.sleep(99)", r"", "wall_timeout"),
    "set the clock": Script(
        "import time; time.clock_settime(time.CLOCK_REALTIME, 0)", r"PermissionError: .*", "error"
    ),
    "count events": Script(system_call(298, 0, 0, -1, -1, 0), REFUSED),
    "a bug in the kernel's programs": Script(system_call(321, 0, 0, 0), REFUSED),
    "wait for a page": Script(system_call(323, 0), REFUSED),
}

ROOMS: dict[str, dict[str, Script]] = {
    "files": FILES,
    "environment": ENVIRONMENT,
    "network": NETWORK,
    "processes": PROCESSES,
    "memory": MEMORY,
    "persistence": PERSISTENCE,
    "signals": SIGNALS,
    "descriptors": DESCRIPTORS,
    "locks": LOCKS,
    "time": TIME,
}
