"""Variants side by side, and the files, table and figure that come out.

The sub-steps are the real ones on a very small policy, without Prefect and DVC; the command itself
is run in tests/flows/test_smoke.py.
"""

import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from flows.commands import compare
from flows.tracking import comparison_report
from params.schema import base
from params.schema import recipe as schema
from tasks import recipes
from tasks.comparison import measure, variants
from tasks.comparison.budget import Budget
from tasks.comparison.comparison import Comparison, Variant
from tasks.comparison.measure import key_of
from tasks.ledger import keys
from tasks.ledger.artifacts import Artifact
from tasks.policy import resident
from tasks.policy.published_model import PublishedRewardModel
from tasks.training.curves import MEASURES, OF_LEARNED_REWARD
from tasks.trees import panels
from tasks.trees.tables import save_questions
from tasks.trees.tree import Question

ROWS = ("reinforce", "ppo")
BUDGET = "sampled_tokens=100"
SEEDS = (0, 7)
KINDS = ("toy", "play")  # of questions, in turn
ROLLOUTS, FIRST = "*-rollout-*/record.json", "0000-rollout-*/record.json"
PANEL = Path("data/toy/panels/test.json")
NOT_ALWAYS = {"singleton_share", "mean_state_group", *OF_LEARNED_REWARD}  # of some rows and recipes
SIZES = {
    "dialogue": {"turn_tokens": 6, "response_tokens": 24},
    "evaluate": {"questions": 4, "bootstrap": 50},
}


def make_world(policy, tokenizer):
    """Make a recipe, its questions and a cold start here, as the stages before leave them."""
    shutil.copytree(base.PARAMS, "params", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    recipe = yaml.safe_load(Path("params/smoke.yaml").read_text())
    for section, changes in SIZES.items():
        recipe[section] |= changes
    recipe["reinforce"]["questions"] = 2
    recipe["reinforce"]["rollout"] |= {"leaves": 4, "initial": 2, "branch": 1, "rows": 8}
    Path("params/toy.yaml").write_text(yaml.dump(recipe))
    questions = [Question(str(i), KINDS[i % 2], f"question {i}", ("1",)) for i in range(8)]
    for split in ("train", "test"):
        save_questions(questions, Path(f"data/toy/questions/{split}.parquet"))
    panels.save(panels.panel_of(questions, "test", "toy", seed=0), PANEL)
    Path("data/toy/corpus").mkdir()
    policy.save_pretrained("models/toy/cold_start")
    tokenizer.save_pretrained("models/toy/cold_start")


@pytest.fixture(scope="module")
def finished(policy, tokenizer, tmp_path_factory):
    """A folder with a finished comparison of ROWS and SEEDS; tests copy it."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "BEFORE", ())  # stages that DVC would run
        with contextlib.chdir(folder):
            make_world(policy, tokenizer)
            run(seeds=SEEDS)
        yield folder


@pytest.fixture
def project(finished, tmp_path, monkeypatch):
    """A copy of the finished comparison, as the working folder."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def forget(name):
    """Remove a variant's results, and what the ledger holds of it."""
    for folder in ("reports/toy/comparison", ".beamline/ledger/toy/compare"):
        shutil.rmtree(Path(folder, comparison_report.slug(name)))


def run(rows=ROWS, changes=(), seeds=(0,), budget=BUDGET):
    """Compare; return all results so far, by variant and seed."""
    resident.POLICIES.clear()
    compare.compare("toy", rows, changes, seeds, budget)
    return results()


def results():
    """The results of all comparisons in the working folder, by variant and seed."""
    files = Path("reports/toy/comparison").glob("*/seed-*.json")
    found = [json.loads(file.read_text()) for file in files]
    return {(result["variant"], result["seed"]): result for result in found}


def records():
    """What the ledger holds of the comparison, and when it was written."""
    places = Path(".beamline/ledger/toy/compare").rglob("record.json")
    return {str(file): file.stat().st_mtime_ns for file in places}


def test_stages_before_a_comparison_make_each_others_inputs():
    stages = yaml.safe_load((base.PARAMS.parent / "dvc.yaml").read_text())["stages"]
    outs = {
        (out if isinstance(out, str) else next(iter(out))): name
        for name, stage in stages.items()
        for out in stage.get("do", stage)["outs"]
    }
    for number, name in enumerate(compare.BEFORE):
        needed = {outs[dep] for dep in stages[name]["do"]["deps"] if dep in outs}
        assert needed <= set(compare.BEFORE[:number])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ("reinforce.algorithm=gspo", "name the row with --algorithms"),
        ("reinforce.iterations=5", "--budget decides when training ends"),
        ("reinforce.update.mini_batches=1", "grpo has a ratio, which is 1 with one optimizer step"),
        ("prepare.overlap_words=3", "variants share everything but"),
        (
            "algorithm.estimator.lamda=0",
            "params/algorithms.yaml, row grpo: unknown key 'estimator.lamda'",
        ),
        ("algorithm.averaging=unit_mean", "unit_mean averages over the units of the ratio"),
        ("algorithm.kl.coefficient=1", r"no key 'grpo.kl' .* or give a section that"),
        ("algorithm=grpo", "variants share everything but"),
    ],
)
def test_overrides_that_could_not_hold_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        variants.variants("smoke", ["grpo"], [changes])


