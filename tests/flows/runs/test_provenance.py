"""Lineage over runs that DVC has really made, kept on branches, with MLflow on SQLite."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from flows.analysis import card
from flows.runs import cache, earlier_outs, git, pipeline, provenance, provenance_subject
from flows.tracking import run as track
from flows.tracking import store
from tests import toy_project as toy
from tests import toy_training as training

FIRST, SECOND, THIRD = (f"runs/toy-2026010{day}-00000{day}" for day in (1, 2, 3))
LINKS = ["checkpoint", "iteration", "trees", "questions", "dataset", "source"]
END = ["commit", "parameters", "MLflow run"]


@pytest.fixture(scope="module")
def built(tmp_path_factory, empty_store):
    """Three runs: the second differs from the first in the evaluation, the third in learning."""
    folder = tmp_path_factory.mktemp("lineage").resolve() / "project"
    folder.mkdir()
    base = training.create(folder)
    for day, changes in enumerate(
        [{}, {"evaluate__bootstrap": 2}, {"reinforce__update__learning_rate": 0.5}], start=1
    ):
        toy.run(
            folder, "git", "checkout", "--quiet", "-b", f"runs/toy-2026010{day}-00000{day}", base
        )
        toy.write_recipe(folder, reinforce__iterations=4, **changes)
        toy.repro(folder)
        keep(folder, day, f"a run\n\nRecipe: toy\nCode: {base}\nSet: changes={day}")
    toy.run(folder, "git", "checkout", "--quiet", "--detach", base)
    shutil.rmtree(folder / "data")
    shutil.rmtree(folder / "models")
    (folder / ".beamline").mkdir(exist_ok=True)
    (folder / ".beamline/mlflow.db").write_bytes(empty_store)
    return folder


def keep(folder, day, message):
    """Commit what a run leaves for git, as of a day in January."""
    when = {f"GIT_{who}_DATE": f"2026-01-0{day}T12:00:00Z" for who in ("AUTHOR", "COMMITTER")}
    toy.run(folder, "git", "add", "--all")
    said = toy.run(folder, "git", "commit", "--quiet", "--message", message, **when)
    assert said.returncode == 0, said.stdout


@pytest.fixture
def project(built, tmp_path, monkeypatch):
    """A copy of the three runs, as the working folder; nothing has run in its checkout."""
    folder = tmp_path.resolve() / "project"
    shutil.copytree(built, folder, symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    provenance._kept.cache_clear()
    provenance_subject.folder_files.cache_clear()
    return folder


def chain(what, revision=None, recipe=None, **wanted):
    return provenance.chain(replace(provenance_subject.find(what, revision, recipe), **wanted))


def link(links, what):
    return next(each for each in links if each.what == what)


def names(links):
    return [each.what for each in links]


def digest(run, path):
    return git.digests_at(run, "toy")[path]


def records(run, stage):
    held = cache.kept_file(digest(run, f"data/toy/records/{stage}.jsonl"))
    return [json.loads(line) for line in held.splitlines()]


# ---------------------------------------------------------------- found


@pytest.mark.parametrize(
    "what", ["success.trained.mean", "reports/toy/metrics.json:success.trained.mean"]
)
def test_chain_of_a_metric_reaches_the_commit(project, what):
    links = chain(what)
    assert names(links) == ["benchmark result", "evaluate", *LINKS, *END]
    assert links[0].name == "success.trained.mean = 0.11"
    assert links[0].digest == digest(THIRD, "reports/toy/metrics.json")
    assert link(links, "commit").name == THIRD
    assert link(links, "commit").digest == git.resolve(THIRD)
    assert link(links, "commit").command == f"beamline reproduce {THIRD}"
    assert link(links, "parameters").facts == ["set: changes=3"]
    assert link(links, "checkpoint").digest == digest(THIRD, "models/toy/trained")
    assert link(links, "dataset").digest == digest(THIRD, "data/toy/questions")
    source = link(links, "source")
    assert source.where == "questions.jsonl"
    assert source.digest == hashlib.md5(Path("questions.jsonl").read_bytes()).hexdigest()


def test_chain_and_card_do_not_depend_on_settings_of_git(project, hostile_git):
    toy.git(project, "checkout", "--quiet", FIRST)

    def read():
        return chain("success.trained.mean"), card.commit_of("toy", pipeline.locked())

    expected = read()
    assert expected[1] == (git.resolve(FIRST), FIRST)
    hostile_git()
    assert read() == expected


def test_iteration_is_that_of_the_evaluated_policy(project):
    links = chain("success.trained.mean")
    update = records(THIRD, "reinforce")[-1]
    (evaluated,) = records(THIRD, "evaluate")
    policy = update["artifacts"]["policy"]
    assert evaluated["inputs"]["policy"] == policy
    assert link(links, "checkpoint").facts == [f"policy {policy} in the ledger"]
    assert link(links, "iteration").name == "3 of 0 to 3, seed 3"
    assert link(links, "iteration").facts[-1] == f"update: policy {policy}"
    assert link(links, "evaluate").facts == [
        f"trained, rollout: trees {evaluated['artifacts']['trees']}"
    ]
    assert link(links, "questions").facts == [
        "9 by id: q4, q4-1, q4-2, q4-3 and 5 more (--all)",
        "cursor 4",
    ]


def test_given_iteration_has_its_policy_and_questions(project):
    links = chain("models/toy/trained", THIRD, iteration=1)
    steps = [record for record in records(THIRD, "reinforce") if record["iteration"] == 1]
    assert link(links, "checkpoint").digest == steps[-1]["artifacts"]["policy"]
    assert link(links, "checkpoint").command == ""
    assert steps[0]["artifacts"]["trees"] in link(links, "iteration").facts[0]
    assert "iteration = 1" in link(links, "trees").facts[0]
    assert link(links, "questions").facts[0].startswith("9 by id: q2, q2-1")
    every = chain("models/toy/trained", THIRD, iteration=1, every=True)
    assert link(every, "questions").facts[0].endswith("q2-6, q2-7, q2-8")
    with pytest.raises(ValueError, match="--iteration 9: this run has 0 to 3"):
        chain("models/toy/trained", THIRD, iteration=9)


def test_checkpoint_in_the_ledger_has_its_path(project):
    update = [record for record in records(THIRD, "reinforce") if record["verb"] == "update"][1]
    place = Path(f".beamline/ledger/toy/reinforce/0001-update-{update['key']}")
    place.mkdir(parents=True)
    links = chain("models/toy/trained", THIRD, iteration=1)
    assert link(links, "checkpoint").where == str(place)


def test_file_of_several_runs_is_of_the_oldest(project):
    links = chain("data/toy/questions")
    assert names(links) == ["dataset", "source", *END]
    assert link(links, "commit").name == FIRST
    assert links[0].facts[0] == f"the same in 2 later runs: {SECOND}, {THIRD}"
    assert names(chain("data/toy/questions", SECOND)) == names(links)
    assert link(chain("data/toy/questions", SECOND), "commit").name == SECOND


def test_equal_metric_is_of_its_own_run(project):
    assert digest(FIRST, "reports/toy/metrics.json") == digest(SECOND, "reports/toy/metrics.json")
    toy.run(project, "git", "branch", "-D", THIRD)
    links = chain("success.trained.mean")
    assert link(links, "commit").name == SECOND
    assert link(chain("models/toy/trained"), "commit").name == FIRST


@pytest.mark.parametrize("name", ["data/toy/trees", "data/toy/trees/1.json"])
def test_copies_are_found_by_digest(project, tmp_path, name):
    held = digest(FIRST, "data/toy/trees")
    copy = tmp_path / "copy"
    cache.restore(held, copy)
    stray = copy / "1.json" if name.endswith(".json") else copy
    for what, run in ((str(stray), FIRST), (name, THIRD)):  # by its path, that of the newest run
        links = chain(what)
        (found,) = [each for each in links if each.where == name]
        assert found.digest == cache.digest_of(stray)
        assert link(links, "commit").name == run
    stray = tmp_path / "nobody's"
    stray.write_text("nobody's")
    with pytest.raises(ValueError, match="which no run has made"):
        chain(str(stray))


def test_model_is_found_by_alias_and_number(project):
    client = store.connect(store.store_uri())
    client.create_registered_model("toy")
    commit = git.resolve(FIRST)
    for tags in ({track.COMMIT: commit}, {track.DIGEST: "1" * 32 + ".dir"}):
        client.create_model_version("toy", "dvc://models/toy/trained", tags=tags)
    client.set_registered_model_alias("toy", "champion", "1")
    for what in ("toy@champion", "toy/1"):
        links = chain(what)
        assert names(links) == [*LINKS, *END]
        assert links[0].facts[0] == "version 1 of the model toy in sqlite:///.beamline/mlflow.db"
        assert links[0].digest == digest(FIRST, "models/toy/trained")
        assert link(links, "commit").digest == commit
    for what, said in {
        "toy/2": "version 2 of toy was registered by hand",
        "toy@challenger": "has no 'toy@challenger'",
        "other/1": "has no 'other/1'",
    }.items():
        with pytest.raises(ValueError, match=said):
            chain(what)


def test_metric_of_several_recipes_needs_one(project):
    locked = yaml.safe_load(git.content(FIRST, "dvc.lock"))
    text = git.content(FIRST, "dvc.lock")
    other = yaml.safe_load(text.replace("@toy", "@other").replace("/toy", "/other"))
    locked["stages"] |= other["stages"]
    Path("dvc.lock").write_text(yaml.safe_dump(locked))
    for recipe in ("toy", "other"):
        Path("reports", recipe).mkdir(parents=True)
        Path(f"reports/{recipe}/metrics.json").write_text(
            git.content(FIRST, "reports/toy/metrics.json")
        )
    Path("params/other.yaml").write_text("a: 1\n")
    with pytest.raises(ValueError, match="is a metric of other, toy: say which, --recipe"):
        chain("success.trained.mean")
    links = chain("success.trained.mean", recipe="other")
    assert links[0].where == "reports/other/metrics.json"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("models/toy/train", "near it: models/toy/trained\nWHAT is\n  a metric  "),
        ("success.traned.mean", "has no metric 'success.traned.mean'; near it: success.trained.m"),
        ("reports/toy/metrics.json:nothing", "has no metric 'nothing'$"),
        ("data/toy/trees/9.json", "is nothing that a run has made"),
    ],
)
def test_unknown_name_is_an_error_with_similar_ones(project, what, said):
    with pytest.raises(ValueError, match=said):
        chain(what)


def test_project_without_runs_is_an_error(project):
    for branch in (FIRST, SECOND, THIRD):
        toy.run(project, "git", "branch", "-D", branch)
    with pytest.raises(ValueError, match=r"no dvc\.lock here, and no run's branch"):
        chain("models/toy/trained")
    with pytest.raises(ValueError, match="'nothing' names no commit here"):
        chain("models/toy/trained", "nothing")


@pytest.mark.parametrize(
    "path",
    ["models/toy/trained", "data/toy/trees", "data/toy/trees/1.json", "reports/toy/metrics.json"],
)
def test_restored_copy_is_apart_from_the_cache(project, path):
    asked = provenance_subject.find(path, SECOND)
    place = provenance_subject.restore(asked)
    assert place == provenance_subject.HOME / git.resolve(SECOND)[:12] / path
    assert cache.digest_of(place) == asked.digest
    edited = place / "1.json" if place.is_dir() else place
    edited.write_text("edited")
    assert cache.digest_of(place) != asked.digest
    assert provenance_subject.restore(asked) == place
    assert cache.digest_of(place) == asked.digest


def test_file_edited_in_a_later_commit_is_refused(project):
    toy.run(project, "git", "checkout", "--quiet", "--detach", SECOND)
    Path("reports/toy/metrics.json").write_text('{"success": {"trained": {"mean": 1.0}}}')
    edited = toy.commit(project, "edited")
    asked = provenance_subject.find("reports/toy/metrics.json", edited)
    with pytest.raises(ValueError, match=r"has another reports/toy/metrics\.json than its run"):
        provenance_subject.restore(asked)
    assert not [each for each in provenance_subject.HOME.rglob("*") if each.is_file()]


@pytest.mark.parametrize("path", ["../../../x", "/x", "."])
def test_out_of_a_commit_that_leads_elsewhere_is_not_restored(project, path):
    asked = provenance_subject.find("models/toy/trained", FIRST)
    with pytest.raises(ValueError, match="which is no path in a run"):
        provenance_subject.restore(replace(asked, path=path, out=path))


def test_missing_file_is_refused_and_leaves_nothing(project):
    held = digest(FIRST, "models/toy/trained")
    (project / ".dvc/cache/files/md5" / held[:2] / held[2:]).unlink()
    with pytest.raises(ValueError, match="DVC's cache lacks"):
        provenance_subject.restore(provenance_subject.find("models/toy/trained", FIRST))
    assert not [each for each in provenance_subject.HOME.rglob("*") if each.is_file()]


# ---------------------------------------------------------------- a checkout that has run


def test_run_of_this_checkout_can_be_committed(project):
    toy.write_recipe(project, reinforce__iterations=4, reinforce__update__learning_rate=0.25)
    toy.repro(project)
    links = chain("success.trained.mean")
    assert links[0].name == "success.trained.mean = 0.06"
    kept = link(links, "commit")
    assert (kept.name, kept.digest) == ("not committed", "")
    with pytest.raises(ValueError, match="models/toy/trained is in this checkout"):
        provenance_subject.restore(provenance_subject.find("models/toy/trained"))
    assert kept.facts[0].endswith(", with changes that are in no commit")
    shutil.rmtree("models")
    restored = toy.run(project, *link(links, "checkpoint").command.split())
    assert restored.returncode == 0, restored.stdout
    assert cache.digest_of(Path("models/toy/trained")) == link(links, "checkpoint").digest
    said = toy.run(project, "sh", "-c", kept.command)
    assert said.returncode == 0, said.stdout
    links = chain("success.trained.mean")
    assert link(links, "commit").digest == toy.git(project, "rev-parse", "HEAD")
    assert link(links, "checkpoint").command.endswith(" --restore")


def test_equal_run_of_this_checkout_is_the_older_one(project):
    toy.repro(project)
    assert link(chain("models/toy/trained"), "commit").name == FIRST


def test_changed_out_is_refused(project):
    toy.repro(project)
    Path("models/toy/trained").unlink()
    Path("models/toy/trained").write_text("changed")
    with pytest.raises(ValueError, match=r"models/toy/trained is not what dvc\.lock says"):
        chain("models/toy/trained")
    assert link(chain("models/toy/trained", FIRST), "commit").name == FIRST
    Path("reports/toy/metrics.json").rename("reports/toy/.metrics.json.earlier")
    with pytest.raises(ValueError, match=r"reports/toy/metrics\.json is gone from this checkout"):
        chain("success.trained.mean")
    record = earlier_outs.HOME / "later@toy.json"  # of a stage that was killed
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps({"outs": ["reports/toy/metrics.json"], "done": False}))
    with pytest.raises(ValueError, match="waits beside its place since a stage was killed"):
        chain("success.trained.mean")


# ---------------------------------------------------------------- what may be missing


def test_mlflow_run_is_the_oldest_with_the_digests(project):
    outs = git.digests_at(THIRD, "toy")
    other = dict.fromkeys(outs, "0" * 32)
    questions = {"data/toy/questions": outs["data/toy/questions"]}
    pipeline = {"recipe": "toy", store.KIND_TAG: store.PIPELINE}
    for name, tags, kept in (
        ("none", pipeline, other),
        ("half", {f"dvc.{path}": made for path, made in questions.items()}, {}),
        ("whole", pipeline, outs),
        ("later", pipeline, outs),
        ("stopped", pipeline, {}),
    ):
        run = track.start_run(name, tags)
        if kept:
            run.log_text(json.dumps(kept), track.OUTS)
        track.start_run(f"stage of {name}", {}, run.handle).end("FINISHED")
        run.end("FINISHED")
    found = link(chain("data/toy/questions", THIRD), "MLflow run")
    assert found.name == "whole"
    assert found.facts[0].startswith("stage of whole: ")
    assert found.facts[-1] == "2 more with the same digest"
    older = track.start_run("older", {f"dvc.{path}": made for path, made in outs.items()})
    older.end("FINISHED")
    found = link(chain("data/toy/questions", THIRD), "MLflow run")
    assert found.name == "older", "with tags, as versions before the artifact wrote them"
    nowhere = link(chain("models/toy/trained", FIRST), "MLflow run")
    assert nowhere.name == "not found in sqlite:///.beamline/mlflow.db"


def test_unreachable_store_costs_the_mlflow_run_alone(project, monkeypatch):
    Path("broken.db").write_text("no database")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{project}/broken.db")
    links = chain("models/toy/trained", FIRST)
    assert names(links) == [*LINKS, *END]
    assert link(links, "MLflow run").name.startswith("not found: the store sqlite:")
    with pytest.raises(ConnectionError, match="cannot be read"):
        chain("toy@champion")


def test_missing_records_leave_the_rest_of_the_chain(project):
    for stage in ("evaluate", "reinforce", "prepare"):
        held = digest(FIRST, f"data/toy/records/{stage}.jsonl")
        (project / ".dvc/cache/files/md5" / held[:2] / held[2:]).unlink()
    links = chain("success.trained.mean", FIRST)
    assert names(links) == ["benchmark result", "evaluate", "checkpoint", "dataset", "source", *END]
    assert link(links, "checkpoint").facts == ["the records of its sub-steps are gone"]


# ---------------------------------------------------------------- agents and the champion


CODE = ["flows/stages/reinforce.py", "tasks/learning", "params/schema"]


LEARNED = "models/toy/reward_model"


TEACHER = "models/toy/teacher"


def locked(start, learned=None, taught=None):
    """A dvc.lock of the stages that a real recipe has, with a champion."""

    def entry(deps, outs, **params):
        return {
            "cmd": "true",
            "deps": [{"path": path, "md5": "1" * 32} for path in deps],
            "outs": [{"path": path, "md5": "2" * 32} for path in outs],
            "params": {"params/toy.yaml": params},
        }

    models = [f"models/toy/{agent}" for agent in ("champion", "cold_start", "trained")]
    champion = {"version": 3, "commit": "c" * 40, "digest": "3" * 32 + ".dir"}
    stages = {
        "prepare": entry(["data/sources"], ["data/toy/questions", "data/toy/traces.parquet"]),
        "champion": entry([], [models[0], TEACHER], champion=champion, teacher=taught),
        "cold_start": entry(["data/toy/traces.parquet", models[0]], models[1:2], start=start),
        "reward_model": entry(models[1:2], [LEARNED], reward_model=learned),
        "reinforce": entry([models[1], LEARNED, TEACHER, "data/toy/questions", *CODE], models[2:]),
        "evaluate": entry(models, ["data/toy/evaluation.parquet", "reports/toy/metrics.json"]),
        "verdict": entry(["data/toy/evaluation.parquet", models[0]], ["reports/toy/verdict.json"]),
    }
    return {"schema": "2.0", "stages": {f"{name}@toy": stage for name, stage in stages.items()}}


def commit_lock(start, learned=None, taught=None):
    agents = {"cold start": 0.1, "trained": 0.2, "champion": 0.3}
    Path("reports/toy").mkdir(parents=True, exist_ok=True)
    metrics = {"success": {agent: {"mean": mean} for agent, mean in agents.items()}}
    Path("reports/toy/metrics.json").write_text(json.dumps(metrics))
    Path("dvc.lock").write_text(yaml.safe_dump(locked(start, learned, taught)))
    return toy.commit(Path.cwd(), "by hand")


@pytest.mark.parametrize(
    ("what", "start", "expected"),
    [
        ("success.trained.mean", "scratch", ["evaluation", "checkpoint", "cold start"]),
        ("success.cold start.mean", "scratch", ["evaluation", "cold start"]),
        ("success.champion.mean", "scratch", ["evaluation", "champion"]),
        (
            "success.trained.mean",
            "champion",
            ["evaluation", "checkpoint", "cold start", "champion"],
        ),
        ("models/toy/trained", "scratch", ["checkpoint", "cold start"]),
        (
            "reports/toy/verdict.json",
            "scratch",
            ["verdict", "evaluation", "checkpoint", "cold start", "champion"],
        ),
    ],
)
def test_chain_has_only_the_stages_that_made_it(project, what, start, expected):
    links = chain(what, commit_lock(start))
    stages = [name for name in names(links) if name in {*expected, "checkpoint", "champion"}]
    assert stages == expected
    assert not {each.where for each in links} & set(CODE), "code is no source of data"
    if "champion" in expected:
        facts = link(links, "champion").facts
        assert facts[0] == f"version 3, of commit {'c' * 40}"
        assert ("training began with it" in facts) == (start == "champion")
        assert facts[-1] == f"its own: beamline lineage models/toy/trained --at {'c' * 12}"


@pytest.mark.parametrize(
    ("taught", "told"),
    [
        (None, None),
        (
            {"kind": "run", "recipe": "large", "commit": "d" * 40, "digest": "4" * 32 + ".dir"},
            f"its own: beamline lineage models/large/trained --at {'d' * 12}",
        ),
        (
            {"kind": "pretrained", "name": "a/b", "revision": "e" * 40},
            f"a/b at revision {'e' * 40}",
        ),
    ],
)
def test_chain_has_the_teacher_where_the_recipe_has_one(project, taught, told):
    commit_lock("scratch", taught=taught)
    found = [each for each in chain("models/toy/trained") if each.what == "teacher"]
    assert [(each.where, each.facts) for each in found] == ([(TEACHER, [told])] if told else [])


@pytest.mark.parametrize("learned", [None, {"labels": 0.1}])
def test_chain_has_the_reward_model_where_the_recipe_has_one(project, learned):
    commit_lock("scratch", learned)
    links = chain("models/toy/trained")
    assert ("reward model" in names(links)) == (learned is not None)
    assert (LEARNED in [each.where for each in links]) == (learned is not None)
