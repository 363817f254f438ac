"""A policy in a folder that has changed is read anew, though DVC does not watch the folder."""

import json
from pathlib import Path

import pytest

from flows.runs import local_policies
from tasks.policy import local_policy, teacher


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A recipe that has run, whose policy, expert's policy and teacher are folders."""
    (tmp_path / "params").mkdir()
    for file in Path("params").glob("*.yaml"):
        (tmp_path / "params" / file.name).symlink_to(file.resolve())
    monkeypatch.chdir(tmp_path)
    for name in ("first", "expert", "teacher"):
        Path("policies", name).mkdir(parents=True)
        Path("policies", name, "config.json").write_text('{"model_type": "llama"}')
    policy = "{kind: pretrained, name: policies/first, revision: null, context: 256}"
    expert = "{kind: sampled, policy: {name: policies/expert, revision: null}, questions: 4, "
    expert += "attempts: 2, most: 1, temperature: 1.0, top_p: 1.0, rows: 8}"
    Path("params/mine.yaml").write_text(
        f"base: smoke\nprepare:\n  policy: {policy}\n  expert: {expert}\n"
        "teacher: {kind: pretrained, name: policies/teacher, revision: null}\n"
    )
    digests = {
        name: local_policy.Artifact.at(Path("policies", name)).digest
        for name in ("first", "expert", "teacher")
    }
    noted = [
        {"verb": "prepare", "inputs": {"policy": digests["first"]}},
        {"verb": "select_traces", "inputs": {"teacher": digests["expert"]}},
    ]
    folders = local_policies.RunFolders("mine")
    records = folders.records("prepare")
    records.parent.mkdir(parents=True)
    records.write_text("".join(json.dumps(each) + "\n" for each in noted))
    folders.teacher.mkdir(parents=True)
    record = {"kind": "pretrained", teacher.SOURCE: digests["teacher"]}
    Path(folders.teacher, teacher.RECORD).write_text(json.dumps(record))
    return records


@pytest.mark.parametrize(
    ("name", "stage"), [("first", "prepare"), ("expert", "prepare"), ("teacher", "champion")]
)
def test_a_changed_folder_is_named_with_the_stage_that_reads_it(mine, name, stage):
    assert local_policies.changed("mine") == {}
    Path("policies", name, "model.safetensors").write_bytes(b"other weights")
    line = f"the policy in policies/{name} has changed"
    assert local_policies.changed("mine") == {f"{stage}@mine": [line]}
    assert local_policies.same("mine", mine.read_text()) == (stage != "prepare")


def test_stages_that_have_not_run_are_left_to_dvc(mine):
    Path("policies/first/model.safetensors").write_bytes(b"other weights")
    mine.write_text("")
    assert local_policies.changed("mine") == {}
    mine.unlink()
    assert local_policies.changed("mine") == {}
