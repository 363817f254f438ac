import hashlib
import shutil
from itertools import chain
from pathlib import Path

import pytest

from flows.runs import commit_check, git, pipeline, provenance_subject, remote_copies, transfer
from tests import toy_project as toy
from tests.flows.runs.conftest import RUN


@pytest.fixture
def clone(tmp_path_factory):
    """Where a clone of the project can go."""
    return tmp_path_factory.mktemp("clone") / "main"


def test_revision_has_the_commit_and_whether_it_is_changed(project):
    assert git.revision() == git.Revision("", dirty=True)
    toy.commit(project)
    clean = git.revision()
    assert len(clean.commit) == 40
    assert not clean.dirty
    toy.repro(project)
    assert Path("reports/toy/table.md").exists()
    assert git.revision() == clean, "what a run writes is no change of what it was made from"
    Path("new").write_text("")
    assert git.revision() == git.Revision(clean.commit, dirty=True)


def test_digests_are_of_the_commit_and_recipe_alone(ran):
    made = git.resolve(RUN)
    Path("dvc.lock").unlink()
    found = git.digests_at(made, "toy")
    assert found["data/toy/first"] == "eb260e9ae827821beceeed4104f0ad89"
    assert set(found) == {"data/toy/first", "data/toy/later", "reports/toy/table.md"}
    assert git.digests_at(made, "other") == {}


def test_file_missing_in_a_commit_is_named(project):
    made = toy.commit(project)
    assert git.content(made, "first.py") == Path("first.py").read_text()
    with pytest.raises(ValueError, match=f"commit {made} has no dvc.lock: "):
        git.digests_at(made, "toy")
    with pytest.raises(ValueError, match=r"commit nowhere has no first\.py"):
        git.content("nowhere", "first.py")


def branch_with(ran, files, monkeypatch):
    """Point a branch of a run at a commit with these files, as a fetch from others may."""
    monkeypatch.setenv("GIT_INDEX_FILE", str(ran / ".git/theirs"))  # which our calls do not read
    pairs = (("--cacheinfo", f"100644,{blob},{path}") for path, blob in files.items())
    toy.git(ran, "read-tree", RUN)
    toy.git(ran, "update-index", "--add", *chain(*pairs))
    tree = toy.git(ran, "write-tree")
    toy.git(ran, "branch", "runs/toy-20261123", toy.git(ran, "commit-tree", tree, "-m", "x"))
    monkeypatch.delenv("GIT_INDEX_FILE")
    return git.resolve("runs/toy-20261123")


def test_branch_whose_lock_nests_is_no_run_for_all_who_look_at_branches(ran, monkeypatch):
    Path("deep").write_text("a: " + "[" * 100_000)
    blob = toy.git(ran, "hash-object", "-w", "deep")
    theirs = branch_with(ran, {"dvc.lock": blob, "reports/toy/metrics.json": blob}, monkeypatch)
    with pytest.raises(ValueError, match=f"dvc.lock of commit {theirs} nests deeper than"):
        git.recipes_at(theirs)
    assert remote_copies.needed(theirs, "toy") == set()
    assert [state.branch for state in provenance_subject._states(None)][1:] == [RUN]
    assert pipeline.already_run("toy") == RUN
    state = provenance_subject.State({}, theirs)
    metrics = provenance_subject.Subject(state, "reports/toy/metrics.json", "", "")
    with pytest.raises(ValueError, match=f"metrics.json of commit {theirs} is no JSON"):
        provenance_subject._measured(metrics, "a")


def test_commit_with_more_files_than_a_run_is_not_read_to_its_end(ran, monkeypatch):
    monkeypatch.setattr(git, "MOST_FILES", 20)
    blob = toy.git(ran, "hash-object", "-w", "dvc.yaml")
    theirs = branch_with(ran, {f"reports/{i}/x": blob for i in range(11)}, monkeypatch)
    assert len(git.files_at(theirs, "reports/3")) == 1
    for use in (lambda: git.files_at(theirs, "reports"), lambda: commit_check.check(theirs, "toy")):
        with pytest.raises(ValueError, match=f"commit {theirs} has more than 20 files and folders"):
            use()
    assert remote_copies.needed(theirs, "toy") == set()


