"""The benchmark of the update on a GPU: what it times is what it says."""

import itertools
import json
import sys

import pytest
import torch

from benchmarks import update_on_gpu as bench
from params.schema.algorithms import load_algorithms
from params.schema.base import Machine
from tasks.engines.transformers import cache
from tasks.learning import passes
from tasks.learning.algorithm import assemble
from tasks.learning.attention import ROWS, attending, form_for
from tasks.learning.packing import lay_out
from tasks.policy.resident import Learner
from tasks.trees.tree import PROMPT

ARCHITECTURE = bench.TINY.architectures["tiny"]
MACHINE = Machine(threads=1, device="cpu", precision="float32")
TREES = [bench.synthetic_tree(seed, bench.TINY.shape, ARCHITECTURE.vocabulary) for seed in (0, 1)]


@pytest.fixture
def learning(tmp_path):
    return Learner(tmp_path, bench.policy(ARCHITECTURE, "cpu"), None)


def packed(learning, packing, tokens=10_000):
    cost = passes.training_cost(learning.model, form_for("cpu"))
    return bench.micro_batches(TREES, packing, tokens, cost, "cpu")


def test_half_of_the_leaves_branch_after_a_result():
    for credited in TREES:
        tree = credited.tree
        paths = [tree.path(leaf) for leaf in tree.leaves]
        assert len(paths) == 16
        assert [node.kind for node in tree.nodes].count(PROMPT) == 1
        assert len({path[1] for path in paths}) == 8, "as many first turns as trunks"
        assert {len(path) for path in paths} == {2 * bench.TINY.shape.turns}


def test_trees_compute_tokens_once_rows_leaves(learning):
    counted = bench.sizes(TREES)
    computed = {
        packing: sum(made.tokens.shape[1] for made in packed(learning, packing))
        for packing in bench.PACKINGS
    }
    assert computed == {"trees": counted["unique_tokens"], "rows": counted["leaf_tokens"]}
    assert counted["leaf_tokens"] > 1.5 * counted["unique_tokens"]


