"""The benchmark against TRL: both sides do the same work, and figures are what they say."""

import copy
import json
import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import against_trl as bench
from benchmarks import cases, floors
from params.schema import algorithms
from tasks.policy.lean_transformers import transformers
from tasks.policy.tiny import build_policy, build_tokenizer
from tasks.tools.python import python_tool
from tasks.trees import dialogue as talk
from tasks.trees.tree import PROMPT, TURN, Call, Node, Observation, Question, Tree

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from benchmarks import peer

CASE = cases.Case("small", "tiny", 2, 4, cases.SIDES, cases.PEER_PATHS, (1, 2))
SMALL = {  # the worlds of the benchmark, with limits that the smallest policy has room for
    "search": {"turn_tokens": 8, "result_tokens": 16, "response_tokens": 150},
    "household": {"turn_tokens": 5, "result_tokens": 12, "response_tokens": 100, "tool_calls": 4},
    "household-fresh": {"turn_tokens": 5, "tool_calls": 4, "prompt_tokens": 400},
}
QUESTIONS = [
    Question(f"q{number}", "sum", f"What is {number} times 34?", (str(34 * number),))
    for number in range(8)
]


@pytest.fixture(scope="module")
def python():
    """The recipe's real tool."""
    recipe = cases.load_recipe(CASE)
    with python_tool(recipe.tools["python"], recipe.machine.threads) as run:
        yield run


@pytest.fixture
def start(tiny, tokenizer, python):
    """A policy of random weights, small enough for a step in a fraction of a second."""
    return begin(CASE, tiny, tokenizer, python, {"turn_tokens": 12, "response_tokens": 64})


def begin(case, tiny, tokenizer, python, limits):
    """The start of a case with the smallest policy and shorter dialogues."""
    recipe = cases.load_recipe(case)
    short = recipe.dialogue.model_copy(update=limits)
    return replace(
        cases.start_of(
            case,
            recipe.model_copy(update={"dialogue": short}),
            lambda: build_policy(tiny, tokenizer, 0),
            tokenizer,
            QUESTIONS,
            python,
        ),
        draws_rewards=True,
    )


@pytest.fixture
def row():
    return algorithms.load_algorithms()["grpo"]


def rolled_out(start, row, case=CASE):
    """A learner, trees that it has sampled, and rewards for their leaves."""
    learning = bench.beamline_learner(start)
    trees = bench.beamline_sample(start, learning, cases.batch_of(start, case, 0), row, 0)
    return learning, trees, cases.drawn_rewards(case, 0)


def peers_gradient(trainer, trees, rewards):
    """The gradient that TRL computes of given trajectories, before it is clipped."""
    trainer.given = peer.laid_out(trainer, *peer.trajectories_of(trees), rewards)
    trainer._step = 0
    trainer.model.zero_grad()
    for _ in trainer.given:
        trainer.training_step(trainer.model, [], None)
    trainer.given = None
    return torch.cat([weight.grad.flatten() for weight in trainer.model.parameters()])


def of_world(world, tiny, tokenizer, **changes):
    """A case of a world of the benchmark, and its start."""
    case = replace(CASE, world=world, peer_paths=cases.ROLLOUT_FUNC, **changes)
    roomy = tiny.model_copy(update={"context": 512})
    return case, begin(case, roomy, tokenizer, None, SMALL[world])


def same_gradient(start, case, micro_batches, row):
    """Assert that both sides compute the same gradient of the same trees; return these."""
    learning, trees, rewards = rolled_out(start, row, case)
    trainer = bench.trl_peer(start, case, micro_batches, peer.ROLLOUT_FUNC)
    theirs = peers_gradient(trainer, trees, rewards)
    metrics = bench.beamline_update(start, learning, trees, rewards, row)
    ours = torch.cat([weight.grad.flatten() for weight in learning.model.parameters()])
    assert torch.cosine_similarity(theirs, ours, dim=0) > 0.9999
    # TRL divides by the standard deviation plus 1e-4, Beamline by that plus 1e-6
    assert metrics["gradient_norm"] == pytest.approx(float(theirs.norm()), rel=1e-3)
    return trees


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_both_sides_compute_the_same_gradient(start, row, micro_batches):
    same_gradient(start, CASE, micro_batches, row)


