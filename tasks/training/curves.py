"""What the iterations of a training took and measured, iteration by iteration."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from tasks.ledger.artifacts import Record
from tasks.training.iteration import Iteration
from tasks.trees.metrics import together

TRAINING = ("rollout", "reward", "advantage", "update")  # verbs; "validation" is beside them
OF_MODEL = ("estimate", "reward_model")  # verbs, where there is a reward model
Seconds = dict[str, float]  # part of an iteration -> seconds
Curve = dict[str, list[float]]  # measure -> a value an iteration

OF_LEARNED_REWARD = (  # measures, where there is a reward model
    *("model_estimate", "model_estimate_deviation", "model_gap", "model_gap_deviation"),
    *("held_out_questions", "scored_share"),
)
MEASURES = {  # of training dynamics: the verb whose records have them
    "success": "reward",
    "score": "reward",
    "episode_steps": "rollout",
    "entropy": "rollout",
    "gradient_norm": "update",
    "advantage_spread": "advantage",
    "advantage_interquartile_range": "advantage",
    "advantage_share_above_1": "advantage",
    "advantage_min": "advantage",
    "advantage_max": "advantage",
    "singleton_share": "advantage",
    "mean_state_group": "advantage",
    **dict.fromkeys(OF_LEARNED_REWARD, "reward"),
}


def training_records(iteration: Iteration) -> list[Record]:
    """Return the records of an iteration's sub-steps, without those of its validation."""
    parts = iteration.get("rollout_part", ())  # where several policies share a rollout
    records = [record for verb in TRAINING for record in iteration[verb]]
    models = [record for verb in OF_MODEL for record in iteration.get(verb, ())]
    return [*parts, *records, *models]


def sum_seconds(iteration: Iteration) -> Seconds:
    """Return the seconds of each part of an iteration, as its sub-steps measured them."""
    total: Seconds = {}
    for record in training_records(iteration):
        for name, value in record["seconds"].items():
            total[name] = total.get(name, 0.0) + value
    return total


def training_curve(iterations: Sequence[Iteration]) -> Curve:
    """Return the MEASURES of each iteration; one that any iteration lacks is left out.

    Episodes are counted in environment steps; several batches of an iteration are averaged.
    """
    by_verb = [
        {verb: together([record["metrics"] for record in one[verb]]) for verb in TRAINING}
        for one in iterations
    ]
    return {
        name: [metrics[verb][name] for metrics in by_verb]
        for name, verb in MEASURES.items()
        if all(name in metrics[verb] for metrics in by_verb)
    }


def spent_so_far(iterations: Sequence[Iteration]) -> Curve:
    """Return what training had spent by the end of each iteration, by kind."""
    each = [together([record["metrics"] for record in one["rollout"]]) for one in iterations]
    kinds = ("tool_calls", "environment_steps", "sampled_tokens")
    return {kind: list(accumulate(one[kind] for one in each)) for kind in kinds}