@pytest.mark.parametrize("sign", ["\u009b31m", "\u202e", "\u2028", "\u0085"])
def test_branches_whose_names_a_terminal_acts_on_are_no_runs(ran, sign):
    toy.git(ran, "branch", f"runs/toy-20261122-{sign}")
    assert git.runs("*") == [RUN]
    assert git.branches_at("HEAD") == [RUN]


def test_branch_of_a_remote_is_found(project, clone, monkeypatch):
    made = toy.commit(project)
    git.branch("runs/toy-1", made)
    assert git.resolve("runs/toy-1") == git.resolve(made[:8]) == made
    toy.git(project, "clone", "--quiet", str(project), str(clone))
    monkeypatch.chdir(clone)
    assert git.resolve("runs/toy-1") == made
    assert git.branches_at(made)
    with pytest.raises(ValueError, match="'runs/toy-2' names no commit here"):
        git.resolve("runs/toy-2")


def test_commit_is_fetched_from_a_remote(project, clone, monkeypatch):
    toy.commit(project)
    toy.git(project, "clone", "--quiet", str(project), str(clone))
    Path("new").write_text("")
    later = toy.commit(project, "later")
    monkeypatch.chdir(clone)
    git.fetch_commit(later)
    assert git.committed("new", at=later)
    assert not git.committed("new")
    with pytest.raises(RuntimeError, match="none of its git remotes does: git push it"):
        git.fetch_commit("0" * 40)


# ---------------------------------------------------------------- repositories


def submodule(project, place):
    toy.git(place, "init", "--quiet", "outer")
    allowed = ("-c", "protocol.file.allow=always")
    toy.git(place / "outer", *allowed, "submodule", "--quiet", "add", str(project), "inner")
    return place / "outer/inner"


def linked(project, place):
    toy.git(project, "worktree", "add", "--quiet", str(place / "linked"), "-b", "other")
    return place / "linked"


def linked_to_a_submodule(project, place):
    return linked(submodule(project, place), place)


def linked_to_a_bare_one(project, place):
    toy.git(place, "clone", "--quiet", "--bare", str(project), "bare")
    return linked(place / "bare", place)


def shallow(project, place):
    toy.git(place, "clone", "--quiet", "--depth", "1", f"file://{project}", "shallow")
    return place / "shallow"


@pytest.mark.parametrize(
    "checkout", [submodule, linked, linked_to_a_submodule, linked_to_a_bare_one, shallow]
)
def test_runs_have_worktrees_in_repositories_of_all_kinds(ran, tmp_path, monkeypatch, checkout):
    """And DVC opens them: it takes a submodule's own checkout for that of its worktrees."""
    (tmp_path / "place").mkdir()
    folder = checkout(ran, tmp_path / "place")
    monkeypatch.chdir(folder)
    git.check_repository()
    worktree = folder / ".beamline/runs/one"
    git.add_worktree(worktree, git.head(folder))
    transfer.share(worktree)
    assert pipeline.kept_in_git("toy", worktree)[0] == "dvc.lock"
    assert git.untracked("own") == git.uncommitted() == []


def of_another_user(project, monkeypatch):
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")


def bare(project, monkeypatch):
    toy.git(project, "config", "core.bare", "true")


def damaged(project, monkeypatch):
    with Path(".git/config").open("a") as config:
        config.write("[core\n")


def without_git(project, monkeypatch):
    monkeypatch.setenv("PATH", str(project))


def part(project, monkeypatch):
    Path("inner").mkdir()
    monkeypatch.chdir("inner")


def unpacked(project, monkeypatch):
    shutil.rmtree(".git")


