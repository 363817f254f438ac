"""The whole pipeline on the smoke recipe, with real processes; tests/chaos kills it."""

import base64
import gzip
import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import yaml
from huggingface_hub import ModelCard
from prefect.context import refresh_global_settings_context

from flows.commands import compare
from flows.tracking import store, traces
from tasks.ledger.substeps import Ledger, SubStep
from tasks.trees.tables import load_questions, read_rows
from tests.checkout import call, environment

REPRO = (sys.executable, "-m", "dvc", "repro", "verdict@smoke")
STAGES = tuple(
    f"{stage}@smoke"
    for stage in (
        *("champion", "prepare", "cold_start", "reward_model"),
        *("reinforce", "evaluate", "verdict"),
    )
)


def digests(folder):
    locked = yaml.safe_load((folder / "dvc.lock").read_text())["stages"]
    return {out["path"]: out["md5"] for stage in STAGES for out in locked[stage]["outs"]}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, smoke_run):
    """A copy of a finished run, which tests may change; and what the run said."""
    source, said = smoke_run
    folder = tmp_path_factory.mktemp("unbroken") / "checkout"
    shutil.copytree(source, folder, symlinks=True)
    return folder, said


def test_a_run_ends_with_the_table_and_dvc_finds_nothing_left_to_do(unbroken):
    folder, said = unbroken
    table = (folder / "reports/smoke/table.md").read_text()
    assert table in said
    assert "its page          reports/smoke/page.html, which a browser opens\n" in said
    assert "success, arithmetic (%)" in table
    verdict = json.loads((folder / "reports/smoke/verdict.json").read_text())
    assert (
        f"verdict: {'promote' if verdict['promote'] else 'reject'}: {verdict['reason']}\n" in said
    )
    assert (verdict["against"], verdict["champion"], verdict["questions"]) == (
        "cold start",
        None,
        30,
    )
    assert {gate["table"] for gate in verdict["gates"]} >= {"questions", "traces", "rewards"}
    again = call(folder, *REPRO)
    assert "Data and pipelines are up to date." in again.stdout
    assert "Running stage" not in again.stdout


def test_runs_in_mlflow_have_the_figures_of_the_table(unbroken):
    folder, _ = unbroken
    table = json.loads((folder / "reports/smoke/metrics.json").read_text())
    client = store.connect(f"sqlite:///{folder}/.beamline/mlflow.db")
    experiment = client.get_experiment_by_name(store.EXPERIMENT).experiment_id
    wanted = {
        "pipeline": f"tags.`{store.KIND_TAG}` = 'pipeline'",
        "evaluate": "tags.stage = 'evaluate'",
    }
    for name, tag in wanted.items():
        [run] = client.search_runs([experiment], tag)
        metrics, measured = run.data.metrics, table["success"]["trained"]
        assert metrics["success/trained"] == pytest.approx(measured["mean"]), name
        assert metrics["success/trained_high"] == pytest.approx(measured["high"]), name
        assert run.data.tags["mlflow.source.name"].startswith("flows/")
        if name == "pipeline":
            assert metrics["seconds/all"] > metrics["seconds/reinforce"] > 0
            assert metrics["promote"] in (0, 1)
            assert {given.dataset.name for given in run.inputs.dataset_inputs} == {
                *("smoke/traces", "smoke/train", "smoke/validation", "smoke/test")
            }


def test_policy_is_checked_once_and_each_stage_that_learns_says_so(unbroken):
    folder, said = unbroken
    lines = re.findall("^policy check: .*", said, re.M)
    assert len(lines) == 2 and lines[0] == lines[1], "cold_start and reinforce"
    assert lines[0].startswith(
        "policy check: 2 layers full_attention, learned as trees; structure (float32) "
    )
    (record,) = (folder / ".beamline/ledger/smoke/policy_check").glob("*-check_policy-*/")
    metrics = json.loads((record / "record.json").read_text())["metrics"]
    client = store.connect(f"sqlite:///{folder}/.beamline/mlflow.db")
    experiment = client.get_experiment_by_name(store.EXPERIMENT).experiment_id
    for stage in ("cold_start", "reinforce"):
        [run] = client.search_runs([experiment], f"tags.stage = '{stage}'")
        assert run.data.tags["policy_check"] == lines[0]
        assert {name: run.data.metrics[name] for name in metrics} == metrics
    text = (folder / "reports/smoke/page.html").read_text()
    assert json.loads(re.search('id="data">(.*?)</script>', text)[1])["policy_check"] == lines[0]


