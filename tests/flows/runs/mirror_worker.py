"""Three iterations of two sub-steps; killed in the update of the iteration that is given.

Each sub-step reads the artifact of the one before, as those of a training do.
"""

import hashlib
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from flows.runs import ledger_mirror
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import Step, recorded


@dataclass(frozen=True)
class Inputs:
    policy: Artifact


@recorded
def rollout(step, inputs):
    (step.out / "trees").write_text(f"{Path(inputs.policy.path).read_text()} {step.seed}")
    return {}


@recorded
def update(step, inputs):
    if sys.argv[1:] == [str(step.iteration)]:
        (step.out / "policy").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)
    trees = Path(inputs.policy.path).read_bytes()
    (step.out / "policy").write_text(hashlib.md5(trees).hexdigest())
    return {}


policy, records = Artifact.at(Path("policy")), []
with ledger_mirror.opened() as ledger:
    for iteration in range(3):
        step = Step("toy", "reinforce", iteration, 7, ledger)
        records.append(rollout(step, Inputs(policy)))
        records.append(update(step, Inputs(artifacts.output(records[-1], "trees"))))
        policy = artifacts.output(records[-1], "policy")
artifacts.publish_records(records, Path("records.jsonl"))
