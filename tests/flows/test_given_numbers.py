"""Numbers of a command line that cannot work are refused by the option's name."""

import subprocess
import sys

import pytest

GIVEN = {
    "serve": "--temperature=0 --temperature=nan --temperature=-1 --port=99999 --port=-5 --port=a",
    "ask": "--temperature=0 --temperature=inf --task=-1",
    "export": "--min-reward=nan --iterations=5,2 --iterations=-1,2",
    "page": "--iteration=-1",
    "compare": "--seeds=-1",
    "agents": "--timeout=nan --retries=-1",
}


@pytest.mark.parametrize("command", GIVEN)
def test_numbers_that_cannot_work_are_refused(command):
    code = "import importlib, sys\nfor line in sys.stdin:\n"
    code += f"    try: importlib.import_module('flows.commands.{command}').main(line.split())\n"
    code += "    except SystemExit as end: assert end.code == 2\n"
    code += "    else: print('taken:', line, file=sys.stderr)\n"
    options = [each.replace("=", " ").replace(",", " ") for each in GIVEN[command].split()]
    lines = "".join(f"smoke {each}\n" for each in options)
    done = subprocess.run(
        [sys.executable, "-c", code], input=lines, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "error:" in line]
    for line, given in zip(told, options, strict=True):
        assert ": give " in line and given.split()[0] in line
