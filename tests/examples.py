"""How much tests try: few examples of Hypothesis in `make test`, all that they can in `.ci/run`."""

import os

from hypothesis import HealthCheck, settings

VARIABLE = "BEAMLINE_EXAMPLES"  # names a profile
FEW, LEAST = 20, 10

# Examples come from the test's name, not from the clock: a run can be repeated. No deadline, since
# several people's work shares the machine.
settings.register_profile(
    "thorough", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("quick", settings.get_profile("thorough"), max_examples=FEW)


def load_profile():
    """Use the profile that BEAMLINE_EXAMPLES names."""
    settings.load_profile(os.environ.get(VARIABLE, "quick"))


def is_thorough():
    """Return whether tests shall try all that they can, as in .ci/run."""
    return settings().max_examples > FEW


def examples(count, **others):
    """Return the settings of a test with so many examples, in the profile quick with fewer."""
    share = settings().max_examples * count // 100
    return settings(max_examples=min(count, max(share, LEAST)), **others)