def test_page_and_traces_name_each_other(unbroken):
    folder, _ = unbroken
    client = store.connect(f"sqlite:///{folder}/.beamline/mlflow.db")
    experiment = client.get_experiment_by_name(store.EXPERIMENT).experiment_id
    [run] = client.search_runs([experiment], f"tags.`{store.KIND_TAG}` = 'pipeline'")
    assert run.data.tags["page"] == "reports/smoke/page.html"
    kept = Path(client.download_artifacts(run.info.run_id, "page.html"))
    assert kept.read_text() == (folder / "reports/smoke/page.html").read_text()
    data, blocks = page_of(folder)
    assert run.info.run_id in data["links"]["run"]
    named = {}  # place in the page -> trace
    for number, block in blocks.items():
        for question in block["questions"]:
            for leaf, entry in enumerate(question["leaves"]):
                if "trace" in entry:
                    place = traces.place_in_page("smoke", int(number), question["id"], leaf)
                    named[place] = entry["trace"]
    found = client.search_traces(locations=[experiment], include_spans=False)
    assert named == {one.info.tags["page"]: one.info.trace_id for one in found}
    assert len(named) == 6, "the leaves of one question of the first iteration"
    evaluated = blocks["evaluation"]["questions"]
    assert len(evaluated) == 30
    for question in evaluated:  # both agents' turns are in the ledger
        assert [leaf["of"] for leaf in question["leaves"]] == ["cold start", "trained"]
        assert all(question["nodes"][leaf["node"]]["size"] > 1 for leaf in question["leaves"])


def test_every_result_names_the_digest_of_the_panel_that_was_asked(unbroken):
    folder, _ = unbroken
    panel = json.loads((folder / "data/smoke/panels/test.json").read_text())
    text = json.dumps(
        {name: panel[name] for name in ("source", "split", "tasks")},
        sort_keys=True,
        separators=(",", ":"),
    )
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert panel["digest"] == digest
    for name in ("metrics", "verdict"):
        named = json.loads((folder / f"reports/smoke/{name}.json").read_text())["panel"]
        assert (named["digest"], named["of"]) == (digest, {"digest": digest, "tasks": 30})
    assert f"\nPanel {digest[:12]}: 30 tasks " in (folder / "reports/smoke/table.md").read_text()
    client = store.connect(f"sqlite:///{folder}/.beamline/mlflow.db")
    experiment = client.get_experiment_by_name(store.EXPERIMENT).experiment_id
    runs = client.search_runs([experiment], f"tags.panel = '{digest}'")
    kinds = {run.data.tags.get("stage", run.data.tags.get(store.KIND_TAG)) for run in runs}
    assert kinds == {"evaluate", "pipeline"}
    records = (folder / "data/smoke/records/evaluate.jsonl").read_text().splitlines()
    asked = [one["questions"] for one in map(json.loads, records) if one["verb"] == "rollout"]
    assert asked == [[task["id"] for task in panel["tasks"]]] * 2


def test_policies_answer_held_out_questions_as_the_recipe_says(unbroken):
    folder, _ = unbroken
    wanted = yaml.safe_load((folder / "params/smoke.yaml").read_text())["evaluate"]
    records = (folder / "data/smoke/records/evaluate.jsonl").read_text().splitlines()
    asked = [one for one in map(json.loads, records) if one["verb"] == "rollout"]
    assert [one["stage"] for one in asked] == ["evaluate/cold_start", "evaluate/trained"]
    for inputs in (one["inputs"] for one in asked):
        assert float(inputs["top_p"]) == wanted["top_p"] < 1
        assert int(inputs["size"]) == wanted["questions"]
        budget = json.loads(inputs["budget"])
        assert (budget["temperature"], budget["leaves"]) == (wanted["temperature"], 1)


def test_the_trained_agent_answers_in_a_terminal_as_in_the_evaluation(unbroken):
    folder, _ = unbroken
    rows = read_rows(folder / "data/smoke/evaluation.parquet")
    tried = {row["question"]: row for row in rows if row["agent"] == "trained"}
    test = load_questions(folder / "data/smoke/questions/test.parquet")
    number = next(n for n, each in enumerate(test) if tried[each.id]["outcome"] == "answer")
    asked = call(folder, sys.executable, "-m", "flows.ask", "smoke", "--task", str(number))
    assert asked.returncode == 0, asked.stdout
    assert f"\nanswer:   {tried[test[number].id]['answer']}\n" in asked.stdout
    assert f"question: {test[number].text}\n" in asked.stdout
    assert asked.stdout.count("\ncall: ") == tried[test[number].id]["tool_calls"]

    piped = subprocess.run(
        [sys.executable, "-m", "flows.ask", "smoke"],
        cwd=folder,
        env=environment(),
        input=b"What is 7 times 8?\n\x1b[2JWhat is \xff?\n\nnever asked\n",
        capture_output=True,
    )
    said = piped.stdout.decode()
    assert piped.returncode == 0, piped.stderr
    assert said.count("\nquestion: ") == 2
    assert "\x1b" not in said
    assert "never asked" not in said


