"""Alarms: what goes wrong in training, seen in the metrics of its iterations. Pure.

Each alarm looks at the newest iteration and those before it. Losses are measured in standard errors
of what chance alone gives, so a limit holds for any number of questions; the other limits are wide.
None is passed in the 59 trained runs of reports/shop and reports/household.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from tasks.trees.intervals import student_interval
from tasks.trees.validation import Validated, differences

Curve = Mapping[str, Sequence[float]]  # metric -> a value an iteration

WINDOW = 5  # iterations of a mean, since a batch of questions may be hard by chance
LEAST_ENTROPY = 0.1  # of that in the first iterations
ENTROPY_RISE = 1.5  # times that of the best iterations
SOLVED = 0.9  # success of rollouts, from which on a low entropy is what training is for
SURE = 4.0  # standard errors; the best of many means is compared with each later one
RISEN = 3.0  # standard errors, beside a fall that is tested by itself
CONFIDENCE = 0.999  # of the interval of a paired difference; one for each validation
SPIKE = 10.0  # times the median of the iterations before
GAP_WINDOW = 10  # iterations of a mean gap, since a batch has few held-out questions
LEAST_SAMPLE = 8  # held-out questions in a window, below which it is not looked at
LEAST_DEVIATION = 0.1  # of a question's gap: few equal ones don't make a window exact
MOST_MASKED = 0.1  # share of the leaves
MOST_BROKEN = 0.05  # share of the leaves
MANY_CALLS, FEW_CALLS = 0.3, 0.1  # calls a trajectory, and the share of them that is hardly any
LEAST_CONTINUED = 0.95  # of the requests of a program that only adds to its conversation
MISMATCH = 1.0  # of log-probabilities, below which a spike does no harm


@dataclass(frozen=True)
class Seen:
    """What training has shown so far."""

    curve: Curve
    questions: int = 1  # asked an iteration, at least
    validated: Sequence[Validated] = ()  # policies that were asked the validation questions


@dataclass(frozen=True)
class Alarm:
    """What an iteration shows; ``message`` has the figures and what often helps."""

    name: str  # of ALARMS
    iteration: int
    message: str


def alarms(seen: Seen) -> list[Alarm]:
    """Return the alarms of the newest iteration. Metrics that are missing raise none."""
    messages = {name: look(seen) for name, look in ALARMS.items()}
    newest = max((len(values) for values in seen.curve.values()), default=0) - 1
    return [Alarm(name, newest, message) for name, message in messages.items() if message]


class History:
    """The metrics of a training run so far, and the alarms that it has raised."""

    def __init__(self, questions: int) -> None:
        """``questions``: asked an iteration, at least."""
        self.questions = questions
        self.curve: dict[str, list[float]] = {}
        self.validated: list[Validated] = []
        self.raised: dict[str, Alarm] = {}  # the first of each name

    def add(self, metrics: Mapping[str, float], policies: Sequence[Validated] = ()) -> list[Alarm]:
        """Add an iteration; return the alarms that are raised for the first time.

        ``policies``: those that were asked the validation questions in this iteration.
        """
        for name, value in metrics.items():
            self.curve.setdefault(name, []).append(value)
        self.validated += policies
        every = alarms(Seen(self.curve, self.questions, self.validated))
        new_alarms = [alarm for alarm in every if alarm.name not in self.raised]
        self.raised |= {alarm.name: alarm for alarm in new_alarms}
        return new_alarms


def entropy_collapse(seen: Seen) -> str:
    """Return a message where the policy hardly varies any more what it samples, else "".

    A policy that is nearly always right varies little as well, and raises none.
    """
    values, success = seen.curve.get("entropy", ()), seen.curve.get("success", ())
    if len(values) <= WINDOW or (success and fmean(success[-WINDOW:]) >= SOLVED):
        return ""
    first, last = fmean(values[:WINDOW]), fmean(values[-WINDOW:])
    if last >= LEAST_ENTROPY * first:
        return ""
    return (
        f"the entropy has fallen to {last:.3g}, from {first:.3g} in the first {WINDOW} iterations: "
        "groups get alike answers, and nothing is left to learn from; lower the learning rate, "
        "raise clip.high, or add a KL term"
    )


def entropy_rise(seen: Seen) -> str:
    """Return a message where the entropy has risen since success was best, which has fallen.

    A policy that explores may have a rising entropy, and loses nothing by it.
    """
    entropies = _means(seen.curve.get("entropy", ()))
    means, errors = _successes(seen)
    if not means or len(entropies) != len(means):
        return ""
    best = max(range(len(means)), key=means.__getitem__)
    chance = (errors[best] ** 2 + errors[-1] ** 2) ** 0.5
    if entropies[-1] < ENTROPY_RISE * entropies[best] or means[best] - means[-1] <= RISEN * chance:
        return ""
    return (
        f"the entropy has risen to {entropies[-1]:.3g}, from {entropies[best]:.3g} when success "
        f"was best, and success has fallen to {100 * means[-1]:.1f} %, from "
        f"{100 * means[best]:.1f} % (means of {WINDOW} iterations): the policy moves too far an "
        "update; lower the learning rate, set reinforce.update.stop_at_kl, or add a KL term"
    )


def no_spread(seen: Seen) -> str:
    """Return a message where all leaves of every group have the same reward, twice running."""
    if not all(share >= 1.0 for share in _last(seen.curve, "groups_without_spread", 2)):
        return ""
    return (
        "in two iterations, all answers to each question had the same reward, so no advantage was "
        "left: questions are too easy or too hard, the reward does not grade, or the policy has "
        "collapsed"
    )


def success_lost(seen: Seen) -> str:
    """Return a message where success is below its best by more than chance gives, else "".

    The standard deviation of a question's share of right leaves is at most that of one leaf.
    """
    means, errors = _successes(seen)
    if (best := _fallen(means, errors)) is None:
        return ""
    return (
        f"success has fallen to {100 * means[-1]:.1f} %, from {100 * best:.1f} % at its best "
        f"(means of {WINDOW} iterations): lower the learning rate, or clip more"
    )


def reward_lost(seen: Seen) -> str:
    """Return a message where the reward is below its best by more than chance gives, else ""."""
    means, errors = _rewards(seen)
    if (best := _fallen(means, errors)) is None:
        return ""
    return (
        f"the reward has fallen to {means[-1]:.3g}, from {best:.3g} at its best (means of {WINDOW} "
        "iterations): lower the learning rate, or clip more"
    )


def validation_lost(seen: Seen) -> str:
    """Return a message where validation success is below its best beyond its interval, else ""."""
    if not (lost := _lost(seen.validated)):
        return ""
    best, now, high = lost
    return (
        f"validation success has fallen to {100 * now.mean('success'):.1f} % after "
        f"{now.iterations} iterations, from {100 * best.mean('success'):.1f} % after "
        f"{best.iterations} ({100 * CONFIDENCE:.1f} % interval of the paired difference: below "
        f"{100 * high:.1f} points): lower the learning rate, or publish the best policy"
    )


def reward_hacked(seen: Seen) -> str:
    """Return a message where the reward has risen since validation success was best, else "".

    Only where validation success has fallen since then, beyond its interval.
    """
    means, errors = _rewards(seen)
    if not (lost := _lost(seen.validated)) or not means:
        return ""
    best, now, _ = lost
    before = min(best.iterations, len(means) - 1)  # place of the window that begins there
    if means[-1] - means[before] <= RISEN * (errors[-1] ** 2 + errors[before] ** 2) ** 0.5:
        return ""
    return (
        f"the reward has risen to {means[-1]:.3g}, from {means[before]:.3g} after "
        f"{best.iterations} iterations, and validation success has fallen to "
        f"{100 * now.mean('success'):.1f} %, from {100 * best.mean('success'):.1f} %: the policy "
        "may collect a part of the reward that asks for something else; compare the parts "
        "of the reward (reward_<part>), and lower the weight of the one that has risen"
    )


def model_hacked(seen: Seen) -> str:
    """Return a message where the reward model likes what is not right, else "".

    That is: its estimate exceeds success on held-out questions by more than it did at its best,
    where an estimate below success counts as equal to it; or validation success has fallen while
    the estimate has risen.
    """
    estimates = _means(seen.curve.get("model_estimate", ()))
    if not estimates:
        return ""
    if widened := _widened(seen.curve):
        narrow, wide = widened
        shown = (
            f"exceeds success on held-out questions by {100 * wide:.1f} points, and did by at most "
            f"{100 * narrow:.1f}"
        )
    elif (lost := _lost(seen.validated)) and _estimate_rose(seen, estimates, lost[0]):
        best, now, _ = lost
        shown = (
            f"has risen to {100 * estimates[-1]:.1f} % while validation success has fallen to "
            f"{100 * now.mean('success'):.1f} %, from {100 * best.mean('success'):.1f} %"
        )
    else:
        return ""
    return (
        f"the reward model's estimate {shown}: the policy has learned what the model likes, and "
        "not what is right; look at trajectories with high estimates, choose an algorithm with a "
        "KL term, raise reward_model.labels, train the model more often (reward_model.again), or "
        "lower the weight of the part model, if the reward has it"
    )


def _estimate_rose(seen: Seen, estimates: Sequence[float], best: Validated) -> bool:
    """Return whether the estimate has risen, beyond chance, since a policy was asked."""
    spread = [value**2 for value in seen.curve.get("model_estimate_deviation", ())]
    errors = [_error(mean**0.5, seen.questions) for mean in _means(spread)]
    then = min(best.iterations, len(estimates) - 1)
    chance = (errors[-1] ** 2 + errors[then] ** 2) ** 0.5
    return estimates[-1] - estimates[then] > RISEN * chance


def _widened(curve: Curve) -> tuple[float, float] | None:
    """Return the narrowest gap, at least 0, and the newest one, or None.

    None where the newest is not SURE standard errors wider. The gap of GAP_WINDOW iterations is the
    mean over all of their held-out questions.
    """
    names = ("held_out_questions", "model_gap", "model_gap_deviation")
    rows = list(zip(*(curve.get(name, ()) for name in names), strict=True))
    ends = range(GAP_WINDOW, len(rows) + 1)
    windows = [one for end in ends if (one := _gap(rows[end - GAP_WINDOW : end]))]
    if not windows:
        return None
    (narrow, chance), (wide, error) = min(windows), windows[-1]
    narrow = max(0.0, narrow)
    return (narrow, wide) if wide - narrow > SURE * (chance**2 + error**2) ** 0.5 else None


def _gap(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float] | None:
    """Return the mean gap of a window's questions and its standard error.

    ``rows``: questions, mean gap and deviation of each iteration. None: fewer than LEAST_SAMPLE.
    """
    total = sum(count for count, _, _ in rows)
    if total < LEAST_SAMPLE:
        return None
    mean = sum(count * gap for count, gap, _ in rows) / total
    # of all questions of the window: within its iterations and between them
    variance = sum(count * (dev**2 + (gap - mean) ** 2) for count, gap, dev in rows) / total
    return mean, max(variance**0.5, LEAST_DEVIATION) / total**0.5


def history_changed(seen: Seen) -> str:
    """Return a message where a program's requests begin anew, twice running, else "".

    An agent that only adds to its conversation goes on from what was sampled.
    """
    last = seen.curve.get("requests_continued", ())[-2:]
    if len(last) < 2 or not all(share < LEAST_CONTINUED for share in last):
        return ""
    return (
        f"only {100 * last[-1]:.0f} % of the program's requests after an episode's first go on "
        "from what was sampled before; the others are prompts of their own, which cost time: look "
        "at the prompts of a trajectory; a program that shortens or rewrites its history, or "
        "asks several agents, does so by itself, else its client changes what it got"
    )


def tools_unused(seen: Seen) -> str:
    """Return a message where the agent has stopped calling its tools for a higher reward, else "".

    Calls are down to a tenth of their most, which was one in a few trajectories at least, while the
    reward has risen since then, beyond chance.
    """
    calls = _means(seen.curve.get("tool_calls_a_leaf", ()))
    rewards, errors = _rewards(seen)
    if not calls or len(rewards) != len(calls):
        return ""
    most = max(range(len(calls)), key=calls.__getitem__)
    chance = (errors[-1] ** 2 + errors[most] ** 2) ** 0.5
    dropped = calls[most] >= MANY_CALLS and calls[-1] <= FEW_CALLS * calls[most]
    if not dropped or rewards[-1] - rewards[most] <= RISEN * chance:
        return ""
    return (
        f"tool calls have fallen to {calls[-1]:.2g} a trajectory, from {calls[most]:.2g}, and the "
        f"reward has risen to {rewards[-1]:.3g}, from {rewards[most]:.3g}: answering without a "
        "tool pays more; look at the trajectories, and lower what they get (format, "
        "answer.wrong), ask for more than can be known without a tool, or reward its use"
    )


def gradient_spike(seen: Seen) -> str:
    """Return a message where the gradient is far longer than before, else ""."""
    return _spike(
        seen.curve.get("gradient_norm", ()),
        "the gradient's norm",
        "one batch may undo what was learned; lower the learning rate or gradient_clip",
    )


def mismatch_spike(seen: Seen) -> str:
    """Return a message where sampler and learner disagree far more than before, else ""."""
    values = seen.curve.get("mismatch_highest", ())
    if not values or values[-1] < MISMATCH:
        return ""
    return _spike(
        values,
        "the largest difference between a token's log-probability when it was sampled and when it "
        "was learned from",
        "the engine may sample with other weights or another precision; use precision float32, or "
        "truncate with importance weights",
    )


def masked(seen: Seen) -> str:
    """Return a message where many leaves were left out of training, twice running, else ""."""
    shares = _last(seen.curve, "masked_share", 2)
    if not all(share >= MOST_MASKED for share in shares):
        return ""
    return (
        f"{100 * shares[-1]:.0f} % of the leaves were left out of training for how they ended "
        "(algorithm.masked): look at their outcomes on the page of the run. A world or a server "
        "fails, or agents reach a limit: repair it, or raise the limit"
    )


def world_broken(seen: Seen) -> str:
    """Return a message where many worlds failed at what agents did, twice running, else ""."""
    shares = seen.curve.get("world_broken", ())[-2:]
    if len(shares) < 2 or not all(share >= MOST_BROKEN for share in shares):
        return ""
    return (
        f"the world of {100 * shares[-1]:.0f} % of the leaves failed at an act, and they are "
        "trained as wrong: the lines of the rollout say why. Correct the world, since some of "
        "them may have been right"
    )


def _means(values: Sequence[float]) -> list[float]:
    """Return the means of all windows; none before there are more iterations than one window."""
    if len(values) <= WINDOW:
        return []
    return [fmean(values[end - WINDOW : end]) for end in range(WINDOW, len(values) + 1)]


def _error(deviation: float, questions: float) -> float:
    """Return the standard error of a window's mean, for the deviation of one question's value."""
    return deviation / (WINDOW * questions) ** 0.5


def _successes(seen: Seen) -> tuple[list[float], list[float]]:
    """Return the mean success of all windows and their standard errors."""
    means = _means(seen.curve.get("success", ()))
    scored = seen.questions * fmean(seen.curve.get("scored_share", (1.0,)))
    return means, [_error((mean * (1 - mean)) ** 0.5, scored) for mean in means]


def _rewards(seen: Seen) -> tuple[list[float], list[float]]:
    """Return the mean rewards of all windows and their standard errors."""
    spread = [value**2 for value in seen.curve.get("reward_deviation", ())]
    errors = [_error(mean**0.5, seen.questions) for mean in _means(spread)]
    return (_means(seen.curve.get("reward", ())), errors) if errors else ([], [])


def _fallen(means: Sequence[float], errors: Sequence[float]) -> float | None:
    """Return the best mean where the last one is SURE standard errors below it, else None."""
    for mean, error in sorted(zip(means, errors, strict=True), reverse=True):
        if mean - means[-1] > SURE * (error**2 + errors[-1] ** 2) ** 0.5:
            return mean
    return None


def _lost(policies: Sequence[Validated]) -> tuple[Validated, Validated, float] | None:
    """Return the best policy, the newest and the upper bound of their difference if it is below 0.

    The policy that training began with may be the best one.
    """
    if len(policies) < 2:
        return None
    best, now = max(policies[:-1], key=lambda one: one.mean("success")), policies[-1]
    _, high = student_interval(differences(now, best, "success"), CONFIDENCE)
    return (best, now, high) if high < 0 else None


def _spike(values: Sequence[float], what: str, remedy: str) -> str:
    if len(values) <= WINDOW:
        return ""
    before, last = median(values[:-1]), values[-1]
    if last <= SPIKE * before:
        return ""
    return f"{what} is {last:.3g}, and was {before:.3g} before (median): {remedy}"


def _last(curve: Curve, name: str, count: int) -> Sequence[float]:
    """Return the newest values of a metric; [0.0] where there are fewer."""
    values = curve.get(name, ())
    return values[-count:] if len(values) >= count else [0.0]


ALARMS: dict[str, Callable[[Seen], str]] = {
    "entropy_collapse": entropy_collapse,
    "entropy_rise": entropy_rise,
    "no_spread": no_spread,
    "success_lost": success_lost,
    "reward_lost": reward_lost,
    "validation_lost": validation_lost,
    "reward_hacked": reward_hacked,
    "model_hacked": model_hacked,
    "tools_unused": tools_unused,
    "history_changed": history_changed,
    "gradient_spike": gradient_spike,
    "mismatch_spike": mismatch_spike,
    "masked": masked,
    "world_broken": world_broken,
}
