"""Parts of a reward as a recipe lists them."""

from tasks.rewards.reward_parts import parts_of


def listed(*entries):
    """Return the typed parts of a list as YAML gives it."""
    typed, faults = parts_of(list(entries), "recipe")
    assert not faults, faults
    return typed


def usual(broken=-1.0, wrong=0.0, bonus=0.1):
    """Return the three parts of ARPO's reward."""
    return listed(
        {"answer": {"weight": 1.0, "wrong": wrong}},
        {"format": {"broken": broken}},
        {"many_tools": {"bonus": bonus}},
    )
