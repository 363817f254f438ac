"""The registry on MLflow with SQLite, over git and DVC repositories in folders of their own."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from flows.commands import retrain
from flows.runs import cache, champions
from flows.tracking import store as track
from params.schema.champion import Champion
from tasks import recipes
from tests import toy_project as toy

ROOT = toy.ROOT


def git(*arguments):
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    ran = subprocess.run(["git", *who, *arguments], capture_output=True, text=True, check=True)
    return ran.stdout.strip()


@pytest.fixture
def project(tmp_path, monkeypatch, empty_store):
    """A repository with git and DVC and an empty registry, as the working folder."""
    folder = tmp_path.resolve() / "project"
    folder.mkdir()
    toy.create(folder, flows=False)
    (folder / ".gitignore").write_text("/.beamline/\n/models/\n")
    (folder / ".beamline").mkdir()
    (folder / ".beamline/mlflow.db").write_bytes(empty_store)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return folder


def commit_run(success, champion=None, *, promote=True, commit=None):
    """What a run commits: its verdict and dvc.lock, with the policy in DVC's cache."""
    policy = Path("models/toy/trained")
    policy.mkdir(parents=True, exist_ok=True)
    (policy / "config.json").write_text('{"model_type": "toy"}')
    (policy / "model.safetensors").write_text(f"weights that reach {success}")
    digest = cache.keep(policy)
    outs = [{"path": str(policy), "md5": digest}, {"path": "data/toy/trees", "md5": "1" * 32}]
    locked = {"reinforce@toy": {"outs": outs}, "reinforce@other": {"outs": [{**outs[0]}]}}
    Path("dvc.lock").write_text(yaml.safe_dump({"schema": "2.0", "stages": locked}))
    verdict = {
        "promote": promote,
        "reason": "it is better" if promote else "it is no better",
        "champion": {"version": champion, "commit": commit, "digest": ""} if champion else None,
        "difference": {"mean": 0.25, "low": 0.125, "high": 0.5, "probability": 0.99},
        "gates": [{"table": "questions", "passed": True}],
    }
    Path("reports/toy").mkdir(parents=True, exist_ok=True)
    Path("reports/toy/verdict.json").write_text(json.dumps(verdict))
    means = {"cold start": 0.25, "trained": success}
    measured = {
        name: {"mean": mean, "low": mean - 0.05, "high": mean + 0.05}
        for name, mean in means.items()
    }
    Path("reports/toy/metrics.json").write_text(json.dumps({"success": measured}))
    git("add", "--all")
    git("commit", "--quiet", "--message", f"a run that reaches {success}")
    return git("rev-parse", "HEAD"), digest


def versions():
    client = track.connect(track.store_uri())
    found = client.search_model_versions("name = 'toy'")
    return {int(each.version): each for each in found}


# ---------------------------------------------------------------- promoting


def test_promoted_run_is_a_version_with_tags(project):
    commit, digest = commit_run(0.5)
    assert champions.current("toy") is None
    said = champions.promote("toy", commit)
    assert said == "version 1 of toy is the champion now: it is better"
    assert champions.current("toy") == Champion(version=1, commit=commit, digest=digest)
    (held,) = versions().values()
    assert held.source == f"dvc://models/toy/trained@{commit}"
    assert held.tags == {
        "beamline.commit": commit,
        "beamline.promoted": "true",
        "beamline.digest": digest,
        "verdict.promote": "true",
        "verdict.reason": "it is better",
        "verdict.champion": "null",
        "verdict.difference.mean": "0.25",
        "verdict.difference.low": "0.125",
        "verdict.difference.high": "0.5",
        "verdict.difference.probability": "0.99",
    }
    assert held.description.splitlines() == [
        "**Success** **50.0 %** [45.0, 55.0], before **25.0 %** [20.0, 30.0]  ",
        "**Promote**: it is better  ",
        f"**Restore**: `beamline reproduce {commit[:12]} --recipe toy`  ",
        "**Recipe**: as it was",
    ]


def test_a_later_version_tells_what_differs_from_the_champion_before(project):
    first = None
    for number, rate in enumerate((0.001, 0.003)):
        recipe = {"seed": 0, "reinforce": {"algorithm": "none", "learning_rate": rate}}
        Path("params/toy.yaml").write_text(yaml.safe_dump(recipe))
        first, _ = commit_run(0.5 + number / 10, champion=number or None, commit=first)
        champions.promote("toy", first)
    told = versions()[2].description
    assert (
        "**Recipe**: `reinforce.learning_rate` 0.001 → 0.003, "
        "beside version 1, the champion before" in told
    )


def test_replay_adds_and_moves_nothing(project):
    commit, _ = commit_run(0.5)
    champions.promote("toy", commit)
    before = versions()
    assert champions.promote("toy", commit) == "version 1 of toy is the champion already"
    assert {n: v.last_updated_timestamp for n, v in versions().items()} == {
        n: v.last_updated_timestamp for n, v in before.items()
    }


