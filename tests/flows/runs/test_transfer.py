import shutil
from contextlib import chdir
from pathlib import Path

import pytest
import yaml

from flows.runs import cache, dvc_command, git, pipeline, transfer
from tests import toy_project as toy


@pytest.fixture
def place(ran):
    """A worktree of a project with a remote and a file that DVC tracks, set up by ``share``."""
    Path("questions").mkdir()
    Path("questions/new.jsonl").write_text('{"id": 1}\n')
    toy.dvc_add(ran, "questions/new.jsonl")
    toy.set_remote(ran, "remote")
    settings = ran / ".dvc/config"
    settings.write_text(settings.read_text().replace("remote\n", "Größe\n"))
    toy.commit(ran)
    folder = ran / ".beamline/runs/one"
    git.add_worktree(folder, git.resolve("HEAD"))
    transfer.share(folder)
    return folder


def test_worktree_shares_cache_remote_and_sources(ran, place):
    transfer.provide_sources(place)
    assert (place / "questions/new.jsonl").read_text() == '{"id": 1}\n'
    assert transfer.default_remote(place) == "store"
    assert pipeline.kept_in_git("toy", place) == [
        "dvc.lock",
        "params/toy.yaml",
        "params/resolved/toy.yaml",
        "params/algorithms.yaml",
        "reports/toy/table.md",
    ]
    transfer.push("toy", place)
    pushed = [path.read_text() for path in (ran / "Größe/files").rglob("*") if path.is_file()]
    assert sorted(pushed) == ["first\n", "later\n"]

    (place / "questions/new.jsonl").unlink()
    for file in (ran / ".dvc/cache/files").rglob("*"):
        if file.is_file():
            file.unlink()
    with pytest.raises(RuntimeError, match="dvc pull failed in"):
        transfer.provide_sources(place)
    git.remove_worktree(place)
    assert not place.exists()
    assert toy.git(ran, "worktree", "list").count("\n") == 0


def test_run_cache_is_shared_until_it_is_hidden(ran, place, capfd):
    for name in ("dvc.lock", "first.py"):
        (place / name).unlink()
    toy.write_stage(place, "first", flows=False, before="'another source'")
    toy.repro(place, "first@toy")
    assert "first has run" in capfd.readouterr().out
    (ran / "first.py").write_text((place / "first.py").read_text())
    toy.repro(ran, "first@toy")
    assert "first has run" not in capfd.readouterr().out, "the checkout's DVC remembers it too"

    transfer.forget_runs(place)
    assert transfer.default_remote(place) is None
    (place / "dvc.lock").unlink()
    toy.repro(place, "first@toy")
    assert "first has run" in capfd.readouterr().out
    (place / "data/toy/first").unlink()
    assert dvc_command.dvc_quietly(place, "checkout", "first@toy") is None
    assert (place / "data/toy/first").read_text() == "first\n"


def test_inputs_that_a_run_has_not_made_need_no_remote_afterwards(ran, place):
    """A file that DVC tracks, the out of another recipe, and a champion that no remote has."""
    pipeline_file = place / "dvc.yaml"
    pipeline_file.write_text(
        pipeline_file.read_text().replace(
            "toy: params/toy.yaml", "toy: params/toy.yaml\n      other: params/other.yaml"
        )
    )
    lock = yaml.safe_load((place / "dvc.lock").read_text())
    others = yaml.safe_load(yaml.safe_dump(lock["stages"]).replace("toy", "other"))
    lock["stages"] |= others
    (place / "dvc.lock").write_text(yaml.safe_dump(lock))
    Path("policy").mkdir()
    Path("policy/weights").write_text("w")
    champion = {"version": 3, "commit": None, "digest": cache.keep(Path("policy"))}
    toy.write_recipe(place, champion=champion, prepare__policy__name="data/other/first")
    shutil.copy(place / "params/toy.yaml", place / "params/other.yaml")
    transfer.push("toy", place)
    first = others["first@other"]["outs"][0]["md5"]
    for digest in (first, champion["digest"]):
        Path(f".dvc/cache/files/md5/{digest[:2]}/{digest[2:]}").unlink()
    locked = (place / "dvc.lock").read_text()
    with pytest.raises(RuntimeError, match=r"version 3 .*lacks .*\.dir, and so does .*store \("):
        transfer.provide_inputs("toy", place, ran / "nothing")
    (place / "dvc.lock").write_text(locked)
    shutil.copytree("policy", ran / "restored/models/toy/champion/policy")
    transfer.provide_inputs("toy", place, ran / "restored")
    assert list(pipeline.locked(place)) == ["first@other"], "its own would count as made"
    assert (place / "data/other/first").read_text() == "first\n"
    assert (place / "questions/new.jsonl").exists()
    transfer.forget_runs(place)
    with chdir(place):
        cache.restore(champion["digest"], place / "champion")
        with pytest.raises(ValueError, match="its remote is switched off in this worktree"):
            cache.restore("0" * 32, place / "nothing")
    assert (place / "champion/weights").read_text() == "w"