def test_a_trainer_of_another_shape_computes_the_same(start, row):
    _, trees, rewards = rolled_out(start, row)
    gradients = []
    trainer = bench.trl_peer(start, CASE, 1, peer.ROLLOUT_FUNC)
    for parts in (1, 2, 4):
        peer.reshape(trainer, replace(trainer.shape, micro_batches=parts, cache=peer.STATIC))
        gradients.append(peers_gradient(trainer, trees, rewards))
        assert trainer.shape.micro_batches == parts == trainer._step
    assert torch.allclose(gradients[0], gradients[1], atol=1e-6)
    assert torch.allclose(gradients[0], gradients[2], atol=1e-6)
    assert trainer.generation_config.cache_implementation == "static"
    peer.reshape(trainer, replace(trainer.shape, cache=peer.DYNAMIC))
    assert trainer.generation_config.cache_implementation is None


@pytest.mark.parametrize("world", SMALL)
def test_gradients_are_the_same_with_results_and_fresh_prompts(tiny, tokenizer, world):
    case, start = of_world(world, tiny, tokenizer)
    trees = same_gradient(start, case, 2, algorithms.load_algorithms()["arpo"])
    kinds = [node.kind for tree in trees for node in tree.nodes[1:]]
    assert kinds.count(PROMPT if world == "household-fresh" else "result") > len(trees) * 4
    assert any(decision.added for tree in trees for decision in tree.decisions)


