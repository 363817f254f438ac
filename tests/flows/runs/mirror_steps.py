"""Sub-steps for the tests of the mirror; ``computed`` has the iterations that were not fetched."""

from dataclasses import dataclass

from tasks.ledger import substeps

computed: list[int] = []


@dataclass(frozen=True)
class Inputs:
    size: int = 2


@substeps.recorded
def verb(step, inputs):
    computed.append(step.iteration)
    (step.out / "table.txt").write_text(f"{inputs.size} {step.iteration}")
    (step.out / "weights").mkdir()
    (step.out / "weights" / "a.bin").write_bytes(b"weights" * 99)
    return {"metrics": {"loss": 0.5}}


@substeps.recorded
def half(step, inputs):
    """Seal a checkpoint and be cut, or find a whole one; artifact ``found``."""
    scratch = step.ledger.scratch(step)
    found = sorted(place.name for place in scratch.iterdir() if substeps.read(place))
    if not found:
        (scratch / "checkpoint-1").mkdir()
        (scratch / "checkpoint-1" / "state.bin").write_text("state")
        step.ledger.seal(scratch / "checkpoint-1")
        raise InterruptedError
    (step.out / "found").write_text(" ".join(found))
    return {"found": found}


@substeps.recorded
def hollow(step, inputs):
    """Make an empty file and an empty folder."""
    computed.append(step.iteration)
    (step.out / "file").touch()
    (step.out / "folder").mkdir()
    return {}
