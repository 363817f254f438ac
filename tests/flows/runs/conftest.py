import shutil
from pathlib import Path

import pytest

from flows.runs import dvc_command, git
from tests import toy_project as toy
from tests.flows.runs import stores

RUN = "runs/toy-20261121-a"  # the branch of the run in `ran`


def enter(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(toy.ROOT))
    monkeypatch.delenv(dvc_command.PARENT, raising=False)
    return folder


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A toy project without Prefect and without a commit, as the working folder."""
    folder = tmp_path.resolve() / "project"
    folder.mkdir()
    toy.create(folder, flows=False)
    return enter(folder, monkeypatch)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A toy project whose stages have run, with the run on a branch; tests copy it."""
    folder = tmp_path_factory.mktemp("finished").resolve() / "project"
    folder.mkdir()
    toy.create(folder, flows=False)
    toy.commit(folder)
    toy.repro(folder)
    toy.git(folder, "checkout", "--quiet", "-b", RUN)
    toy.commit(folder, "a run")
    return folder


@pytest.fixture
def ran(finished, tmp_path, monkeypatch):
    """A copy of the project whose stages have run, as the working folder."""
    folder = tmp_path.resolve() / "ran"
    shutil.copytree(finished, folder, symlinks=True)
    return enter(folder, monkeypatch)


@pytest.fixture(scope="session")
def s3():
    """The address of a server that speaks S3."""
    with stores.s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def hostile_git(tmp_path, monkeypatch):
    """Return a function after which git has settings that change all that it prints.

    They are in a global file, in the environment, and in variables as a hook of git sets them.
    """
    attributes = tmp_path / "attributes"
    attributes.write_text("* text eol=crlf\n")
    values = {
        **dict.fromkeys(git.ELSEWHERE, str(tmp_path / "nowhere")),
        **{"GIT_LITERAL_PATHSPECS": "1", "GIT_ICASE_PATHSPECS": "0", "GIT_PAGER_IN_USE": "1"},
        **{"GIT_CONFIG_GLOBAL": str(Path(__file__).with_name("hostile.gitconfig"))},
        **{"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "core.attributesFile"},
        **{"GIT_CONFIG_VALUE_0": str(attributes), "GIT_TRACE": "1", "GIT_PAGER": "tr a-z A-Z"},
        **{"LANGUAGE": "de", "LC_ALL": "C", "GREP_COLORS": "mt=1", "TERM": "xterm"},
    }
    return lambda: [monkeypatch.setenv(*pair) for pair in values.items()]