@pytest.mark.parametrize("world", SMALL)
def test_trl_plays_a_world_as_beamline_does(tiny, tokenizer, row, world):
    """TRL, given the turns of Beamline's leaves, writes the same prompts, responses and masks."""
    case, start = of_world(world, tiny, tokenizer)
    _, trees, _ = rolled_out(start, row, case)
    questions, expected = peer.trajectories_of(trees)
    trainer = bench.trl_peer(start, case, 1, peer.ROLLOUT_FUNC)
    turns = [
        [node.tokens.tolist() for node in leaf if node.kind == TURN]
        for tree in trees
        for leaf in tree.trajectories()
    ]
    live = list(range(len(turns)))

    def generate(prompts, *_, **__):
        nonlocal live
        live = [leaf for leaf in live if turns[leaf]]
        assert len(prompts) == len(live)
        return [turns[leaf].pop(0) for leaf in live], None

    trainer._generate_single_turn = generate
    assert peer.play(trainer, questions) == expected
    assert not any(turns)
    calls = {len(leaf) // 2 for tree in trees for leaf in ([*t] for t in tree.trajectories())}
    assert calls <= ({3, 4, 5, 6} if world == "search" else {5})


@pytest.mark.parametrize("world", ["search", "household"])
def test_trl_samples_the_leaves_that_it_is_given(tiny, tokenizer, row, world):
    """All of TRL's own code samples; the tokens are those of Beamline's leaves."""
    case, start = of_world(world, tiny, tokenizer)
    _, trees, _ = rolled_out(start, row, case)
    trainer = bench.trl_peer(start, case, 1, peer.ROLLOUT_FUNC)
    _, expected = peer.trajectories_of(trees)
    measured = bench.trl_step(start, case, trainer, 0, trees)
    assert trainer.played == expected
    assert measured.sampled_tokens == sum(sum(one.own) for each in expected for one in each)
    bench.trl_step(start, case, trainer, 0)  # on its own again
    assert trainer.played != expected
    with pytest.raises(RuntimeError, match="not those"), peer.scripted(trainer, trees):
        trainer.played = []


def scripted(tokenizer, turns):
    """What a policy samples that says ``turns`` in this order, one after each tool result."""
    results = tokenizer.convert_tokens_to_ids("</result>")

    def generate(prompts, *_, **__):
        said = [turns[list(prompt).count(results)] for prompt in prompts]
        return [talk.encode(tokenizer, turn).tolist() for turn in said], None

    return generate


@pytest.mark.parametrize("path", cases.PEER_PATHS)
@pytest.mark.parametrize(
    "turns",
    [
        ["<answer>\\boxed{2}</answer>"],
        ["<python>print(1+1)</python>", "so<python>print(3)</python>", "<answer>2</answer>"],
        ["<python>print(9</python>", "<answer>2</answer>"],
        ["<python>print(1)</python>"] * 4,  # a call more than the recipe allows
    ],
)
def test_trl_writes_the_dialogue_as_beamline_does(start, tokenizer, path, turns):
    roomy = start.recipe.dialogue.model_copy(update={"response_tokens": 200})
    start = replace(start, recipe=start.recipe.model_copy(update={"dialogue": roomy}))
    trainer = bench.trl_peer(start, CASE, 1, path)
    trainer._generate_single_turn = scripted(trainer.processing_class, turns)
    trainer.model.train()
    asked = [peer.example(question) for question in QUESTIONS[:2] for _ in range(CASE.group)]
    trainer._generate_and_score_completions(asked)
    prompts, responses, own = zip(*(context for (context,) in trainer.played), strict=True)
    assert prompts[0] == talk.prompt_tokens(tokenizer, roomy, QUESTIONS[0]).tolist()
    expected, mask = [], []
    for number, turn in enumerate(turns):
        said = talk.encode(tokenizer, turn).tolist()
        expected, mask = expected + said, mask + [1] * len(said)
        _, call = talk.read_turn(turn, "stop")
        if call and number < roomy.tool_calls:
            _, result = talk.result_tokens(
                tokenizer, start.tools.trl([call])[0], roomy.result_tokens
            )
            expected, mask = expected + result.tolist(), mask + [0] * len(result)
    assert list(responses) == [expected] * 8
    assert [list(one) for one in own] == [mask] * 8


@pytest.mark.parametrize("path", cases.PEER_PATHS)
def test_trl_samples_one_turn_and_stops_at_tags(start, path):
    trainer = bench.trl_peer(start, CASE, 1, path)
    own = trainer.processing_class
    tags = [own.convert_tokens_to_ids(tag) for tag in talk.stop_strings(own)]
    assert set(tags) < set(trainer.generation_config.eos_token_id)
    turns, _ = trainer._generate_single_turn([[5, 6, 7]] * 64, None, {}, 1)
    ends = {own.eos_token_id, *tags}
    assert max(len(turn) for turn in turns) == start.recipe.dialogue.turn_tokens
    assert all(turn[-1] in ends or len(turn) == 12 for turn in turns)
    assert not any(token in ends for turn in turns for token in turn[:-1])


def test_a_case_gives_ratios_of_equal_work(start, capsys):
    entry = bench.run_case(start, CASE, 1)
    floors.add_floors(entry, 1e9)
    speeds = ("step", "step_without_tools", "sampling", "update", "step_branching")
    assert all(entry["ratios"][name] > 0 for name in speeds)
    assert set(entry["tried"]) > {"sampling, tools", "update, 2 micro-batches"}
    trl, ours = entry[cases.TRL], entry[cases.BEAMLINE]
    assert entry["ratios"]["step"] == trl["step"]["median"] / ours["step"]["median"]
    assert ours["unique_tokens"]["median"] < ours["leaf_tokens"]["median"]
    assert trl["sampled_tokens"]["median"] <= CASE.questions * CASE.group * 64
    assert trl["floor"] == ours["floor"]
    assert "small 1/1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("world", "precision"), [("search", "bfloat16"), ("household-fresh", "float32")]
)
def test_a_case_of_a_world_is_measured_on_all_sides(tiny, tokenizer, world, precision):
    case, start = of_world(world, tiny, tokenizer, precision=precision, tries=1)
    entry = bench.run_case(start, case, 1)
    floors.add_floors(entry, 1e9)
    assert set(entry["tried"]) == {"update, 1 micro-batches", "update, 2 micro-batches"}
    speeds = ("step", "sampling", "update", "step_branching", "sampling_branching")
    assert all(entry["ratios"][name] > 0 for name in speeds)
    branching, ours, trl = (entry[side] for side in reversed(cases.SIDES))
    for name in ("sampled_tokens", "response_tokens"):
        assert trl[name]["median"] == pytest.approx(ours[name]["median"], rel=0.4)
    shared = entry["ratios"]["tokens_shared_branching"]
    assert shared > entry["ratios"]["tokens_shared"] > 0
    assert branching["leaf_tokens"]["median"] > branching["unique_tokens"]["median"]


