"""The other side of the benchmark: TRL's GRPOTrainer on Beamline's questions, tools and dialogue.

TRL samples, scores and trains with its own code. It has two ways to make the dialogue's tool calls,
and the benchmark takes the faster one (benchmarks/README.md):

``rollout_func``  a function of the user, which asks TRL for one turn of all live dialogues at a
                  time; here it follows Beamline's rules of a dialogue exactly
``tools``         TRL's own loop, which finds calls by a response template
"""

from __future__ import annotations

import copy
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

from params.schema.agent import Dialogue
from params.schema.recipe import Recipe
from tasks.dialects.contract import Dialect, Exchange
from tasks.dialects.observation_text import shown_text
from tasks.environments import Respond
from tasks.policy.tiny import ASSISTANT, END, USER
from tasks.scorers import project_scorers
from tasks.trees import dialogue as talk
from tasks.trees.marks import token_texts
from tasks.trees.outcomes import StopReason
from tasks.trees.tree import TURN, Call, Node, Observation, Question, Tree

ROLLOUT_FUNC, TOOLS = "rollout_func", "tools"
DYNAMIC, STATIC = "dynamic", "static"

# `tools` needs a template that renders tool calls and results of the dialogue, and one that parses
# them. A result continues the agent's turn.
TOOL_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}<result>{{ message['content'] }}</result>"
    "{% elif message['role'] == 'assistant' %}" + ASSISTANT + "{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<{{ call.function.name }}>"
    "{% for name, value in call.function.arguments.items() %}"
    "{% if name != 'code' %}{{ name }}={% endif %}{{ value }}{% endfor %}"
    "</{{ call.function.name }}>{% endfor %}"
    "{% if not message['tool_calls'] %}" + END + "{% endif %}"
    "{% else %}" + USER + "{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1]['role'] != 'tool' %}" + ASSISTANT + "{% endif %}"
)
RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": [ASSISTANT, "</result>"],
    "fields": {
        "tool_calls": {
            "open": "<python>",
            "close": "</python>",
            "repeats": True,
            "content": "text",
            "content_args": {"strip": False},
            "transform": {
                "type": "function",
                "function": {"name": "python", "arguments": {"code": "{content}"}},
            },
        },
        "content": {"close": END, "content": "text"},
    },
}


@dataclass(frozen=True)
class Shape:
    """The layout of a batch in TRL."""

    questions: int  # a step
    group: int  # rollouts a question
    micro_batches: int  # a step; each is one forward and backward pass
    path: str  # ROLLOUT_FUNC or TOOLS
    cache: str = DYNAMIC  # of ``generate``: DYNAMIC or STATIC

    @property
    def rollouts(self) -> int:
        return self.questions * self.group


@dataclass(frozen=True)
class Game:
    """The rules of the dialogues that TRL samples."""

    dialect: Dialect
    dialogue: Dialogue
    respond: Respond


class Context(NamedTuple):
    """What one row of TRL holds: a prompt, what follows it, and which tokens are the policy's."""

    prompt: list[int]
    response: list[int]
    own: list[int]


Trajectory = list[Context]  # one context, or with fresh prompts one for each step


class Peer(GRPOTrainer):
    """TRL's trainer, with a clock around its sampling, able to train on given trajectories."""

    shape: Shape
    game: Game
    model: Any
    sampler: Any  # the model that samples, or with bf16 a copy of it in that precision
    ends: TurnEnds | None  # None: each turn ends with a token of ``generate``'s own
    optimizer: Any
    lr_scheduler: Any
    seconds_sampling = 0.0
    seconds_rest = 0.0  # between sampling and the first micro-batch: rewards, rows, advantages
    played: list[Trajectory]  # what it has sampled last
    given: list[dict[str, Any]] | None = None  # micro-batches to train on instead of sampled ones
    trajectories: Any = None  # returned instead of sampling
    rewards: list[float] | None = None  # instead of scores
    script: list[list[list[int]]] | None = None  # turns of each rollout, instead of its own draws
    drawn: list[list[int]] | None = None  # those of the present round

    def _generate(self, prompts: list[Any]) -> Any:
        if self.trajectories is not None:
            return self.trajectories
        began = time.perf_counter()
        sampled = super()._generate(prompts)
        self.seconds_sampling = time.perf_counter() - began
        self.played = [[Context(*parts)] for parts in zip(*sampled[:3], strict=True)]
        return sampled

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        began = time.perf_counter()
        scored = super()._generate_and_score_completions(inputs)
        self.seconds_rest = time.perf_counter() - began - self.seconds_sampling
        return scored

    def _calculate_rewards(self, *arguments: Any) -> Tensor:
        if self.rewards is None:
            return super()._calculate_rewards(*arguments)
        return torch.tensor(self.rewards)[:, None]

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if self.given is None:
            return super()._prepare_inputs(generation_batch)
        return self.given[self._step % len(self.given)]


