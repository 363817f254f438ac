"""What changes the digest of a function and of all that it uses, and what does not."""

import shutil

import pytest

from tasks.ledger import functions
from tasks.ledger.keys import PROJECT

REPORTING = ("flows/host", "flows/runs", "flows/tracking", "flows/workers")


def digests(folder):
    for cached in vars(functions).values():
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
    file = folder / "flows/comparisons/measured.py"
    return functions.function_digests(file, "measured", "flows", REPORTING)


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(PROJECT / "flows", tmp_path / "flows")
    (tmp_path / "pyproject.toml").touch()
    return tmp_path.resolve()


@pytest.mark.parametrize(
    ("file", "old", "new", "decides"),
    [
        ("comparisons/measured.py", "if total[budget.kind] >= budget.amount", "if True", True),
        ("comparisons/measured.py", "LONGEST = 20", "LONGEST = 21", True),
        ("comparisons/measured.py", '"""Train until', '"""Go on until', False),
        (
            "reinforce.py",
            "place += len(rollouts)",
            "place += 1 + len(rollouts)",
            True,
        ),
        ("reinforce.py", '"learning_curve.png"', '"other.png"', False),
        ("compare.py", "of training; else the recipe's", "of every training", False),
        ("tracking/comparison_tables.py", "success (%)", "right (%)", False),
        (
            "reinforce.py",
            "        done, seconds = replaying(",
            "        seconds, done = replaying(",
            False,
        ),
    ],
)
def test_only_what_decides_a_result_is_in_its_code(copy, file, old, new, decides):
    before = digests(copy)
    assert {"measured", "train_until", "train", "sample", "learn", "LONGEST"} <= set(before)
    place = copy / "flows" / file
    text = place.read_text()
    if old in text:
        place.write_text(text.replace(old, new, 1))
    else:
        assert not decides, f"{file} no longer has {old}"
    assert (digests(copy) != before) == decides


def test_a_function_that_moves_keeps_its_digest(copy):
    before = digests(copy)
    measured = copy / "flows/comparisons/measured.py"
    text = measured.read_text()
    start = text.index("def spent(")
    (copy / "flows/comparisons/moved.py").write_text(
        "from flows.comparisons.measured import SPENT, sum_seconds, together\n\n" + text[start:]
    )
    changed = text[:start].replace(
        "from flows.comparisons.variants",
        "from flows.comparisons.moved import spent\nfrom flows.comparisons.variants",
    )
    measured.write_text(changed)
    after = digests(copy)
    assert after["spent"] == before["spent"]
    assert after["train_until"] == before["train_until"]
