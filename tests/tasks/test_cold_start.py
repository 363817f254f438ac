import copy
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks import families
from flows.runs import ledger_mirror
from params.schema.base import Machine
from params.schema.cold_start import ColdStart
from tasks.cold_start import ColdStartInputs, cold_start
from tasks.learning import fine_tuning, passes
from tasks.learning.learner_group import open_learners
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import Ledger, SubStep, newest_checkpoint
from tasks.policy import checkpoint
from tasks.policy.load_model import load_tokenizer
from tasks.policy.resident import Learner
from tasks.policy.small_copy import small_copy
from tasks.trees.tables import write_table
from tasks.trees.tree import PROMPT, RESULT, TURN
from tests.launch_learners import forked_learners
from tests.learner_processes import kill_once

ROOT = Path(__file__).parents[2]
STEP = SubStep("toy", "cold_start", 0, 5)
MACHINE = Machine(threads=1, device="cpu", precision="float32")
SETTINGS = ColdStart(
    steps=6,
    batch=4,
    micro_batch=4,
    learning_rate=1e-2,
    warmup_steps=1,
    weight_decay=0.01,
    save_every=2,
)


@pytest.fixture(scope="module")
def initial(policy, tokenizer, tmp_path_factory):
    """The folder of a very small policy."""
    folder = tmp_path_factory.mktemp("policy") / "initial"
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made_traces(count=10):
    """Traces of unequal lengths: a prompt, a turn, a result, a turn."""
    random = np.random.default_rng(0)
    rows = []
    for number in range(count):
        parts = random.integers(2, 7, 4)
        tokens = random.integers(5, 270, parts.sum()).tolist()
        rows.append(
            {
                "question_id": f"q{number}",
                "tokens": tokens,
                "trained": np.repeat([0, 1, 0, 1], parts).astype(bool).tolist(),
            }
        )
    return rows


def train(initial, rows, settings=SETTINGS, machine=MACHINE, **watch):
    """Run the verb in the folder that is the working one; its record."""
    write_table(pa.Table.from_pylist(rows), Path("traces.parquet"))
    traces = Artifact.at(Path("traces.parquet"))
    with ledger_mirror.opened() as ledger:
        step = replace(STEP, ledger=ledger)
        inputs = ColdStartInputs(Artifact.at(initial), traces, settings, machine)
        return cold_start(step, inputs, **watch)


def test_a_trace_is_a_tree_of_its_own_tokens_and_nothing_else():
    row = {"question_id": "q", "tokens": [7, 8, 9, 10, 11], "trained": [0, 1, 1, 0, 1]}
    made = fine_tuning.tree_of(row)
    parts = [(node.kind, node.tokens.tolist()) for node in made.tree.nodes]
    assert parts == [(PROMPT, [7]), (TURN, [8, 9]), (RESULT, [10]), (TURN, [11])]
    assert [credit.advantages.tolist() for credit in made.credits] == [[1, 1, 1]]


@torch.no_grad()
def loss_of_rows(model, rows):
    """The mean loss of the trained tokens, each row by itself."""
    terms = []
    for row in rows:
        tokens = torch.tensor(row["tokens"])
        logprobs = torch.log_softmax(model(input_ids=tokens[None]).logits[0], -1)
        terms += [-logprobs[t - 1, tokens[t]] for t, own in enumerate(row["trained"]) if own]
    return float(torch.stack(terms).mean())