def peer(
    model: Any,
    tokenizer: Any,
    recipe: Recipe,
    shape: Shape,
    questions: Sequence[Question],
    game: Game,
) -> Peer:
    """Return a trainer that is ready for ``step``; ``questions`` are all that it will get.

    ``model`` becomes TRL's: it patches the model's forward pass.
    """
    from datasets import Dataset

    model.generation_config.eos_token_id = [
        tokenizer.eos_token_id,
        *ending_tokens(tokenizer, game.dialect.stop_strings),
    ]
    sampler = model if recipe.machine.precision == "float32" else half(model)
    peer_tokenizer = copy.deepcopy(tokenizer)
    known = {question.text: question for question in questions}
    ways: dict[str, Any] = {"rollout_func": rollout_func(known)}
    scored: Any = reward({question.id: question for question in questions}, peer_tokenizer)
    if shape.path == TOOLS:
        peer_tokenizer.chat_template, peer_tokenizer.response_template = (
            TOOL_TEMPLATE,
            RESPONSE_TEMPLATE,
        )
        ways = {"tools": [python(peer_tokenizer, recipe, game.respond)]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rollout_func is experimental
        trainer = Peer(
            model=model,
            reward_funcs=scored,
            args=config(recipe, shape, tempfile.mkdtemp(prefix="peer")),
            train_dataset=Dataset.from_list([example(questions[0])]),
            processing_class=peer_tokenizer,
            **ways,
        )
    trainer.game, trainer.sampler = game, sampler
    trainer.ends = turn_ends(tokenizer, game.dialect.stop_strings)
    # As ``Trainer.train`` does: with bf16, the forward pass then casts.
    trainer.model = trainer.model_wrapped = trainer.accelerator.prepare(trainer.model)
    trainer.create_optimizer_and_scheduler(num_training_steps=10**6)
    trainer.optimizer = trainer.accelerator.prepare(trainer.optimizer)
    reshape(trainer, shape)
    return trainer


def reshape(trainer: Peer, shape: Shape) -> None:
    """Change a trainer's micro-batches and its cache, as if it had been made so."""
    args: Any = trainer.args
    parts, cache = shape.micro_batches, cache_of(shape)
    args.per_device_train_batch_size = shape.rollouts // parts
    args.gradient_accumulation_steps = args.steps_per_generation = parts
    trainer.current_gradient_accumulation_steps = parts
    trainer.generation_config.cache_implementation = cache
    trainer.generation_kwargs["cache_implementation"] = cache
    trainer.shape = shape


def config(recipe: Recipe, shape: Shape, folder: str) -> GRPOConfig:
    """Return TRL's fastest settings for `grpo` here, without work that Beamline lacks."""
    update, dialogue = recipe.reinforce.update, recipe.dialogue
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=recipe.machine.precision == "bfloat16",
        fp16=False,
        gradient_checkpointing=False,
        optim="adamw_torch_fused",
        learning_rate=update.learning_rate,
        adam_beta1=update.adam_betas[0],
        adam_beta2=update.adam_betas[1],
        weight_decay=update.weight_decay,
        max_grad_norm=update.gradient_clip,
        lr_scheduler_type="constant",
        per_device_train_batch_size=shape.rollouts // shape.micro_batches,
        gradient_accumulation_steps=shape.micro_batches,  # and as many per generation
        num_generations=shape.group,
        num_iterations=1,
        beta=0.0,  # no reference model
        loss_type="grpo",
        epsilon=0.2,
        temperature=recipe.reinforce.rollout.temperature,
        top_p=1.0,
        top_k=0,
        max_completion_length=dialogue.response_tokens,
        max_tool_calling_iterations=dialogue.tool_calls,
        cache_implementation=cache_of(shape),
        generation_kwargs={"max_new_tokens": dialogue.turn_tokens},
        disable_dropout=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=recipe.seed,
    )


def cache_of(shape: Shape) -> str | None:
    """Return TRL's name of a cache; it has none for ``generate``'s default."""
    return None if shape.cache == DYNAMIC else shape.cache


# ---------------------------------------------------------------- what TRL gets


