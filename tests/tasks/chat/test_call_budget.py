"""An account of calls outlives the processes that write it."""

import anyio

from params.schema.chat import ChatBudget
from tasks.chat.call_budget import CallBudget, Spent


def test_half_a_line_costs_no_entry_after_it(tmp_path):
    file = tmp_path / "spent.jsonl"
    file.write_bytes(b'{"call": "one", "calls": 1, "tokens": 7}\n{"call": "two", "ca')  # killed
    limits = ChatBudget(calls=3, tokens=None)
    anyio.run(CallBudget(file, limits, "judge").reserve, 5)
    assert CallBudget(file, limits, "judge").spent == Spent(calls=2, tokens=12)
