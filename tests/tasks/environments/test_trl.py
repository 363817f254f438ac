"""A class for TRL answers here as it does in TRL's own trainer."""

import copy
import json
import random
import tempfile
import warnings
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, Optional, Union

import numpy as np
import pytest
from transformers.utils import get_json_schema

from tasks.environments import trl
from tasks.environments.episodes import ADAPTER, open_worlds
from tasks.environments.own_world import environment_kind
from tasks.environments.trl_schema import spec_of
from tasks.extensions.world_host import WorldHost
from tasks.policy.tiny import ASSISTANT, END, USER, build_policy
from tasks.tools.schema import with_values
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Observation, Question


class Counter:
    """Count to a number with as few acts as possible."""

    def reset(self, goal: int, **row: Any) -> str:
        self.goal, self.count, self.acts = goal, 0, 0
        assert row["prompt"][-1]["content"] == "Count. "
        return f"Count to {goal}."

    def add(self, number: int, times: int = 1) -> int:
        """Add to the counter.

        Args:
            number: What to add,
                once or several times.
            times: How often.

        Returns:
            The new count.
        """
        self.acts += 1
        if number > 100:
            raise ValueError(f"{number} is too large")
        self.count += number * times
        return self.count

    def look(self) -> dict[str, int]:
        """Look at the counter and the goal."""
        return {"count": self.count, "goal": self.goal}

    async def rest(self) -> None:
        """Do nothing."""

    def picture(self) -> list[dict[str, str]]:
        """Show the counter."""
        return [{"type": "text", "text": f"a picture of {self.count}"}]

    def get_reward(self) -> float:
        return float(self.count == self.goal) - 0.125 * self.acts

    @property
    def done(self) -> bool:
        raise RuntimeError("nobody asked")

    def _private(self) -> None:
        raise RuntimeError("no tool")


class Dice:
    """Throw dice."""

    def reset(self) -> None:
        self.thrown = [random.random()]

    def throw(self, text: str) -> str:
        """Throw a die.

        Args:
            text: What to say.
        """
        self.thrown.append(random.random() + float(np.random.random()))
        return f"{text} {self.thrown}"


ACTS: list[tuple[str, dict[str, Any]]] = [
    ("look", {}),
    ("add", {"number": 4, "times": 2}),
    ("add", {"number": 1000}),
    ("picture", {}),
    ("rest", {}),
    ("add", {"number": -1}),
]
ROW = {"goal": 7, "note": "an extra column"}
TASK = Question("q", "count", "Count. ", (), data=json.dumps({"row": ROW, "seed": 3}))

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}<result>"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part.text }}{% endfor %}{% endif %}</result>"
    "{% elif message['role'] == 'assistant' %}" + ASSISTANT + "{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<call>{{ call.function | tojson }}</call>"
    "{% endfor %}{% if not message['tool_calls'] %}" + END + "{% endif %}"
    "{% else %}" + USER + "{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1]['role'] != 'tool' %}" + ASSISTANT + "{% endif %}"
)
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": [ASSISTANT, "</result>"],
    "fields": {
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": END, "content": "text"},
    },
}


