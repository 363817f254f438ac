import numpy as np
import pytest
import yaml

from params import schema
from tasks import algorithm, losses
from tasks.algorithm import assemble, read_row, rows
from tasks.estimators import group

ROW = {
    "branching": "none",
    "estimator": "group_relative",
    "ratio": "token",
    "clip": {"low": 0.1, "high": 0.3},
    "averaging": "token_mean",
}


def table(folder, **entries):
    file = folder / "algorithms.yaml"
    file.write_text(yaml.safe_dump(entries))
    return file


def test_every_row_of_the_shipped_table_assembles():
    for name, row in rows().items():
        chosen = assemble(row)
        advantages = chosen.estimator(np.array([0.0, 1.0]))
        assert advantages[0] < 0 < advantages[1], name


def test_the_recipes_name_rows_of_the_table():
    for name in schema.names():
        assert schema.load(name).reinforce.algorithm in rows()


def test_grpo_and_arpo_differ_in_branching_alone():
    grpo, arpo = read_row("grpo").model_dump(), read_row("arpo").model_dump()
    assert {choice for choice in grpo if grpo[choice] != arpo[choice]} == {"branching"}
    assert grpo["clip"] == {"low": 0.2, "high": 0.2}
    assert grpo["averaging"] == "sequence_mean"


def test_without_branching_all_paths_start_at_the_prompt():
    rollout = schema.load("tiny").reinforce.rollout
    spent = assemble(read_row("grpo")).budget(rollout)
    assert (spent.leaves, spent.initial, spent.branch) == (rollout.leaves, rollout.leaves, 0)
    assert (
        spent.model_copy(update={"initial": rollout.initial, "branch": rollout.branch}) == rollout
    )
    assert assemble(read_row("arpo")).budget(rollout) == rollout


def test_a_row_of_the_users_own_needs_no_code(tmp_path):
    chosen = assemble(read_row("mine", table(tmp_path, mine=ROW)))
    assert chosen.estimator is group.group_relative
    assert chosen.loss.ratio is losses.token_ratio
    assert chosen.loss.clip == losses.Clip(0.1, 0.3)
    assert chosen.loss.averaging == losses.Averaging(losses.token_mean, losses.count_tokens)


def test_a_name_that_the_table_lacks_is_an_error_with_those_it_has(tmp_path):
    with pytest.raises(
        ValueError, match=r"reinforce\.algorithm 'other' .*algorithms.yaml: \['mine'\]"
    ):
        read_row("other", table(tmp_path, mine=ROW))


@pytest.mark.parametrize("choice", list(algorithm.CHOICES))
def test_an_unknown_choice_is_an_error_with_the_known_ones(tmp_path, choice):
    file = table(tmp_path, good=ROW, mine={**ROW, choice: "magic"})
    with pytest.raises(ValueError) as caught:
        rows(file)
    assert f"{file}, row mine: {choice} 'magic' is unknown" in str(caught.value)
    assert str(list(algorithm.CHOICES[choice])) in str(caught.value)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({**ROW, "colour": "blue"}, "unknown key 'colour'"),
        ({name: ROW[name] for name in ROW if name != "ratio"}, "missing key 'ratio'"),
        ({**ROW, "clip": {"low": 0.2}}, "missing key 'clip.high'"),
        ({**ROW, "clip": {"low": "wide", "high": 0.2}}, "'clip.low' = 'wide'"),
        ({**ROW, "clip": {"low": -0.2, "high": 0.2}}, "'clip.low' = -0.2"),
    ],
)
def test_a_faulty_row_is_an_error_with_file_row_key_and_value(tmp_path, row, said):
    file = table(tmp_path, good=ROW, mine=row)
    with pytest.raises(ValueError) as caught:
        rows(file)
    assert str(caught.value).startswith(f"{file}, row mine: ")
    assert said in str(caught.value)
