"""What each variant of a comparison may spend in training."""

from __future__ import annotations

from dataclasses import dataclass

SPENT = ("sampled_tokens", "tool_calls", "environment_steps", "seconds")  # kinds of a budget


@dataclass(frozen=True)
class Budget:
    """What each variant may spend in training: an amount of one of SPENT."""

    kind: str
    amount: float

    @staticmethod
    def parse(text: str) -> Budget:
        """Read ``kind=amount``. Raises ValueError."""
        kind, _, amount = text.partition("=")
        try:
            budget = Budget(kind, float(amount))
        except ValueError:
            budget = Budget(kind, 0.0)
        if kind not in SPENT or not 0 < budget.amount < float("inf"):
            given = f"--budget {text}" if text else "--budget is missing"
            raise ValueError(f"{given}: write kind=amount, with a kind of {list(SPENT)}")
        return budget
