"""Noise and power of a difference over seeds and questions, against simulated comparisons."""

import numpy as np
import pytest

from tasks.trees.intervals import interval_over_seeds
from tasks.trees.power import (
    Noise,
    noise_of,
    questions_needed,
    seeds_needed,
    smallest_difference,
)

TRUE = Noise(seeds=0.02**2, questions=0.2**2, rest=0.45**2)  # of answers that are right or wrong


def simulated(draw, noise, seeds, questions, mean=0.0):
    """Differences [S, Q] with these variances."""
    parts = ((noise.seeds, (seeds, 1)), (noise.questions, questions), (noise.rest, None))
    sizes = [(variance, size or (seeds, questions)) for variance, size in parts]
    return mean + sum(variance**0.5 * draw.normal(size=size) for variance, size in sizes)


def test_variances_are_estimated_without_bias():
    draw = np.random.default_rng(0)
    found = [noise_of(simulated(draw, TRUE, 4, 60)) for _ in range(2000)]
    for name in ("questions", "rest"):
        expected = getattr(TRUE, name)
        assert np.mean([getattr(one, name) for one in found]) == pytest.approx(expected, rel=0.05)
    large = Noise(0.1, 0.05, 0.2)  # far above 0, so none is cut there
    found = [noise_of(simulated(draw, large, 4, 60)) for _ in range(4000)]
    assert np.mean([one.seeds for one in found]) == pytest.approx(0.1, rel=0.06)


def test_noise_by_hand():
    # seeds' means 1 and 3; questions' means 1, 2, 3; nothing left over
    found = noise_of(np.array([[0.0, 1.0, 2.0], [2.0, 3.0, 4.0]]))
    assert (found.seeds, found.questions, found.rest) == pytest.approx((2.0, 1.0, 0.0))
    # mean squares: of seeds 4, of questions 0, of the rest 1
    found = noise_of(np.array([[0.0, 1.0], [3.0, 2.0]]))
    assert (found.seeds, found.questions, found.rest) == pytest.approx((1.5, 0.0, 1.0))
    one = noise_of(np.array([[0.0, 1.0, 2.0]]))
    assert (one.seeds, one.questions, one.rest) == pytest.approx((0.0, 1.0, 0.0))
    assert one.error(1, 3) == pytest.approx(3**-0.5)
    with pytest.raises(ValueError, match="at least two"):
        noise_of(np.zeros((3, 1)))


def test_error_of_resampled_means_is_the_average_over_simulated_comparisons():
    draw = np.random.default_rng(1)
    for seeds, questions in ((3, 60), (1, 60), (5, 20)):
        variances = []
        for run in range(150):
            low, high = interval_over_seeds(simulated(draw, TRUE, seeds, questions), 200, run)
            variances.append(((high - low) / (2 * 1.96)) ** 2)
        expected = TRUE.resampled_error(seeds, questions)
        assert np.mean(variances) ** 0.5 == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize(("seeds", "questions"), [(3, 100), (8, 40)])
def test_the_smallest_difference_is_told_in_80_of_100_simulated_comparisons(seeds, questions):
    draw, runs = np.random.default_rng(seeds), 600
    difference = smallest_difference(TRUE, seeds, questions)
    found = {}
    for mean in (0.0, difference):
        told = 0
        for run in range(runs):
            values = simulated(draw, TRUE, seeds, questions, mean)
            low, high = interval_over_seeds(values, 200, run)
            told += low > 0 or high < 0
        found[mean] = told / runs
    assert found[difference] == pytest.approx(0.8, abs=0.05)
    assert found[0.0] < 0.07


def test_the_sizes_needed_are_the_least_that_tell_the_difference():
    for difference in (0.05, 0.06, -0.1):
        seeds = seeds_needed(difference, TRUE, 300)
        questions = questions_needed(difference, TRUE, 5)
        assert seeds and questions
        assert smallest_difference(TRUE, seeds, 300) <= abs(difference)
        assert smallest_difference(TRUE, 5, questions) <= abs(difference)
        assert seeds == 2 or smallest_difference(TRUE, seeds - 1, 300) > abs(difference)
        assert smallest_difference(TRUE, 5, questions - 1) > abs(difference)


def test_some_differences_need_more_of_the_other():
    assert seeds_needed(0.03, TRUE, 300) is None, "300 questions alone are noisier than that"
    assert questions_needed(0.02, TRUE, 3) is None, "so are three seeds"
    assert seeds_needed(0.0, TRUE, 300) is None
    assert seeds_needed(0.01, Noise(0.0, 0.0, 0.0), 300) == 2
