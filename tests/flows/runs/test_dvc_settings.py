"""What is wrong in DVC's settings is named by file, key and value, for each reader."""

from pathlib import Path

import pytest

from flows.runs import cache, dvc_settings
from flows.runs.dvc_command import open_repository

LOCAL = ".dvc/config.local"
REMOTE = "['remote \"one\"']\n"
WRONG = {
    REMOTE + "url = nosuchscheme://x": ["remote.one.url = 'nosuchscheme://x', which is no kind"],
    REMOTE + "user = me": ["remote.one has no url"],
    "[core]\nautostage = maybe\nx = 1": ["core.autostage = 'maybe'", "core.x = '1', which is no"],
    "[cache]\ntype = foo": ["cache.type = 'foo'"],
    "[nothing]\na = 1": ["nothing, which is no setting"],
    "[core\nremote": ["cannot be read as settings of DVC"],
    REMOTE + "url = ssh://x\nmy_password = abcdef": ["remote.one.my_password = '***'"],
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_settings(project, text):
    Path(LOCAL).write_text(text)
    for reader in (cache.default_store, open_repository().__enter__):
        with pytest.raises(ValueError, match=r"config\.local") as refused:
            reader()
        lines = str(refused.value).splitlines()
        assert len(lines) == len(WRONG[text])
        for line, expected in zip(lines, WRONG[text], strict=True):
            assert line.startswith(LOCAL)
            assert expected in line


def test_default_remote_without_settings(project):
    Path(LOCAL).write_text("[core]\nremote = two\n" + REMOTE + "url = store")
    assert f"{LOCAL}: core.remote = 'two'" in dvc_settings.unknown_default()
    Path(LOCAL).write_text("[core]\nremote = one\n" + REMOTE + "url = store")
    assert dvc_settings.unknown_default() == ""