UNFIT = {
    of_another_user: "detected dubious ownership in repository .* git init would not help",
    bare: "is bare, so git sees no checkout here: git config core.bare false if",
    damaged: "bad config line .* git init would not help",
    without_git: "git is in none of the folders of PATH, .*: install git",
    part: "is the folder inner/ of the git repository .*: git clone the project",
    unpacked: r"is in no git repository \(an unpacked archive has none\): git init is enough",
}


@pytest.mark.parametrize("spoil", UNFIT)
def test_repository_that_does_not_serve_is_refused_with_the_true_cause(ran, monkeypatch, spoil):
    spoil(ran, monkeypatch)
    with pytest.raises(ValueError, match=f"(?s){UNFIT[spoil]}"):
        git.check_repository()
    with pytest.raises(ValueError):
        git.resolve("runs/toy-nowhere")


# ---------------------------------------------------------------- settings of users

NAME, TEXT = "grüße.txt", "one\ntwo\n"
SOURCES = "171f558d73d6df3cc837117214733339.dir"  # DVC's digest of a folder with ä.jsonl alone
MESSAGE = "Run of töy: 50 %\n\n# no comment\n\nRecipe: toy\nCode: abc\nSet: a=1\nSet: b=2"


def read_all(folder):
    """All that is read of a run, by name."""
    first = git.digests_at(RUN, "toy")["data/toy/first"]
    names = git.folder_with_digest("data/sources", SOURCES, RUN)
    return {
        "revision": git.revision(),
        "fault": git.fault(),
        "uncommitted": git.uncommitted(),
        "untracked": git.untracked("own"),
        "tracked": git.tracked(folder),
        "committed": git.committed(NAME),
        "runs": git.runs("toy"),
        "runs with": git.runs_with(first),
        "branches": git.branches_at(git.resolve(RUN)),
        "recipes": git.recipes_at(RUN),
        "file": git.with_digest(NAME, hashlib.md5(TEXT.encode()).hexdigest(), RUN),
        "folder": names,
    }


def write_all(worktree):
    """All that is written for a run, by name."""
    git.add_worktree(worktree, RUN)
    checked_out = (worktree / NAME).read_bytes()
    (worktree / "reports/toy/new.txt").write_bytes(b"one\ntwo\r\n")
    tree = git.stage_files(["reports/toy/new.txt"], worktree)
    commit = git.commit(MESSAGE, worktree)
    git.branch("runs/toy-20261122-b", commit)
    trailers = [git.trailer(commit, key) for key in ("Recipe", "Code", "Set")]
    equal = git.equal_run(tree, git.resolve(RUN), "toy")
    git.remove_worktree(worktree)
    return checked_out, tree, commit, trailers, equal


def test_settings_of_a_user_change_nothing(ran, tmp_path, monkeypatch, hostile_git):
    """What is read, and the commit of a run to its last byte, are the same."""
    Path(NAME).write_text(TEXT)
    Path("data/sources").mkdir()
    Path("data/sources/ä.jsonl").write_text(TEXT)
    toy.commit(ran, "with a name that git quotes")
    toy.git(ran, "branch", "--force", "other", "HEAD")
    toy.git(ran, "tag", "other")
    Path(NAME).write_text("changed")
    Path("own").mkdir()
    Path("own/täg.py").write_text("")
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_DATE", "2026-01-01T12:00:00Z")
    expected = read_all(ran), write_all(tmp_path / "worktree")
    assert expected[0]["uncommitted"] == [f" M {NAME}"]
    assert expected[0]["untracked"] == ["own/täg.py"]
    assert expected[0]["runs with"] and expected[0]["file"] and expected[0]["folder"]
    assert expected[1][0] == TEXT.encode()
    assert expected[1][3:] == (["toy", "abc", "a=1\nb=2"], "runs/toy-20261122-b")
    toy.git(ran, "branch", "-D", "runs/toy-20261122-b")
    hostile_git()
    assert (read_all(ran), write_all(tmp_path / "worktree")) == expected
