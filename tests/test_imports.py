"""What each program imports before its first word: no more modules than tests/imports.yaml says.

``python tests/test_imports.py`` writes that table anew.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("imports.yaml")
PROGRAMS = sorted(
    file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    for room in ("flows", "flows/stages", "flows/commands")
    for file in (ROOT / room).glob("*.py")
    if file.stem != "__init__"
)
HEAVY = (  # a program may import those alone that the table says
    *("accelerate", "botocore", "dvc", "fastapi", "great_expectations", "matplotlib", "mlflow"),
    *("openai", "pandas", "peft", "plotly", "prefect", "pyarrow", "scipy", "sklearn", "sqlalchemy"),
    *("sympy", "torch", "torch._dynamo", "torch.distributed.tensor", "transformers", "trio"),
)
LARGE = 20  # modules of a package that has a number of its own in the table
SLACK = 0.05, 20  # more modules than in the table: a share, or a number if that is more
# Libraries that a process imports one after the other. Each program is imported in a fork of it, as
# late as the libraries are all among those that the table allows the program. transformers is none:
# who imports it first decides what comes with it (tasks/policy/lean_transformers.py).
SHARED = ("pyarrow", "pandas", "prefect", "torch")
FORKS = """
import json, os, sys

steps = json.loads(sys.argv[1])
for library, programs in steps:
    if library:
        __import__(library)
    for program in programs:
        sys.stdout.flush()
        if not os.fork():
            __import__(program)
            print(json.dumps([program, [*filter(sys.modules.get, sys.modules)]]), flush=True)
            os._exit(0)
        if os.wait()[1]:
            sys.exit(f"{program} cannot be imported")
"""


def modules_of(program: str) -> list[str]:
    """Return the modules that a new interpreter has after an import of ``program``."""
    code = (
        f"import json, sys, {program}; print(json.dumps([*filter(sys.modules.get, sys.modules)]))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def modules_of_all(table: dict) -> dict[str, list[str]]:
    """Return the modules of each program, all but a few of them imported once."""
    steps = [("", [])] + [(library, []) for library in SHARED]
    for program in PROGRAMS:
        heavy = table.get(program, {"heavy": []})["heavy"]
        allowed = [name in heavy for name in SHARED]
        steps[[*allowed, False].index(False)][1].append(program)
    command = [sys.executable, "-c", FORKS, json.dumps(steps)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


def measured(modules: list[str]) -> dict:
    """Return the row of the table for these modules."""
    packages = Counter(name.partition(".")[0] for name in modules)
    return {
        "modules": len(modules),
        "heavy": [name for name in HEAVY if name in modules],
        "packages": {name: n for name, n in sorted(packages.items()) if n >= LARGE},
    }


def faults(row: dict, now: dict) -> list[str]:
    """Return what is worse now than the row of the table."""
    share, least = SLACK
    grown = {
        name: number - row["packages"].get(name, 0)
        for name, number in now["packages"].items()
        if number > row["packages"].get(name, 0)
    }
    found = [f"imports {name}" for name in now["heavy"] if name not in row["heavy"]]
    if now["modules"] > row["modules"] + max(share * row["modules"], least):
        more = ", ".join(f"{name} {number}" for name, number in grown.items())
        found.append(f"{now['modules']} modules, not {row['modules']}; more of: {more or 'many'}")
    return found


@pytest.fixture(scope="module")
def table() -> dict:
    return yaml.safe_load(TABLE.read_text())


@pytest.fixture(scope="module")
def imported(table):
    return modules_of_all(table)


def test_table_has_each_program(table):
    assert sorted(table) == PROGRAMS


@pytest.mark.parametrize("program", PROGRAMS)
def test_imports_no_more(program, table, imported):
    found = faults(table[program], measured(imported[program]))
    assert not found, (
        f"{program}: {'; '.join(found)}: import them where they are used, or accept them with "
        "`python tests/test_imports.py`"
    )


def test_names_what_came():
    row = {"modules": 1000, "heavy": ["torch"], "packages": {"torch": 900}}
    assert not faults(row, {"modules": 1050, "heavy": [], "packages": {"torch": 950}})
    more = {"modules": 1051, "heavy": ["scipy", "torch"], "packages": {"scipy": 60, "torch": 900}}
    heavy, grown = faults(row, more)
    assert "scipy" in heavy
    assert "scipy 60" in grown
    assert "torch" not in grown


# A command that is called in vain, and one whose recipe has not been trained, say so at once: what
# they would compute with is imported after their checks.
REFUSALS = {
    "agents": ["nosuch"],
    "ask": ["smoke", "--question", "?"],
    "compare": ["smoke", "--suite", "arpo", "--committed"],
    "figures": ["smoke"],
    "launch": ["nosuch"],
    "plan": ["nosuch"],
    "retrain": ["smoke", "--set", "nosuch=1"],
    "ui": ["--nosuch"],
}
LATE = ("mlflow", "matplotlib", "pandas", "prefect", "torch", "transformers")
REFUSED = """
import importlib, json, os, sys

import tasks.recipes  # what most of them read a recipe with

calls, late = json.loads(sys.argv[1])
for program, arguments in calls:
    sys.stdout.flush()
    if not os.fork():
        out = os.fdopen(os.dup(1), "w")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        try:
            status = importlib.import_module(f"flows.commands.{program}").main(arguments)
        except SystemExit as end:
            status = end.code
        imported = [name for name in late if name in sys.modules]
        print(json.dumps([program, arguments, status, imported]), file=out, flush=True)
        os._exit(0)
    os.wait()
"""


def test_refusals_come_before_the_imports(tmp_path):
    (tmp_path / "params").symlink_to(ROOT / "params")
    calls = list(REFUSALS.items())
    command = [sys.executable, "-c", REFUSED, json.dumps([calls, LATE])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    results = list(map(json.loads, done.stdout.splitlines()))
    assert len(results) == len(calls), done.stderr
    wrong = [each for each in results if each[2] != 2 or each[3]]
    assert not wrong


def write() -> None:
    """Write the table anew."""
    with ThreadPoolExecutor(2) as pool:
        rows = dict(zip(PROGRAMS, map(measured, pool.map(modules_of, PROGRAMS)), strict=True))
    text = yaml.safe_dump(rows, default_flow_style=None, sort_keys=False, width=100)
    TABLE.write_text(
        "# Modules that each program imports; tests/test_imports.py writes this.\n" + text
    )


if __name__ == "__main__":
    write()