def test_trl_samples_in_bf16_from_the_present_weights(tiny, tokenizer):
    case, start = of_world("search", tiny, tokenizer, precision="bfloat16")
    trainer = bench.trl_peer(start, case, 1, peer.ROLLOUT_FUNC)
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight.fill_(2.5)
    with peer.sampling(trainer):
        used = [*trainer.model_wrapped.parameters()]
        assert {weight.dtype for weight in used} == {torch.bfloat16}
        assert all((weight == 2.5).all() for weight in used)
    assert {weight.dtype for weight in trainer.model_wrapped.parameters()} == {torch.float32}


# ---------------------------------------------------------------- a real model's shape

TURNS = [
    ["<think>so</think><python>print(1+1)</python>", "<think>2</think><answer>\\boxed{2}</answer>"],
    ["<python>print(3)</python>", "<python>print(4)</python>", "<answer>\\boxed{4}</answer>"],
    ["nothing comes", "of this"],
    ["<answer>\\boxed{1}</answer>"],
]


@pytest.fixture(scope="module")
def real(tiny, python):
    """A small case of the recipe smollm, and its start: a llama whose tags are several tokens."""
    case = replace(cases.CASES["smollm"], questions=1, group=4, peer_micro_batches=(1, 2))
    tokenizer = build_tokenizer([each.text for each in QUESTIONS], tiny, tags=())
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    recipe = cases.load_recipe(case)
    short = recipe.dialogue.model_copy(update={"turn_tokens": 64, "response_tokens": 192})
    recipe = recipe.model_copy(update={"dialogue": short})
    copies = partial(copy.deepcopy, model)
    start = cases.start_of(case, recipe, copies, tokenizer, QUESTIONS, python)
    return case, start


def draws_turns(monkeypatch, tokenizer, turns):
    """Have ``generate`` draw the given turns [rows of the first round][rounds], then noise."""
    scripts = [[talk.encode(tokenizer, turn).tolist() for turn in row] for row in turns]
    state = {"live": scripts, "step": 0}

    def multinomial(probabilities, num_samples):
        step = state["step"]
        state["step"] += 1
        drawn = [row[0][step] if step < len(row[0]) else 7 for row in state["live"]]
        assert len(drawn) == len(probabilities)
        return torch.tensor(drawn)[:, None]

    def begin_round(rounds):
        state.update(step=0, live=[row[rounds:] for row in scripts if len(row) > rounds])

    monkeypatch.setattr(torch, "multinomial", multinomial)
    return begin_round


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_trl_ends_turns_at_tags_of_several_tokens(real, monkeypatch, precision):
    case, start = real
    machine = start.recipe.machine.model_copy(update={"precision": precision})
    start = replace(start, recipe=start.recipe.model_copy(update={"machine": machine}))
    trainer = bench.trl_peer(start, case, 1, peer.ROLLOUT_FUNC)
    end = start.tokenizer.eos_token
    turns = [TURNS[0], TURNS[1], [TURNS[2][0] + end], TURNS[3]]
    begin_round = draws_turns(monkeypatch, start.tokenizer, turns)
    own, rounds = trainer._generate_single_turn, iter(range(9))
    monkeypatch.setattr(
        *(trainer, "_generate_single_turn"), lambda *a: begin_round(next(rounds)) or own(*a)
    )
    trajectories = peer.play(trainer, QUESTIONS[:1] * 4)
    assert "generate" not in vars(trainer.sampler)
    for (context,), row in zip(trajectories, turns, strict=True):
        said = [token for token, own in zip(context.response, context.own, strict=True) if own]
        assert said == [t for turn in row for t in talk.encode(start.tokenizer, turn)]
    results = [sum(not own for own in context.own) for (context,) in trajectories]
    assert results[0] > 0
    assert results[1] == 2 * results[0]
    assert results[2:] == [0, 0]