def example(question: Question) -> dict[str, Any]:
    """Return a row of TRL's batch."""
    return {"prompt": [{"role": "user", "content": question.text}], "question": question.id}


def reward(known: dict[str, Question], tokenizer: Any) -> Callable[..., list[float]]:
    """Return TRL's reward function: the score of the answer, -1 where there is none."""

    def score(completion_ids: list[list[int]], question: list[str], **_: Any) -> list[float]:
        texts = tokenizer.batch_decode(completion_ids)
        return [
            _score(talk.final_answer(text), known[question_id])
            for text, question_id in zip(texts, question, strict=True)
        ]

    return score


def _score(answer: str | None, question: Question) -> float:
    if answer is None:
        return -1.0
    return project_scorers()[question.scorer](answer, question.answers)["score"]


def python(tokenizer: Any, recipe: Recipe, respond: Respond) -> Callable[[str], str]:
    """Return the tool for TRL's ``tools``: it returns the result's text, cut to its budget."""
    tags = sum(len(talk.encode(tokenizer, tag)) for tag in talk.RESULT_TAGS)

    def python(code: str) -> str:
        """
        Run Python.

        Args:
            code: The program.
        """
        observation = respond([Call("python", code)])[0]
        limit = recipe.dialogue.result_tokens
        text, _ = talk.result_tokens(tokenizer, observation, max(limit, tags))
        return text.removeprefix("<result>").removesuffix("</result>")

    return python


def ending_tokens(tokenizer: Any, stops: Sequence[str]) -> list[int]:
    """Return the tokens that have a stop string in their text: TRL ends turns at tokens alone."""
    texts = token_texts(tokenizer, len(tokenizer))
    return [token for token, text in enumerate(texts) if any(stop in text for stop in stops)]


