import pytest
import yaml

from params import overrides

RECIPE = """\
# what this recipe is for
seed: 3  # of every draw
search: null
empty:
reinforce:
  # how fast
  update: {learning_rate: 3e-4,  betas: [0.9, 0.99]}
  prompt: |
    two
    lines
  rollout:
    leaves: 8   # of a tree

    branch: 'a'
evaluate: {questions: 5}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE)
    return path


def test_only_the_characters_of_the_value_change(file):
    overrides.apply(["seed=14", "reinforce.update.learning_rate = 1e-3"], file)
    assert file.read_text() == RECIPE.replace("seed: 3 ", "seed: 14 ").replace("3e-4", "1e-3")


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("search={passages: 2, texts: [a, b]}", {"passages": 2, "texts": ["a", "b"]}),
        ("empty=7", 7),
        ("reinforce.prompt=one", "one"),
        ("reinforce.rollout={leaves: 2}", {"leaves": 2}),
        ("reinforce.rollout.branch=b=c", "b=c"),
        ("evaluate.questions='5'", "5"),
        ("reinforce.update.betas=[1, 2]", [1, 2]),
        ("reinforce=null", None),
    ],
)
def test_a_value_of_any_kind_takes_the_place_of_any_other(file, override, value):
    expected = place = yaml.safe_load(RECIPE)
    *sections, key = override.partition("=")[0].split(".")
    for section in sections:
        place = place[section]
    place[key] = value
    overrides.apply([override], file)
    assert yaml.safe_load(file.read_text()) == expected
    assert file.read_text().startswith("# what this recipe is for\nseed: 3  # of every draw\n")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed", "--set seed: write it as section.key=value"),
        ("=3", "--set =3: write it as"),
        ("reinforce.updat.k=3", r"has no key 'reinforce.updat.k' \('updat' is not there\): choose"),
        ("seed.k=3", "'k' is not there.: its section has no keys"),
        ("seed=[1", r"'\[1' is not one YAML value: put it in quotes"),
        ("seed=1\nempty: 5", "is not one YAML value"),
        ("reinforce.update.learning_rate=1, more: 2", "is not one YAML value"),
    ],
)
def test_a_fault_is_named_and_leaves_the_file_as_it_was(file, override, said):
    with pytest.raises(ValueError, match=said):
        overrides.apply(["seed=4", override], file)
    assert file.read_text() == RECIPE
