"""What the disk does to a run: files cut short or changed, and no room left."""

import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tasks.ledger import artifacts
from tests.chaos import runs

ROOM = 600  # MiB of the small disk
LEFT = 2  # MiB of it that a run finds left in its middle


def cut_short(file):
    """What a machine leaves that loses its power while a file is written."""
    content = file.read_bytes()
    replace(file, content[: len(content) // 2])


def corrupt(file):
    """What a failing disk makes of a file: a few other bytes in its middle."""
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 8] = bytes(255 - byte for byte in content[middle : middle + 8])
    replace(file, bytes(content))


def replace(file, content):
    """In place, as a disk does it: links to the file show it, too."""
    file.chmod(0o644)
    file.write_bytes(content)


DAMAGES = {
    "a checkpoint cut short": ("0000-update-*", "policy/model.safetensors", cut_short),
    "a corrupted tree file": ("0000-rollout-*", "trees/*.parquet", corrupt),
    "a record cut short": ("0000-advantage-*", "record.json", cut_short),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_of_the_ledger_is_made_again(prepared, expected, folder, name):
    place, file, damage = DAMAGES[name]
    runs.copy(prepared, folder)
    run = runs.start(folder, held="reinforce/0001-rollout")
    runs.wait_for(run, lambda: runs.begun(folder, "0001-rollout"))
    runs.kill(runs.below(run.pid))
    run.wait()
    damage(next((folder / runs.LEDGER / "reinforce").glob(f"{place}/{file}")))
    text = runs.finish(folder)
    assert "damaged" in text, "it is said"
    assert runs.outcome(folder) == expected
    runs.check_sound(folder)


def test_a_checkpoint_of_the_cold_start_that_is_cut_short_is_not_taken(bare, expected, folder):
    runs.copy(bare, folder)
    run = runs.start(folder, held="cold_start/0000-cold_start")
    runs.wait_for(run, lambda: runs.saved(folder, "cold_start"))
    runs.kill(runs.below(run.pid))
    run.wait()
    weights = list((folder / runs.LEDGER / "cold_start").glob(".*.scratch/*/**/*.safetensors"))
    assert weights
    for file in weights:
        cut_short(file)
    runs.finish(folder)
    assert runs.outcome(folder) == expected
    runs.check_sound(folder)


@pytest.mark.parametrize("out", ["data/smoke/trees", "models/smoke/trained"])
def test_a_damaged_out_is_brought_back(unbroken, expected, folder, out):
    runs.copy(unbroken, folder)
    largest = max(
        (path for path in (folder / out).rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    corrupt(largest)
    runs.finish(folder)
    assert runs.outcome(folder) == expected
    assert artifacts.digest(folder / out) == artifacts.digest(unbroken / out)
    runs.check_sound(folder)


# ---------------------------------------------------------------- a full disk


@pytest.fixture
def small_disk(tmp_path):
    """A disk of ROOM MiB: what runs a command on it, in its folder ``main``, and our path to it."""
    place = tmp_path.resolve() / "disk"
    place.mkdir()
    mount = f"mount -t tmpfs -o size={ROOM}m tmpfs {place} && echo there && exec sleep infinity"
    own = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount]
    holder = subprocess.Popen(own, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "there\n"
        enter = ["nsenter", f"--target={holder.pid}", "--user", "--mount", "--preserve-credentials"]
        enter += ["sh", "-c", f'cd {place}/main && exec "$@"', "sh"]
        seen = Path(f"/proc/{holder.pid}/root{place}")
        runs.said(seen / "main").symlink_to(tmp_path / "said")  # not on the disk, or it would end
        yield enter, seen
    finally:
        holder.kill()
        holder.wait()


def fill(seen, left):
    """Leave ``left`` MiB of the disk, or less where the run writes too; the file with the rest."""
    filler, disk = seen / "filler", os.statvfs(seen)
    size = disk.f_bavail * disk.f_frsize - left * 2**20
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.tell() < size:
            file.write(bytes(min(2**20, size - file.tell())))
        while not left:
            file.write(bytes(4096))
    return filler


def test_a_disk_without_room_is_refused_before_any_work(prepared, small_disk):
    inside, seen = small_disk
    subprocess.run(["cp", "--archive", prepared, seen / "main"], check=True)
    fill(seen, LEFT)
    run = runs.start(seen / "main", within=inside)
    assert run.wait(runs.PATIENCE) == 2
    assert "GiB more on disk" in (text := runs.said(seen / "main").read_text()), text
    assert "Running stage" not in text


@pytest.mark.parametrize("sub_step", ["0000-rollout", "0001-update"])
def test_a_disk_that_fills_up_ends_the_run_and_loses_nothing(
    prepared, expected, small_disk, sub_step
):
    inside, seen = small_disk
    subprocess.run(["cp", "--archive", prepared, seen / "main"], check=True)
    run = runs.start(seen / "main", within=inside)
    runs.wait_for(run, lambda: runs.begun(seen / "main", sub_step))
    filler = fill(seen, 0)
    assert run.wait(runs.PATIENCE) != 0
    filler.unlink()
    text = runs.said(seen / "main").read_text()
    assert "The disk is full" in text and "Traceback" not in text, text
    runs.finish(seen / "main", within=inside)
    assert runs.outcome(seen / "main") == expected
    runs.check_sound(seen / "main")
