"""The records of one iteration: which verb made what, in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact, Record
from tasks.trees import validation
from tasks.trees.validation import Validated

# verb -> records of its calls; "validation", where it was asked -> those of the policies' exams;
# "rollout_part", where several policies share a rollout; "carry", where groups were left over
Iteration = Mapping[str, Sequence[Record]]


def policy_of(iteration: Iteration) -> Artifact:
    """Return the policy that an iteration has made."""
    return artifacts.output(iteration["update"][0], "policy")


def validated_in(iterations: Sequence[Iteration]) -> list[Validated]:
    """Return what the policies of these iterations got for the validation questions."""
    return validation.validated(
        [record for iteration in iterations for record in iteration.get("validation", ())]
    )


def in_order(iteration: Iteration) -> list[Record]:
    """Return an iteration's records in execution order; records of batches carry ``attempt``."""
    verbs = [verb for verb in ("rollout", "estimate", "reward") if verb in iteration]
    batches = zip(*(iteration[verb] for verb in verbs), strict=True)
    sampled = [
        {**record, "attempt": attempt} for attempt, batch in enumerate(batches) for record in batch
    ]
    exams, parts = iteration.get("validation", ()), iteration.get("rollout_part", ())
    carried = iteration.get("carry", ())
    learned = [*iteration["advantage"], *iteration["update"], *iteration.get("reward_model", ())]
    return [*parts, *sampled, *carried, *learned, *exams]