def in_trl(tiny, tokenizer, row, acts):
    """Let TRL's trainer sample the acts: its messages after the prompt, prompts and rewards."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    seen: dict[str, Any] = {}

    class Trainer(GRPOTrainer):
        def _generate_single_turn(self, prompts, *arguments, **named):
            texts = [self.processing_class.decode(prompt) for prompt in prompts]
            seen.setdefault("prompt", texts[0])
            return [self._turn(text.count("</result>")) for text in texts], None

        def _turn(self, number):
            said = "done" + END
            if number < len(acts):
                name, values = acts[number]
                said = f"<call>{json.dumps({'name': name, 'arguments': values})}</call>"
            return self.processing_class.encode(said, add_special_tokens=False)

        def _generate(self, prompts):
            generated = super()._generate(prompts)
            seen["completions"] = generated[3]
            return generated

        def _calculate_rewards(self, *arguments):
            seen["rewards"] = super()._calculate_rewards(*arguments)
            return seen["rewards"]

    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE
    example = {"prompt": [{"role": "user", "content": "Count. "}], **row}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            model=build_policy(tiny.model_copy(update={"context": 4096}), tokenizer, 0),
            args=GRPOConfig(
                output_dir=tempfile.mkdtemp(),
                use_cpu=True,
                bf16=False,
                per_device_train_batch_size=2,
                num_generations=2,
                max_completion_length=2000,
                report_to="none",
            ),
            train_dataset=Dataset.from_list([example]),
            processing_class=tokenizer,
            environment_factory=Counter,
        )
        trainer.model.train()
        trainer._generate_and_score_completions([example, example])
    return seen


def in_beamline(row, acts):
    """The same acts in the world: first observation, (tool, arguments, text) each, reward."""
    world = trl.world_of(Counter)()
    specs = {spec.name: spec for spec in world.tools}
    first = world.start(TASK, 3)
    said = []
    for name, values in acts:
        call = with_values(Call(name, json.dumps(values)), specs[name])
        said.append((name, call.values, world.act(call).text))
    reward = world.end("done").reward
    world.close()
    return first, said, reward


@pytest.mark.parametrize("acts", [ACTS, ACTS[1:2], []])
def test_transcript_equals_that_of_the_trainer(tiny, tokenizer, acts):
    theirs = in_trl(tiny, copy.deepcopy(tokenizer), ROW, acts)
    first, said, reward = in_beamline(ROW, acts)
    assert theirs["prompt"] == f"{USER}Count. {first}{ASSISTANT}"
    for rollout in theirs["completions"]:
        calls = [one["function"] for turn in rollout for one in turn.get("tool_calls") or ()]
        results = [turn["content"] for turn in rollout if turn["role"] == "tool"]
        texts = [one if isinstance(one, str) else one[0]["text"] for one in results]
        assert said == [
            (call["name"], call["arguments"], text) for call, text in zip(calls, texts, strict=True)
        ]
    assert theirs["rewards"].flatten().tolist() == [reward, reward]


def test_results_are_the_trainers_texts():
    first, said, reward = in_beamline(ROW, ACTS)
    assert (first, reward) == ("Count to 7.", 1 - 3 * 0.125)
    assert [text for *_, text in said] == [
        "{'count': 0, 'goal': 7}",
        "8",
        "{'error': '1000 is too large'}",
        "a picture of 8",
        "None",
        "7",
    ]


class SharedDice:
    """A world of one's own that draws from the numbers that all of a process share."""

    def start(self, task: Question, seed: int) -> str:
        return "start"

    def act(self, call: Call) -> str:
        return f"{random.random()} {np.random.random()}"

    def solve(self) -> Call:
        return Call("throw", str(random.random()))


@pytest.mark.parametrize("kind", ["Dice", "SharedDice"])
def test_episode_has_random_numbers_of_its_own(kind):
    job = {
        "world": f"tests/tasks/environments/test_trl.py:{kind}",
        "adapter": ADAPTER,
        "settings": None,
    }
    host = WorldHost(job)
    task = {"id": "q", "kind": "k", "text": "t", "answers": [], "before": []}
    handles = count()

    def episode(seed):
        handle = next(handles)
        host.start(handle, task, seed)
        for _ in range(3):
            if hasattr(host.worlds[handle], "solve"):
                host.solve(handle)  # which no replay asks for
            yield host.act(handle, "throw", "so", {"text": "so"})["seen"]["text"]

    random.seed(1)
    outside = random.getstate()
    alone = list(episode(5))
    mixed = list(zip(episode(5), episode(6), episode(5), strict=True))
    assert [column[0] for column in mixed] == [column[2] for column in mixed] == alone
    assert mixed[-1][1] != alone[-1] and len(set(alone)) == 3
    assert random.getstate() == outside


LIGHTS = """
import random


class Lights:
    '''Switch the right light on.'''

    def reset(self, lights=2, **row):
        self.on, self.lights = False, lights
        self.right = random.randrange(lights)
        return f"There are {lights} lights."

    def press(self, number: int) -> str:
        '''Press a switch.

        Args:
            number: Of the light.
        '''
        if number >= self.lights:
            raise ValueError(f"no light {number}")
        self.on = self.on or number == self.right
        return "on" if number == self.right else "off"

    def get_reward(self):
        return float(self.on)
"""