# learned positions; windows; states, convolutions and decays; one that learns as rows; experts
KINDS = ["gpt2", "mistral", "qwen3_5_text", "lfm2", "jamba", "falcon_mamba", "qwen3_moe"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_a_batch_is_that_of_its_own_tokens(kind):
    """Whatever the traces share; a first token that is marked, and a trace without own tokens."""
    model = small_copy(families.config_of(kind), 2**20)
    learner = Learner(Path("policy"), model, None)
    random = np.random.default_rng(0)
    system = random.integers(3, 60, 20).tolist()
    rows = [
        {"question_id": "q", "tokens": [*system, *more], "trained": [False] * 22 + [True] * (n - 2)}
        for n, more in ((n, random.integers(3, 60, n).tolist()) for n in (5, 23, 70))
    ]
    rows += [{"question_id": "q", "tokens": [4, 5, 6], "trained": [True, False, True]}]
    rows += [{"question_id": "q", "tokens": [4, 5, 6], "trained": [False] * 3}]
    expected = loss_of_rows(model, [*rows[:3], {**rows[3], "trained": [False, False, True]}])
    settings = fine_tuning.optimizer_settings(SETTINGS, 3, rows)
    checkpoint.prepare_optimizer(learner, settings)
    batch = [fine_tuning.tree_of(row) for row in rows]
    loss = fine_tuning.imitate(learner, batch, settings, MACHINE)
    assert loss == pytest.approx(expected, abs=1e-5)
    assert fine_tuning.imitate(learner, batch[:3], settings, MACHINE) < expected


def test_a_system_message_is_computed_once_and_only_own_tokens_have_logits(policy, monkeypatch):
    random = np.random.default_rng(1)
    rows = [
        {
            "question_id": "q",
            "tokens": [*range(5, 30), *random.integers(30, 270, 20).tolist()],
            "trained": [False] * 35 + [True] * 10,
        }
        for _ in range(4)
    ]
    seen = []
    logprobs = passes.token_logprobs

    def watched(model, states, targets, *rest):
        seen.append(len(targets))
        return logprobs(model, states, targets, *rest)

    def computed(forest):
        seen.append(forest.tokens.shape[1])

    monkeypatch.setattr(passes, "token_logprobs", watched)
    monkeypatch.setattr(passes, "remember", computed)
    monkeypatch.setattr(passes, "lanes", lambda device, pieces: 1)
    learner = Learner(Path("policy"), copy.deepcopy(policy), None)
    settings = fine_tuning.optimizer_settings(SETTINGS, 0, rows)
    checkpoint.prepare_optimizer(learner, settings)
    fine_tuning.imitate(learner, [fine_tuning.tree_of(row) for row in rows], settings, MACHINE)
    assert seen == [25 + 4 * 20, 4 * 10]


def test_rows_without_a_token_are_not_trained(initial, folder):
    """And the policy is that of the same training without them."""
    model = AutoModelForCausalLM.from_pretrained(initial)
    tokens = model.config.vocab_size
    model.resize_token_embeddings(tokens + 20, mean_resizing=False)
    padded = folder / "padded"
    model.save_pretrained(padded)
    load_tokenizer(initial).save_pretrained(padded)
    short = SETTINGS.model_copy(update={"steps": 2, "weight_decay": 0.0})
    trained = [
        AutoModelForCausalLM.from_pretrained(
            artifacts.output(train(policy, made_traces(), short), "policy").path
        ).get_input_embeddings()
        for policy in (padded, initial)
    ]
    before = model.get_input_embeddings().weight
    assert torch.equal(trained[0].weight[tokens:], before[tokens:])
    assert torch.allclose(trained[0].weight[:tokens], trained[1].weight, atol=1e-6)
    assert not torch.allclose(trained[1].weight, before[:tokens], atol=1e-4)


def test_an_observed_token_that_nothing_follows_changes_nothing(initial, folder):
    # a token that something follows is context; as a label it must not count
    short = SETTINGS.model_copy(update={"steps": 2})
    digests = []
    for ending in ([9, 9], [200, 100]):
        rows = [
            {**row, "tokens": row["tokens"] + ending, "trained": row["trained"] + [False] * 2}
            for row in made_traces()
        ]
        digests.append(artifacts.output(train(initial, rows, short), "policy").digest)
    assert digests[0] == digests[1]
    rows = [{**row, "trained": [*row["trained"][:-2], True, True]} for row in rows]
    assert artifacts.output(train(initial, rows, short), "policy").digest != digests[1]


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_a_batch_in_micro_batches_is_learnt_from_as_a_whole(initial, folder, unbroken, micro_batch):
    """Ten uneven traces in batches of four: the last batch of a pass is smaller."""
    in_parts = SETTINGS.model_copy(update={"micro_batch": micro_batch})
    made = train(initial, made_traces(), in_parts)
    assert [point["step"] for point in made["curve"]] == list(range(1, 7))
    losses = [[point["loss"] for point in record["curve"]] for record in (made, unbroken)]
    np.testing.assert_allclose(*losses, atol=1e-4)


def test_passes_in_bf16_learn_nearly_the_same_and_leave_float32(initial, folder, unbroken):
    half = MACHINE.model_copy(update={"precision": "bfloat16"})
    made = train(initial, made_traces(), machine=half)
    losses = [[point["loss"] for point in record["curve"]] for record in (made, unbroken)]
    assert losses[0] != losses[1]
    np.testing.assert_allclose(*losses, atol=0.05)
    model = AutoModelForCausalLM.from_pretrained(
        artifacts.output(made, "policy").path, dtype="auto"
    )
    assert model.dtype is torch.float32


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder in which a training was not interrupted."""
    return tmp_path_factory.mktemp("unbroken")


@pytest.fixture(scope="module")
def unbroken(initial, place):
    """The record of a training that nothing interrupted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        return train(initial, made_traces())


def test_training_lowers_the_loss_and_leaves_a_policy_and_a_curve(initial, folder):
    longer = SETTINGS.model_copy(update={"steps": 30})
    made = train(initial, made_traces(), longer)
    assert [point["step"] for point in made["curve"]] == list(range(1, 31))
    assert made["metrics"]["loss"] == made["curve"][-1]["loss"] < made["curve"][0]["loss"] - 0.5
    assert made["curve"][-1]["learning_rate"] < 0.1 * longer.learning_rate
    trained = Path(artifacts.output(made, "policy").path)
    before, after = (AutoModelForCausalLM.from_pretrained(place) for place in (initial, trained))
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)
    assert not list(artifacts.ROOT.rglob(".*")), "no checkpoint is left"