def test_the_end_of_a_turn_is_found_in_what_was_sampled():
    ends = peer.TurnEnds(["<", "/a", ">", "x", ">y"], ["</a>"])
    assert [ends.at_last(turn) for turn in ([0, 1, 2], [0, 1, 3, 2], [1, 2])] == [
        True,
        False,
        False,
    ]
    assert ends.cut([3, 0, 1, 2, 2, 2]) == [3, 0, 1, 2]
    assert ends.cut([0, 1, 4, 3]) == [0, 1, 4]  # a token goes on behind the tag
    assert ends.cut([0, 3, 1, 2]) == [0, 3, 1, 2]
    batch = torch.tensor([[3, 0, 1, 2], [0, 1, 2, 3], [0, 1, 3, 2]])
    assert ends.criterion(0)(batch, None).tolist() == [True, False, False]
    assert ends.criterion(2)(batch, None).tolist() == [False, False, False]  # begins in the prompt


def test_both_sides_of_a_real_model_compute_the_same_gradient(real):
    case, start = real
    for name in ("grpo", "arpo"):
        same_gradient(start, case, 2, algorithms.load_algorithms()[name])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_case_of_a_real_model_is_measured_on_all_sides(real, precision):
    case, start = real
    machine = start.recipe.machine.model_copy(update={"precision": precision})
    start = replace(start, recipe=start.recipe.model_copy(update={"machine": machine}))
    entry = bench.run_case(start, case, 2)
    floors.add_floors(entry, 1e9)
    ways = {f"sampling, rollout_func, {cache} cache" for cache in ("dynamic", "static")}
    assert set(entry["tried"]) == ways | {f"update, {n} micro-batches" for n in (1, 2)}
    trl, ours = entry[cases.TRL], entry[cases.BEAMLINE]
    parts = ("sampling", "tools", "rest", "update")
    for side in (trl, ours):
        assert sum(side[part]["median"] for part in parts) == pytest.approx(
            side["step"]["median"], rel=1e-3
        )
    assert entry["ratios"]["length"] == entry["ratios"]["sampled_tokens"] == 1
    assert entry["ratios"]["update"] == trl["update"]["median"] / ours["update"]["median"]
    assert entry["ratios"]["step_branching"] > 0


def test_a_real_models_cases_differ_in_precision_alone():
    first, second = cases.CASES["smollm"], cases.CASES["smollm-bf16"]
    assert replace(second, name=first.name, precision=first.precision) == first
    assert second.precision == "bfloat16"
    recipe, tuned = cases.load_settings("smollm", cases.PARAMS), cases.load_recipe(first)
    assert tuned.dialogue == recipe.dialogue
    assert tuned.tools == recipe.tools
    assert first.questions * 2 == recipe.reinforce.questions, "a step of TRL takes minutes"
    assert first.group == recipe.reinforce.rollout.leaves


