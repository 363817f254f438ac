"""The card of a run that left only its records; tests/flows/test_smoke.py has a whole run."""

from pathlib import Path

import pytest
import yaml

from flows.analysis import card
from flows.analysis.origin import PolicyOrigin
from flows.runs import cache
from tests import toy_project as toy
from tests.params.edits import REMOVED, edited

LEFT_OUT = ("start", "environment", "judge", "reinforce__ahead", "verdict__measure")
READ = ("start", "environment", "judge", "reinforce", "verdict.measure")


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes the recipe of a run with other values; the run has ended."""
    toy.create(tmp_path, flows=False)
    monkeypatch.chdir(tmp_path)
    trained = Path("models/toy/trained")
    trained.mkdir(parents=True)
    (trained / "config.json").write_text("{}")
    recipe = toy.RECIPE
    read = {key: recipe[key] for key in READ if key in recipe} | {"verdict.measure": "success"}
    outs = [{"path": trained.as_posix(), "md5": cache.digest_of(trained)}]
    stage = {"deps": [], "params": {"params/toy.yaml": read}, "outs": outs}
    Path("dvc.lock").write_text(yaml.safe_dump({"stages": {"reinforce@toy": stage}}))
    toy.commit(tmp_path)

    def written(**changes):
        Path("params/toy.yaml").write_text(yaml.safe_dump(edited(recipe, changes)))

    return written


def test_keys_that_are_left_out_have_the_values_of_the_run(write):
    write(**dict.fromkeys(LEFT_OUT, REMOVED))
    assert "# toy" in card.written("toy")


def test_other_recipe_than_that_of_the_run_is_refused(write):
    write(judge=REMOVED, start="champion", reinforce__ahead=2)
    reasons = "'reinforce.ahead' is 2 and was 0, 'start' is 'champion' and was 'scratch'"
    with pytest.raises(ValueError, match=rf"toy\.yaml is not that of the run: {reasons}: "):
        card.written("toy")


@pytest.mark.parametrize(
    ("cold_start", "said"),
    [({"steps": 7}, "after 7 supervised steps"), (None, "without cold start")],
)
def test_introduction_says_what_training_began_with(cold_start, said):
    settings = {
        "prepare": {"policy": {"kind": "tiny"}},
        "reinforce": {"iterations": 2, "algorithm": "grpo"},
        "tools": {"python": {}},
        "cold_start": cold_start,
    }
    assert said in card._introduction("mine", settings, PolicyOrigin("random weights"))


def test_the_base_models_licence_holds_unless_another_is_given():
    origin = PolicyOrigin(
        "a file", "maker/model", "abc", "apache-2.0", "`general.license` of the file"
    )
    settings = {"reinforce": {"algorithm": "grpo"}}
    for given, held in ((None, "apache-2.0"), ("mit", "mit")):
        data = card._metadata("mine", settings, {}, origin, given)
        assert (data.license, data.base_model, data.base_model_revision) == (
            held,
            "maker/model",
            "abc",
        )
    assert card._base_model(origin).splitlines() == [
        "- Model: [maker/model](https://huggingface.co/maker/model)",
        "- Licence: apache-2.0, which is stated in `general.license` of the file",
    ]
    nothing = PolicyOrigin("random weights")
    assert card._base_model(nothing) == ""
    assert card._metadata("mine", settings, {}, nothing, None).license is None
