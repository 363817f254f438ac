import json
from pathlib import Path

import pytest

from params.schema.champion import Champion
from tasks.ledger.artifacts import Artifact
from tasks.policy import champion

PINNED = Champion(version=3, commit="a" * 40, digest="b" * 32 + ".dir")


def bring(digest, target):
    """What DVC would bring."""
    target.mkdir()
    (target / "weights").write_text(digest)


def nothing(digest, target):
    raise ValueError(f"neither DVC's cache nor its remote has {digest}")


def test_without_a_champion_a_file_says_so(tmp_path):
    folder = tmp_path / "models/toy/champion"
    champion.write(folder, None, nothing)
    assert json.loads((folder / "champion.json").read_text()) == {"version": None}
    assert [path.name for path in folder.iterdir()] == ["champion.json"]
    assert champion.read(folder) is None
    assert champion.policy(folder) is None


def test_a_champion_is_its_name_and_its_files(tmp_path):
    folder = tmp_path / "models/toy/champion"
    champion.write(folder, PINNED, bring)
    assert champion.read(folder) == {"version": 3, "commit": "a" * 40, "digest": PINNED.digest}
    made = champion.policy(folder)
    assert made == Artifact.at(folder / "policy")
    assert (Path(made.path) / "weights").read_text() == PINNED.digest


def test_new_champion_replaces_the_old_files(tmp_path):
    folder = tmp_path / "champion"
    champion.write(folder, PINNED, bring)
    champion.write(folder, None, nothing)
    assert [path.name for path in tmp_path.rglob("*")] == ["champion", "champion.json"]


def test_failed_restore_keeps_the_old_champion(tmp_path):
    folder = tmp_path / "champion"
    champion.write(folder, PINNED, bring)
    with pytest.raises(ValueError, match="neither"):
        champion.write(folder, PINNED.model_copy(update={"version": 4}), nothing)
    assert champion.read(folder)["version"] == 3


def test_a_folder_that_no_stage_has_written_is_said(tmp_path):
    with pytest.raises(ValueError, match="run the stage that makes it, champion, first"):
        champion.policy(tmp_path)
