"""A folder with a user's programs, and what runs them with an engine and a dialect."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from params.schema.agent import Dialogue
from params.schema.algorithms import Marks
from params.schema.reinforce import Rollout
from tasks.dialects.tags import Tags
from tasks.programs.opening import open_program
from tasks.programs.own_program import program_kind
from tasks.programs.program_rollout import grow_programs
from tasks.rollouts.paths import Setting
from tasks.trees.tree import Question

PROGRAMS = Path(__file__).with_name("own_programs")


def question(number, text="What is 3 + 4?"):
    return Question(f"q{number}", "toy", text, ("7",))


@dataclass(frozen=True)
class Running:
    """How programs are run in a test."""

    tokenizer: Any
    engine: Any
    dialect: Any

    def grow(self, name, questions=1, leaves=1, branching="none", **settings):
        """Run episodes of a program; return the trees and what they cost."""
        kind = program_kind(name)
        marks = settings.pop("marks", Marks(kind="think"))
        dialogue = {"response_tokens": 4000, "tool_calls": 40} | settings.pop("dialogue", {})
        asked = [question(number) for number in range(questions)]
        rollout = Rollout(
            leaves=leaves,
            initial=min(2, leaves),
            branch=2,
            marks_per_rollout=1,
            entropy_window=20,
            base_probability=0.5,
            entropy_weight=0.2,
            threshold=0.5,
            draw=False,
            temperature=1.0,
            rows=max(leaves, 1000),
        )
        setting = Setting(
            self.tokenizer,
            Dialogue(system="", turn_tokens=40, result_tokens=40, **dialogue),
            rollout,
            None,
            None,
            "0/0",
            branching,
            marks,
        )
        given = {"trusted": True, "prompt_tokens": 2000, "requests": 100} | settings
        with open_program({name: kind.settings(**given)}) as program:
            return grow_programs(asked, self.engine, setting, 1.0, program, self.dialect)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The folder of a user, with the programs of own_programs."""
    folder = tmp_path / "own"
    folder.mkdir()
    for file in PROGRAMS.glob("*.py"):
        (folder / file.name).write_text(file.read_text())
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def running(tokenizer):
    """Run programs with a scripted engine, in tags; a script can be given."""
    from tests.scripted_engine import ScriptedEngine

    def made(script, dialect=None, tokens=tokenizer):
        return Running(tokens, ScriptedEngine(tokens, script), dialect or {"tags": Tags()})

    return made
