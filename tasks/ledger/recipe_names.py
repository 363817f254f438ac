"""Name the inputs of sub-steps as the recipe does, for explanations.

Nothing here decides a result: an input that is missing here keeps its own name.
"""

from __future__ import annotations

ANY = ""
# verb -> the beginning of an input's path -> that of the recipe's key; the longest one counts
SETTINGS = {
    ANY: {
        "agent.": "",
        "step.": "",
        "labels": "reward_model",
        "response_tokens": "dialogue.response_tokens",
        "algorithm": "algorithm",
    },
    "prepare": {"settings": "prepare", "sets": "params/benchmarks.yaml"},
    "select_traces": {"expert": "prepare.expert", "context": "prepare.policy.context"},
    "cold_start": {"settings": "cold_start"},
    "correct": {"context": "prepare.policy.context"},
    "labelled_questions": {"most_questions": "reward_model.questions"},
    "reward_model": {"settings": "reward_model", "steps": "reward_model.steps"},
    "rollout": {
        "budget": "reinforce.rollout",
        "size": "reinforce.questions",
        "branching": "algorithm.branching",
        "marks": "algorithm.marks",
        "turns": "reinforce.turns_per_policy",
    },
    "estimate": {"micro_batch_tokens": "reward_model.micro_batch_tokens"},
    "reward": {
        "settings": "reinforce.reward",
        "overlong": "algorithm.overlong",
        "papers": "evaluate.protocol",
    },
    "advantage": {
        "settings": "reinforce.update",
        "questions": "reinforce.questions",
        "temperature": "reinforce.rollout.temperature",
    },
    "update": {
        "settings": "reinforce.update",
        "temperature": "reinforce.rollout.temperature",
    },
    "collect": {"leaves": "reinforce.rollout.leaves", "reward": "reinforce.reward"},
    "evaluate": {"settings": "evaluate"},
    "verdict": {"settings": "verdict"},
}
EXAM = {
    "budget.temperature": "evaluate.temperature",
    "budget.leaves": "evaluate.samples",
    "budget.initial": "evaluate.samples",
    "top_p": "evaluate.top_p",
    "size": "evaluate.questions",
}
SAMPLED = {
    "budget.temperature": "prepare.expert.temperature",
    "budget.leaves": "prepare.expert.attempts",
    "budget.initial": "prepare.expert.attempts",
    "budget.rows": "prepare.expert.rows",
    "top_p": "prepare.expert.top_p",
    "size": "prepare.expert.questions",
}
OF_STAGES = {  # the beginning of a stage -> what is other there
    "evaluate/": EXAM,
    "reinforce/validation": EXAM
    | {"size": "reinforce.validation.questions", "budget.leaves": "reinforce.validation.samples"}
    | {"budget.initial": "reinforce.validation.samples"},
    "prepare/sampled": SAMPLED,
    "reward_model": {"size": "reward_model.questions"},
}
MADE = {  # an input -> what it is, in words
    "advantages": "the advantages",
    "answers": "the answers of the evaluation",
    "before": "the part of the rollout before",
    "champion": "the champion",
    "cold_start": "the answers of the cold start",
    "corpus": "the corpus that tools look in",
    "critic": "the critic",
    "dropped": "the questions that were left out",
    "estimates": "the reward model's estimates",
    "gates": "what the gates have found",
    "metrics": "the metrics of the iterations",
    "model": "the reward model",
    "named": "the files of what the recipe names",
    "optimizer": "the state of the optimizer",
    "panel": "the tasks that are asked",
    "policy": "the policy",
    "questions": "the questions",
    "reference": "the reference policy",
    "rewards": "the rewards",
    "samplers": "the policies that sampled",
    "scorers": "the files of the scorers",
    "sources": "the files that it reads",
    "student": "the first policy",
    "tables": "the tables of the iterations",
    "teacher": "the policy that writes traces",
    "traces": "the traces of the cold start",
    "trained": "the answers of the trained policy",
    "trees": "the trajectories",
    "validation": "the answers of the validation",
}


def recipe_name(path: str, stage: str, verb: str) -> str:
    """Return the recipe's key for the path of an input of a verb; the path where there is none."""
    special = next((names for start, names in OF_STAGES.items() if stage.startswith(start)), {})
    names = SETTINGS[ANY] | SETTINGS.get(verb, {}) | special
    fitting = [start for start in names if _begins(path, start)]
    if not fitting:
        return path
    start = max(fitting, key=len)
    return names[start] + path[len(start) :]


def _begins(path: str, start: str) -> bool:
    return path == start or path.startswith(start if start.endswith(".") else f"{start}.")
