"""YAML as people write it: what is read, and what is refused with file, line and remedy."""

import os

import pytest

from params import strict_yaml
from params.schema.base import PARAMS
from tasks import recipes
from tests.params.test_recipe import write

TINY = (PARAMS / "tiny.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("~", None),
        ("-12", -12),
        ("0.5", 0.5),
        ("2e-3", 0.002),
        (".5", 0.5),
        ("1.", 1.0),
        ("true", True),
        ("'5'", "5"),
        *(
            (word, word)
            for word in ("yes", "no", "on", "Off", "1:30", "010", "0x10", "1_000", "e3")
        ),
        ("'2026-01-01'", "2026-01-01"),
        ("2026-1-1", "2026-1-1"),
    ],
)
def test_plain_values_are_those_of_yaml_1_2(text, value):
    found = strict_yaml.parse(text, "it")
    assert (found, type(found)) == (value, type(value))


END = TINY.count("\n")  # lines of the file before what is added
BOMB = "bomb:\n  a0: &a0 [x, x]\n" + "".join(
    f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
FAULTS = [
    (BOMB, 11, f"line {END + 3}: the alias '*a0' stands for other values: write them out"),
    (
        "seed: 5\nmachine: {threads: 2}\n",
        2,
        "the key 'seed' is written twice ('0' in line 4, '5' here",
    ),
    (
        "a: {b: [{c: 1, c: [2]}]}\n",
        1,
        f"the key 'a.b.0.c' is written twice ('1' in line {END + 1}, a list",
    ),
    ("1: a\n", 1, f"line {END + 1}: the key 1 of the file is not a text: write it in quotes"),
    ("x: 2026-01-01\n", 1, f"line {END + 1}: 2026-01-01 is a date to DVC: write it in quotes"),
    ("x: =\n", 1, f"line {END + 1}: = is a sign to DVC: write it in quotes"),
    ("<<: {}\n", 1, f"line {END + 1}: << is a sign to DVC: write it in quotes"),
    ("x: 2026-1-1 09:30:00\n", 1, f"line {END + 1}: 2026-1-1 09:30:00 is a date to DVC"),
    ("x: !!python/name:os.system a\n", 1, "is not read: remove it; quotes make a text"),
    (f"x: {'[' * 9000}{']' * 9000}\n", 1, "more than 32 lists and mappings inside one another"),
    (f"x: {'9' * 5000}\n", 1, "a value cannot be read (Exceeds the limit"),
    (b"# gr\xfcn\n", 1, f"is not UTF-8 (byte 0xfc in line {END + 1}): save it as UTF-8"),
    ("x: [own/a.py:b, c]\n", 1, "own/a.py:b stands in brackets: write it in quotes"),
    (" " * 2**20, 1, "a file of parameters has at most 131,072"),
]


@pytest.mark.parametrize(("text", "count", "said"), FAULTS, ids=[said[:40] for *_, said in FAULTS])
def test_each_fault_of_a_file_is_a_line_with_its_remedy(tmp_path, text, count, said):
    name = write(tmp_path, TINY)
    with (tmp_path / f"{name}.yaml").open("ab") as file:
        file.write(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as caught:
        recipes.load(name, tmp_path)
    lines = str(caught.value).splitlines()
    assert len(lines) == count
    assert all(line.startswith(str(tmp_path / "mine.yaml")) for line in lines)
    assert said in lines[0]


@pytest.mark.parametrize("value", ["true", "1:30", "'5'", "1.0", "010", "no"])
def test_a_number_is_written_as_a_number(tmp_path, value):
    name = write(tmp_path, TINY.replace("seed: 0", f"seed: {value}"))
    for load in (recipes.load, lambda *_: recipes.load_changed("tiny", [f"seed={value}"])):
        with pytest.raises(ValueError, match=r"'seed' = .*valid integer: write digits alone"):
            load(name, tmp_path)


@pytest.mark.parametrize("name", ["mine", "algorithms"])
def test_a_pipe_in_place_of_a_file_is_refused(tmp_path, name):
    recipe = write(tmp_path, TINY)
    (tmp_path / f"{name}.yaml").unlink()
    os.mkfifo(tmp_path / f"{name}.yaml")
    for load in (recipes.load, lambda *some: recipes.load_changed(some[0], ["seed=1"], some[1])):
        with pytest.raises(ValueError, match=rf"{name}\.yaml is no regular file"):
            load(recipe, tmp_path)


def test_changed_values_are_read_again_as_they_are_written():
    strict_yaml.parse("a: [1]", "file")["a"].append(2)
    assert strict_yaml.parse("a: [1]", "file") == {"a": [1]}


@pytest.mark.parametrize("sign", ["\\ud800", "\\0", "\\uFDD0", "\\x7F", "\\v"])
def test_what_is_no_character_is_refused_with_its_line(sign):
    with pytest.raises(ValueError, match=r"x, line 2: .* has U\+[0-9A-F]{4}, which is no char"):
        strict_yaml.parse(f'a:\n  system: "say {sign} it"\n', "x")
    assert strict_yaml.parse('a: "tab\\t, line\\n, 🙂, \\u0301"', "x")