ABLATIONS = [  # of GAGPO, table 2
    "algorithm.estimator.lambda=0",
    "algorithm.estimator.lambda=1",
    "algorithm.ratio=token algorithm.averaging=token_mean",
    "algorithm.estimator.omega=1",
    "algorithm.estimator.normalisation=none",
    "algorithm.estimator.normalisation=batch",
]


def both_rows(*changes):
    return variants.variants("smoke", ["gagpo", "grpo"], changes)


def test_choices_of_the_row_are_overrides_with_a_key_of_their_own():
    found = variants.variants("smoke", ["gagpo"], ABLATIONS)
    assert [variant.name for variant in found[1:4]] == [
        "gagpo, algorithm.estimator.lambda=0",
        "gagpo, algorithm.estimator.lambda=1",
        "gagpo, algorithm.ratio=token, algorithm.averaging=token_mean",
    ]
    whole = common(found[0].recipe)
    assert len({key_of(whole, variant, 0) for variant in found}) == len(found) == 7
    assert (found[3].algorithm.ratio, found[3].algorithm.averaging) == ("token", "token_mean")
    assert [variant.name for variant in both_rows(f"gagpo: {ABLATIONS[0]}")] == [
        "gagpo",
        "gagpo, algorithm.estimator.lambda=0",
        "grpo",
    ]
    with pytest.raises(ValueError, match="gspo is none of the compared rows"):
        both_rows("gspo: algorithm.clip.low=0.1")
    on_policy = "algorithm.ratio=none algorithm.clip=null algorithm.averaging=token_mean"
    _, changed = variants.variants("smoke", ["gagpo"], [on_policy])
    assert changed.steps == 1, "without a ratio, one optimizer step a batch"


def test_an_override_is_checked_with_its_row_and_may_have_spaces():
    changes = ["'reinforce.update.adam_betas=[0.9, 0.99]' reinforce.rollout.initial=6"]
    first, second = variants.variants("smoke", ["grpo", "grpo"], changes)
    assert second.recipe.reinforce.update.adam_betas == (0.9, 0.99)
    assert (first.name, first.steps) == ("grpo", 2)


def common(recipe):
    artifact = Artifact("x", "0" * 64)
    names = ("cold_start", "questions", "test", "panel", "corpus")
    artifacts = dict.fromkeys(names, artifact)
    budget = Budget("sampled_tokens", 100.0)
    return Comparison("smoke", recipe, budget, **artifacts, environment=None, reader=None)


@pytest.mark.parametrize(
    ("change", "decides"),
    [
        ("verdict.confidence=0.9", False),
        ("evaluate.bootstrap=7", False),
        ("reinforce.trace_every=1", False),
        ("prepare.overlap_words=7", False),
        ("reinforce.iterations=7", True),  # bounds a variant that hardly spends the budget
        ("evaluate.top_p=0.5", True),
        ("reinforce.rollout.temperature=0.5", True),
        ("machine.threads=2", True),
    ],
)
def test_a_key_has_what_decides_a_result_and_nothing_else(change, decides):
    keys = []
    for changes in ([], [change]):
        recipe = recipes.load_changed("smoke", ["reinforce.algorithm=grpo", *changes])
        algorithm = schema.algorithm_of(recipe)
        trained = variants.without_idle_validation(recipe)
        variant = Variant("grpo", trained, algorithm)
        keys.append([key_of(common(recipe), variant, 0), key_of(common(recipe), variant, 1)])
    assert (keys[0] != keys[1]) == decides
    assert keys[0][0] != keys[0][1]


def test_a_result_of_another_panel_is_not_used_again():
    own = common(recipes.load("smoke"))
    other = replace(own, panel=Artifact("x", "1" * 64))
    assert key_of(own, None, 0) != key_of(other, None, 0)


