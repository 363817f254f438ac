"""The metrics whose charts stand first on the page of a run in MLflow.

MLflow's UI makes a section of charts of what names have before their last slash, and sorts sections
by that text, capitals first; names without a slash come after all of them. So a few metrics are
logged once more, under the same name in one of these sections.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")

SECTIONS = {
    "Progress": ("reward", "reward_deviation", "success"),
    "Training": (
        *("clip_fraction", "entropy", "gradient_norm", "kl", "masked_share"),
        *("ratio_highest", "ratio_lowest", "response_tokens", "tool_calls_a_leaf"),
    ),
}


def of(metrics: Mapping[str, Value]) -> dict[str, Value]:
    """Return those of the metrics of an iteration that stand first, by their further names."""
    return {
        f"{section}/{name}": metrics[name]
        for section, names in SECTIONS.items()
        for name in names
        if name in metrics
    }
