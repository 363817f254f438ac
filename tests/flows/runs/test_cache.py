import hashlib
import json
import shutil
from pathlib import Path

import pytest

from flows.runs import cache
from tasks.ledger import artifacts
from tests import toy_project as toy


@pytest.fixture
def kept(project):
    """A folder in DVC's cache, and its digest."""
    folder = Path("policy")
    (folder / "inner").mkdir(parents=True)
    (folder / "weights").write_text("w" * 100)
    (folder / "inner/config.json").write_text("{}")
    return folder, cache.keep(folder)


def cached_weights():
    """The file of the cache that holds them."""
    files = [path for path in Path(".dvc/cache").rglob("*") if path.is_file()]
    return next(path for path in files if path.read_text() == "w" * 100)


def test_kept_folder_has_the_digest_of_dvc(project, kept):
    toy.dvc_add(project, "policy")
    assert kept[1] in Path("policy.dvc").read_text()


def test_restored_copy_may_be_changed(kept, tmp_path):
    folder, digest = kept
    cache.restore(digest, tmp_path / "again")
    assert artifacts.digest(tmp_path / "again") == artifacts.digest(folder)
    (tmp_path / "again/weights").write_text("may be changed")
    cache.restore(digest, tmp_path / "third")
    assert artifacts.digest(tmp_path / "third") == artifacts.digest(folder)


@pytest.mark.parametrize("lost", ["all", "one file"])
def test_files_missing_in_the_cache_come_from_the_remote(project, kept, tmp_path, lost):
    toy.dvc_add(project, "policy", remote=str(tmp_path / "remote"))
    if lost == "all":
        shutil.rmtree(".dvc/cache/files/md5")
    else:
        cached_weights().unlink()
    cache.restore(kept[1], tmp_path / "again")
    assert (tmp_path / "again/weights").read_text() == "w" * 100
    assert (tmp_path / "again/inner/config.json").read_text() == "{}"


def test_missing_folder_is_an_error_with_a_remedy(project, kept, tmp_path):
    shutil.rmtree(".dvc/cache")
    with pytest.raises(ValueError, match=r"cache lacks .*\.dir, .*no remote"):
        cache.restore(kept[1], tmp_path / "again")
    (tmp_path / "remote").mkdir()
    toy.set_remote(project, str(tmp_path / "remote"))
    with pytest.raises(ValueError, match=r"cache lacks .*remote.*dvc push"):
        cache.restore(kept[1], tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_damaged_file_of_the_cache_is_refused(kept, tmp_path):
    file = cached_weights()
    file.chmod(0o644)
    file.write_text("v" * 100)
    with pytest.raises(ValueError, match="damaged"):
        cache.restore(kept[1], tmp_path / "again")


@pytest.mark.parametrize(
    ("path", "digest"),
    [("../x", "0" * 32), ("OUTSIDE/x", "0" * 32), ("a/../../x", "0" * 32), ("x", "../../secret")],
)
def test_folder_with_a_file_outside_of_it_is_refused(kept, tmp_path, path, digest):
    entry = {"relpath": path.replace("OUTSIDE", str(tmp_path)), "md5": digest}
    listed = json.dumps([entry]).encode()
    name = hashlib.md5(listed).hexdigest()
    Path(f".dvc/cache/files/md5/{name[:2]}").mkdir(exist_ok=True)
    Path(f".dvc/cache/files/md5/{name[:2]}/{name[2:]}.dir").write_bytes(listed)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="a file outside of it"):
        cache.restore(f"{name}.dir", tmp_path / "again")
    with pytest.raises(ValueError, match="is no digest of DVC"):
        cache.restore("ab/../../../secret", tmp_path / "again")
    after = [each for each in sorted(tmp_path.rglob("*")) if ".dvc/tmp" not in str(each)]
    assert after == [each for each in before if ".dvc/tmp" not in str(each)]