def test_a_result_of_other_sources_is_not_used_again(monkeypatch):
    own = common(recipes.load("smoke"))
    before = key_of(own, None, 0)
    counted = {file.stem for file in keys.import_closure(Path(measure.__file__))}
    assert counted >= {"loop", "rollout", "estimate", "reward", "advantage", "update", "exam"}
    monkeypatch.setattr(keys, "source_digest", lambda file: file.name)
    assert key_of(own, None, 0) != before


@pytest.mark.parametrize("part", ["model", "trees", "rewards"])
def test_a_result_of_another_reward_model_is_not_used_again(part):
    recipe = recipes.load("tiny-reward-model")
    (variant,) = variants.variants("tiny-reward-model", ["grpo"], [])
    artifact = Artifact("x", "0" * 64)
    began = PublishedRewardModel(artifact, artifact, artifact)
    own = replace(common(recipe), reward_model=began)
    changed = replace(began, **{part: Artifact("x", "1" * 64)})
    other = replace(own, reward_model=changed)
    assert key_of(own, variant, 0) != key_of(other, variant, 0)
    assert key_of(own, None, 0) == key_of(other, None, 0), "the cold start does not depend on it"


def test_each_variant_and_seed_spends_the_budget_and_leaves_a_file(project):
    found = results()
    assert set(found) == {(name, seed) for name in ("cold start", *ROWS) for seed in SEEDS}
    for (name, seed), result in found.items():
        assert len(result["right"]) == SIZES["evaluate"]["questions"]
        assert result["kinds"] == found["cold start", 0]["kinds"], "all seeds have the same exam"
        assert set(result["kinds"]) == set(KINDS)
        assert result["success"] == sum(result["right"]) / len(result["right"])
        if name == "cold start":
            continue
        files = list(Path(".beamline/ledger/toy/compare", name, f"seed-{seed}").glob(ROLLOUTS))
        if name != ROWS[0]:  # whose first batch is the one that this variant learns from, too
            files += Path(".beamline/ledger/toy/compare", ROWS[0], f"seed-{seed}").glob(FIRST)
        rollouts = [json.loads(file.read_text()) for file in files]
        assert len(rollouts) == result["iterations"]
        for kind in ("sampled_tokens", "tool_calls", "environment_steps"):
            assert result["spent"][kind] == sum(one["metrics"][kind] for one in rollouts)
        last = max(rollouts, key=lambda one: one["step"]["iteration"])["metrics"]["sampled_tokens"]
        assert result["spent"]["sampled_tokens"] - last < 100 <= result["spent"]["sampled_tokens"]
        curve = result["curve"]
        assert {len(values) for values in curve.values()} == {result["iterations"]}
        assert set(curve) >= set(MEASURES) - NOT_ALWAYS
        assert curve["environment_steps"][-1] == result["spent"]["environment_steps"]
        assert result["algorithm"]["ratio"] == {"reinforce": "none", "ppo": "token"}[name]
    assert [found[name, 0]["steps_a_batch"] for name in ROWS] == [1, 2]
    text = Path("reports/toy/comparison.md").read_text()
    parts = text.split("| variant | alarm |")[0].split("| variant |")
    table, kinds, differences = (part.splitlines() for part in parts[1:])
    for rows in (table, kinds):
        names = [line.split("|")[1].strip() for line in rows[2:5]]
        assert names == ["cold start", *ROWS]
    assert kinds[0].split("|")[:2] == [" play (%) ", " toy (%) "]
    assert differences[3] and not differences[4], "the better of the rows is the baseline"
    for figure in ("comparison", "comparison_curves"):
        assert Path(f"reports/toy/{figure}.png").stat().st_size > 5000

    whole = panels.load(PANEL)
    order = [task["id"] for task in whole.tasks[: SIZES["evaluate"]["questions"]]]
    files = Path(".beamline/ledger/toy/compare").rglob("evaluate/*-rollout-*/record.json")
    asked = [json.loads(file.read_text())["questions"] for file in files]
    assert asked == [order] * len(found), "each seed asks the same tasks in the same order"
    summary = panels.summary(whole, 0, len(order))
    assert all(result["panel"] == summary for result in found.values())
    assert text.endswith(f"\n{panels.sentence(summary)}\n")


def test_a_finished_result_is_not_computed_again_with_its_file_alone(project):
    found, before = results(), records()
    assert run(seeds=SEEDS) == found
    assert records() == before
    shutil.rmtree(".beamline")
    assert run(seeds=SEEDS) == found, "the files are enough"
    assert not Path(".beamline/ledger/toy/compare").exists()
    more = run(["ppo"], budget="sampled_tokens=200")
    assert more["ppo", 0]["spent"]["sampled_tokens"] >= 200
    assert more["ppo", 0]["key"] != found["ppo", 0]["key"]
    assert more["cold start", 0] == found["cold start", 0]


