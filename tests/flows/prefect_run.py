"""A sub-step in a Prefect flow, called again after each of some changes of Prefect's stored result.

Writes to ``counts.json`` how often it was called again, how often it returned what the ledger has,
how often its body ran and how often Prefect called it cached. Changes are flipped bits, one every
``sys.argv[1]``, and whole results of somebody else.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from prefect import flow, task

from tasks.ledger import prefect_cache, substeps
from tasks.ledger.substeps import Step

EVERY = int(sys.argv[1])
computed = []


@dataclass(frozen=True)
class Inputs:
    size: int = 2


@task(**prefect_cache.TASK_OPTIONS)
@substeps.recorded
def train(step, inputs):
    computed.append(step.iteration)
    (step.out / "table.txt").write_text(str(inputs.size))
    return {"metrics": {"loss": 0.25}, "found": {"__class__": "builtins.int", "data": "3"}}


def changed(content):
    for bit in range(0, 8 * len(content), EVERY):
        other = bytearray(content)
        other[bit // 8] ^= 1 << bit % 8
        yield bytes(other)
    stored = json.loads(content)
    for result in ("{}", "null", "[]", '{"metrics": {"loss": 9}}', "not JSON"):
        yield json.dumps({**stored, "result": result}).encode()
    yield from (b"", b"null", b"{}", b"\xff", content[: len(content) // 2])


@flow
def call_again():
    step = Step("smoke", "toy", 0, 1)
    true = train(step, Inputs())
    (stored,) = prefect_cache.RESULTS.rglob("0000-train-*")
    equal = calls = cached = 0
    for content in changed(stored.read_bytes()):
        stored.write_bytes(content)
        state = train(step, Inputs(), return_state=True)
        calls, equal = calls + 1, equal + (state.result() == true)
        cached += state.name == "Cached"
    counts = {"calls": calls, "equal": equal, "ran": len(computed), "cached": cached}
    Path("counts.json").write_text(json.dumps(counts))


call_again()