def test_a_package_that_is_missing_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(cases.INSTALLED_BY, "no_such_package", "make .venv/smollm")
    recipe = cases.load_recipe(cases.CASES["smollm"])
    policy = recipe.prepare.policy.model_copy(update={"name": "no_such_package"})
    without = recipe.model_copy(
        update={"prepare": recipe.prepare.model_copy(update={"policy": policy})}
    )
    with pytest.raises(SystemExit, match=r"no_such_package.*make \.venv/smollm"):
        cases.require_package(without)
    cases.require_package(cases.load_recipe(CASE))


def test_repetitions_have_equal_new_questions(start):
    first, second = (cases.batch_of(start, CASE, number) for number in (0, 1))
    assert [question.id for question in first] == ["q0", "q1"]
    assert [question.id for question in second] == ["q2", "q3"]


def test_weights_are_put_back(start, row):
    learning, trees, rewards = rolled_out(start, row)
    before = [weight.detach().clone() for weight in learning.model.parameters()]
    bench.beamline_update(start, learning, trees, rewards, row)
    changed = [torch.equal(a, b) for a, b in zip(before, learning.model.parameters(), strict=True)]
    assert not any(changed)
    bench.restore(before, learning.model)
    assert all(torch.equal(a, b) for a, b in zip(before, learning.model.parameters(), strict=True))


def echo(arguments):
    return [Observation("ok", argument) for argument in arguments]


def test_reading_the_tools_clock_resets_it():
    clock = cases.Tools(echo)
    clock.beamline([Call("python", "1")])
    assert clock.take() > 0
    assert clock.take() == 0


def test_trl_runs_all_calls_beamline_different_ones():
    asked = []
    tools = cases.Tools(lambda arguments: asked.append(list(arguments)) or echo(arguments))
    calls = [Call("python", "1"), Call("search", "1"), Call("python", "1"), Call("python", "2")]
    ours, theirs = tools.beamline(calls), tools.trl(calls)
    assert asked == [["1", "2"], ["1", "1", "2"]]
    assert [one.outcome for one in ours] == [one.outcome for one in theirs]
    assert [one.text for one in theirs if one.outcome == "ok"] == ["1", "1", "2"]


# ---------------------------------------------------------------- the floor


def node(parent, kind, length, token=0):
    empty = np.zeros(0, np.float32)
    return Node(parent, kind, "", "", np.full(length, token, np.int32), empty, empty)


def test_the_floor_counts_each_token_of_a_tree_once():
    nodes = [node(-1, PROMPT, 3), node(0, TURN, 2), node(0, TURN, 1, 1), node(1, "result", 2)]
    tree = Tree(QUESTIONS[0], nodes, [3, 2])
    pairs = (1 + 2 + 3) + (4 + 5) + 4 + (6 + 7)
    assert floors.counts([tree]) == (8, pairs, 3)
    other = Tree(QUESTIONS[1], [node(-1, PROMPT, 3, 2), *nodes[1:]], [3, 2])
    assert floors.counts([tree, other]) == (16, 2 * pairs, 6)
    assert floors.counts([tree, tree]) == (8, pairs, 3)  # all of it is shared
    alike = Tree(QUESTIONS[0], [*nodes, node(0, TURN, 3)], [3, 2, 4])  # begins as the first does
    assert floors.counts([alike]) == (8, pairs, 4)


@pytest.mark.parametrize(("second", "tokens", "pairs"), [(1, 16, 49), (0, 12, 39)])
def test_the_floor_begins_contexts_anew_and_counts_equal_prompts_once(second, tokens, pairs):
    """Two leaves act and get a prompt of 4 tokens each, which are different or equal."""
    prompts = [node(1, PROMPT, 4, 2), node(2, PROMPT, 4, 2 + second)]
    acts = [node(-1, PROMPT, 3), node(0, TURN, 2), node(0, TURN, 1, 1)]
    tree = Tree(QUESTIONS[0], [*acts, *prompts, node(3, TURN, 1), node(4, TURN, 1, 1)], [5, 6])
    assert floors.counts([tree]) == (tokens, pairs, 5)