def test_kill_between_version_and_alias_is_mended(project, monkeypatch):
    commit, _ = commit_run(0.5)
    with monkeypatch.context() as patch:
        from mlflow.tracking import MlflowClient

        def die(*_):
            raise KeyboardInterrupt

        patch.setattr(MlflowClient, "set_registered_model_alias", die)
        with pytest.raises(KeyboardInterrupt):
            champions.promote("toy", commit)
    assert list(versions()) == [1]
    assert champions.current("toy") is None
    champions.promote("toy", commit)
    assert list(versions()) == [1]
    assert champions.current("toy").version == 1


def test_alias_moves_back_only_on_request(project):
    first, _ = commit_run(0.5)
    champions.promote("toy", first)
    second, digest = commit_run(0.75, champion=1)
    assert champions.promote("toy", second).startswith("version 2 of toy is the champion now")
    said = champions.promote("toy", first)
    assert said == "not promoted: version 1 of toy has been the champion once"
    assert champions.current("toy") == Champion(version=2, commit=second, digest=digest)
    assert champions.promote("toy", first, back=True).startswith("version 1 of toy is the champion")
    assert champions.current("toy").version == 1
    assert champions.promote("toy", second).startswith("not promoted: version 2 of toy has been")
    git("branch", "a-run", second)
    assert champions.promote("toy", "a-run", back=True).startswith(
        "version 2 of toy is the champion"
    )
    assert sorted(versions()) == [1, 2], "a branch names its commit"


def test_overtaken_candidate_is_not_promoted(project):
    first, _ = commit_run(0.5)
    champions.promote("toy", first)
    alone, _ = commit_run(0.6)  # there was no champion when it began
    with pytest.raises(champions.OvertakenError, match=r"is version 1.*with nobody: run"):
        champions.promote("toy", alone)
    second, _ = commit_run(0.75, champion=1)
    beside, _ = commit_run(0.7, champion=1)
    champions.promote("toy", second)
    said = "the champion of toy is version 2, and the candidate was compared with version 1: run"
    with pytest.raises(champions.OvertakenError, match=said):
        champions.promote("toy", beside)
    assert sorted(versions()) == [1, 2]


def test_rejected_run_registers_nothing(project):
    commit, _ = commit_run(0.5, promote=False)
    for back in (False, True):
        assert champions.promote("toy", commit, back=back) == "not promoted: it is no better"
    assert versions() == {}


def test_commit_that_is_no_run_is_named(project):
    Path("new").touch()
    git("add", "new")
    git("commit", "--quiet", "--message", "no run")
    commit = git("rev-parse", "HEAD")
    with pytest.raises(ValueError, match=f"commit {commit} has no reports/toy/verdict.json"):
        champions.promote("toy", commit)
    Path("reports/toy").mkdir(parents=True, exist_ok=True)
    Path("reports/toy/verdict.json").write_text("[" * 200_000)
    git("add", "--force", "reports")
    git("commit", "--quiet", "--message", "a verdict that nests")
    with pytest.raises(ValueError, match=r"verdict.json of commit \w+ is no JSON"):
        champions.promote("toy", git("rev-parse", "HEAD"))


# ---------------------------------------------------------------- an unreachable registry


def test_unreachable_registry_is_a_message(project, monkeypatch):
    commit, _ = commit_run(0.5)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    recipe = Path("params/toy.yaml").read_text()
    for call in (
        lambda: champions.promote("toy", commit),
        lambda: champions.fetch("toy", Path("params/toy.yaml")),
    ):
        with pytest.raises(
            champions.RegistryError,
            match=r"the model registry http://127\.0\.0\.1:9 cannot be used",
        ):
            call()
    assert Path("params/toy.yaml").read_text() == recipe, "the champion of the recipe stays"
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert champions.promote("toy", commit).startswith("version 1"), "the call can be repeated"


def test_next_retraining_promotes_after_an_outage(project, monkeypatch, capsys):
    commit, _ = commit_run(0.5)
    git("branch", "runs/toy-1", commit)
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        retrain.after_commit("toy", commit)
    assert "cannot be used" in capsys.readouterr().err
    assert not retrain.is_overtaken("toy", "runs/toy-1")
    assert champions.current("toy").commit == commit
    assert not retrain.is_overtaken("toy", "runs/toy-1")


def test_overtaken_run_is_made_again(project):
    first, _ = commit_run(0.5)
    beside, _ = commit_run(0.7)
    rejected, _ = commit_run(0.4, promote=False)
    champions.promote("toy", first)
    assert retrain.is_overtaken("toy", beside)
    assert not retrain.is_overtaken("toy", rejected)


def test_damaged_store_is_an_error(project):
    Path(".beamline/mlflow.db").write_text("no database")
    with pytest.raises(champions.RegistryError, match="not a database"):
        champions.current("toy")


