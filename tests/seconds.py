"""Say after a run of the tests what it took, beside what was recorded before.

`make test` loads this plugin, with --seconds=tests/seconds.json; with --record-seconds it rewrites
that file. Processor seconds are those of pytest, its workers and the processes that they waited
for: they hardly depend on what else the machine does.
"""

import json
import resource
import time
from pathlib import Path

import pytest

FINISHED = ("passed", "failed", "skipped", "xfailed", "xpassed")


def pytest_addoption(parser):
    parser.addoption("--seconds", metavar="FILE", type=Path, help="what the tests took before")
    parser.addoption("--record-seconds", action="store_true", help="rewrite the file of --seconds")


def pytest_configure(config):
    config.pluginmanager.register(OfWorker() if hasattr(config, "workerinput") else OfRun())


def processor_seconds(*whose):
    used = [resource.getrusage(each) for each in whose]
    return sum(each.ru_utime + each.ru_stime for each in used)


class OfWorker:
    """What a worker of xdist tells about itself."""

    @pytest.hookimpl(trylast=True)  # after the fixtures of the session, which end processes
    def pytest_sessionfinish(self, session):
        both = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        session.config.workeroutput["processor_seconds"] = processor_seconds(*both)


class OfRun:
    """What a whole run took."""

    def __init__(self):
        self.began = time.monotonic()
        self.workers = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.workers.append(getattr(node, "workeroutput", {}).get("processor_seconds", 0.0))

    @pytest.hookimpl(trylast=True)  # below the slowest tests
    def pytest_terminal_summary(self, terminalreporter, config):
        # Workers are children, too: where they have told, children do not count once more.
        whose = (
            [resource.RUSAGE_SELF]
            if self.workers
            else [resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN]
        )
        took = {
            "tests": sum(len(terminalreporter.stats.get(kind, ())) for kind in FINISHED),
            "processor": round(processor_seconds(*whose) + sum(self.workers)),
            "wall": round(time.monotonic() - self.began),
        }
        if not (file := config.getoption("seconds")):
            return
        terminalreporter.write_line(f"took      {in_words(took)}")
        if config.getoption("record_seconds"):
            file.write_text(json.dumps(took) + "\n")
        elif file.exists():
            before = json.loads(file.read_text())
            growth = took["processor"] / max(before["processor"], 1) - 1
            terminalreporter.write_line(f"recorded  {in_words(before)}; now {growth:+.0%}")


def in_words(took):
    return "{tests:,} tests, {processor:,} s of processors, {wall:,} s by the clock".format(**took)