def test_the_tokenizer_is_handed_on_as_it_was(initial, tokenizer, folder):
    short = SETTINGS.model_copy(update={"steps": 1})
    trained = artifacts.output(train(initial, made_traces(2), short), "policy").path
    handed_on = PreTrainedTokenizerFast.from_pretrained(trained)
    assert handed_on.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert handed_on.chat_template == tokenizer.chat_template
    assert handed_on.eos_token == tokenizer.eos_token


KILLED = """
import os, signal, time
from pathlib import Path
from tests.tasks import test_cold_start as test

store = os.environ.get("BEAMLINE_STORE")

def sent():
    return list(Path(store).glob("toy/cold_start/.*.scratch/checkpoint-4/record.json"))

def deadly(done, shown):
    if done == 5:
        while store and not sent():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

test.train(Path({policy!r}), test.made_traces(), advance=deadly)
"""


def kill_while_training(initial):
    code = KILLED.format(policy=str(initial))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    killed = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr


def checkpoints():
    return sorted(
        path.name for path in artifacts.ROOT.glob("toy/cold_start/.*.scratch/checkpoint-*")
    )


@pytest.mark.kills
def test_a_killed_training_goes_on_and_ends_as_an_unbroken_one(initial, folder, unbroken):
    kill_while_training(initial)
    assert checkpoints() == ["checkpoint-2", "checkpoint-4"]
    (scratch,) = artifacts.ROOT.glob("toy/cold_start/.*.scratch")
    half = scratch / "checkpoint-6"  # as if the kill had come while this one was written
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half of the weights")

    steps = []
    made = train(initial, made_traces(), advance=lambda done, shown: steps.append(done))
    assert steps[0] == 5, "it goes on at its newest whole checkpoint"
    assert made["artifacts"]["policy"]["digest"] == unbroken["artifacts"]["policy"]["digest"]
    assert made["curve"] == unbroken["curve"]
    assert checkpoints() == []


@pytest.mark.kills
def test_a_training_that_was_killed_here_goes_on_elsewhere(initial, folder, unbroken, monkeypatch):
    monkeypatch.setenv(ledger_mirror.VARIABLE, str(folder / "shared"))
    for name in ("first", "second"):
        (folder / name).mkdir()
    monkeypatch.chdir(folder / "first")
    kill_while_training(initial)
    monkeypatch.chdir(folder / "second")
    steps = []
    made = train(initial, made_traces(), advance=lambda done, shown: steps.append(done))
    assert steps[0] == 5
    assert made["artifacts"]["policy"]["digest"] == unbroken["artifacts"]["policy"]["digest"]
    assert made["cursor"] == unbroken["cursor"] == SETTINGS.steps * SETTINGS.batch
    assert made["questions"] == sorted(f"q{number}" for number in range(10))
    assert checkpoints() == []
    assert [p.name[:15] for p in (folder / "shared/toy/cold_start").iterdir()] == [
        "0000-cold_start"
    ]


