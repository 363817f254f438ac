"""What a run says at its end."""

from flows.tracking import outcome_words

MEASURED = {
    "success": {
        "cold start": {"mean": 0.623, "low": 0.6, "high": 0.65},
        "trained": {"mean": 0.841, "low": 0.81, "high": 0.87},
        "champion": {"mean": 0.85, "low": 0.8, "high": 0.9},
    },
    "tool errors a question": {"cold start": {"mean": 0.1}, "trained": {"mean": 0.02}},
    "response length": {"cold start": {"mean": 120.4}, "trained": {"mean": 98.2}},
    "differences": {
        "success": {
            "cold start": {"mean": 0.218, "low": 0.19, "high": 0.246, "p": 0.0},
            "champion": {"mean": -0.0001, "low": -0.02, "high": 0.02, "p": 0.9},
        },
        "success, story": {"cold start": {"mean": 0.3, "p": 0.001, "p_holm": 0.003}},
        "success, chain": {"cold start": {"mean": -0.1, "p": 0.01, "p_holm": 0.02}},
        "success, sum": {"cold start": {"mean": 0.04, "p": 0.03, "p_holm": 0.06}},
    },
}
SECONDS = {"prepare": 20.0, "reinforce": 400.0, "evaluate": 50.0, "verdict": 1.0}


def test_a_run_says_in_six_lines_what_is_better_and_what_is_worse():
    verdict = {"promote": True, "reason": "every gate passed", "against": "cold start"}
    said = outcome_words.lines(MEASURED, verdict, ["success_lost", "no_spread"], SECONDS)
    assert said == [
        "success 62.3 % (cold start) → 84.1 % [81.0, 87.0] (trained): +21.8 points [19.0, 24.6], "
        "better beyond chance",
        "of 3 kinds of question, beyond chance: better story +30.0; worse chain -10.0",
        "tool errors a question 0.10 → 0.02, response length 120 → 98 tokens",
        "alarms: success_lost, no_spread",
        "verdict: promote: every gate passed",
        "took 8 min: reinforce 7 min, evaluate 50 s, prepare 20 s",
    ]
    assert outcome_words.worse_kinds(MEASURED, "cold start") == ["chain"]


def test_a_run_is_compared_with_what_its_verdict_names():
    verdict = {"promote": False, "reason": "no better", "against": "champion"}
    assert outcome_words.lines(MEASURED, verdict, [], {}) == [
        "success 85.0 % (champion) → 84.1 % [81.0, 87.0] (trained): +0.0 points [-2.0, 2.0], "
        "no difference beyond chance",
        "alarms: none",
        "verdict: reject: no better",
    ]


def test_a_recipe_without_reports_has_its_time_alone():
    assert outcome_words.lines({}, {}, None, {"first": 1.0}) == ["took 1 s: first 1 s"]
