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


def test_only_the_value_changes(file):
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
def test_any_value_replaces_any_other(file, override, value):
    expected = place = yaml.safe_load(RECIPE)
    *sections, key = override.partition("=")[0].split(".")
    for section in sections:
        place = place[section]
    place[key] = value
    overrides.apply([override], file)
    assert yaml.safe_load(file.read_text()) == expected
    assert file.read_text().startswith("# what this recipe is for\nseed: 3  # of every draw\n")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "--set seed: write it as section.key=value"),
        ("=3", "--set =3: write it as"),
        ("reinforce.updat.k=3", r"no key 'reinforce.updat.k' \('updat' is missing\): choose"),
        (
            "reinforce.validation.every=3",
            r"\('validation' is missing\): choose .*, or give a section .* as a whole",
        ),
        ("evaluate.top=1", r"\('top' is missing\): .*'protocol', 'questions', 'samples'\]$"),
        ("seed.k=3", "no key 'seed.k' .*: 'seed' is a single value"),
        ("seed=[1", r"'\[1' is not one YAML value: put it in quotes"),
        ("seed=1\nempty: 5", "is not one YAML value"),
        ("seed=4 # as before", r"put it in quotes \('# as before' is no part of it\)"),
        ("seed=--- 4", r"'---' is no part of it"),
        ("seed=|", "announces lines that do not follow"),
        ("reinforce.update.learning_rate=1, more: 2", "is not one YAML value"),
    ],
)
def test_faulty_override_leaves_the_file(file, override, message):
    with pytest.raises(ValueError, match=message):
        overrides.apply(["seed=4", override], file)
    assert file.read_text() == RECIPE


def test_an_entry_of_a_list_is_named_by_its_number(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("reward:\n  - answer: {weight: 1.0} # of the score\n  - steps: {}\n")
    overrides.apply(["reward.0.answer.weight=2.0", "reward.1=format: {}"], file)
    assert file.read_text() == (
        "reward:\n  - answer: {weight: 2.0} # of the score\n  - format: {}\n"
    )
    with pytest.raises(ValueError, match=r"'2' is missing\): choose one of \['0', '1'\]"):
        overrides.apply(["reward.2.steps=1"], file)


def test_a_key_that_may_be_left_out_is_added(file):
    values = ["evaluate.samples=3", "reinforce.rollout.leaves=4", "reinforce.ahead=1", "judge=null"]
    overrides.apply(values, file)
    assert file.read_text() == RECIPE.replace("{questions", "{samples: 3, questions").replace(
        "leaves: 8", "leaves: 4"
    ).replace("  # how fast\n", "  # how fast\n  ahead: 1\n").replace("seed", "judge: null\nseed")


TABLE = """\
# rows
other: {estimator: {kind: return}, ratio: none}

gagpo: # steps
  marks: step
  estimator: {kind: grouped_gae, lambda: 0.8} # of time
  kl: {}
  ratio: segment
"""
CHOSEN = "seed: 1\nreinforce: {algorithm: other} # a row\n"
OF_GAGPO = "reinforce.algorithm=gagpo"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.yaml").write_text(CHOSEN)
    (tmp_path / "algorithms.yaml").write_text(TABLE)
    return tmp_path


def test_choices_of_an_algorithm_change_or_complete_the_row_that_the_recipe_names(folder):
    choices = ["algorithm.estimator.lambda=0", "algorithm.estimator.omega = 0.5"]
    choices += ["algorithm.overlong={buffer: 0.2}", "algorithm.kl.refresh=3"]
    overrides.apply_to("mine", [*choices, OF_GAGPO, "seed=2"], folder)
    assert (folder / "mine.yaml").read_text() == CHOSEN.replace("1", "2").replace("other", "gagpo")
    assert (folder / "algorithms.yaml").read_text() == TABLE.replace(
        "{kind: grouped_gae, lambda: 0.8}", "{omega: 0.5, kind: grouped_gae, lambda: 0}"
    ).replace("  marks", "  overlong: {buffer: 0.2}\n  marks").replace("{}", "{refresh: 3}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.estimator.deep.er=1", r"'gagpo.estimator.deep' \('deep' is missing\)"),
        ("algorithm.ratio.unit=token", "'gagpo.ratio' is a single value"),
        ("algorithm.ratio=[1", "is not one YAML value"),
        ("algorithm.new=1\nother: 2", "is not one YAML value"),
        ("algorithm.ratio", "write it as section.key=value"),
    ],
)
def test_faulty_choice_leaves_both_files(folder, override, message):
    with pytest.raises(ValueError, match=message):
        overrides.apply_to("mine", ["seed=2", OF_GAGPO, override], folder)
    assert (folder / "mine.yaml").read_text() == CHOSEN
    assert (folder / "algorithms.yaml").read_text() == TABLE
    overrides.apply_to("mine", ["reinforce.algorithm=no_row", "algorithm.ratio=token"], folder)
    assert (folder / "algorithms.yaml").read_text() == TABLE, "the schema refuses the recipe"
