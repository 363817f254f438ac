"""Names of families, and what is refused."""

from datetime import date

import pytest

from tasks.dialects import family
from tests.tasks.dialects import families

DAY = date(2026, 1, 1)


@pytest.mark.parametrize(
    ("written", "known"),
    [
        ("llama_3", "llama-3"),
        ("Llama3", "llama-3"),
        ("glm45", "glm-4.5"),
        ("GLM_4_5", "glm-4.5"),
        ("gpt_oss", "gpt-oss"),
        ("Default", "default"),
        ("AUTO", "auto"),
    ],
)
def test_a_family_is_known_by_its_letters_and_digits(written, known):
    assert family.canonical(written) == known
    assert family.faults(written, {}) == []


def test_a_policy_is_published_with_the_librarys_name():
    assert family.open_renderer("llama_3", {}, families.tokenizer("llama-3"), DAY)[0] == "llama-3"


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_auto_takes_a_family_and_refuses_a_template_of_none(name):
    """As docs/own-dialect.md says; ``default`` takes any template."""
    tokenizer = families.tokenizer(name)
    assert family.open_renderer("default", {}, tokenizer, DAY)[0] == "default"
    if name == "qwen3":
        assert family.open_renderer("auto", {}, tokenizer, DAY)[0] == "qwen3"
        return
    with pytest.raises(ValueError, match=r"no known family.*set renderer to default"):
        family.open_renderer("auto", {}, tokenizer, DAY)


def test_no_two_families_are_written_alike():
    names = family.families()
    assert [family.canonical(name) for name in names] == names


def test_an_unknown_name_is_refused_with_all_that_are_known():
    (fault,) = family.faults("llama_9", {})
    assert fault.startswith("dialect.native.renderer llama_9 is unknown: choose auto, default or ")
    assert all(name in fault for name in family.families())


def test_gpt_oss_without_the_vocabulary_of_its_library_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))
    with pytest.raises(ValueError, match=r"gpt-oss: its library has no vocabulary .*o200k_base"):
        family.open_renderer("gpt-oss", {}, families.tokenizer("gpt-oss"), DAY)


@pytest.mark.parametrize("renderer", ["auto", "default"])
def test_gpt_oss_is_named_as_it_is_since_its_channels_are_read_by_its_library_alone(renderer):
    with pytest.raises(ValueError, match=r"channels of gpt-oss, in .*: set it to gpt-oss, or"):
        family.open_renderer(renderer, {}, families.tokenizer("gpt-oss"), DAY)