def test_operations_are_those_that_torch_counts(tiny, tokenizer):
    model = build_policy(tiny, tokenizer, 0)
    model.set_attn_implementation("eager")
    tokens = torch.arange(20)[None]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tokens)
    everything = floors.forward_operations(model.config, 20, 20 * 20, 20)  # eager sees all pairs
    assert counter.get_total_flops() == everything


def test_a_group_without_spread_needs_no_update(tiny, tokenizer):
    config = build_policy(tiny, tokenizer, 0).config
    trees = [
        Tree(QUESTIONS[0], [node(-1, PROMPT, 3, n), node(0, TURN, 2), node(0, TURN, 2)], [1, 2])
        for n in range(2)
    ]
    both = floors.needed_operations(config, trees, [0.0, 1.0, 0.0, 1.0])
    one = floors.needed_operations(config, trees, [0.0, 1.0, 1.0, 1.0])
    assert one["floor_update_operations"] == both["floor_update_operations"] / 2
    assert one["floor_sampling_operations"] == both["floor_sampling_operations"]
    assert both["floor_update_operations"] == 3 * both["floor_sampling_operations"]


def test_matrix_rate_is_possible():
    assert 1e8 < floors.matrix_rate() < 1e14


# ---------------------------------------------------------------- the figures


def side(**medians):
    return {name: {"median": value} for name, value in medians.items()}


def test_ratios_are_speeds_of_beamline_over_trl():
    sides = {
        cases.TRL: side(
            step=6.0,
            step_without_tools=4.0,
            sampled_tokens_a_second=100.0,
            sampled_tokens=1000,
            mean_leaf_response_tokens=100,
        ),
        cases.BEAMLINE: side(
            step=2.0,
            step_without_tools=1.0,
            sampled_tokens_a_second=250.0,
            sampled_tokens=990,
            update=0.5,
            peers_update=2.0,
            unique_tokens=1000,
            leaf_tokens=1250,
            mean_leaf_response_tokens=98,
        ),
        cases.BRANCHING: side(
            step=1.5,
            step_without_tools=1.0,
            sampled_tokens_a_second=200.0,
            sampled_tokens=700,
            update=0.4,
            peers_update=2.0,
            unique_tokens=750,
            leaf_tokens=1500,
            mean_leaf_response_tokens=104,
        ),
    }
    found = bench.ratios(sides)
    assert found["step"] == 3
    assert found["step_without_tools"] == 4
    assert found["sampling"] == 2.5
    assert found["update"] == 4
    assert found["sampled_tokens"] == 0.99
    assert (found["length"], found["length_branching"]) == (0.98, 1.04)
    assert found["step_branching"] == 4
    assert found["update_branching"] == 5
    assert found["sampling_branching"] == 2
    assert found["tokens_shared"] == pytest.approx(0.2)
    assert found["tokens_shared_branching"] == 0.5
    assert found["tokens_shared_by_branching"] == 0.25
    assert found["update_saved_by_branching"] == pytest.approx(0.2)
    del sides[cases.BRANCHING]
    assert set(bench.ratios(sides)) == {
        *("step", "step_without_tools", "sampling", "update", "sampled_tokens", "tokens_shared"),
        "length",
    }


def test_a_spread_is_median_least_and_greatest():
    assert bench.spread([3.0, 1.0, 2.0, 10.0]) == {"median": 2.5, "least": 1.0, "greatest": 10.0}


def test_the_file_is_written_whole_and_to_four_digits(tmp_path, capsys):
    file = tmp_path / "found.json"
    bench.report({"step": 2.345678, "sampling": None, "cases": {}}, file)
    assert json.loads(file.read_text()) == {"step": 2.346, "sampling": None, "cases": {}}
    assert [entry.name for entry in tmp_path.iterdir()] == ["found.json"]
    assert str(file) in capsys.readouterr().out


