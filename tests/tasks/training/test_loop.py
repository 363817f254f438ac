"""What an iteration begins with, how it gathers its batches, and that each row goes through one.

The sub-steps are the real ones on a very small policy, called without Prefect.
"""

import copy
import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from flows.tracking import reinforce_report
from params.schema.algorithms import MOST_BATCHES, Kl, Overlong, load_algorithms
from params.schema.base import PARAMS
from params.schema.reinforce import Curriculum, Lora, RewardPart
from params.schema.reward_model import Again
from tasks.collect import collect, publish_collected
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tasks.policy import checkpoint, outcome_model, published_model, resident
from tasks.policy.machine import use_machine
from tasks.policy.published_model import PublishedRewardModel
from tasks.recipes import labels_of
from tasks.recipes import load as settings_of
from tasks.recipes.opening import reader_of
from tasks.reward_model import RewardModelInputs, reward_model
from tasks.rewards import scoring
from tasks.rewards.model import Model
from tasks.rollout import pass_order
from tasks.training import sampling
from tasks.training.agents import Agents
from tasks.training.inputs import collect_inputs
from tasks.training.iteration import in_order, policy_of
from tasks.training.loop import train
from tasks.training.sampling import EMPTY, sample, sample_part
from tasks.training.setup import Training, reward_model_of
from tasks.trees import dialogue as talk
from tasks.trees.tables import load_trees, read_rows, save_questions
from tasks.trees.tree import TURN, Observation, Question
from tests.agents import questions_with
from tests.sections import REWARD_MODEL

ROWS = load_algorithms()
SMOKE = settings_of("smoke")
STEP = SubStep("toy", "reinforce", 0, 7)


def trained(training, iterations):
    """The records of so many iterations."""
    return list(train(replace(training, most_iterations=iterations)))