# ---------------------------------------------------------------- fetching


def test_champion_is_written_into_the_recipe_alone(project):
    recipe = Path("params/toy.yaml")
    shipped = (ROOT / "params/tiny.yaml").read_text()
    recipe.write_text(shipped)
    shutil.copy(ROOT / "params/benchmarks.yaml", "params")
    assert champions.fetch("toy", recipe) is None
    lines = shipped.splitlines()
    (place,) = [number for number, line in enumerate(lines) if line.startswith("champion:")]
    for success, reigning in ((0.5, None), (0.75, 1)):
        commit, digest = commit_run(success, champion=reigning)
        champions.promote("toy", commit)
        found = champions.fetch("toy", recipe)
        assert (found.commit, found.digest) == (commit, digest)
        assert recipes.load("toy", Path("params")).champion == found
        written = recipe.read_text().splitlines()
        assert written[:place] + written[place + 1 :] == lines[:place] + lines[place + 1 :]


def test_champion_over_several_lines_is_replaced(project):
    recipe = Path("params/toy.yaml")
    recipe.write_text("seed: 1\nchampion:\n  version: 1\n  digest: x\nmachine: 2\n")
    champions.fetch("toy", recipe)
    assert recipe.read_text() == "seed: 1\nchampion: null\nmachine: 2\n"


def test_recipe_without_the_key_gets_it_with_the_first_champion(project):
    file = Path("params/toy.yaml")
    file.write_text("seed: 1")
    assert champions.fetch("toy", file) is None
    assert file.read_text() == "seed: 1"
    commit, _ = commit_run(0.5)
    champions.promote("toy", commit)
    champion = champions.fetch("toy", file)
    assert champion.version == 1
    assert yaml.safe_load(file.read_text()) == {"seed": 1, "champion": champion.model_dump()}


def test_recipe_with_two_champions_is_an_error(project):
    Path("params/toy.yaml").write_text("champion: null\nchampion: null\n")
    with pytest.raises(ValueError, match=r"toy\.yaml has 2 lines that begin with 'champion"):
        champions.fetch("toy", Path("params/toy.yaml"))


def register_by_hand(source):
    client = track.connect(track.store_uri())
    client.create_registered_model("toy")
    number = client.create_model_version("toy", source=source).version
    client.set_registered_model_alias("toy", champions.ALIAS, str(number))


def test_folder_registered_by_hand_is_kept_by_dvc(project, tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    register_by_hand(str(folder))
    found = champions.current("toy")
    assert found.commit is None
    shutil.rmtree(folder)
    cache.restore(found.digest, tmp_path / "again")
    assert (tmp_path / "again/config.json").read_text() == "{}"


def test_version_with_unknown_source_is_an_error(project):
    register_by_hand("s3://bucket/model")
    with pytest.raises(ValueError, match="version 1 of the model toy has the source 's3://bucket"):
        champions.current("toy")


# ---------------------------------------------------------------- loading it


def test_documented_lines_load_the_champion(project, policy, tokenizer):
    """As docs/runs.md#the-champion shows it."""
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    trained = Path("models/toy/trained")
    policy.save_pretrained(trained)
    tokenizer.save_pretrained(trained)
    commit, _ = commit_run(0.5)
    policy.save_pretrained(trained)
    tokenizer.save_pretrained(trained)
    digest = cache.keep(trained)
    locked = yaml.safe_load(Path("dvc.lock").read_text())
    locked["stages"]["reinforce@toy"]["outs"][0]["md5"] = digest
    Path("dvc.lock").write_text(yaml.safe_dump(locked))
    git("commit", "--quiet", "--all", "--message", "with a real policy")
    commit = git("rev-parse", "HEAD")
    champions.promote("toy", commit)
    shutil.rmtree("models")

    text = (ROOT / "docs/runs.md").read_text()
    shown = text.split("```python\n")[1].split("```")[0].replace('"tiny"', '"toy"')
    names: dict = {}
    exec(shown, names)
    assert len([line for line in shown.splitlines() if line.strip() and "import" not in line]) == 2
    assert isinstance(names["tokenizer"], PreTrainedTokenizerFast)
    for name, weight in AutoModelForCausalLM.from_config(policy.config).named_parameters():
        loaded = dict(names["model"].named_parameters())[name]
        assert loaded.shape == weight.shape
        assert torch.equal(loaded, dict(policy.named_parameters())[name])
    assert names["tokenizer"].encode("12 times 34") == tokenizer.encode("12 times 34")
    name = f"toy-1-{digest[:8]}"
    assert champions.champion("toy") == Path(".beamline/champions") / name, "it is there already"


def test_loading_without_a_champion_is_an_error(project):
    with pytest.raises(ValueError, match="the recipe toy has no champion yet"):
        champions.champion("toy")
