"""What is known of a base model, and that nothing else is said."""

import gguf
import pytest

from flows.analysis.origin import origin_of

POLICY = {"kind": "pretrained", "name": "some/model", "revision": "a" * 40, "context": 64}
CARD = "---\nlicense: mit\nbase_model: other/older\n---\n\n# It\n"


def write(file, **metadata):
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in metadata.items():
        writer.add_string(f"general.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A Python package with a GGUF file; returns how its metadata are written."""
    folder = tmp_path / "a_tiny_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.syspath_prepend(tmp_path)

    def policy(origin=None, **metadata):
        write(folder / "it.gguf", **metadata)
        held = {"name": folder.name, "revision": None, "gguf": "it.gguf", "origin": origin}
        return {**POLICY, **held}

    return policy


def test_a_file_says_its_licence_and_the_recipe_its_model(package):
    origin = origin_of(package("maker/model", license="apache-2.0", name="Model 8k Mix1"))
    assert origin.described == (
        "[maker/model](https://huggingface.co/maker/model), as `it.gguf` of `a_tiny_package`"
    )
    assert (origin.base_model, origin.revision) == ("maker/model", None)
    assert (origin.license, origin.stated_in) == ("apache-2.0", "`general.license` of the file")


def test_what_nobody_says_is_left_out(package):
    origin = origin_of(package(name="maker/model"))  # a name is no origin
    assert origin.described == "`it.gguf` of `a_tiny_package`"
    assert (origin.base_model, origin.license) == (None, None)
    gone = {**package(), "name": "no_such_package"}
    assert origin_of(gone).license is None
    assert origin_of({"kind": "tiny"}).described == "random weights"


@pytest.mark.parametrize(
    ("card", "license"),
    [
        (b"---\nlicense: mit\ntags: [a, b\n---\n", None),
        (b"---\nlicense: mit\n---\ncaf\xe9\n", None),
        (b"---\nhello\n---\n", None),
        (b"---\nlicense: {a: 1}\n---\n", None),
        (b"---\nlicense:\n- mit\n- apache-2.0\n---\n", "mit, apache-2.0"),
    ],
)
def test_a_card_that_cannot_be_read_stops_no_export(card, license, tmp_path, capsys):
    (tmp_path / "README.md").write_bytes(card)
    policy = {**POLICY, "name": str(tmp_path), "revision": None}
    assert origin_of(policy).license == license
    assert (license is None) == ("README.md" in capsys.readouterr().out or b"{a" in card)


def test_a_folder_says_it_in_its_card(tmp_path):
    policy = {**POLICY, "name": str(tmp_path), "revision": None}
    assert origin_of(policy).license is None
    (tmp_path / "README.md").write_text(CARD)
    origin = origin_of(policy)
    assert (origin.license, origin.base_model) == ("mit", None)  # not what that one was made of
    assert origin.stated_in == "`license` of its folder's README.md"
    assert origin_of({**policy, "origin": "maker/model"}).base_model == "maker/model"


def test_a_model_of_the_hub_is_its_own_origin(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    origin = origin_of(POLICY)
    assert (origin.base_model, origin.revision) == ("some/model", "a" * 40)
    assert origin.license is None  # its card is not on this machine
    assert origin.described.endswith(f"at `{'a' * 40}`")