def test_results_of_an_older_form_are_computed_anew(project):
    found = results()
    kept = ("variant", "seed", "key", "right", "success")
    older = {0: [1], 7: {name: found["reinforce", 7][name] for name in kept}}
    for seed, result in older.items():
        comparison_report.place("toy", "reinforce", seed).write_text(json.dumps(result))
    assert run(["reinforce"], seeds=SEEDS) == found


def test_killed_comparison_resumes_from_the_ledger(project, monkeypatch):
    whole = results()
    forget("ppo")
    asked = measure.answer

    def killed(exam, step, policy):
        if "/ppo/" in step.stage:
            raise KeyboardInterrupt
        return asked(exam, step, policy)

    monkeypatch.setattr(measure, "answer", killed)
    with pytest.raises(KeyboardInterrupt):
        run()
    before = records()
    assert any("/ppo/" in place for place in before), "it was trained"
    monkeypatch.setattr(measure, "answer", asked)
    again = run()
    assert before.items() < records().items(), "nothing that was finished runs again"
    for place, result in again.items():
        assert result["right"] == whole[place]["right"]


def test_budget_may_grow_and_shrink(project):
    forget("reinforce")
    few = run(["reinforce"], budget="environment_steps=8")["reinforce", 0]
    before = records()
    many = run(["reinforce"], budget="environment_steps=24")["reinforce", 0]
    assert before.items() < records().items()
    assert many["iterations"] > few["iterations"]
    again = run(["reinforce"], budget="environment_steps=8")["reinforce", 0]  # a policy now pruned
    for result in (few, again):
        result["spent"]["seconds"] = result["curve"]["seconds"] = 0
    assert again == few


def test_overrides_are_variants_of_their_own(project):
    changes = ["reinforce.update.mini_batches=4"]
    found = run(["grpo"], changes, budget="sampled_tokens=1")
    steps = {name: result.get("steps_a_batch") for (name, _), result in found.items()}
    assert steps == {
        "cold start": None,
        "reinforce": 1,
        "ppo": 2,
        "grpo": 2,
        "grpo, reinforce.update.mini_batches=4": 4,
    }
    recipe = yaml.safe_load(Path("params/toy.yaml").read_text())
    assert recipe["reinforce"]["update"]["mini_batches"] == 1, "the recipe stays as it is"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere", "--budget", BUDGET], "no recipe 'nowhere'"),
        (["toy", "--budget", BUDGET, "--algorithms", "grpo", "magic"], "'magic' is no row"),
        (["toy"], "--budget"),
        (["toy", "--budget", "iterations=3"], "'sampled_tokens', 'tool_calls'"),
        (["toy", "--budget", "tool_calls=-3"], "--budget tool_calls=-3: write kind=amount"),
        (["toy", "--budget", "tool_calls=inf"], "--budget tool_calls=inf"),
        (["toy", "--budget", BUDGET, "--overrides", "cold_start.steps=3"], "variants share"),
        (
            ["toy", "--budget", BUDGET, "--algorithms", "grpo", "--baseline", "gspo"],
            "gspo is no variant (did you mean 'grpo'?): choose one of ['cold start', 'grpo']",
        ),
        (
            ["toy", "--budget", BUDGET, "--overrides", "reinforce.magic=3"],
            "no key 'reinforce.magic'",
        ),
        (["toy", "--budget", BUDGET, "--overrides", "reinforce.questions=x"], "params/toy.yaml"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_any_work(project, capsys, arguments, said):
    try:
        status = compare.main(arguments)
    except SystemExit as refused:  # by the parser of the command line
        status = refused.code
    assert status == 2
    assert said in capsys.readouterr().err


def test_all_faults_of_the_variants_are_named_at_once(project):
    with pytest.raises(ValueError) as raised:
        variants.variants("toy", ["magic", "grpo"], ["prepare.questions.train=3"])
    assert "magic" in str(raised.value)
    assert "prepare.questions.train=3" in str(raised.value)


def test_every_variant_has_a_folder_of_its_own():
    names = ["a, b=1", "a, b=2", "a/b=1", "a b=1", "a, " + "x" * 300, "a, " + "x" * 301]
    folders = [comparison_report.slug(name) for name in names]
    assert len(set(folders)) == len(names)
    assert all("/" not in folder and len(folder) < 120 for folder in folders)