@dataclass(frozen=True)
class TurnEnds:
    """Finds the tokens that complete a stop string, where a tokenizer writes one in several."""

    pieces: Sequence[str]  # texts of the vocabulary's tokens
    stops: Sequence[str]

    @cached_property
    def may_end(self) -> NDArray[np.bool_]:
        """[vocabulary] whether a token has the last character of a stop string."""
        last = {stop[-1] for stop in self.stops}
        return np.array([bool(last & set(piece)) for piece in self.pieces])

    @cached_property
    def window(self) -> int:
        """Tokens that hold any stop string: a character is at most 4 tokens, its bytes."""
        return 4 * max(map(len, self.stops))

    def at_last(self, turn: Sequence[int]) -> bool:
        """Return whether a turn ends with its last token."""
        text = "".join(self.pieces[token] for token in turn[-self.window :])
        return any(stop in text for stop in self.stops)

    def cut(self, turn: list[int]) -> list[int]:
        """Return a turn without what ``generate`` pads it with."""
        suspects = np.flatnonzero(self.may_end[turn])
        return next((turn[: n + 1] for n in suspects if self.at_last(turn[: n + 1])), turn)

    def criterion(self, prompt: int) -> Callable[..., Tensor]:
        """Return what ends the rows of a batch, whose first ``prompt`` tokens are not sampled."""

        def done(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            ended = self.may_end[input_ids[:, -1].numpy()]
            for row in np.flatnonzero(ended):
                ended[row] = self.at_last(input_ids[row, prompt:].tolist())
            return torch.from_numpy(ended)

        return done


def turn_ends(tokenizer: Any, stops: Sequence[str]) -> TurnEnds | None:
    """Return what ends turns beside ``ending_tokens``; None where these are enough."""
    if all(len(talk.encode(tokenizer, stop)) == 1 for stop in stops):
        return None
    return TurnEnds(token_texts(tokenizer, len(tokenizer)), stops)


def half(model: Any) -> Any:
    """Return a copy that samples in bf16, which is faster than to cast weights at each token."""
    return copy.deepcopy(model).to(torch.bfloat16).requires_grad_(False)


# ---------------------------------------------------------------- how TRL's dialogues go


@dataclass
class Episode:
    """One dialogue of TRL while it grows."""

    question: Question
    prompt: list[int]
    response: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    done: Trajectory = field(default_factory=list)  # contexts before the present one
    past: list[Exchange] = field(default_factory=list)
    spent: int = 0  # tokens of all responses
    script: list[list[int]] = field(default_factory=list)  # turns that it has to take

    @property
    def history(self) -> list[int]:
        return self.prompt + self.response

    @property
    def trajectory(self) -> Trajectory:
        return [*self.done, Context(self.prompt, self.response, self.own)]

    def add(self, tokens: Sequence[int], mask: int) -> None:
        self.response += tokens
        self.own += [mask] * len(tokens)
        self.spent += len(tokens)

    def begin_anew(self, prompt: list[int]) -> None:
        self.done = self.trajectory
        self.prompt, self.response, self.own = prompt, [], []


def rollout_func(known: dict[str, Question]) -> Callable[[list[Any], Any], dict[str, Any]]:
    """Return the ``rollout_func``, given all questions by their text."""

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        questions = [known[prompt[-1]["content"]] for prompt in prompts]
        contexts = [trajectory[0] for trajectory in play(trainer, questions)]
        return {
            "prompt_ids": [context.prompt for context in contexts],
            "completion_ids": [context.response for context in contexts],
            "logprobs": None,
            "env_mask": [context.own for context in contexts],
        }

    return rollout


def play(trainer: Peer, questions: Sequence[Question]) -> list[Trajectory]:
    """Play a dialogue of each question: rounds of a turn of every live one, then all calls.

    Each turn is TRL's own ``generate`` over the left-padded histories.
    """
    game, tokenizer = trainer.game, trainer.processing_class
    prompts = {each.text: game.dialect.prompt(each).tolist() for each in questions}
    episodes = [Episode(question, list(prompts[question.text])) for question in questions]
    for episode, turns_of_it in zip(episodes, trainer.script or (), strict=bool(trainer.script)):
        episode.script = turns_of_it
    live = list(episodes)
    with sampling(trainer):
        while live:
            histories = [episode.history for episode in live]
            if trainer.script:
                trainer.drawn = [episode.script[len(episode.past)] for episode in live]
            turns, _ = trainer._generate_single_turn(histories, None, {}, 1)
            if trainer.ends:
                turns = [trainer.ends.cut(turn) for turn in turns]
            pending_calls = [
                (episode, turn, call)
                for episode, turn in zip(live, turns, strict=True)
                if (call := take_turn(game, tokenizer, episode, turn))
            ]
            observations = game.respond([call for _, _, call in pending_calls])
            live = [
                episode
                for (episode, turn, call), seen in zip(pending_calls, observations, strict=True)
                if go_on(game, tokenizer, episode, turn, call, seen)
            ]
    return [episode.trajectory for episode in episodes]


@contextmanager
def sampling(trainer: Peer) -> Iterator[None]:
    """Let TRL's ``generate`` use the copy in bf16, where there is one, with the present weights."""
    learning = trainer.model_wrapped
    if trainer.sampler is not trainer.model:
        with torch.no_grad():
            weights = zip(trainer.sampler.parameters(), trainer.model.parameters(), strict=True)
            for copied, weight in weights:
                copied.copy_(weight)
        trainer.model_wrapped = trainer.sampler
    try:
        with generating(trainer, trainer.model_wrapped):
            yield
    finally:
        trainer.model_wrapped, trainer.drawn = learning, None


@contextmanager
def generating(trainer: Peer, model: Any) -> Iterator[None]:
    """Give ``generate`` what TRL does not hand on: the ends of turns, and a script of draws."""
    if trainer.ends is None and trainer.script is None:
        yield
        return
    generate = model.generate

    def with_more(input_ids: Tensor, **others: Any) -> Any:
        width = input_ids.shape[1]
        if trainer.ends:
            others["stopping_criteria"] = StoppingCriteriaList([trainer.ends.criterion(width)])
        if trainer.drawn:
            others["logits_processor"] = LogitsProcessorList([following(trainer.drawn, width)])
        return generate(input_ids=input_ids, **others)

    model.generate = with_more
    try:
        yield
    finally:
        del model.generate


def following(turns: Sequence[Sequence[int]], prompt: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what makes the rows of a batch draw ``turns``; where one is over, its row is free."""

    def only(input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.shape[1] - prompt
        rows = [row for row, turn in enumerate(turns) if step < len(turn)]
        scores[rows] = -torch.inf
        scores[rows, [turns[row][step] for row in rows]] = 0.0
        return scores

    return only


def turns_of(trajectories: Sequence[Trajectory]) -> list[list[list[int]]]:
    """Return the turns of each trajectory: what was sampled without anything in between."""
    return [
        [
            [token for token, _ in part]
            for context in trajectory
            for own, part in groupby(zip(context.response, context.own, strict=True), _is_own)
            if own
        ]
        for trajectory in trajectories
    ]


def _is_own(token: tuple[int, int]) -> int:
    return token[1]


@contextmanager
def scripted(trainer: Peer, trees: Sequence[Tree] | None) -> Iterator[None]:
    """Have TRL sample the leaves of trees, with all of its work but the choice of tokens.

    Raises RuntimeError where it has sampled others. None: it draws by itself.
    """
    if trees is None:
        yield
        return
    _, trajectories = trajectories_of(trees)
    trainer.script = turns_of(trajectories)
    try:
        yield
    finally:
        trainer.script = None
    if trainer.played != trajectories:
        raise RuntimeError("TRL's dialogues are not those whose turns it was given")


def take_turn(game: Game, tokenizer: Any, episode: Episode, turn: list[int]) -> Call | None:
    """Append a turn, as far as there is room; return its call if that is allowed.

    ``turn`` is cut in place.
    """
    del turn[game.dialogue.response_tokens - episode.spent :]
    text, ended = tokenizer.decode(turn), turn[-1] == tokenizer.eos_token_id
    closed = any(stop in text for stop in game.dialect.stop_strings)
    read = game.dialect.read(
        np.array(episode.history, np.int32),
        np.array(turn, np.int32),
        text.removesuffix(tokenizer.eos_token) if ended else text,
        StopReason.END if ended else StopReason.STOP if closed else StopReason.LENGTH,
    )
    episode.add(turn, 1)
    return read.call if len(episode.past) < game.dialogue.tool_calls else None


def go_on(
    game: Game, tokenizer: Any, episode: Episode, turn: list[int], call: Call, seen: Observation
) -> bool:
    """Append what answers a call, or begin the next step's prompt; False: there is no room."""
    tokens, dialogue = np.array(turn, np.int32), game.dialogue
    episode.past.append(Exchange(tokens, tokenizer.decode(turn), (call,), (seen,)))
    left = dialogue.response_tokens - episode.spent
    if dialogue.prompt_tokens is not None:
        shown = shown_text(episode.past, seen, dialogue)
        prompt = game.dialect.prompt(episode.question, shown).tolist()
        fits = left > 0 and len(prompt) <= dialogue.prompt_tokens
        if fits:
            episode.begin_anew(prompt)
        return fits
    limit = min(dialogue.result_tokens, left - 1)
    before = np.array(episode.history[: -len(turn)], np.int32)
    written = game.dialect.observe(before, tokens, [call], [seen], limit)
    assert written, "a dialogue in tags goes on from any tokens"
    fits = len(written[1]) <= limit
    if fits:
        episode.add(written[1].tolist(), 0)
    return fits


# ---------------------------------------------------------------- what TRL does


def sample(trainer: Peer, questions: Sequence[Question]) -> float:
    """Return the seconds in which TRL samples a batch. ``questions``: one for each rollout."""
    if trainer.game.dialogue.prompt_tokens is None:
        trainer.model.train()
        trainer._generate_and_score_completions([example(question) for question in questions])
        return trainer.seconds_sampling
    began = time.perf_counter()
    play(trainer, questions)
    return time.perf_counter() - began


class Stepped(NamedTuple):
    """Seconds of the parts of a step, and what it has sampled."""

    sampling: float
    rest: float
    update: float
    trajectories: list[Trajectory]


def steps_of(dialogue: Dialogue) -> Callable[[Peer, Sequence[Question]], Stepped]:
    """Return how TRL does a step of such dialogues."""
    return whole_step if dialogue.prompt_tokens is None else step_in_parts


def whole_step(trainer: Peer, questions: Sequence[Question]) -> Stepped:
    """Do one step, in which TRL itself samples. ``questions``: one for each rollout."""
    seconds = step(trainer, [example(question) for question in questions])
    before = trainer.seconds_sampling + trainer.seconds_rest
    return Stepped(trainer.seconds_sampling, trainer.seconds_rest, seconds - before, trainer.played)


def step_in_parts(trainer: Peer, questions: Sequence[Question]) -> Stepped:
    """Sample, then train on rows that are single steps: TRL has no row of several prompts.

    The rows are laid out, and their advantages computed, before the clock of the update starts.
    """
    assert trainer.rewards is not None, "rewards of whole trajectories, from outside"
    began = time.perf_counter()
    trajectories = play(trainer, questions)
    seconds = time.perf_counter() - began
    learning = update(trainer, questions, trajectories, trainer.rewards)
    return Stepped(seconds, 0.0, learning, trajectories)


def step(trainer: Peer, examples: list[dict[str, Any]]) -> float:
    """Do one step of ``Trainer``'s inner loop, from sampling to the optimizer; return its seconds.

    The forward and backward passes of all micro-batches are TRL's ``training_step``; the first one
    samples for all of them.
    """
    began = time.perf_counter()
    trainer._step = 0
    for _ in range(trainer.shape.micro_batches):
        trainer.training_step(trainer.model, examples, None)
    trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
    trainer.optimizer.step()
    trainer.lr_scheduler.step()
    trainer.model.zero_grad()
    return time.perf_counter() - began


def update(
    trainer: Peer,
    questions: Sequence[Question],
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float],
) -> float:
    """Return the seconds of ``step`` without sampling, on given trajectories.

    TRL lays the trajectories out and computes the advantages by itself, before the clock starts.
    """
    trainer.given = laid_out(trainer, questions, trajectories, rewards)
    try:
        return step(trainer, [])
    finally:
        trainer.given = None


def laid_out(
    trainer: Peer,
    questions: Sequence[Question],
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float],
) -> list[dict[str, Tensor]]:
    """Return the micro-batches that TRL makes of trajectories that it has not sampled.

    Each context is a row. A row of several counts as much in TRL's mean over rows as its own tokens
    do in Beamline's mean over trajectories.
    """
    places = by_step(trajectories, trainer.shape.group)
    rows = [trajectories[leaf][context_index] for leaf, context_index in places]
    before = trainer.rewards
    trainer.trajectories = _as_generated(rows)
    trainer.rewards = [rewards[leaf] for leaf, _ in places]
    trainer.model.train()
    try:
        examples = [example(questions[leaf]) for leaf, _ in places]
        whole: Any = trainer._generate_and_score_completions(examples)
    finally:
        trainer.trajectories, trainer.rewards = None, before
    whole["advantages"] = whole["advantages"] * torch.tensor(weights(trajectories, places))
    shuffled: Any = shuffle_sequence_dict(whole)
    parts: list[Any] = split_tensor_dict(shuffled, trainer.shape.micro_batches)
    return parts


