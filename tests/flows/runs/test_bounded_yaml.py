"""YAML that nests, or repeats itself, beyond what anybody's file does."""

import time

import pytest
import yaml

from flows.runs import bounded_yaml

DOUBLED = "a0: &a0 {k: x}\n" + "".join(
    f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40)
)
STEPS = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 5000))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: " + "[" * 100_000, "nests deeper than 100"),
        ("- " * 100_000, "nests deeper than 100"),
        ("? " * 100_000, "nests deeper than 100"),
        ("".join(f"{' ' * i}a:\n" for i in range(3000)), "nests deeper than 100"),
        (STEPS, "nests deeper than 100"),
        (DOUBLED, "values, with those that its aliases repeat"),
        ("[" + "x, " * 600_000 + "]", "values, with those that its aliases repeat"),
        ("a: &a [*a]", "the alias *a before its anchor has ended"),
        ("a: 1" + ":1" * 100_000, "a text of 200001 characters"),
        ("a: [1,", "cannot be read as YAML"),
        ("a: 2026-13-45", "cannot be read as YAML"),
        ("a: \udcff", "cannot be read as YAML"),
        ("{[a]: 1}", "cannot be read as YAML"),
        ("x" * (bounded_yaml.LARGEST + 1), "at most 16777216 are read"),
    ],
    ids=str.split("flow lists keys blocks steps merged many itself number half date byte key long"),
)
def test_text_beyond_a_bound_is_refused_by_name(text, said):
    begin = time.process_time()
    with pytest.raises(ValueError, match=r"^dvc\.lock of abc ") as refused:
        bounded_yaml.load(text, "dvc.lock of abc")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert time.process_time() - begin < 5, "the bound is there to save the work"


def test_ordinary_text_has_its_content():
    text = "a: &a [1, {b: x}]\nc: *a\nd: {<<: {e: 2026-01-02}}\n"
    assert bounded_yaml.load(text, "x") == yaml.safe_load(text)
    assert bounded_yaml.load("", "x") is None
    assert bounded_yaml.load("[" * 99 + "]" * 99, "x")


def test_small_numbers_are_read_as_dvc_writes_them(tmp_path):
    """A learning rate of dvc.lock would else differ from the recipe's, whatever it is."""
    from dvc.utils.serialize import dump_yaml

    values = {"rates": [1e-05, 2.5e-06, 1e22, -1e-09], "texts": ["1e-05", "12345678e12", "1e"]}
    dump_yaml(tmp_path / "dvc.lock", values)
    assert bounded_yaml.load((tmp_path / "dvc.lock").read_text(), "it") == values
