"""Plant faults in the code, one after the other, and see that a test finds each of them.

``tests/faults.yaml`` has the faults: a text of a file, what takes its place, and the test that
fails then. They are planted in copies of the files that git tracks, as they are in this checkout,
one copy for each job. First all these tests run without any fault, since a test that fails anyway
finds nothing. Found is a fault whose test fails; a test that passes, does not end or cannot be
collected has not found it.

``python -m benchmarks.planted_faults`` plants all of them and takes some minutes; names choose
faults or areas. The exit status is 1 where a fault is not found.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, fields
from functools import partial
from importlib.util import cache_from_source, find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import NoReturn

import yaml

from flows.runs import git
from tasks.extensions.waiting import is_readable

PROGRAM = Path(__file__).parents[1]  # the checkout that this file is in
FAULTS = Path("tests/faults.yaml")
SECONDS = 600.0  # until a test counts as one that does not end
PASSED, FAILED, CRASHED = 0, 1, 70  # exit statuses of pytest, and of a process without one
FOUND, MISSED, ENDLESS, BROKEN = "found", "not found", "no end", "not run"
UNSOUND = "fails anyway"  # so it finds nothing
RESULTS = {PASSED: MISSED, FAILED: FOUND, None: ENDLESS}
PYTEST = ("-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-m", "")
PACKAGES = ("flows", "tasks", "params", "beamline", "benchmarks", "tests")
TIED_TO_A_RUN = ("BEAMLINE_", "DVC_", "MLFLOW_", "PREFECT_", "PYTEST_")
SETTINGS = {  # read when the libraries are imported, as flows/__init__.py has them
    **{"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "DO_NOT_TRACK": "1"},
    **{"OMP_DYNAMIC": "FALSE", "MKL_DYNAMIC": "FALSE"},
}
# Imported once for all tests, which takes longer than most of them do.
LIBRARIES = (
    *("hypothesis", "numpy", "pandas", "pyarrow.parquet", "pydantic", "pytest", "regex"),
    *("scipy.stats", "torch", "torch.nn.attention.flex_attention", "transformers.modeling_utils"),
    "transformers.models.qwen2.modeling_qwen2",
)
FIRST_FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """A text of a file, the text that takes its place, and the test that finds it."""

    area: str
    name: str
    file: str
    old: str
    new: str
    test: str  # node id of a file or of a test, without parameters

    def planted(self, text: str) -> str:
        """Return the file's text with the fault. Raises ValueError where it cannot be planted."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"fault '{self.name}': its old text is {count} times in {self.file}: write one "
                "that is there once"
            )
        if self.old == self.new:
            raise ValueError(f"fault '{self.name}': old and new text are equal")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """What came of a fault: a line of the table."""

    area: str
    fault: str
    file: str
    test: str
    result: str  # FOUND, MISSED, ENDLESS, BROKEN or UNSOUND
    seconds: float
    by: str  # the first test that failed


def load(file: Path = FAULTS) -> list[Fault]:
    """Read the faults by area and name. Raises ValueError for a name that several have."""
    areas = yaml.safe_load(file.read_text())
    faults = [
        Fault(area, name, **fault) for area, named in areas.items() for name, fault in named.items()
    ]
    names = [*areas, *(fault.name for fault in faults)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{file}: {', '.join(sorted(twice))} is there twice: rename one")
    return faults


# ---------------------------------------------------------------- copies of the checkout


def copy(root: Path, folder: Path) -> None:
    """Make ``folder`` a repository with the files that git tracks in ``root``, as they are now."""
    for name in git.tracked(root):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    git.initialize(folder, "without faults", author="faults")


@contextmanager
def planted(fault: Fault, folder: Path) -> Iterator[None]:
    """Plant a fault in a copy during the block."""
    file = folder / fault.file
    before = file.read_bytes()
    # goes by the second of a file's time and by its size, which two faults may share
    byte_code = Path(cache_from_source(str(file)))
    file.write_text(fault.planted(before.decode()))
    byte_code.unlink(missing_ok=True)
    try:
        yield
    finally:
        file.write_bytes(before)
        byte_code.unlink(missing_ok=True)


# ---------------------------------------------------------------- tests


def import_libraries() -> None:
    """Import what most tests import, and have byte code written, which all copies begin without."""
    os.environ.update(SETTINGS)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    for library in LIBRARIES:
        importlib.import_module(library)


def run(folder: Path, *arguments: str, seconds: float) -> tuple[int | None, str]:
    """Run pytest in a copy; return its exit status, None where it does not end, and its output.

    It is a fork of this process, in which the libraries are imported. What it leaves is killed.
    """
    output, temporary_folder = folder.with_name("output"), folder.with_name("made")
    process = os.fork()
    if not process:
        be_pytest(folder, output, [*PYTEST, "--basetemp", str(temporary_folder), *arguments])
    descriptor = os.pidfd_open(process)
    try:
        ended = is_readable(descriptor, seconds)
    finally:
        os.close(descriptor)
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status) if ended else None, output.read_text()