def recipe(questions=2, leaves=4):
    """The smoke recipe, smaller still."""
    rollout = SMOKE.reinforce.rollout.model_copy(
        update={"leaves": leaves, "initial": leaves // 2, "branch": 1, "rows": 8}
    )
    sizes = {"turn_tokens": 6, "response_tokens": 24}
    return SMOKE.model_copy(
        update={
            "dialogue": SMOKE.dialogue.model_copy(update=sizes),
            "reinforce": SMOKE.reinforce.model_copy(
                update={"questions": questions, "rollout": rollout}
            ),
        }
    )


@pytest.fixture
def start(policy, tokenizer, tmp_path, monkeypatch):
    """A folder with a policy; a function that makes what an iteration is handed."""
    monkeypatch.chdir(tmp_path)
    resident.POLICIES.clear()
    use_machine(SMOKE.machine)
    policy.save_pretrained("policy")
    tokenizer.save_pretrained("policy")
    Path("corpus").mkdir()
    Path("params").mkdir()
    shutil.copy(PARAMS / "benchmarks.yaml", "params")  # the recipe's intake is a row of it
    environment = questions_with({"python": lambda codes: [Observation("ok", "1") for _ in codes]})

    def made(count):
        questions = [Question(str(i), "toy", f"question {i}", ("1",)) for i in range(count)]
        save_questions(questions, Path("questions.parquet"))
        return {
            "questions": Artifact.at(Path("questions.parquet")),
            "corpus": Artifact.at(Path("corpus")),
            "environment": environment,
            "reader": reader_of(SMOKE, "policy", environment),
        }

    return made


# ---------------------------------------------------------------- policy, critic and reference


def artifact(name):
    return Artifact(f"models/{name}", name)


def finished(number):
    """An iteration that has left its update behind."""
    made = {
        name: {"path": f"{name} {number}", "digest": f"{name} {number}"}
        for name in ("policy", "optimizer", "critic")
    }
    return {"update": [{"artifacts": made, "metrics": {"optimizer_steps": 2.0}}]}


@pytest.mark.parametrize(
    ("refresh", "references"),
    [
        (None, ["cold start"] * 5),
        (1, ["cold start", "policy 0", "policy 1", "policy 2", "policy 3"]),
        (2, ["cold start", "cold start", "policy 1", "policy 1", "policy 3"]),
        (3, ["cold start"] * 3 + ["policy 2"] * 2),
    ],
)
def test_the_reference_is_refreshed_every_so_many_iterations(refresh, references):
    kl = Kl(place="loss", estimator="k3", coefficient=0.1, refresh=refresh)
    row = ROWS["grpo"].model_copy(update={"kl": kl})
    agents = Agents(artifact("cold start"), 0, None, None, artifact("cold start"))
    seen = []
    for number in range(5):
        agents = agents.at(number, row)
        seen.append(agents.reference.digest)
        agents = agents.after(finished(number), row)
        assert agents.policy.digest == f"policy {number}"
        assert agents.steps == 2 * (number + 1)
    assert seen == references


def test_a_row_without_a_kl_term_keeps_its_first_reference():
    agents = Agents(artifact("cold start"), 0, None, None, artifact("cold start"))
    agents = agents.after(finished(0), ROWS["grpo"]).at(1, ROWS["grpo"])
    assert agents.reference == artifact("cold start")


def test_only_a_row_with_a_critic_hands_one_on():
    agents = Agents(artifact("cold start"), 0, None, None, artifact("cold start"))
    assert agents.after(finished(0), ROWS["grpo"]).critic is None
    critic = agents.after(finished(0), ROWS["ppo"]).critic
    assert critic and critic.digest == "critic 0"


# ---------------------------------------------------------------- batches of one iteration

# A penalty on every token, so that rewards differ though all answers of such a policy are broken.
BY_LENGTH = ROWS["dapo"].model_copy(update={"overlong": Overlong(buffer=1.0, factor=1.0)})
WITHOUT_SPREAD = ROWS["dapo"].model_copy(update={"overlong": None})


@pytest.fixture
def scores_differ(monkeypatch):
    """Answers of an odd number of tokens get the score 1: such a policy has no right ones."""
    score = scoring.score

    def by_length(*arguments):
        made = score(*arguments)
        return made | {"score": float(made["sampled_tokens"] % 2)}

    monkeypatch.setattr(scoring, "score", by_length)


def asked(records):
    return [
        [tree.question.id for tree in load_trees(Path(artifacts.output(record, "trees").path))]
        for record in records
    ]


def gathered(start, row, count=40, chosen=None, place=0):
    policy = Artifact.at(Path("policy"))
    training = Training(STEP, chosen or recipe(), row, policy, **start(count))
    found = sample(training, STEP, Agents(policy, 0, None, None, policy), place)
    return found.rollouts, found.rewards


def test_without_a_filter_an_iteration_takes_one_batch(start):
    rolled_out, rewarded = gathered(start, ROWS["grpo"])
    assert rewarded[0]["groups_with_spread"] == 0
    assert [len(batch) for batch in asked(rolled_out)] == [2]
    assert len(rewarded) == 1


def test_with_a_filter_batches_are_taken_until_enough_groups_have_a_spread(start, scores_differ):
    # the leaves of a question are often all cut at the same length
    rolled_out, rewarded = gathered(start, BY_LENGTH, chosen=recipe(3))
    spread = [record["groups_with_spread"] for record in rewarded]
    assert 1 < len(spread) < MOST_BATCHES
    assert sum(spread) >= 3 > sum(spread[:-1]), "the last batch was needed, and no other one"
    questions = [question for batch in asked(rolled_out) for question in batch]
    assert len(questions) == len(set(questions)) == 3 * len(spread)
    for rolled, scored in zip(rolled_out, rewarded, strict=True):
        assert rolled["step"] == scored["step"]
        rows = read_rows(Path(artifacts.output(scored, "rewards").path))
        assert list(dict.fromkeys(row["question"] for row in rows)) == asked([rolled])[0]


def test_an_iteration_gives_up_after_ten_batches(start):
    rolled_out, rewarded = gathered(start, WITHOUT_SPREAD)
    assert sum(record["groups_with_spread"] for record in rewarded) == 0
    assert [len(batch) for batch in asked(rolled_out)] == [2] * MOST_BATCHES
    assert MOST_BATCHES == 10
    questions = [question for batch in asked(rolled_out) for question in batch]
    assert len(set(questions)) == 20


@pytest.mark.parametrize(("count", "place"), [(5, 0), (5, 3), (4, 2), (1, 0)])
def test_an_iteration_ends_where_questions_run_out(start, count, place):
    rolled_out, _ = gathered(start, WITHOUT_SPREAD, count, place=place)
    assert 1 <= len(rolled_out) < MOST_BATCHES
    questions = [question for batch in asked(rolled_out) for question in batch]
    assert len(questions) == len(set(questions)) <= count
    assert all(asked(rolled_out)), "no batch is empty"
    assert not rolled_out[-1]["another_batch"]


def test_what_has_been_gathered_is_read_back(start):
    first = gathered(start, WITHOUT_SPREAD, count=6)
    resident.POLICIES.clear()
    assert gathered(start, WITHOUT_SPREAD, count=6) == first
    assert resident.POLICIES.learner is None, "no policy was loaded"


# ---------------------------------------------------------------- whole iterations


def run_two(chosen, row, given):
    """Two iterations of a row from the cold start on."""
    cold_start = Artifact.at(Path("policy"))
    return trained(Training(STEP, chosen, row, cold_start, **given), 2)


def test_a_curriculum_asks_later_what_taught_nothing(start):
    """No group has spread: the second pass is skipped, and nothing is asked twice before it."""
    chosen = recipe()
    section = chosen.reinforce.model_copy(update={"curriculum": Curriculum(rest=1)})
    chosen = chosen.model_copy(update={"reinforce": section})
    training = Training(STEP, chosen, ROWS["grpo"], Artifact.at(Path("policy")), **start(4))
    done = trained(training, 4)
    batches = [asked(entry["rollout"])[0] for entry in done]
    assert sorted(batches[0] + batches[1]) == sorted(batches[2] + batches[3])
    expected = [[str(i) for i in pass_order(4, STEP.seed, number)] for number in (0, 2)]
    assert [batches[0] + batches[1], batches[2] + batches[3]] == expected
    resident.POLICIES.clear()
    assert [asked(entry["rollout"])[0] for entry in trained(training, 4)] == batches, "found again"


def test_no_iteration_asks_again_what_further_batches_have_asked(start, monkeypatch):
    monkeypatch.setattr(sampling, "MOST_BATCHES", 3)
    done = run_two(recipe(), WITHOUT_SPREAD, start(60))
    questions = [
        question for entry in done for batch in asked(entry["rollout"]) for question in batch
    ]
    assert len(questions) == len(set(questions)) == 2 * 2 * 3


def killed(*_):
    raise KeyboardInterrupt


def left_over(done):
    """What each iteration leaves to the next one."""
    return [entry["advantage"][0]["surplus"] for entry in done]


def test_groups_that_are_left_over_are_learned_from_first(start, scores_differ, monkeypatch):
    """By the policy that sampled them, and an iteration that has them samples less."""
    row = BY_LENGTH.model_copy(update={"surplus": "next"})
    cold_start, given = Artifact.at(Path("policy")), start(60)
    training = Training(STEP, recipe(5), row, cold_start, **given)
    done = trained(training, 4)
    assert any(left_over(done)[:2]), "so that a later iteration shows it"
    policies = [cold_start.digest]
    policies += [entry["update"][0]["artifacts"]["policy"]["digest"] for entry in done]
    for number, (before, entry) in enumerate(pairwise(done), start=1):
        left = before["advantage"][0]["surplus"]
        assert [q for record in entry.get("carry", ()) for q in record["questions"]] == left
        learned = entry["update"][0]["questions"]
        assert learned[: len(left)] == left and len(learned) == 5
        spread = [record["groups_with_spread"] for record in entry["reward"]]
        assert len(left) + sum(spread) >= 5 > len(left) + sum(spread[:-1])
        samplers = json.loads(entry["update"][0]["inputs"]["samplers"]).values()
        assert [*samplers] == policies[number - bool(left) : number + 1]
        rows = read_rows(Path(artifacts.output(entry["update"][0], "tokens").path))
        assert np.abs(np.concatenate([row["logprob_gap"] for row in rows])).max() < 1e-4
        share = entry["advantage"][0]["metrics"]["groups_carried"]
        groups = len(left) + sum(len(record["questions"]) for record in entry["rollout"])
        assert share == pytest.approx(len(entry["advantage"][0]["surplus"]) / groups)
    inputs = collect_inputs(training, done)
    publish_collected(inputs, collect(STEP, inputs), Path("data/toy"))
    number = next(i for i, left in enumerate(left_over(done)) if left) + 1
    questions = {tree.question.id for tree in load_trees(Path("data/toy/trees"), number)}
    assert questions >= set(left_over(done)[number - 1])
    resident.POLICIES.clear()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        shutil.rmtree(STEP.folder)
        patched.setattr(sampling, "carry", killed)
        trained(training, 4)
    resident.POLICIES.clear()
    assert everything(trained(training, 4)) == everything(done)


def test_a_group_that_is_asked_again_counts_anew(start, scores_differ):
    """With as many questions as an iteration takes, what is left over is always asked again."""
    row = BY_LENGTH.model_copy(update={"surplus": "next"})
    training = Training(STEP, recipe(3), row, Artifact.at(Path("policy")), **start(4))
    done = trained(training, 4)
    for entry in done:
        records = [*entry.get("carry", ()), *entry["rollout"]]
        questions = [question for record in records for question in record["questions"]]
        assert len(questions) == len(set(questions))


@pytest.mark.parametrize("name", ROWS)
def test_every_row_of_the_table_goes_through_its_iterations_and_its_gates(
    start, scores_differ, name
):
    chosen, row = recipe(), ROWS[name]
    if row.overlong:
        row = BY_LENGTH
    training = Training(STEP, chosen, row, Artifact.at(Path("policy")), **start(40))
    done = trained(training, 2)
    for entry in done:
        assert [len(entry[verb]) for verb in ("advantage", "update")] == [1, 1]
        made = set(entry["update"][0]["artifacts"])
        assert made == {"policy", "optimizer", "tokens"} | ({"critic"} if row.critic else set())
        for records in entry.values():
            for record in records:
                assert np.isfinite(list(record["metrics"].values())).all()
        in_reward, in_loss = (row.kl is not None and row.kl.place == p for p in ("reward", "loss"))
        looked = (entry["advantage"][0]["inputs"], entry["update"][0]["inputs"])
        assert [given["reference"] != "null" for given in looked] == [in_reward, in_loss]
    verbs = [record["verb"] for record in in_order(done[0])]
    assert verbs == ["rollout", "reward"] * len(done[0]["rollout"]) + ["advantage", "update"]
    asked_for = [question for batch in asked(done[0]["rollout"]) for question in batch]
    assert [q for record in done[0]["rollout"] for q in record["questions"]] == asked_for
    assert set(done[0]["update"][0]["questions"]) <= set(asked_for)
    cursors = [record["cursor"] for entry in done for record in entry["rollout"]]
    assert cursors == [2 * (number + 1) for number in range(len(cursors))]
    learned = done[0]["update"][0]["artifacts"]["policy"]["digest"]
    assert done[1]["rollout"][0]["inputs"]["policy"] == learned
    if name in ("ppo", "dapo"):  # with a critic, and with further batches
        inputs = collect_inputs(training, done)
        publish_collected(inputs, collect(STEP, inputs), Path("data/toy"))
        curve = Path("data/toy/curve.csv").read_text().splitlines()
        assert len(curve) == 3


LORA = Lora(rank=2, alpha=4, modules=("q_proj", "v_proj", "up_proj"))
WITH_REFERENCE = {
    "the base, in the loss": Kl(place="loss", estimator="k3", coefficient=0.1),
    "the newest, in the reward": Kl(place="reward", estimator="k1", coefficient=0.1, refresh=1),
}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kl", WITH_REFERENCE)
def test_an_adapter_goes_through_its_iterations_and_whole_weights_are_published(
    start, scores_differ, kl, precision
):
    chosen = recipe()
    machine = chosen.machine.model_copy(update={"precision": precision})
    update = chosen.reinforce.update.model_copy(update={"recompute": True, "learning_rate": 0.01})
    settings = chosen.reinforce.model_copy(update={"update": update})
    chosen = chosen.model_copy(update={"machine": machine, "reinforce": settings, "lora": LORA})
    row = BY_LENGTH.model_copy(update={"kl": WITH_REFERENCE[kl]})
    done = run_two(chosen, row, start(40))
    assert all(entry["update"][0]["metrics"]["gradient_norm"] > 0 for entry in done)
    adapter = Path(policy_of(done[-1]).path)
    said = json.loads((adapter / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == "policy", "of the first one, by relative path"
    assert said["revision"] == artifacts.digest(Path("policy"))
    assert not (adapter / "model.safetensors").exists()
    artifacts.publish(policy_of(done[-1]), Path("models/trained"), checkpoint.merged)
    trained = AutoModelForCausalLM.from_pretrained("models/trained")
    assert type(trained).__name__ == "Qwen2ForCausalLM"
    before = AutoModelForCausalLM.from_pretrained("policy").state_dict()
    moved = {
        name.split(".")[-2]
        for name, weight in trained.state_dict().items()
        if not torch.equal(weight, before[name])
    }
    assert moved == set(LORA.modules)


def test_an_adapter_is_found_again_instead_of_made_again(start):
    chosen = recipe().model_copy(update={"lora": LORA})
    given = start(40)
    first = run_two(chosen, BY_LENGTH, given)
    resident.POLICIES.clear()
    assert run_two(chosen, BY_LENGTH, given) == first
    assert resident.POLICIES.learner is None, "no policy was loaded"
    other = chosen.model_copy(update={"lora": LORA.model_copy(update={"rank": 3})})
    again = run_two(other, BY_LENGTH, given)
    assert again[0]["rollout"] == first[0]["rollout"], "the first one's policy is the same"
    assert again[0]["update"][0]["key"] != first[0]["update"][0]["key"]


@pytest.mark.parametrize("last", [1, 2])
def test_old_checkpoints_go_right_before_the_new_one_is_written(start, last, monkeypatch):
    chosen = recipe()
    keep = chosen.reinforce.keep.model_copy(update={"optimizer_last": last, "weights_every": 9})
    settings = chosen.reinforce.model_copy(update={"keep": keep})
    chosen = chosen.model_copy(update={"reinforce": settings})
    seen = []  # iterations whose policy lies there when a checkpoint is written

    def save(*arguments):
        seen.append([int(place.parent.name[:4]) for place in policies()])
        write(*arguments)

    def policies():
        return sorted(STEP.folder.glob("[0-9]*-update-*/policy"))

    write = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", save)
    cold_start = Artifact.at(Path("policy"))
    training = Training(STEP, chosen, ROWS["grpo"], cold_start, **start(40))
    assert len(trained(training, 4)) == 4
    assert seen == [[], [0], [1], [2]]
    assert [int(place.parent.name[:4]) for place in policies()] == [2, 3][-last:]


def ahead(chosen, batches=1):
    keep = chosen.reinforce.keep.model_copy(update={"weights_every": 1})
    settings = chosen.reinforce.model_copy(update={"ahead": batches, "keep": keep})
    return chosen.model_copy(update={"reinforce": settings})


LEARNS = ROWS["grpo"].model_copy(update={"entropy_bonus": 1.0})  # without a reward, too


def run_ahead(start, batches, iterations, row=LEARNS, **changes):
    cold_start = Artifact.at(Path("policy"))
    training = Training(STEP, ahead(recipe(), batches), row, cold_start, **start(40))
    return trained(replace(training, **changes), iterations)


def grown(record):
    return load_trees(Path(artifacts.output(record, "trees").path))


@pytest.mark.parametrize(
    ("batches", "samplers"),  # of each iteration, as the number of iterations learned from
    [(1, [0, 0, 1, 2, 3]), (2, [0, 0, 0, 1, 2]), (3, [0, 0, 0, 0, 1]), (8, [0, 0, 0, 0, 0])],
)
def test_a_batch_is_sampled_by_the_policy_that_lacks_as_many_updates(start, batches, samplers):
    """The update corrects for it: its ratio is against the policy that sampled."""
    done = run_ahead(start, batches, 5)
    learned = [entry["update"][0] for entry in done]
    made = [Artifact.at(Path("policy")).digest]
    made += [update["artifacts"]["policy"]["digest"] for update in learned]
    assert len(set(made)) == 6
    assert [update["inputs"]["policy"] for update in learned] == made[:5]
    steps = int(learned[0]["metrics"]["optimizer_steps"])
    assert [update["metrics"]["optimizer_steps"] for update in learned] == [steps] * 5
    for number, (entry, sampler) in enumerate(zip(done, samplers, strict=True)):
        assert entry["rollout"][0]["inputs"]["policy"] == made[sampler]
        for verb in ("advantage", "update"):
            assert json.loads(entry[verb][0]["inputs"]["samplers"]) == {
                str(steps * sampler): made[sampler]
            }
        of_nodes = {
            (node.kind == TURN, node.policy_steps)
            for tree in grown(entry["rollout"][0])
            for node in tree.nodes
        }
        assert of_nodes == {(True, steps * sampler), (False, 0)}
        metrics = entry["update"][0]["metrics"]
        assert metrics["staleness"] == metrics["staleness_highest"] == steps * (number - sampler)
        assert (metrics["kl"] == 0) == (number == sampler)
    asked = [entry["rollout"][0]["cursor"] for entry in done]
    assert asked == [2, 4, 6, 8, 10], "the questions are those that rounds would have asked"


def test_the_old_policy_of_the_ratio_is_the_checkpoint_that_sampled(start):
    done = run_ahead(start, 2, 4)
    sampler, learner = (
        AutoModelForCausalLM.from_pretrained(policy_of(done[number]).path).eval()
        for number in (0, 2)
    )
    (learned,) = done[3]["update"]
    seen = {
        (row["question"], row["node"]): row
        for row in read_rows(Path(artifacts.output(learned, "tokens").path))
    }
    assert seen
    for tree in grown(done[3]["rollout"][0]):
        for index, node in enumerate(tree.nodes):
            if (row := seen.get((tree.question.id, index))) is None:
                continue
            context = np.concatenate([tree.nodes[place].tokens for place in tree.path(index)])
            old, new = (
                logprobs(model, context)[-len(node.tokens) :] for model in (sampler, learner)
            )
            np.testing.assert_allclose(node.logprobs + row["logprob_gap"], old, atol=1e-4)
            np.testing.assert_allclose(node.logprobs, old, atol=1e-4)
            np.testing.assert_allclose(np.log(row["ratio"]), new - old, atol=1e-4)
            assert np.abs(new - old).max() > 1e-3, "these are different policies"


@torch.no_grad()
def logprobs(model, tokens):
    """Log-probabilities of all tokens but the first, at the temperature of the rollout."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    scores = model(ids).logits[0, :-1].float() / SMOKE.reinforce.rollout.temperature
    return scores.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()


def test_batches_ahead_ask_no_question_of_a_batch_before_them(start, monkeypatch):
    """A group filter takes as many questions as it needs, which only sampling shows."""
    monkeypatch.setattr(sampling, "MOST_BATCHES", 3)
    done = run_ahead(start, 2, 2, WITHOUT_SPREAD)
    questions = [
        question for entry in done for batch in asked(entry["rollout"]) for question in batch
    ]
    assert len(questions) == len(set(questions)) == 2 * 2 * 3


@pytest.mark.parametrize("batches", [1, 3])
def test_policies_that_waiting_batches_were_sampled_by_stay(start, batches, monkeypatch):
    """So a run that is killed can go on; others go as soon as they can."""
    lying = []  # the iterations whose policies lie there, when an update is about to save its own

    def save(*arguments):
        lying.append(
            [int(at.parent.name[:4]) for at in sorted(STEP.folder.glob("[0-9]*-update-*/policy"))]
        )
        if len(lying) == 5:
            raise KeyboardInterrupt
        write(*arguments)

    write = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", save)
    chosen = ahead(recipe(), batches)
    keep = chosen.reinforce.keep.model_copy(update={"optimizer_last": 1, "weights_every": 9})
    settings = chosen.reinforce.model_copy(update={"keep": keep})
    chosen = chosen.model_copy(update={"reinforce": settings})
    with pytest.raises(KeyboardInterrupt):
        run_ahead(start, batches, 6, recipe=chosen)
    for place in STEP.folder.glob("0005-rollout-*"):  # was not done either
        shutil.rmtree(place)
    resident.POLICIES.clear()
    resumed = run_ahead(start, batches, 6, recipe=chosen)
    expected = {1: [[], [0], [0, 1], [1, 2], [2, 3]]}
    expected[3] = [[], [0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert lying[:5] == lying[:4] + lying[5:6] == expected[batches]
    shutil.rmtree(STEP.folder)
    resident.POLICIES.clear()
    unbroken = run_ahead(start, batches, 6, recipe=chosen)
    assert everything(resumed) == everything(unbroken)


def everything(done):
    """Digests of all artifacts of a run."""
    return [
        (verb, name, made["digest"])
        for entry in done
        for verb, records in entry.items()
        for record in records
        for name, made in record["artifacts"].items()
    ]


@pytest.fixture
def talkative(start, policy, tokenizer):
    """The same folder with a policy that has learned to call the tool, twice and more."""
    model, dialogue = copy.deepcopy(policy), shared(3, 1).dialogue
    texts = [("<python>1</python>", True), ("<result>1</result>", False)] * 3
    questions = [Question(str(i), "toy", f"question {i}", ("1",)) for i in range(3)]
    prompts = [talk.prompt_tokens(tokenizer, dialogue, question) for question in questions]
    traces = [talk.trace_tokens(tokenizer, prompt, texts, limit=24)[0] for prompt in prompts]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(30):
        tokens = torch.from_numpy(traces[step % 3].astype(np.int64))[None]
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained("policy")
    return start


def shared(batches, turns, **changes):
    """A recipe of more turns, in which several policies share a rollout."""
    chosen = ahead(recipe(), batches)
    sizes = {"turn_tokens": 12, "response_tokens": 90, "tool_calls": 4}
    return chosen.model_copy(
        update={
            "dialogue": chosen.dialogue.model_copy(update=sizes),
            "reinforce": chosen.reinforce.model_copy(update={"turns_per_policy": turns, **changes}),
        }
    )


def versions(done):
    """Of each iteration, the steps of the policies of the first four turns of its longest leaf."""
    found = []
    for entry in done:
        paths = [path for tree in grown(entry["rollout"][0]) for path in tree.trajectories()]
        longest = max(paths, key=len)
        found.append([node.policy_steps for node in longest if node.kind == TURN][:4])
    return found


def test_policies_share_a_rollout_and_each_samples_its_turns(talkative):
    done = run_ahead(talkative, 3, 5, recipe=shared(3, 1))
    learned = [entry["update"][0] for entry in done]
    made = [Artifact.at(Path("policy")).digest]
    made += [update["artifacts"]["policy"]["digest"] for update in learned]
    steps = int(learned[0]["metrics"]["optimizer_steps"])
    # by hand: batch i is begun by policy i - 3, and each up to i - 1 goes on with it for a turn
    by_policy = [[0] * 4, [0] * 4, [0, 1, 1, 1], [0, 1, 2, 2], [1, 2, 3, 3]]
    assert versions(done) == [[steps * policy for policy in each] for each in by_policy]
    for number, (entry, policies) in enumerate(zip(done, by_policy, strict=True)):
        *parts, last = sorted(set(policies))
        assert [part["inputs"]["policy"] for part in entry.get("rollout_part", ())] == [
            made[policy] for policy in parts
        ]
        assert entry["rollout"][0]["inputs"]["policy"] == made[last]
        samplers = {str(steps * policy): made[policy] for policy in sorted(set(policies))}
        assert json.loads(entry["update"][0]["inputs"]["samplers"]) == samplers
        metrics = entry["update"][0]["metrics"]
        turns = [
            node
            for tree in grown(entry["rollout"][0])
            if tree.question.id in entry["update"][0]["questions"]
            for node in tree.nodes
            if node.kind == TURN
        ]
        ages = [steps * number - turn.policy_steps for turn in turns for _ in turn.tokens]
        assert metrics["staleness"] == pytest.approx(np.mean(ages))
        assert metrics["staleness_highest"] == max(ages) == steps * (number - policies[0])
    verbs = [record["verb"] for record in in_order(done[4])]
    assert verbs == ["rollout_part"] * 2 + ["rollout", "reward", "advantage", "update"]


def test_the_old_policies_of_a_shared_rollout_are_those_of_its_turns(talkative):
    """What each turn was sampled with is what the trainer computes for it."""
    done = run_ahead(talkative, 2, 4, recipe=shared(2, 1))
    (learned,) = done[3]["update"]
    rows = read_rows(Path(artifacts.output(learned, "tokens").path))
    nodes = {
        (tree.question.id, index): node
        for tree in grown(done[3]["rollout"][0])
        for index, node in enumerate(tree.nodes)
    }
    of_rows = [nodes[row["question"], row["node"]].policy_steps for row in rows]
    assert len(set(of_rows)) == 2
    gaps = np.concatenate([row["logprob_gap"] for row in rows])
    assert np.abs(gaps).max() < 1e-4


def test_a_rollout_shared_by_equal_policies_is_an_undivided_one(talkative):
    policy = Artifact.at(Path("policy"))
    agents = Agents(policy, 7, None, None, policy)
    training = Training(STEP, shared(3, 1), ROWS["arpo"], policy, **talkative(40))
    begun = EMPTY
    for _ in range(2):
        begun = sample_part(training, STEP, agents, 0, begun)
    divided, undivided = (
        grown(sample(training, STEP, agents, 0, given).rollouts[0]) for given in (begun, EMPTY)
    )
    assert len(begun.parts) == 2 and begun.samplers == {7: policy}
    for ours, theirs in zip(divided, undivided, strict=True):
        assert (ours.question, ours.leaves) == (theirs.question, theirs.leaves)
        assert [vars(node) | MEASURED for node in ours.nodes] == [
            vars(node) | MEASURED for node in theirs.nodes
        ]
        for one, other in zip(ours.nodes, theirs.nodes, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    assert any(decision.added for tree in divided for decision in tree.decisions)


MEASURED = {"tokens": None, "logprobs": None, "entropies": None}  # compared by their own means


def test_a_shared_rollout_goes_on_where_it_was_killed(talkative, monkeypatch):
    chosen = shared(3, 1)
    unbroken = everything(run_ahead(talkative, 3, 5, recipe=chosen))
    for killed in ("rollout_part", "rollout"):
        shutil.rmtree(STEP.folder)
        resident.POLICIES.clear()
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(sampling, killed, killed_once(getattr(sampling, killed)))
            run_ahead(talkative, 3, 5, recipe=chosen)
        resident.POLICIES.clear()
        assert everything(run_ahead(talkative, 3, 5, recipe=chosen)) == unbroken, killed


def killed_once(whole):
    """A sub-step that is killed when iteration 3 asks for it for the first time."""
    asked_for = []

    def kill(step, inputs, **others):
        asked_for.append(step.iteration)
        if asked_for.count(3) == 1 and step.iteration == 3:
            raise KeyboardInterrupt
        return whole(step, inputs, **others)

    return kill


def test_a_failed_batch_ends_the_run_and_no_later_one_begins(start, monkeypatch):
    sampled = []

    def rolled_out(step, inputs, **others):
        sampled.append(step.iteration)
        if step.iteration == 1:
            raise OSError("the engine is gone")
        return whole(step, inputs, **others)

    whole = sampling.rollout
    monkeypatch.setattr(sampling, "rollout", rolled_out)
    with pytest.raises(OSError, match="gone"):
        run_ahead(start, 3, 5)
    assert sampled == [0, 1]


def test_what_was_sampled_ahead_is_what_was_sampled_by_itself(start):
    """The update goes on in the same weights in memory, and changes nothing of the sampling."""
    cold_start = Artifact.at(Path("policy"))
    chosen = recipe()
    training = Training(STEP, ahead(chosen), ROWS["grpo"], cold_start, **start(40))
    done = trained(training, 3)
    for number, entry in enumerate(done):
        policy = (
            cold_start if number < 2 else artifacts.output(done[number - 2]["update"][0], "policy")
        )
        alone = replace(training, start=replace(STEP, recipe="alone"), recipe=chosen)
        step = replace(alone.start, iteration=number)
        found = sample(alone, step, Agents(policy, 0, None, None, cold_start), 2 * number)
        digests = [
            artifacts.output(record, "trees").digest
            for record in (*entry["rollout"], *found.rollouts)
        ]
        assert len(set(digests)) == 1


def test_a_run_that_samples_ahead_is_found_again(start):
    cold_start = Artifact.at(Path("policy"))
    training = Training(STEP, ahead(recipe()), ROWS["grpo"], cold_start, **start(40))
    done = trained(training, 3)
    resident.POLICIES.clear()
    assert trained(training, 3) == done
    assert resident.POLICIES.learner is resident.POLICIES.copy is None, "no policy was loaded"


# ---------------------------------------------------------------- a learned reward

LEARNED = REWARD_MODEL.model_copy(
    update={"labels": 1.0, "questions": 10, "steps": 3, "micro_batch_tokens": 500}
    | {"learning_rate": 1e-3, "gradient_clip": 1.0, "save_every": 50}
    | {"again": Again(every=2, frozen=0, steps=2, iterations=3, mebibytes=9)}
)
BY_MODEL = (RewardPart(name="model", settings=Model(weight=2.0)),)


@pytest.fixture
def successes(monkeypatch):
    """Answers of an odd number of tokens are successes: such a policy has no right ones."""
    score = scoring.score

    def by_length(*arguments):
        made = score(*arguments)
        return made | {"success": bool(made["sampled_tokens"] % 2)}

    monkeypatch.setattr(scoring, "score", by_length)


def learning_rewards(start, row=LEARNS, batches=0, **changes):
    """A training whose reward is that of a model, which some trees of the cold start have made."""
    given, cold_start = start(40), Artifact.at(Path("policy"))
    step = replace(STEP, stage="reward_model")
    plain = Training(step, recipe(questions=10), row, cold_start, **given)
    labelled = sample(plain, step, Agents(cold_start, 0, None, None, cold_start), 0)
    (batch,) = labelled.scored_trees
    again = LEARNED.again.model_copy(update=changes)
    settings = LEARNED.model_copy(update={"again": again})
    chosen = ahead(recipe(), batches)
    chosen = chosen.model_copy(
        update={
            "reward_model": settings,
            "reinforce": chosen.reinforce.model_copy(update={"reward": BY_MODEL}),
        }
    )
    inputs = RewardModelInputs(
        policy=cold_start,
        before=None,
        trees=[batch.trees],
        rewards=[batch.rewards],
        first_batches=1,
        labels=labels_of(chosen),
        settings=settings,
        steps=3,
        machine=SMOKE.machine,
    )
    model = artifacts.output(reward_model(step, inputs), "model")
    first = PublishedRewardModel(model, batch.trees, batch.rewards)
    return Training(STEP, chosen, row, cold_start, reward_model=first, **given)


def test_only_a_recipe_with_the_section_needs_the_stages_model(start, successes):
    training = learning_rewards(start)
    chosen, made = training.recipe, training.reward_model
    remedy = r"toy\.yaml .* models/toy/reward_model .*: run `dvc repro reward_model@toy`"
    folder = Path("models/toy/reward_model")

    def found():
        return reward_model_of(chosen, "toy")

    assert reward_model_of(recipe(), "toy") is None, "nothing is read"
    with pytest.raises(ValueError, match=remedy):
        found()
    published_model.publish(folder, None)
    with pytest.raises(ValueError, match=remedy):
        found()
    published_model.publish(folder, made)
    assert found().model.digest == made.model.digest
    assert reward_model_of(recipe(), "toy") is None, "an older run may have left it"
    (folder / "rewards.parquet").unlink()
    with pytest.raises(ValueError, match=remedy):
        found()


def scored_by(done):
    """The digest of the model that scored the batch of each iteration."""
    return [entry["estimate"][0]["inputs"]["model"] for entry in done]


def made_models(done):
    """Iteration -> the digest of the model that it made."""
    return {
        number: artifacts.output(entry["reward_model"][0], "model").digest
        for number, entry in enumerate(done)
        if "reward_model" in entry
    }


def test_the_model_is_trained_at_the_end_of_iterations_and_scores_the_next(start, successes):
    training = learning_rewards(start)
    first = training.reward_model.model.digest
    done = trained(training, 5)
    made = made_models(done)
    assert list(made) == [1, 3]
    assert len({first, *made.values()}) == 3
    assert scored_by(done) == [first, first, made[1], made[1], made[3]]
    verbs = [record["verb"] for record in in_order(done[1])]
    assert verbs == ["rollout", "estimate", "reward", "advantage", "update", "reward_model"]
    seen = []
    for entry in done:
        tables = [(verb, entry[verb][0]) for verb in ("estimate", "reward")]
        estimates, rewards = (
            read_rows(Path(artifacts.output(record, f"{verb}s").path)) for verb, record in tables
        )
        assert [row["reward"] for row in rewards] == [2 * row["estimate"] for row in estimates]
        metrics = entry["reward"][0]["metrics"]
        labels = labels_of(training.recipe)
        gaps = [
            estimated["estimate"] - rewarded["success"]
            for estimated, rewarded in zip(estimates, rewards, strict=True)
            if labels.role(rewarded["question"]) != "train"
        ]
        assert metrics["held_out_questions"] * 4 == len(gaps)
        assert metrics["model_gap"] == pytest.approx(np.mean(gaps) if gaps else 0)
        assert metrics["labelled_success"] == pytest.approx(metrics["success"])
        seen += gaps
    assert seen
    shown = reinforce_report.metrics_of(done[1])
    assert shown["reward_model/buffer_batches"] == 3  # the first trees, and two iterations
    assert done[3]["reward_model"][0]["metrics"]["buffer_batches"] == 4  # three of four iterations


@pytest.mark.parametrize(
    ("changes", "made"),
    [({"frozen": 2}, [3]), ({"every": 1, "frozen": 3}, [3, 4]), ({"every": 9}, [])],
)
def test_a_frozen_model_stays(start, successes, changes, made):
    done = trained(learning_rewards(start, **changes), 5)
    assert list(made_models(done)) == made
    assert len(set(scored_by(done)[: made[0] + 1 if made else 5])) == 1


def test_batches_that_are_sampled_ahead_are_scored_by_the_model_that_is_there(start, successes):
    training = learning_rewards(start, batches=1, every=1)
    first = training.reward_model.model.digest
    done = trained(training, 4)
    made = made_models(done)
    assert scored_by(done) == [first, first, made[0], made[1]]


def test_old_models_go_and_an_equal_run_needs_none(start, successes):
    training = learning_rewards(start, every=1)
    keep = training.recipe.reinforce.keep.model_copy(update={"weights_every": 3})
    settings = training.recipe.reinforce.model_copy(update={"keep": keep})
    chosen = training.recipe.model_copy(update={"reinforce": settings})
    training = replace(training, recipe=chosen)
    done = trained(training, 5)
    kept = [place.parent.name[:4] for place in STEP.folder.glob("*-reward_model-*/model")]
    assert sorted(kept) == ["0002", "0003", "0004"]  # every third, and the last one's parent
    outcome_model.SCORING.drop()
    assert trained(training, 5) == done
    assert outcome_model.SCORING.model is None, "no model was loaded"
