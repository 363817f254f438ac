import os
import subprocess
import sys

from tests.checkout import ROOT

PROGRAM = """
import atexit, threading, time
from concurrent.futures import ThreadPoolExecutor
from flows import exit_fast

def work(name):
    time.sleep(0.2)
    print(name)

ThreadPoolExecutor(1).submit(work, 'in a pool')
threading.Thread(target=work, args=['in a thread']).start()
atexit.register(print, 'at exit')
exit_fast({0})
"""


def end(status, **options):
    command = [sys.executable, "-c", PROGRAM.format(status)]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    return subprocess.run(command, text=True, timeout=600, env=buffered, **options)


def test_threads_end_and_what_was_printed_is_written():
    ended = end(3, stdout=subprocess.PIPE)
    assert ended.returncode == 3
    *threads, last = ended.stdout.splitlines()
    assert sorted(threads) == ["in a pool", "in a thread"]
    assert last == "at exit"


def test_output_that_nobody_can_read_is_a_failure():
    reader, writer = os.pipe()
    os.close(reader)
    assert end(0, stdout=writer).returncode == 120
    assert end(2, stdout=writer).returncode == 2
    os.close(writer)


def test_a_profiler_writes_what_it_measured(tmp_path):
    program, measured = tmp_path / "program.py", tmp_path / "measured"
    program.write_text("from flows import exit_fast\nexit_fast(0)\n")
    profiler = [sys.executable, "-m", "cProfile", "-o", str(measured), str(program)]
    subprocess.run(profiler, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=600)
    assert measured.stat().st_size > 0