def test_some_cases_take_their_place_among_the_others(tmp_path, capsys):
    file, ours = tmp_path / "found.json", {"ratios": {"step": 2.0}, "questions": 1, "group": 2}
    first = dict.fromkeys(bench.FIRST_KEYS, 3.0)
    old = {**first, "machine": {"cores": 8}, "cases": {"smollm": {"old": 1}, "tiny-8": {"old": 1}}}
    file.write_text(json.dumps(old))
    entry = {**ours, "repetitions": 3, "trl": {}}
    nothing = dict.fromkeys(bench.FIRST_KEYS)
    bench.report({**nothing, "machine": {"cores": 2}, "cases": {"smollm": entry}}, file)
    found = json.loads(file.read_text())
    assert found == {
        **first,
        "machine": {"cores": 8},
        "cases": {"tiny-8": {"old": 1}, "smollm": {"machine": {"cores": 2}, **entry}},
    }
    assert "tiny-8" not in capsys.readouterr().out


def test_all_cases_and_the_first_one_replace_the_first_keys():
    old = {**dict.fromkeys(bench.FIRST_KEYS, 3.0), "machine": 1, "cases": {"tiny-8": {}}}
    new = {**dict.fromkeys(bench.FIRST_KEYS, 5.0), "machine": 2}
    whole = {**new, "cases": {name: {} for name in cases.CASES}}
    assert bench.merged(whole, old) == whole
    assert bench.merged({**new, "cases": {"tiny-16": {}}}, old)["step"] == 5.0


def test_peak_memory_never_falls():
    before = bench.resident_mib("VmHWM")
    block = np.ones(int(64e6 / 8))
    now = bench.resident_mib("VmRSS")
    del block
    assert bench.resident_mib("VmHWM") >= max(before, now) - 1
    assert now > 60


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "somewhere"], "--policy and --questions belong together"),
        (["--repetitions", "0"], "ask for at least one"),
        (["--cases", "huge"], "tiny-16"),
        (["--policy", "a", "--questions", "b"], "smollm and tiny: name --cases of one"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(monkeypatch, capsys, arguments, said):
    monkeypatch.setattr("sys.argv", ["against_trl", *arguments])
    with pytest.raises(SystemExit):
        bench.parse()
    assert said in capsys.readouterr().err


# ---------------------------------------------------------------- the worlds and the start


def test_prepare_gets_the_sets_that_the_recipe_names():
    inputs = cases.cold_start_inputs(cases.load_recipe(CASE))
    assert inputs.settings.intake
    assert inputs.settings.intake.set in inputs.sets


@pytest.mark.parametrize("most", [3, 5])
def test_numbers_of_calls_are_equally_likely(most):
    def calls(drawn):
        made = 0
        while cases.calls_again(made, drawn.integers(9999, size=5, dtype=np.int32), 3, most):
            made += 1
        return made

    drawn = np.random.default_rng(0)
    found = [calls(drawn) for _ in range(3000)]
    shares = np.bincount(found, minlength=6)[3 : most + 1] / 3000
    assert sum(shares) == pytest.approx(1)
    assert shares == pytest.approx(1 / (most - 2), abs=0.03)


def test_answers_have_the_length_that_is_wanted_and_depend_on_the_call(tokenizer):
    texts = [question.text for question in QUESTIONS]
    run = cases.answering(texts, tokenizer, (280, 320))
    calls = [f"query {number}" for number in range(50)]
    answers = [seen.text for seen in run(calls)]
    assert answers == [seen.text for seen in run(calls)]
    assert len(set(answers)) == 50
    lengths = [len(talk.encode(tokenizer, text)) for text in answers]
    assert 260 < min(lengths) < max(lengths) < 340


def test_turns_end_by_chance_at_the_same_tokens_on_both_sides():
    texts = ["a", "Xa", "X", "Y", *["b"] * 20, "Zb", "ZX"]
    stops = cases.ending_letters(texts, 10)
    assert not {letter for letter in stops if letter.islower()}
    ending = [text for text in texts if any(stop in text for stop in stops)]
    assert 0 < len(ending) * 10 <= len(texts)
