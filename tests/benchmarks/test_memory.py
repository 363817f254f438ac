"""The benchmark of memory by vocabulary: both forms do the same work, and sizes stay in bounds."""

import pytest
import torch

from benchmarks import memory as bench
from flows.tracking import run_figures
from tasks.learning import passes
from tests.trees import VOCABULARY, small_policy


def test_both_forms_give_equal_gradients(monkeypatch):
    monkeypatch.setattr(passes, "LOGITS_AT_ONCE", dict.fromkeys(("cpu", "cuda"), 5 * VOCABULARY))
    model, found = small_policy(), []
    hidden = torch.randn(23, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for form in bench.FORMS.values():
        logprobs, entropies = form(model, hidden, torch.arange(23), 0.7)
        assert entropies is None
        (gradient,) = torch.autograd.grad(logprobs.sum(), hidden)
        found.append((logprobs.detach(), gradient))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("tokens", "leaves"), [(2, 2), (64, 16)])
def test_tree_has_its_number_of_sampled_tokens(tokens, leaves):
    tree = bench.tree_of(50, tokens, leaves)
    assert sum(len(credit.advantages) for credit in tree.credits) == tokens
    assert len(tree.tree.leaves) == leaves
    assert all(credit.advantages.any() for credit in tree.credits), "no leaf is skipped"


def test_a_plain_form_that_is_too_large_is_not_run():
    found = bench.cases(bench.VOCABULARIES, bench.TOKENS)
    assert {case for case in found if case[0] == bench.PARTS} == {
        (bench.PARTS, vocabulary, tokens)
        for vocabulary in bench.VOCABULARIES
        for tokens in bench.TOKENS
    }
    plain = [(vocabulary, tokens) for form, vocabulary, tokens in found if form == bench.PLAIN]
    assert max(4 * bench.PLAIN_COPIES * vocabulary * tokens for vocabulary, tokens in plain) < 6e9
    assert (151_936, 8_192) not in plain
    assert (2_048, 8_192) in plain


def test_process_measures_memory_of_all_logits():
    tokens, vocabulary = 512, 8_192  # logits of 16 MiB
    taken = bench.measure_apart(bench.PLAIN, vocabulary, tokens)
    assert 2 * 4 * tokens * vocabulary < taken < 20 * 4 * tokens * vocabulary


def test_table_and_figure_show_all_measurements(tmp_path):
    rows = [
        {
            "form": form,
            "vocabulary": vocabulary,
            "tokens": tokens,
            "logits_mib": 1.0,
            "peak_mib": 7.0,
        }
        for form, vocabulary, tokens in bench.cases(bench.VOCABULARIES, bench.TOKENS)
    ]
    assert len(bench.table(rows).splitlines()) == 2 + len(rows)
    figure = bench.draw(rows)
    (axes,) = figure.axes
    assert sum(len(line.get_xdata()) for line in axes.lines) == len(rows)
    run_figures.save(figure, tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").stat().st_size > 1000
