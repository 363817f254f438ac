"""The stages that read the champion, in a fresh clone without any set-up."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from flows.runs import cache
from flows.stages.cold_start import cold_start_flow
from params.run_folders import RunFolders
from params.schema import champion
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact
from tasks.policy import champion as champion_module
from tasks.trees.tables import save_questions
from tasks.trees.tree import Question
from tests import toy_project as toy
from tests.checkout import call, checkout

REPRO = (sys.executable, "-m", "dvc", "repro", "champion@smoke")
ROOT = Path(__file__).parents[2]


def pin(digest):
    recipe = Path("params/smoke.yaml")
    said = {"version": 2, "commit": "a" * 40, "digest": digest}
    recipe.write_text(recipe.read_text().replace("champion: null", f"champion: {json.dumps(said)}"))


def test_dvc_alone_makes_the_champion_of_a_fresh_clone_and_of_a_recipe_that_names_one(
    tmp_path, monkeypatch, api
):
    folder = tmp_path.resolve()
    checkout(folder)
    monkeypatch.chdir(folder)
    ran = call(folder, *REPRO)
    assert ran.returncode == 0, ran.stdout
    place = Path("models/smoke/champion")
    assert champion_module.policy(place) is None
    assert toy.repro(folder, REPRO[-1]) == [], "it is up to date"

    policy = Path("policy")
    policy.mkdir()
    (policy / "config.json").write_text("{}")
    digest = cache.keep(policy)
    pin(digest)
    assert REPRO[-1] in toy.repro(folder, REPRO[-1], PREFECT_API_URL=api)
    assert champion_module.read(place) == {"version": 2, "commit": "a" * 40, "digest": digest}
    assert artifacts.digest(place / "policy") == artifacts.digest(policy)

    for kept in (place, Path(".dvc/cache")):
        shutil.rmtree(kept)
    ran = call(folder, *REPRO, PREFECT_API_URL=api)
    assert ran.returncode == 255
    assert f"champion smoke: DVC's cache lacks {digest}, and no remote is set" in ran.stdout
    assert "Traceback" not in ran.stdout


@pytest.fixture
def prepared(tmp_path, monkeypatch, policy, tokenizer):
    """What the stages before the cold start leave, with a champion, as the working folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "params", "params", ignore=shutil.ignore_patterns("__pycache__"))
    recipe = yaml.safe_load(Path("params/smoke.yaml").read_text())
    Path("params/smoke.yaml").write_text(yaml.safe_dump(recipe | {"start": "champion"}))
    Path("models/smoke/initial").mkdir(parents=True)
    Path("data/smoke").mkdir(parents=True)
    Path("data/smoke/traces.parquet").touch()
    save_questions(
        [Question("q", "sum", "What is 1 + 2?", ("3",))], RunFolders("smoke").split("train")
    )

    def bring(digest, target):
        policy.save_pretrained(target)
        tokenizer.save_pretrained(target)

    pinned = champion.Champion(version=2, commit=None, digest="b" * 32 + ".dir")
    champion_module.write(Path("models/smoke/champion"), pinned, bring)
    return tmp_path


def test_training_begins_with_the_champion_where_the_recipe_says_so(prepared, capsys):
    cold_start_flow.fn("smoke")
    begun = Artifact.at(Path("models/smoke/cold_start"))
    assert begun.digest == champion_module.policy(Path("models/smoke/champion")).digest
    assert "cold_start: the champion as it is" in capsys.readouterr().out
    assert not list(artifacts.ROOT.rglob("[0-9]*-cold_start-*")), "nothing was fine-tuned"
    assert len(list(artifacts.ROOT.rglob("record.json"))) == 1, "the check of the policy"
