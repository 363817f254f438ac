"""The check of a policy asks vLLM where that samples."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tasks.check_policy import (
    STAGE,
    VLLM_BUILDS,
    PolicyCheckError,
    check_policy,
    forget,
    inputs_of,
)
from tasks.engines.vllm.vllm_engine import VllmEngine
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tasks.policy import resident
from tasks.trees.tables import save_questions
from tasks.trees.tree import Question
from tests.vllm.conftest import MACHINE, ROWS, SETTINGS

pytestmark = pytest.mark.usefixtures("forks")


def test_vllm_agrees_and_one_that_forgets_a_token_is_stopped(make, monkeypatch):
    _, policy = make()
    file = Path("q.parquet")
    save_questions([Question("q", "sum", "What is 12 times 34?", ("408",))], file)
    inputs = inputs_of(policy, Artifact.at(file), SETTINGS, MACHINE, 256)
    assert len(inputs.versions.keys() & {*VLLM_BUILDS}) == 1
    resident.POLICIES.clear()
    try:
        metrics = check_policy(SubStep("toy", STAGE, 0, 0), inputs, policy=policy, rows=ROWS)[
            "metrics"
        ]
        assert 0 < metrics["policy_check/precision/sampler"] < 1e-4
        assert "policy_check/structure/sampler" not in metrics, "vLLM has the policy alone"
        real = VllmEngine.sample

        def forgetting(self, turns):
            """Leave out a token of contexts, but of prompts alone, as a cache may."""
            short = [
                replace(one, tokens=np.delete(one.tokens, 40)) if len(one.tokens) > 41 else one
                for one in turns
            ]
            return real(self, short)

        monkeypatch.setattr(VllmEngine, "sample", forgetting)
        other = replace(inputs, context=255)
        with pytest.raises(PolicyCheckError, match="the sampler's log-probabilities differ") as no:
            check_policy(SubStep("toy", STAGE, 0, 0), other, policy=policy, rows=ROWS)
        assert "the learner's" not in str(no.value) and "vllm on cpu" in str(no.value)
    finally:
        forget()
    assert resident.POLICIES.learner is None