def by_step(trajectories: Sequence[Trajectory], group: int) -> list[tuple[int, int]]:
    """Return (trajectory, context) of each row: the same step of a whole group side by side.

    So TRL's advantages, which are relative to such a group, are those of the trajectories. Raises
    ValueError where trajectories of a group have different numbers of steps.
    """
    rows = []
    for first in range(0, len(trajectories), group):
        leaves = range(first, first + group)
        steps = {len(trajectories[leaf]) for leaf in leaves}
        if len(steps) > 1:
            raise ValueError(
                f"the trajectories of a group have {sorted(steps)} steps with prompts of their "
                "own: raise dialogue.prompt_tokens or response_tokens of the case's world"
            )
        rows += [(leaf, context_index) for context_index in range(*steps) for leaf in leaves]
    return rows


def weights(trajectories: Sequence[Trajectory], places: Sequence[tuple[int, int]]) -> list[float]:
    """Return the weight of each row: its share of a trajectory's sampled tokens, 1 on average."""
    sampled = [[sum(context.own) for context in each] for each in trajectories]
    share = len(places) / len(trajectories)
    return [
        share * sampled[leaf][context_index] / sum(sampled[leaf]) for leaf, context_index in places
    ]


def trajectories_of(trees: Sequence[Tree]) -> tuple[list[Question], list[Trajectory]]:
    """Return the leaves of trees as TRL would have sampled them, each with its question."""
    questions, trajectories = [], []
    for tree in trees:
        for leaf in tree.leaves:
            questions.append(tree.question)
            contexts = [[tree.nodes[i] for i in nodes] for nodes in tree.contexts(leaf)]
            trajectories.append([_context(prompt, rest) for prompt, *rest in contexts])
    return questions, trajectories


def _context(prompt: Node, rest: Sequence[Node]) -> Context:
    return Context(
        prompt.tokens.tolist(),
        [int(token) for node in rest for token in node.tokens],
        [int(node.kind == TURN) for node in rest for _ in node.tokens],
    )


def _as_generated(rows: Sequence[Context]) -> tuple[Any, ...]:
    """Return rows in the form that TRL's ``_generate`` returns; no reward reads their texts."""
    prompts, responses, masks = (
        [list(part) for part in parts] for parts in zip(*rows, strict=True)
    )
    texts = [[{"role": "assistant", "content": ""}] for _ in rows]
    return prompts, responses, masks, texts, None, {}, None, []
