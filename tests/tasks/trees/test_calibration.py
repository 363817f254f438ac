"""Calibration of the reward model: known scores, and what a fit restores."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.trees import calibration
from tasks.trees.calibration import LEAST, Calibration, auc, expected_calibration_error, fit

SCORES = np.array([0.1, 0.4, 0.35, 0.8])
LABELS = np.array([False, False, True, True])


def test_auc_is_the_chance_that_a_success_scores_higher():
    assert auc(SCORES, LABELS) == 0.75
    assert auc(np.zeros(4), LABELS) == 0.5  # ties count half
    assert auc(-SCORES, LABELS) == 0.25
    assert auc(SCORES, np.ones(4, bool)) is None


def test_calibration_error_is_the_mean_distance_of_the_bins():
    probabilities = np.array([0.95, 0.95, 0.95, 0.95, 0.05])
    labels = np.array([True, True, True, False, False])
    # bin 9: |0.95 - 0.75| over four of five, bin 0: |0.05 - 0| over one of five
    assert expected_calibration_error(probabilities, labels) == pytest.approx(0.8 * 0.2 + 0.01)
    rows = calibration.reliability(probabilities, labels)
    assert [row["count"] for row in rows] == [1, 4]
    assert rows[1] == {"count": 4, "probability": pytest.approx(0.95), "success": 0.75}
    assert expected_calibration_error(np.ones(3), np.ones(3, bool)) == 0  # 1 is in the last bin


@pytest.mark.parametrize(("temperature", "offset"), [(3.0, 0.0), (0.5, -1.0), (1.0, 2.0)])
def test_a_fit_restores_what_scores_were_made_with(temperature, offset):
    random = np.random.default_rng(0)
    logits = 3 * random.standard_normal(20_000)
    true = Calibration(temperature=temperature, offset=offset).probabilities(logits)
    labels = random.random(len(logits)) < true
    fitted = fit(logits, labels)
    assert fitted.temperature == pytest.approx(temperature, rel=0.1)
    assert fitted.offset == pytest.approx(offset, abs=0.1)
    before = expected_calibration_error(Calibration().probabilities(logits), labels)
    after = expected_calibration_error(fitted.probabilities(logits), labels)
    assert after < 0.02 < before


def test_too_few_equal_or_reversed_labels_fit_nothing():
    logits = np.linspace(-3, 3, 2 * LEAST)
    assert fit(logits, logits > 0)
    assert fit(logits, logits < 0) is None  # higher for failures
    assert fit(logits, np.ones(len(logits), bool)) is None
    assert fit(logits[: LEAST - 1], logits[: LEAST - 1] > -2) is None


@given(st.lists(st.tuples(st.floats(-9, 9), st.booleans()), min_size=2, max_size=30))
def test_calibration_keeps_the_order_and_gives_probabilities(rows):
    logits, labels = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    found = Calibration(temperature=2.5, offset=-0.7).probabilities(logits)
    assert ((found >= 0) & (found <= 1)).all()
    order = np.argsort(logits, kind="stable")
    assert (np.diff(found[order]) >= 0).all()
    assert 0 <= expected_calibration_error(found, labels) <= 1


def test_probabilities_of_extreme_scores_are_finite():
    found = Calibration().probabilities(np.array([-1e6, 0.0, 1e6]))
    assert found.tolist() == [0.0, 0.5, 1.0]
