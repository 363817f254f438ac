"""Families beyond plain attention learn on a GPU as their own pass over rows does.

Each is a small copy (tasks/policy/small_copy.py) in the form in which it learns there: recurrent
layers and convolutions along chains of slots, sinks and latent attention in flex attention. In bf16
the measure is float32, as in test_learner_gpu.py.
"""

from dataclasses import replace

import pytest
import torch

from benchmarks.families import INPUTS, config_of
from benchmarks.update_on_gpu import Shape, synthetic_tree
from params.schema.base import Machine
from tasks import check_policy
from tasks.learning import agreement
from tasks.learning.attention import FLEX, GATHERED, ROWS, form_of
from tasks.learning.passes import recomputing
from tasks.policy import small_copy

SLACK = 1.5
FAMILIES = (
    *("qwen3_5_text", "lfm2", "nemotron_h"),  # delta rule, convolutions, Mamba 2 with attention
    *("gpt_oss", "deepseek_v3"),  # sinks and windows, latent attention
)


def exactly(device):
    return Machine(threads=1, device=device, precision="float32")


def coarsely(device):
    return Machine(threads=1, device=device, precision="bfloat16")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, device):
    """A small copy of a family on the device."""
    copied = small_copy.small_copy(config_of(request.param), 2**20, check_policy.SEED)
    return copied.to(device)


@pytest.fixture(scope="module")
def tree():
    """A tree whose contexts exceed windows, chunks of a scan and blocks of attention."""
    shape = Shape(prompt=60, turns=3, turn=40, result=10, leaves=6)
    return synthetic_tree(5, shape, small_copy.VOCABULARY).tree


def flat(values):
    """All numbers of log-probabilities by node, or of gradients by weight, as one row."""
    if isinstance(values, dict):
        return torch.cat([values[name].flatten() for name in sorted(values)])
    return torch.cat([torch.from_numpy(node) for node in values])


def distance(found, expected):
    found, expected = flat(found), flat(expected)
    return float((found - expected).norm() / expected.norm())


def test_families_learn_as_trees(model, device):
    assert form_of(model, device) == (FLEX if device == "cuda" else GATHERED) != ROWS


def test_checks_tree_is_that_of_rows(model, device):
    inputs = replace(INPUTS, machine=exactly(device), device=device)
    found, uncopied = check_policy.structure_of(model.config, inputs)
    assert not uncopied
    assert {name: each for name, each in found.items() if not each.holds} == {}


def test_trees_equal_rows_in_float32(model, tree, device):
    machine = exactly(device)
    rows = agreement.by_rows(model, tree, machine)
    assert agreement.largest(agreement.by_learner(model, tree, machine), rows) < 1e-4
    expected = agreement.gradient_by_rows(model, tree, machine)
    assert agreement.apart(agreement.gradient_by_learner(model, tree, machine), expected) < 5e-5


def test_trees_in_bf16_are_as_close_as_rows(model, tree, device):
    exact, coarse = exactly(device), coarsely(device)
    for by_rows, by_learner in (
        (agreement.by_rows, agreement.by_learner),
        (agreement.gradient_by_rows, agreement.gradient_by_learner),
    ):
        expected = by_rows(model, tree, exact)
        error = distance(by_rows(model, tree, coarse), expected)
        assert 0 < error < 0.3, f"{by_rows.__name__}: rows in bf16 are far off themselves"
        assert distance(by_learner(model, tree, coarse), expected) < SLACK * error


@pytest.mark.parametrize("machine", [exactly, coarsely])
def test_recomputing_gives_the_same_gradient(model, tree, device, machine):
    kept = agreement.gradient_by_learner(model, tree, machine(device))
    with recomputing(model, True):
        again = agreement.gradient_by_learner(model, tree, machine(device))
    assert distance(again, kept) < (1e-5 if machine is exactly else 1e-2)  # sums in no fixed order