def test_exported_trajectories_load_as_a_dataset_of_chats(unbroken, tmp_path):
    folder, _ = unbroken
    export = (sys.executable, "-m", "flows.export", "smoke", "--out", str(tmp_path))
    rewards = read_rows(folder / "data/smoke/trees/rewards.parquet")
    least = sorted(row["reward"] for row in rewards)[len(rewards) // 2]
    ran = call(folder, *export, "--iterations", "1", "1", "--min-reward", str(least), "--gzip")
    assert ran.returncode == 0, ran.stdout
    written = datasets.load_dataset(
        "json",
        data_files=str(tmp_path / "trajectories.jsonl.gz"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    kept = [row for row in rewards if row["iteration"] == 1 and row["reward"] >= least]
    columns = ("question", "leaf", "reward", "sampled_tokens", "outcome")
    assert [[line[c] for c in columns] for line in written] == [
        [row[c] for c in columns] for row in kept
    ]
    for line, row in zip(written, kept, strict=True):
        roles = [message["role"] for message in line["messages"]]
        assert roles == ["user", *["assistant", "tool"] * row["tool_calls"], "assistant"]
        if row["answer"] is not None:
            assert row["answer"] in line["messages"][-1]["content"]
    ran = call(folder, *export, "--split", "test")
    assert ran.returncode == 0, ran.stdout
    lines = [json.loads(line) for line in (tmp_path / "evaluation.jsonl").open()]
    answers = read_rows(folder / "data/smoke/evaluation.parquet")
    columns = ("agent", "question", "success", "answer")
    assert [[line[c] for c in columns] for line in lines] == [
        [row[c] for c in columns] for row in answers
    ]


CARD_READER = """
import re, sys
code = re.findall(r"```python\\n(.*?)```", open("policy/README.md").read(), re.DOTALL)
exec("\\n".join(code[:2]).replace("<this folder>", "policy"))
print([name for name in sys.modules if name.split(".")[0] in ("flows", "params", "tasks")])
"""


def test_the_exported_policy_has_a_card_and_answers_alike(unbroken, tmp_path):
    folder, _ = unbroken
    before = digests(folder)["models/smoke/trained"]
    export = (sys.executable, "-m", "flows.export", "smoke", "--out", str(tmp_path))
    assert call(folder, *export, "--license", "mit").returncode == 0
    card = ModelCard.load(tmp_path / "policy/README.md")
    verdict = json.loads((folder / "reports/smoke/verdict.json").read_text())
    [result] = card.data.eval_results
    assert (card.data.license, card.data.base_model) == ("mit", None)
    assert result.metric_value == verdict["means"]["trained"]
    table = (folder / "reports/smoke/table.md").read_text().strip()
    recipe = (folder / "params/smoke.yaml").read_text().strip()
    none = ("reports/", "models/smoke/champion", "models/smoke/teacher")  # not of the policy
    for told in (table, verdict["reason"], recipe, *digests(folder)):
        assert told in card.text or told.startswith(none)
    asked = subprocess.run(
        [sys.executable, "-c", CARD_READER], cwd=tmp_path, text=True, capture_output=True
    )
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.endswith("\n[]\n"), "the code of a card needs nothing of the project"
    for file in (folder / "models/smoke/trained").iterdir():
        assert (tmp_path / "policy" / file.name).read_bytes() == file.read_bytes()
    assert not (folder / "models/smoke/trained/README.md").exists()
    file = folder / "params/smoke.yaml"
    file.write_text(recipe.replace("iterations: 2", "iterations: 3"))
    refused = call(folder, *export)
    file.write_text(recipe + "\n")
    assert refused.returncode == 2
    assert "'reinforce.iterations' is 3 and was 2: restore" in refused.stdout
    assert before == digests(folder)["models/smoke/trained"]


def test_a_comparison_of_algorithms_takes_the_stages_before_as_they_are(
    unbroken, api, monkeypatch, capfd
):
    folder, _ = unbroken
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PREFECT_API_URL", api)
    refresh_global_settings_context()
    wanted = ["--budget", "tool_calls=1", "--algorithms", "grpo", "arpo"]
    assert compare.main(["smoke", *wanted]) == 0
    said = capfd.readouterr().out
    assert "Running stage" not in said
    table = (folder / "reports/smoke/comparison.md").read_text()
    assert table in said
    *lines, panel = table.splitlines()
    assert [line.split()[1] for line in lines[2:5]] == ["cold", "grpo", "arpo"]
    assert panel in (folder / "reports/smoke/table.md").read_text(), "the same tasks"


def test_a_change_that_needs_pruned_weights_replays_the_updates(unbroken, api):
    folder, _ = unbroken
    before = published(folder)
    recipe = folder / "params/smoke.yaml"
    recipe.write_text(recipe.read_text().replace("wall_seconds: 20.0", "wall_seconds: 30.0"))
    stage = (sys.executable, "-m", "flows.reinforce", "smoke")
    ran = call(folder, *stage, PREFECT_API_URL=api)
    assert ran.returncode == 0, ran.stdout
    assert "has been pruned, and is needed again" in ran.stdout
    after = published(folder)
    assert after.keys() == before.keys()
    changed = {path.as_posix() for path in after if after[path] != before[path]}
    assert changed == {"data/smoke/records/reinforce.jsonl"}, "only what it says of the limits"


def test_published_policy_that_was_pruned_is_made_again(unbroken, api, monkeypatch):
    folder, _ = unbroken
    before = published(folder)
    monkeypatch.chdir(folder)
    ledger = Ledger()
    later = SubStep("smoke", "reinforce", 9, 0, ledger)
    ledger.retire(later, "update", 0, 100, ("policy",), small=("tokens",))
    assert not list(Path(".beamline/ledger/smoke/reinforce").glob("*-update-*/policy*"))
    ran = call(folder, sys.executable, "-m", "flows.reinforce", "smoke", PREFECT_API_URL=api)
    assert ran.returncode == 0, ran.stdout
    assert "has been pruned, and is needed again" in ran.stdout
    after = published(folder)
    assert {path.as_posix() for path in after if after[path] != before[path]} <= {
        "data/smoke/records/reinforce.jsonl"
    }
    assert after.keys() == before.keys()


def test_training_that_goes_on_has_a_page_of_its_own(unbroken, api):
    folder, _ = unbroken
    for place in (folder / ".beamline/ledger/smoke/reinforce").rglob("0000-*-*/"):
        shutil.rmtree(place)  # the first iteration is computed again, and then validated
    ran = call(folder, sys.executable, "-m", "flows.reinforce", "smoke", PREFECT_API_URL=api)
    assert ran.returncode == 0, ran.stdout
    shown, blocks = page_of(folder)
    assert (shown["finished"], list(blocks)) == (False, ["0"])
    assert [one["number"] for one in shown["iterations"]] == [0]


def page_of(folder):
    """Return the data of a run's page, and its blocks by name."""
    text = (folder / "reports/smoke/page.html").read_text()
    packed = dict(re.findall(r'id="block-(\w+)">(.*?)</script>', text))
    blocks = {n: json.loads(gzip.decompress(base64.b64decode(one))) for n, one in packed.items()}
    return json.loads(re.search('id="data">(.*?)</script>', text)[1]), blocks


def published(folder):
    """Return the content of each file that the stage reinforce has made."""
    outs = yaml.safe_load((folder / "dvc.lock").read_text())["stages"]["reinforce@smoke"]["outs"]
    paths = [Path(out["path"]) for out in outs]
    files = [path for out in paths for path in [folder / out, *(folder / out).rglob("*")]]
    return {file.relative_to(folder): file.read_bytes() for file in files if file.is_file()}


FORGETFUL = """

_write = RaggedCache.write


def _forgetting(self, new, layer, rows, positions):
    lost = (positions == 45)[:, None, None, None]
    new = torch.where(lost, 0.0, new) if layer == 0 else new
    return _write(self, new, layer, rows, positions)


RaggedCache.write = _forgetting
"""


def test_policy_that_would_be_sampled_wrongly_ends_the_run_with_one_message(unbroken):
    folder, _ = unbroken
    file = folder / "tasks/engines/transformers/cache.py"
    source = file.read_text()
    file.write_text(source + FORGETFUL)
    ran = call(folder, sys.executable, "-m", "flows.cold_start", "smoke")
    file.write_text(source)
    assert ran.returncode == 1, ran.stdout
    message = ran.stdout.splitlines()[-1]
    assert message.startswith(
        "cold_start smoke: the policy (2 layers full_attention) does not compute a tree as its own "
        "pass over rows does, with transformers on cpu "
    )
    assert "in structure, the sampler's log-probabilities differ by " in message
    assert "sample with another engine (engine.kind)" in message
    assert "the learner's" not in message and "Traceback" not in ran.stdout
    client = store.connect(f"sqlite:///{folder}/.beamline/mlflow.db")
    experiment = client.get_experiment_by_name(store.EXPERIMENT).experiment_id
    failed = "tags.stage = 'cold_start' and attributes.status = 'FAILED'"
    [run] = client.search_runs([experiment], failed)
    found = "policy_check/structure/sampler"
    assert run.data.metrics[found] > 100 * run.data.metrics[f"{found}_tolerance"]