@pytest.mark.parametrize("tokens", [200, 10_000])
def test_both_packings_compute_the_same_gradient(learning, tokens):
    loss = assemble(load_algorithms()["grpo"], 1).loss
    found = []
    for packing in bench.PACKINGS:
        with attending(learning.model, form_for("cpu")):
            batch = packed(learning, packing, tokens)
            bench.forward_backward(learning, batch, loss, MACHINE)
        found.append([weight.grad.clone() for weight in learning.model.parameters()])
    for one, other in zip(*found, strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("packing", bench.PACKINGS)
def test_operations_of_matrices_and_visible_pairs(learning, packing):
    batch = packed(learning, packing)
    layers = sum(
        weight.numel() for weight in learning.model.model.layers.parameters() if weight.ndim == 2
    )
    head = learning.model.lm_head.weight.numel()
    expected = 0
    for made in batch:
        expected += 6 * (made.tokens.numel() * layers + len(made.targets) * head)
        seen = set()
        for place, slot in (
            pair
            for packed in made.layout.trees
            for path in packed.paths
            for pair in enumerate(path)
        ):
            if slot not in seen:  # once, with the keys of its own path
                seen.add(slot)
                expected += 12 * (place + 1) * ARCHITECTURE.hidden * ARCHITECTURE.layers
    assert bench.operations(learning.model, batch) == expected


# Of tiny policies: entries of matrices that a token meets, layers with attention to all tokens and
# to a window, entries of a query and a value, and the window.
FORMULAS = {
    "tiny-Qwen3.5": (
        3 * 32 * (4 * 32 + 2 * 2 + 32)  # queries, keys, values, gates; decays and steps; output
        + 32 * (2 * 32 + 2 * 16 + 32)  # queries with gates, keys and values, output
        + 3 * 4 * 96  # convolutions over 4 tokens
        + 4 * 3 * 32 * 64,
        (1, 0, 2 * 2 * 16, None),
    ),
    "tiny-gpt-oss": (
        2 * (32 * (32 + 2 * 16 + 32) + 4 * 32 + 2 * 3 * 32 * 64),  # two of four experts
        (1, 1, 2 * 2 * 16, 16),
    ),
    "tiny-DeepSeek": (
        2 * (32 * 16 + 16 * 2 * 16 + 32 * (16 + 8) + 16 * 2 * (8 + 16) + 2 * 16 * 32)
        + 3 * 32 * 64  # the first layer
        + (4 * 32 + 3 * 3 * 32 * 32),  # two of four experts and a shared one
        (2, 0, 2 * (16 + 16), None),
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_operations_of_other_families(name, tmp_path):
    model = bench.policy(bench.TINY.architectures[name], "cpu")
    batch = packed(Learner(tmp_path, model, None), "trees")
    entries, (full, windows, widths, window) = FORMULAS[name]
    assert bench.matrices(model) == entries
    positions = torch.cat([made.positions[0] for made in batch]) + 1
    pairs = full * positions.sum() + windows * positions.clamp(max=window or 1).sum()
    sampled = sum(len(made.targets) for made in batch)
    forward = 2 * (len(positions) * entries + sampled * 32 * 512 + int(pairs) * widths)
    assert bench.operations(model, batch) == 3 * forward


COUNTS = {
    **{"Qwen2.5-0.5B": 494e6, "Qwen2.5-1.5B": 1544e6, "Qwen2.5-3B": 3086e6},  # as published
    **{"Qwen3.5-like": 487e6, "gpt-oss-like": 474e6, "DeepSeek-like": 518e6},  # half a billion
}


def test_sizes_are_those_of_the_models():
    for name, architecture in bench.PLAN.architectures.items():
        with torch.device("meta"):
            model = bench.policy(architecture, "meta")
        weights = sum(weight.numel() for weight in model.parameters())
        assert weights == pytest.approx(COUNTS[name], rel=2e-3), name


def test_own_pass_is_measured_where_families_differ(monkeypatch):
    tiny = bench.TINY.architectures
    assert bench.variants_of(tiny["tiny"], "cpu") == bench.VARIANTS
    assert bench.variants_of(tiny["tiny-Qwen3.5"], "cpu") == (*bench.VARIANTS, ("own", False))
    monkeypatch.setattr(bench, "form_of", lambda model, device: ROWS)
    assert set(bench.variants_of(tiny["tiny-Qwen3.5"], "cpu")) == {("own", False), ("own", True)}


def test_own_pass_computes_padded_rows():
    name = "tiny-Qwen3.5"
    architecture = bench.TINY.architectures[name]
    own, rows = (
        bench.measure(name, architecture, packing, False, TREES, 1024, "cpu", 1.0, 1)
        for packing in ("own", "rows")
    )
    assert rows["computed_tokens"] == rows["leaf_tokens"] <= own["computed_tokens"]
    assert own["computed_tokens"] < 1.3 * own["leaf_tokens"]
    assert own["operations"] == rows["operations"]


def test_real_trees_have_long_leaves():
    credited = bench.synthetic_tree(0, bench.PLAN.shape, 1000)
    (packed,) = lay_out([(credited, range(16))]).trees
    assert all(1000 < len(path) < 2000 for path in packed.paths)


def test_micro_batches_shrink_to_fit(monkeypatch):
    tried = []

    def measure(*arguments):
        tried.append(arguments[-4])
        if arguments[-4] > 10:
            raise torch.OutOfMemoryError("no more")
        return {"fits": arguments[-4]}

    monkeypatch.setattr(bench, "measure", measure)
    rest = {"device": "cpu", "rate": 1.0, "repetitions": 1}
    assert bench.measure_what_fits("a", tokens=(40, 20, 10, 5), **rest) == {"fits": 10}
    assert tried == [40, 20, 10]
    assert bench.measure_what_fits("a", tokens=(40, 20), **rest) is None


@pytest.mark.parametrize("recompute", [False, True])
def test_measured_update_is_in_bf16_over_float32(monkeypatch, recompute):
    seen = []

    def spy(learning, batch, loss, machine):
        kept = learning.model.is_gradient_checkpointing
        seen.append((machine.precision, kept, learning.model.dtype, len(learning.optimizer.state)))
        work(learning, batch, loss, machine)

    work = bench.forward_backward
    monkeypatch.setattr(bench, "forward_backward", spy)
    bench.measure("tiny", ARCHITECTURE, "trees", recompute, TREES, 1024, "cpu", 1.0, 5)
    assert {entry[:3] for entry in seen} == {("bfloat16", recompute, torch.float32)}
    assert [entry[3] > 0 for entry in seen] == [False] + [True] * (len(seen) - 1)


def test_decoding_step_reads_weights_and_cache():
    model = bench.policy(ARCHITECTURE, "cpu")
    weights = 2 * sum(weight.numel() for weight in model.parameters())
    one = bench.bytes_of_a_turn(ARCHITECTURE, model, rows=3, before=10, sampled=1)
    size = ARCHITECTURE.hidden // ARCHITECTURE.heads
    held = 2 * 2 * ARCHITECTURE.layers * ARCHITECTURE.key_value_heads * size  # keys, values; bytes
    assert one == weights + 3 * 10 * held
    two = bench.bytes_of_a_turn(ARCHITECTURE, model, rows=3, before=10, sampled=2)
    assert two - one == weights + 3 * 11 * held


def test_sampling_takes_the_measured_steps(monkeypatch):
    passes = []
    logits = cache.RaggedSession.logits

    def spy(session, tokens, last, visible):
        passes.append((tuple(tokens.shape), session.network.like.dtype))
        return logits(session, tokens, last, visible)

    monkeypatch.setattr(cache.RaggedSession, "logits", spy)
    found = bench.measure_sampling("tiny", ARCHITECTURE, 2, bench.TINY.turn, "cpu", 1e9)
    prefill, *steps = passes
    assert prefill == ((2, bench.TINY.turn.prompt), torch.bfloat16)
    turns = bench.WARM_UP + bench.REPETITIONS
    assert steps == [((2, 1), torch.bfloat16)] * turns * bench.TINY.turn.sampled
    assert found["share_of_copy_rate"] == pytest.approx(
        found["floor_of_a_step"] / found["seconds_of_a_step"]
    )


@pytest.mark.parametrize("name", bench.TINY.architectures)
def test_runs_without_a_gpu_where_asked(monkeypatch, tmp_path, capsys, name):
    ticks = itertools.count()
    monkeypatch.setattr(bench.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(bench, "TREES", 1)
    monkeypatch.setattr(bench, "REPETITIONS", 1)
    file = tmp_path / "found.json"
    line = ["update_on_gpu", "--device", "cpu", "--tiny", "--only", name, "--file", str(file)]
    monkeypatch.setattr(sys, "argv", line)
    bench.main()
    found = json.loads(file.read_text())
    assert found["bf16_matrix_operations_per_second"] == 2 * 256**3  # each product took a second
    for row in found["rows"]:
        assert row["unique_tokens_per_second"] == row["unique_tokens"]
        assert row["share_of_matrix_rate"] == row["operations"] / (2 * 256**3)
    printed = capsys.readouterr().out
    variants = bench.variants_of(bench.TINY.architectures[name], "cpu")
    assert tuple((row["packing"], row["recompute"]) for row in found["rows"]) == variants
    assert found["copied_bytes_per_second"] == 2 * 2**20
    assert len(found["sampling"]) == (name == "tiny")
    for row in found["sampling"]:
        assert row["tokens_per_second"] == row["rows"] * bench.TINY.turn.sampled
    assert all(f"| {name} | {packing} |" in printed for packing, _ in variants)


def test_options_choose_leaves_packings_and_repetitions(monkeypatch, tmp_path):
    file = tmp_path / "found.json"
    line = ["update_on_gpu", "--device", "cpu", "--tiny", "--file", str(file), "--updates"]
    line += ["--only", "tiny", "--leaves", "4", "--packings", "rows", "--repetitions", "2"]
    monkeypatch.setattr(sys, "argv", line)
    bench.main()
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["packing"], row["leaves"], len(row["seconds_all"])) == ("rows", 4 * 4, 2)


def test_policy_of_another_plan_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [*"update_on_gpu --device cpu --only tiny".split()])
    with pytest.raises(SystemExit):
        bench.main()
    assert "take one of" in capsys.readouterr().err


def test_missing_gpu_is_an_error_with_remedy(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["update_on_gpu"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "no GPU here" in capsys.readouterr().err
