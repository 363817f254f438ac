import shutil
from pathlib import Path

import pytest
import yaml

from flows.runs import pipeline
from params import recipe_files
from params.run_folders import OUTS, RunFolders
from tasks.ledger import keys
from tests import toy_project as toy
from tests.flows.runs.conftest import RUN

ROOT = toy.ROOT


def test_stages_are_in_the_order_of_the_graph(project):
    first, later = pipeline.stages("toy")
    assert (first.name, later.name) == ("first@toy", "later@toy")
    assert later.timeout_seconds == 60
    assert (first.retries, first.timeout_seconds) == (0, None)


def test_unknown_recipe_meta_key_and_project_are_errors(project, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"dvc\.yaml has no stage for the recipe 'mine'"):
        pipeline.status("mine")
    text = Path("dvc.yaml").read_text().replace("timeout_seconds", "timeout")
    Path("dvc.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"later@toy: meta .* \['timeout'\]"):
        pipeline.stages("toy")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=str(tmp_path)):
        pipeline.stages("toy")


def test_status_has_the_stages_to_run_and_the_reasons(ran):
    assert pipeline.status("toy") == {}
    toy.write_recipe(ran, evaluate__questions=2, cold_start__steps=7)
    assert pipeline.status("toy") == {"later@toy": ["evaluate.questions: 1 -> 2"]}
    Path("data/toy/first").unlink()
    assert pipeline.status("toy")["first@toy"] == ["results: data/toy/first missing"]
    Path("first.py").write_text(Path("first.py").read_text() + "# changed\n")
    assert "code: first.py" in pipeline.status("toy")["first@toy"]
    Path("dvc.lock").unlink()
    assert list(pipeline.status("toy")) == ["first@toy", "later@toy"]


def test_only_what_a_short_recipe_or_its_base_changes_runs_again(ran):
    """The stages that had run before the recipe got its base count, as long as values stay."""
    toy.give_base(ran)
    recipe, base = Path("params/toy.yaml"), Path("params/whole.yaml")
    recipe_files.refresh("toy", Path("params"))
    assert pipeline.follow_file("toy") and not pipeline.follow_file("toy")
    assert pipeline.status("toy") == {} and toy.repro(ran) == []
    recipe.write_text("base: whole\nevaluate: {questions: 2}\n")
    recipe_files.refresh("toy", Path("params"))
    assert pipeline.status("toy") == {"later@toy": ["evaluate.questions: 1 -> 2"]}
    assert toy.repro(ran) == ["later@toy"]
    base.write_text(base.read_text().replace("seed: 3", "seed: 4"))
    recipe_files.refresh("toy", Path("params"))
    assert pipeline.status("toy") == {"first@toy": ["seed: 3 -> 4"]}
    assert toy.repro(ran) == ["first@toy"], "it wrote the same, which is all that the other reads"


def test_digests_are_those_of_dvc_lock(ran):
    # md5 of "first\n"
    assert pipeline.digests("first@toy") == {"data/toy/first": "eb260e9ae827821beceeed4104f0ad89"}
    Path("dvc.lock").unlink()
    assert pipeline.digests("first@toy") == {}


# ---------------------------------------------------------------- whether anything is new


def keep_run(folder, name):
    """Run the stages and commit them on a branch, as a retraining does."""
    toy.repro(folder)
    toy.git(folder, "checkout", "--quiet", "-B", name)
    toy.commit(folder, "a run")


def test_run_of_equal_inputs_is_found(ran):
    assert pipeline.already_run("toy") == RUN
    for out in ("data", "reports"):
        shutil.rmtree(out)
    Path("dvc.lock").unlink()
    assert pipeline.already_run("toy") == RUN
    toy.git(ran, "worktree", "add", "--quiet", "--detach", ".beamline/runs/next")
    assert pipeline.already_run("toy", Path(".beamline/runs/next")) == RUN
    assert Path.cwd() == ran
    toy.write_recipe(ran, cold_start__steps=7)
    assert pipeline.already_run("toy"), "no stage reads it"


def test_any_changed_input_is_new(ran):
    toy.write_recipe(ran, evaluate__questions=2)
    assert pipeline.already_run("toy") is None
    toy.write_recipe(ran)
    assert pipeline.already_run("toy")
    text = Path("later.py").read_text()
    Path("later.py").write_text(text + "# changed\n")
    assert pipeline.already_run("toy") is None
    Path("later.py").unlink()
    assert pipeline.already_run("toy") is None
    Path("later.py").write_text(text)
    Path("dvc.yaml").write_text(Path("dvc.yaml").read_text().replace("exec python", "python"))
    assert pipeline.already_run("toy") is None