def test_class_of_a_users_file_is_an_environment(tmp_path, monkeypatch):
    """The class as it is, by its path, in processes of its own."""
    monkeypatch.chdir(tmp_path)
    Path("own").mkdir()
    Path("own/lights.py").write_text(LIGHTS)
    kind = environment_kind("own/lights.py:Lights")
    settings = kind.settings()
    assert [spec.name for spec in kind.specs(settings)] == ["press"]
    task = kind.tasks(settings, "train", 2, 0)[0]
    assert task.text == "Switch the right light on."
    told = replace(task, data=json.dumps({"seed": 5, "row": {"lights": 3}}))
    with open_worlds(kind, settings, 1) as worlds, worlds.session() as session:
        ((one, first),) = session.open([told])
        twin = session.fork(one, 0)  # replayed from the seed
        answers = [
            session.act([(handle, Call("press", json.dumps({"number": number})))])[0]
            for handle in (one, twin)
            for number in range(4)
        ]
        last = session.end([(one, "done"), (twin, "done")])
    assert first.text == "There are 3 lights."
    assert [each.text for each in answers[:3]].count("on") == 1
    assert (answers[3].outcome, answers[3].text) == (Outcome.ERROR, "{'error': 'no light 3'}")
    assert answers[:4] == answers[4:]
    assert [(each.reward, each.info) for each in last] == [(1.0, {"score": 1.0})] * 2


def test_environment_of_gymnasium_is_no_class_for_trl():
    import gymnasium

    with pytest.raises(ValueError, match="is an environment of gymnasium"):
        trl.world_of(gymnasium.Env)


class Faulty:
    def reset(self): ...

    def nothing(self): ...

    def untyped(self, word):
        """Say a word.

        Args:
            word: The word.
        """

    def undescribed(self, word: str):
        """Say a word."""

    def several(self, *words: str):
        """Say words.

        Args:
            words: The words.
        """

    def odd(self, words: set[str]):
        """Say words.

        Args:
            words: The words.
        """


def test_all_faults_of_a_class_are_named_at_once():
    with pytest.raises(ValueError) as error:
        trl.world_of(Faulty)
    lines = str(error.value).split("; ")
    assert [line.split(":")[1] for line in lines] == [
        " method nothing",
        " method odd",
        " method several",
        " method undescribed",
        " method untyped",
    ]
    assert lines[-1].endswith("parameter word has no type: write word: str, or what it is")


class Signatures:
    def plain(self, a: int, b: float, c: str, d: bool, e: list, f: dict, g: Any) -> str:
        """Take everything.

        It has two paragraphs.

        Args:
            a: First.
            b: Second,
                with another line: and a colon.
            c: Third (choices: ["x", "y"]).

            d: Fourth
            e: Fifth.
            f: Sixth.
            g: Seventh.

        Returns:
            A text.
        """

    def plain_choices(self, c: str = "x"):
        """Choose.

        Args:
            c: One of two (choices: ["x", "y"])
        """

    def nested(
        self,
        a: list[int],
        b: dict[str, list[float]],
        c: tuple[int, str],
        d: Literal["x", "y"],
        e: Literal[1, "z", None] = 1,
    ):
        """Take what is nested.
        Args:
            a: One.
            b: Two.
            c: Three.
            d: Four.
            e: Five.
        Raises:
            ValueError: Always.
        """

    def unions(
        self,
        a: int | str,
        b: Optional[int] = None,  # noqa: UP045
        c: Union[list[int], str, None] = None,  # noqa: UP007
        d: Counter | None = None,
        e: "list[str] | None" = None,
        *,
        f: list | tuple = (),
    ) -> dict[str, int] | None:
        """Take one of several.

        Args:
            a: One.
            b: Two.
            c: Three.
            d: Four.
            e: Five.
            f: Six.
        """

    @staticmethod
    def static(a: int):
        """Need no object.

        Args:
            a: One.
        """


@pytest.mark.parametrize(
    "method",
    [method for of in (Signatures, Counter) for _, method in trl.methods(of)],
    ids=lambda method: method.__name__,
)
def test_schema_equals_that_of_transformers(method):
    spec, theirs = spec_of(method), get_json_schema(method)["function"]
    theirs.pop("return", None)
    ours = {"name": spec.name, "description": spec.description, "parameters": spec.parameters}
    assert json.dumps(ours) == json.dumps(theirs)


def test_null_is_taken_where_a_type_allows_it():
    spec = spec_of(Signatures.unions)
    taken = with_values(Call("unions", '{"a": 1, "b": null, "c": [2]}'), spec)
    assert taken.values == {"a": 1, "b": None, "c": [2]}
    refused = with_values(Call("unions", '{"a": null}'), spec)
    assert isinstance(refused, Observation) and refused.outcome == Outcome.BAD_ARGUMENTS
