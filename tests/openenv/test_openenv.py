"""Worlds of a server of the real package openenv, in an environment of its own.

openenv needs an older mcp than Beamline, so they cannot share one. The tests are those of
tests/tasks/environments/test_openenv.py. OPENENV_PYTHON names a Python that has openenv already.
"""

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

from tests.tasks.environments.test_openenv import *  # noqa: F403

PACKAGE = "openenv==0.10.*"
SCRIPT = Path(__file__).parents[2] / ".ci/install.py"


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """What starts a server of the package when a port is added."""
    python = os.environ.get("OPENENV_PYTHON") or installed(tmp_path_factory.mktemp("openenv"))
    shown = "import importlib.metadata as m; print(m.version('openenv'))"
    said = subprocess.run([python, "-c", shown], capture_output=True, text=True, check=True)
    assert said.stdout.startswith("0.10.")
    return [str(python), str(Path(__file__).with_name("guessing_server.py"))]


def installed(folder):
    """Install openenv into a folder, with the uv and the indexes that install Beamline."""
    spec = importlib.util.spec_from_file_location("install", SCRIPT)
    install = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(install)
    install.UV.parent.mkdir(exist_ok=True)
    install.provide_uv()
    python = folder / "bin/python"
    environment = os.environ | install.uv_settings(os.environ)
    for step in (
        ("venv", "--quiet", "--python", install.PYTHON_VERSION, folder),
        ("pip", "install", "--quiet", "--compile-bytecode", "--python", python, PACKAGE),
    ):
        subprocess.run([install.UV, *step], env=environment, check=True)
    return python