def test_only_branches_of_the_recipe_count(ran):
    toy.write_recipe(ran, evaluate__questions=2)
    keep_run(ran, "runs/toy-20261122-b")
    toy.write_recipe(ran)
    assert pipeline.already_run("toy") == RUN, "an older run"
    for name in ("runs/toy-search-20261121-a", "toy-20261121-a"):
        toy.git(ran, "branch", "-f", name, RUN)
    toy.git(ran, "branch", "-D", RUN)
    assert pipeline.already_run("toy") is None


def test_champion_alone_is_nothing_new(ran):
    stage = (
        "  champion:\n    foreach: ${recipes}\n    do:\n"
        "      cmd: mkdir -p data && touch data/champion-${key}\n"
        "      params:\n        - ${item}:\n            - champion\n"
        "      outs:\n        - data/champion-${key}\n"
    )
    Path("dvc.yaml").write_text(Path("dvc.yaml").read_text() + stage)
    keep_run(ran, "runs/toy-20261122-b")
    toy.write_recipe(ran, champion={"version": 1, "commit": None, "digest": "a" * 32 + ".dir"})
    assert list(pipeline.status("toy")) == ["champion@toy"]
    assert pipeline.already_run("toy") == "runs/toy-20261122-b"


def test_new_source_data_tracked_by_dvc_are_new_once(project):
    text = Path("dvc.yaml").read_text()
    deps = "        - first.py\n"
    Path("dvc.yaml").write_text(text.replace(deps, f"{deps}        - questions\n"))
    intake = Path("questions/intake/toy")
    intake.mkdir(parents=True)
    Path("questions/README.md").touch()
    keep_run(project, RUN)
    assert pipeline.already_run("toy") == RUN
    (intake / "new.jsonl").write_text("{}")
    toy.dvc_add(project, str(intake))
    toy.commit(project, "a delivery")
    assert pipeline.already_run("toy") is None
    assert [stage.name for stage in pipeline.stages("toy")] == ["first@toy", "later@toy"]
    keep_run(project, "runs/toy-20261122-b")
    assert pipeline.already_run("toy") == "runs/toy-20261122-b"


# ---------------------------------------------------------------- dependencies on source


STAGES = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
# They check every section, and word what is wrong; a stage depends on those that it reads.
LOADING = {
    *(Path("params/schema", f"{name}.py") for name in ("recipe", "reading")),
    *(Path("params/suggestions.py"), Path("tasks/recipes/__init__.py")),
}
SHARED = Path("flows/__init__.py")  # runs before every flow
TEXTS = Path("params/prompts")  # which are read, not imported


def code_of(stage):
    """The flow of a stage, and what it imports of tasks/ and of the schema's sections."""
    flow = Path("flows/stages", f"{stage}.py")
    found, waiting = set(), [flow]
    while waiting:
        file = waiting.pop()
        elsewhere = file.parts[0] == "flows" and file != flow
        if file not in found and not elsewhere and file not in LOADING:
            found.add(file)
            waiting += [path.relative_to(ROOT) for path in keys.imported_files(ROOT / file)]
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_deps_of_a_stage_are_what_it_imports(stage):
    code = code_of(stage)
    deps = [Path(dep) for dep in STAGES[stage]["do"]["deps"]]
    ours = [dep for dep in deps if dep.parts[0] in ("flows", "tasks", "params")]
    deps = [dep for dep in ours if dep not in (SHARED, TEXTS)]
    unlisted = [file for file in code if not any(file.is_relative_to(dep) for dep in deps)]
    assert not unlisted, f"dvc.yaml, {stage}: add the rooms of {unlisted} to deps"
    unused = [dep for dep in deps if not any(file.is_relative_to(dep) for file in code)]
    assert not unused, f"dvc.yaml, {stage}: the flow imports nothing of {unused}"


def test_run_folders_are_the_outs_of_the_stages():
    outs = set()
    for stage in STAGES.values():
        do = stage["do"]
        for out in [*do["outs"], *do.get("metrics", []), *do.get("plots", [])]:
            outs.add(next(iter(out)) if isinstance(out, dict) else out)
    named = {Path(path.format("${key}")) for path in OUTS.values()}
    folders = RunFolders("${key}")
    named |= {folders.gates(stage) for stage in ("prepare", "reinforce")}
    named |= {folders.records(stage) for stage in STAGES if stage not in ("champion", "verdict")}
    rooms = {folders.data, folders.models, folders.reports}
    assert {path.as_posix() for path in named - rooms} == outs