def test_a_training_that_was_killed_at_its_very_end_repeats_the_steps_since_its_checkpoint(
    initial, folder, unbroken, monkeypatch
):
    # all steps are done, but no record has been written
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "finish", lambda *_: pytest.fail("the end"))
        with pytest.raises(pytest.fail.Exception, match="the end"):
            train(initial, made_traces())
    assert checkpoints() == ["checkpoint-2", "checkpoint-4"]
    made = train(initial, made_traces())
    assert made["artifacts"]["policy"]["digest"] == unbroken["artifacts"]["policy"]["digest"]
    assert made["metrics"] == unbroken["metrics"]


def test_the_newest_whole_checkpoint_is_taken(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    for number in (90, 100, 110, 120):
        checkpoint = tmp_path / f"checkpoint-{number}"
        checkpoint.mkdir()
        (checkpoint / "model.safetensors").write_bytes(b"the weights")
        if number != 110:  # cut while it was written
            Ledger().seal(checkpoint)
    (tmp_path / "checkpoint-120" / "model.safetensors").write_bytes(b"the weig")  # truncated
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-100"


OF_TRAINER = {  # what transformers' Trainer (5.19) made of the same: loss and rate of each step
    "loss": [5.751841, 5.775801, 5.702085, 4.944730, 4.927778, 5.047452],
    "learning_rate": [0.0, 0.01, 0.009045085, 0.006545085, 0.003454915, 0.0009549150],
}


@pytest.mark.parametrize("name", OF_TRAINER)
def test_order_schedule_and_optimizer_are_those_of_the_trainer(name, unbroken):
    found = [point[name] for point in unbroken["curve"]]
    np.testing.assert_allclose(found, OF_TRAINER[name], rtol=1e-5)


def test_a_single_step_has_a_curve(initial, folder):
    settings = SETTINGS.model_copy(update={"steps": 1, "save_every": 500})
    assert [point["step"] for point in train(initial, made_traces(2), settings)["curve"]] == [1]


# ---------------------------------------------------------------- several processes


def test_processes_learn_as_one_does(initial, folder, place, unbroken):
    """Also where one is killed between two checkpoints, and where training is called again."""
    several = MACHINE.model_copy(update={"processes": 2})
    rows, mark = made_traces(), folder / "killed"

    def kill_after_three(finished, shown):
        if finished == 3:
            learners.run(kill_once, mark)

    with forked_learners(2), open_learners(several) as learners:
        made = train(initial, rows, machine=several, learners=learners)
        shutil.rmtree(artifacts.ROOT)
        again = train(initial, rows, machine=several, learners=learners, advance=kill_after_three)
        assert mark.exists(), "it was killed"
    assert made["artifacts"] == again["artifacts"]
    assert made["curve"] == again["curve"]
    for point, expected in zip(made["curve"], unbroken["curve"], strict=True):
        assert point == pytest.approx(expected, rel=1e-4)
    together, alone = (
        AutoModelForCausalLM.from_pretrained(root / artifacts.output(record, "policy").path)
        for root, record in ((folder, made), (place, unbroken))
    )
    for weight, expected in zip(together.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-4)


def test_experts_go_on_from_a_checkpoint(tokenizer, tmp_path, monkeypatch):
    """They are saved as matrices of each expert, and learned as one tensor."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=len(tokenizer), **sizes, **heads, **experts
    )
    policy = tmp_path / "policy"
    AutoModelForCausalLM.from_config(config).save_pretrained(policy)
    tokenizer.save_pretrained(policy)

    def stop(done, shown):
        if done == 5:
            raise KeyboardInterrupt

    made = {}
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        if name == "stopped":
            with pytest.raises(KeyboardInterrupt):
                train(policy, made_traces(), advance=stop)
            assert checkpoints() == ["checkpoint-2", "checkpoint-4"]
        made[name] = train(policy, made_traces())
    assert made["whole"]["artifacts"] == made["stopped"]["artifacts"]
    assert made["whole"]["curve"] == made["stopped"]["curve"]