def be_pytest(folder: Path, output: Path, arguments: Sequence[str]) -> NoReturn:
    """Become a process that runs pytest in ``folder``, with the modules that are there."""
    status = CRASHED
    try:
        os.setsid()
        sys.stdout = sys.stderr = output.open("w")
        os.dup2(sys.stdout.fileno(), 1)
        os.dup2(sys.stdout.fileno(), 2)
        elsewhere, hooks = ("", str(Path.cwd()), str(PROGRAM)), sys.modules[__name__]
        os.chdir(folder)
        for name in [name for name in os.environ if name.startswith(TIED_TO_A_RUN)]:
            del os.environ[name]
        os.environ["PYTHONPATH"] = str(folder)
        sys.path[:] = [str(folder), *(path for path in sys.path if path not in elsewhere)]
        for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
            del sys.modules[name]
        check_imports(folder)
        sys.modules["__main__"] = importlib.import_module("pytest.__main__")
        status = int(importlib.import_module("pytest").main([*arguments], [hooks]))
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def pytest_collection() -> None:
    """Have Hypothesis stop at the first example that fails: pytest calls this hook.

    The search for a smaller one takes minutes.
    """
    from hypothesis import Phase, settings

    phases = [Phase.explicit, Phase.reuse, Phase.generate]
    settings.register_profile("faults", settings.default, phases=phases)
    settings.load_profile("faults")


def check_imports(folder: Path) -> None:
    """Raise RuntimeError where the packages of a copy would be imported from elsewhere."""
    for name in PACKAGES:
        spec = find_spec(name) if (folder / name).is_dir() else None
        places = set(spec.submodule_search_locations or ()) if spec else set()
        if places - {str(folder / name)}:
            raise RuntimeError(f"{name} would be imported from {places}, and not from {folder}")


def own_copy(root: Path, home: Path) -> Path:
    """Return this process's copy of ``root`` below ``home``; make it at the first call."""
    folder = home / str(os.getpid()) / "checkout"
    if not folder.exists():
        copy(root, folder)
    return folder


def passes(test: str, root: Path, home: Path, seconds: float) -> bool:
    """Return whether a test passes without any fault; print the end of its output if not."""
    status, output = run(own_copy(root, home), test, seconds=seconds)
    if status != PASSED:
        print(f"{test} does not pass without any fault:\n{output[-2000:]}", file=sys.stderr)
    return status == PASSED


def judge(fault: Fault, sound: Collection[str], root: Path, home: Path, seconds: float) -> Outcome:
    """Plant a fault in this process's copy, and run the test that has to find it.

    ``sound``: the tests that pass without any fault.
    """
    about = (fault.area, fault.name, fault.file, fault.test)
    if fault.test not in sound:
        return Outcome(*about, UNSOUND, 0.0, "")
    folder = own_copy(root, home)
    began = time.monotonic()
    with planted(fault, folder):
        status, output = run(folder, "-x", fault.test, seconds=seconds)
    result = RESULTS.get(status, BROKEN)
    failed = FIRST_FAILURE.search(output)
    by = failed[1] if failed and result == FOUND else ""
    return Outcome(*about, result, round(time.monotonic() - began, 1), by)


def judge_all(
    faults: Sequence[Fault], root: Path, jobs: int = 1, seconds: float = SECONDS
) -> Iterator[Outcome]:
    """Yield what comes of each fault, in their order. Raises ValueError for one without a place."""
    for fault in faults:
        fault.planted((root / fault.file).read_text())
    tests = list(dict.fromkeys(fault.test for fault in faults))
    with (
        tempfile.TemporaryDirectory(prefix="faults-") as folder,
        ProcessPoolExecutor(jobs, get_context("fork")) as pool,
    ):
        home = Path(folder).resolve()
        tried = pool.map(partial(passes, root=root, home=home, seconds=seconds), tests)
        sound = {test for test, passed in zip(tests, tried, strict=True) if passed}
        judging = partial(judge, sound=sound, root=root, home=home, seconds=seconds)
        yield from pool.map(judging, faults)


# ---------------------------------------------------------------- the command line


def save(outcomes: Sequence[Outcome], table: Path) -> None:
    """Write the table as CSV."""
    with table.open("w", newline="") as stream:
        rows = csv.writer(stream, lineterminator="\n")
        rows.writerow([column.name for column in fields(Outcome)])
        rows.writerows(map(astuple, outcomes))


def chosen_of(faults: Sequence[Fault], names: Sequence[str]) -> list[Fault]:
    """Return the faults of these names and areas, or all. Raises ValueError for others."""
    if unknown := set(names) - {name for fault in faults for name in (fault.area, fault.name)}:
        raise ValueError(f"no fault or area is called {', '.join(sorted(unknown))}")
    return [fault for fault in faults if not names or {fault.area, fault.name} & {*names}]


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit status. 2: the list of faults is not sound."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planted_faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="of faults or areas; else all")
    parser.add_argument("--jobs", type=int, default=1, help="copies that are tested side by side")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table there, as CSV")
    args = parser.parse_args(arguments)
    outcomes: list[Outcome] = []
    try:
        for outcome in judge_all(chosen_of(load(), args.names), Path.cwd(), args.jobs):
            print(f"{outcome.result:12} {outcome.seconds:6.1f} s  {outcome.fault}", flush=True)
            outcomes.append(outcome)
    except ValueError as error:
        print(f"planted_faults: {error}", file=sys.stderr)
        return 2
    if args.table:
        save(outcomes, args.table)
    missed = [outcome.fault for outcome in outcomes if outcome.result != FOUND]
    print(f"{len(outcomes) - len(missed)} of {len(outcomes)} faults are found")
    return 1 if missed else 0


if __name__ == "__main__":
    import_libraries()
    sys.exit(main(sys.argv[1:]))
