"""Drawing a token: frequencies, nuclei, and the ends of the noise."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tasks.engines.transformers.drawing import draw, nucleus

ONE = torch.tensor([0])


def frequencies(logits, temperature, top_p, draws=20_000):
    """How often each token is drawn, over noise that is spread evenly."""
    noise = (torch.arange(draws) + 0.5) / draws
    tokens, _, _ = draw(logits[None], noise, temperature, top_p, torch.zeros(draws, dtype=int))
    return torch.bincount(tokens, minlength=logits.shape[-1]) / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_frequencies_are_tempered_probabilities(temperature):
    logits = torch.linspace(-2, 2, 12)[torch.randperm(12, generator=torch.manual_seed(0))]
    expected = torch.softmax(logits / temperature, -1)
    found = frequencies(logits, temperature, 1.0)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def test_random_noise_gives_the_probabilities_too():
    """Pearson's statistic over 11 degrees of freedom: above 31 once in a thousand."""
    logits = torch.linspace(-2, 2, 12)
    noise = torch.from_numpy(np.random.default_rng(0).random(20_000, np.float32))
    tokens, _, _ = draw(logits.expand(20_000, -1), noise, 1.0, 1.0, torch.arange(20_000))
    expected = 20_000 * torch.softmax(logits, -1)
    found = torch.bincount(tokens, minlength=12)
    assert float(((found - expected) ** 2 / expected).sum()) < 31


def test_top_p_renormalises_within_the_nucleus():
    probabilities = torch.tensor([0.05, 0.5, 0.15, 0.3])
    found = frequencies(probabilities.log(), 1.0, 0.75)
    torch.testing.assert_close(found, torch.tensor([0, 0.5 / 0.8, 0, 0.3 / 0.8]), atol=2e-4, rtol=0)


def test_logprobs_are_those_before_top_p():
    probabilities = torch.tensor([[0.05, 0.5, 0.15, 0.3]])
    tokens, logprobs, entropies = draw(probabilities.log(), torch.tensor([0.0]), 1.0, 0.4, ONE)
    assert tokens.tolist() == [1]
    assert float(logprobs) == pytest.approx(np.log(0.5), abs=1e-6)
    p = probabilities.numpy()
    assert float(entropies) == pytest.approx(float(-(p * np.log(p)).sum() / np.log(4)), abs=1e-6)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.4, [1]), (0.75, [1, 3]), (0.85, [1, 2, 3]), (0.97, [0, 1, 2, 3]), (1e-9, [1])],
)
def test_nucleus_is_the_smallest_set_of_mass_top_p(top_p, kept):
    found = nucleus(torch.tensor([[0.05, 0.5, 0.15, 0.3]]), top_p)
    assert found[0].nonzero().flatten().tolist() == kept


def test_the_nucleus_breaks_ties_by_token():
    found = nucleus(torch.full((1, 4), 0.25), 0.4)
    assert found[0].tolist() == [0.25, 0.25, 0, 0]


@given(
    logits=arrays.arrays(np.float32, (3, 17), elements=st.floats(-40, 40, width=32)),
    noise=arrays.arrays(np.float32, 3, elements=st.floats(0, float(1 - 2**-24), width=32)),
    temperature=st.floats(0.1, 5),
    top_p=st.floats(0.01, 1),
)
def test_a_draw_never_leaves_the_nucleus(logits, noise, temperature, top_p):
    rows = torch.from_numpy(logits)
    tokens, logprobs, entropies = draw(
        rows, torch.from_numpy(noise), temperature, top_p, torch.arange(3)
    )
    probabilities = torch.softmax(rows / temperature, -1)
    # all tokens, where a sum that rounds to 1 before the last ones would leave these out
    kept = probabilities if top_p == 1 else nucleus(probabilities, top_p)
    for row, token in enumerate(tokens.tolist()):
        assert kept[row, token] > 0
        mass, smallest = kept[row].sum(), kept[row][kept[row] > 0].min()
        assert mass >= top_p - 1e-5
        assert mass - smallest < top_p + 1e-5
        assert float(logprobs[row].exp()) == pytest.approx(float(probabilities[row, token]), 1e-3)
    assert (logprobs <= 0).all()
    assert ((entropies >= 0) & (entropies <= 1)).all()


@pytest.mark.parametrize("noise", [0.0, float(1 - 2**-24), 1.0])
def test_extreme_noise_draws_probable_tokens(noise):
    logits = torch.tensor([[-200.0, 0.0, -200.0, 1.0, -200.0]])
    tokens, _, _ = draw(logits, torch.tensor([noise]), 1.0, 1.0, ONE)
    assert tokens.tolist() == ([1] if noise == 0 else [3])


# ---- a large vocabulary, whose tokens are found by blocks

LARGE = 5003  # not a multiple of a block


def test_blocks_give_the_token_of_the_cumulative_distribution():
    random = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4, LARGE, generator=random)
    logits[0, : LARGE // 2] = -1e30  # whole blocks without mass
    noise, rows = torch.rand(400, generator=random), torch.arange(4).repeat_interleave(100)
    tokens, logprobs, entropies = draw(logits, noise, 0.8, 1.0, rows)
    exact = (logits.double() / 0.8).log_softmax(-1)
    ends = exact.exp().cumsum(-1)
    below = torch.where(tokens > 0, ends[rows, tokens - 1], 0.0)
    assert ((below - 1e-6 <= noise) & (noise <= ends[rows, tokens] + 1e-6)).all()
    torch.testing.assert_close(logprobs.double(), exact[rows, tokens], rtol=0, atol=2e-6)
    entropy = -(exact.exp() * exact).sum(-1) / np.log(LARGE)
    torch.testing.assert_close(entropies.double(), entropy[rows], rtol=0, atol=1e-6)


@pytest.mark.parametrize("noise", [0.0, float(1 - 2**-24), 1.0])
def test_extreme_noise_draws_probable_tokens_of_a_large_vocabulary(noise):
    logits = torch.full((1, LARGE), -200.0)
    logits[0, 300], logits[0, LARGE - 700] = 0.0, 1.0
    tokens, _, _ = draw(logits, torch.tensor([noise]), 1.0, 1.0, ONE)
    assert tokens.tolist() == [300 if noise == 0 else LARGE - 700]


def test_a_draw_from_a_large_vocabulary_does_not_depend_on_its_neighbours():
    random = torch.Generator().manual_seed(0)
    logits, noise = torch.randn(9, LARGE, generator=random), torch.rand(9, generator=random)
    for top_p in (1.0, 0.9):
        together = draw(logits, noise, 1.0, top_p, torch.arange(9))
        for row in range(9):
            alone = draw(logits[row : row + 1], noise[row : row + 1], 1.0, top_p, ONE)
            assert [float(one) for one in alone] == [float(all_of[row]) for all_of in together]


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 8.0])
@pytest.mark.parametrize("top_p", [0.3, 0.95])
@pytest.mark.parametrize("vocabulary", [40, 2048, 49_152])
def test_the_nucleus_is_that_of_a_full_sort(scale, top_p, vocabulary):
    """Scale 0: all are equal, and the first ones stay; others have ties by rounding."""
    random = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(3, vocabulary, generator=random)).to(torch.bfloat16).float()
    probabilities = logits.softmax(-1)
    ordered, index = probabilities.sort(dim=-1, descending=True, stable=True)
    outside = ordered.cumsum(-1) - ordered >= top_p
    expected = probabilities.masked_fill(outside.gather(-1, index.argsort(-1)), 0.0)
    found = nucleus(probabilities, top_p)
    assert torch.equal(found, expected)
