"""The teacher's folder: where its files come from, and whether its tokens are the policy's."""

import json
import shutil

import pytest

from params.schema.teacher import PretrainedTeacher, RunTeacher, ServerTeacher
from tasks.ledger import keys
from tasks.policy import load_model, teacher
from tests.sections import MACHINE

DIGEST = "4" * 32 + ".dir"
OF_RUN = RunTeacher(kind="run", recipe="large", commit="c" * 40, digest=DIGEST)


@pytest.fixture(scope="module")
def kept(policy, tokenizer, tmp_path_factory):
    """The folder of a small policy."""
    folder = tmp_path_factory.mktemp("kept") / "policy"
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def refuse(digest, target):
    raise AssertionError("nothing is restored")


def test_there_may_be_none_and_an_old_one_goes(tmp_path, kept):
    folder = tmp_path / "teacher"
    with pytest.raises(ValueError, match=r"teacher\.json does not exist: run .* champion, first"):
        teacher.policy(folder)
    asked = []

    def restore(digest, target):
        asked.append(digest)
        shutil.copytree(kept, target)

    teacher.write(folder, OF_RUN, restore)
    assert asked == [DIGEST]
    assert teacher.policy(folder).path == str(folder / "policy")
    teacher.write(folder, None, refuse)
    assert teacher.policy(folder) is None and not (folder / "policy").exists()


def test_a_pretrained_one_is_an_ordinary_folder(tmp_path, kept, policy):
    named = PretrainedTeacher(kind="pretrained", name=str(kept), revision=None)
    teacher.write(tmp_path / "teacher", named, refuse)
    loaded = load_model.load_policy(teacher.policy(tmp_path / "teacher").path, MACHINE)
    pairs = zip(loaded.parameters(), policy.parameters(), strict=True)
    assert all(one.equal(other) for one, other in pairs)
    teacher.check_tokens(tmp_path / "teacher" / "policy", kept)


def test_tokens_of_another_family_are_refused(tmp_path, kept, tokenizer):
    shutil.copytree(kept, tmp_path / "other")
    text = (kept / "tokenizer.json").read_text()
    token = max(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    (tmp_path / "other" / "tokenizer.json").write_text(text.replace(f'"{token}"', '"<|other|>"'))
    with pytest.raises(ValueError, match=r"another tokenizer .* lacks 1 tokens, the first"):
        teacher.check_tokens(tmp_path / "other", kept)


def test_a_server_has_no_files_here_and_only_its_name_counts(tmp_path):
    server = ServerTeacher(kind="server", url="http://127.0.0.1:8000/v1", name="big")
    teacher.write(tmp_path / "teacher", server, refuse)
    assert json.loads((tmp_path / "teacher" / "teacher.json").read_text()) == {
        "kind": "server",
        "name": "big",
    }
    assert teacher.of(tmp_path / "teacher", server) is server
    assert teacher.of(tmp_path / "teacher", None) is None
    elsewhere = server.model_copy(update={"url": "http://127.0.0.1:9/v1", "retries": 1})
    assert keys.identity(elsewhere) == keys.identity(server)
