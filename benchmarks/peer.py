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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

from params.schema.recipe import Recipe
from tasks.environments import Respond
from tasks.policy.tiny import ASSISTANT, END, USER
from tasks.scorers import project_scorers
from tasks.trees import dialogue as talk
from tasks.trees.outcomes import StopReason
from tasks.trees.tree import TURN, Call, Question, Tree

ROLLOUT_FUNC, TOOLS = "rollout_func", "tools"

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

    @property
    def rollouts(self) -> int:
        return self.questions * self.group


class Peer(GRPOTrainer):
    """TRL's trainer, with a clock around its sampling, able to train on given trajectories."""

    shape: Shape
    model: Any
    optimizer: Any
    lr_scheduler: Any
    seconds_sampling = 0.0
    sampled: tuple[Any, Any, Any]  # prompts, responses, and whether tokens are the policy's own
    given: list[dict[str, Any]] | None = None  # micro-batches to train on instead of sampled ones
    trajectories: Any = None  # returned instead of sampling
    rewards: list[float] | None = None  # instead of scores

    def _generate(self, prompts: list[Any]) -> Any:
        if self.trajectories is not None:
            return self.trajectories
        began = time.perf_counter()
        sampled = super()._generate(prompts)
        self.seconds_sampling = time.perf_counter() - began
        self.sampled = sampled[:3]
        return sampled

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
    respond: Respond,
) -> Peer:
    """Return a trainer that is ready for ``step``; ``questions`` are all that it will get.

    ``model`` becomes TRL's: it patches the model's forward pass.
    """
    from datasets import Dataset

    model.generation_config.eos_token_id = [
        tokenizer.eos_token_id,
        *(tokenizer.convert_tokens_to_ids(stop) for stop in talk.stop_strings(tokenizer)),
    ]
    own = copy.deepcopy(tokenizer)
    ways: dict[str, Any] = {"rollout_func": rounds(recipe, respond)}
    scored: Any = reward({question.id: question for question in questions}, own)
    if shape.path == TOOLS:
        own.chat_template, own.response_template = TOOL_TEMPLATE, RESPONSE_TEMPLATE
        ways = {"tools": [python(own, recipe, respond)]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rollout_func is experimental
        trainer = Peer(
            model=model,
            reward_funcs=scored,
            args=config(recipe, shape, tempfile.mkdtemp(prefix="peer")),
            train_dataset=Dataset.from_list([example(questions[0])]),
            processing_class=own,
            **ways,
        )
    trainer.shape = shape
    trainer.create_optimizer_and_scheduler(num_training_steps=10**6)
    trainer.optimizer = trainer.accelerator.prepare(trainer.optimizer)
    trainer.current_gradient_accumulation_steps = shape.micro_batches
    return trainer


def config(recipe: Recipe, shape: Shape, folder: str) -> GRPOConfig:
    """Return TRL's fastest settings for `grpo` here, without work that Beamline lacks."""
    update, dialogue = recipe.reinforce.update, recipe.dialogue
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
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
        generation_kwargs={"max_new_tokens": dialogue.turn_tokens},
        disable_dropout=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=recipe.seed,
    )


# ---------------------------------------------------------------- what TRL gets


def example(question: Question) -> dict[str, Any]:
    """Return a row of TRL's batch."""
    return {"prompt": [{"role": "user", "content": question.text}], "question": question.id}


def batch(questions: Sequence[Question], group: int) -> list[dict[str, Any]]:
    """Return the rows of one step: each question once per rollout of its group."""
    return [example(question) for question in questions for _ in range(group)]


def reward(known: dict[str, Question], tokenizer: Any) -> Callable[..., list[float]]:
    """Return TRL's reward function: the score of the answer, -1 where there is none."""

    def score(completion_ids: list[list[int]], question: list[str], **_: Any) -> list[float]:
        texts = tokenizer.batch_decode(completion_ids)
        return [
            _score(talk.final_answer(text), known[asked])
            for text, asked in zip(texts, question, strict=True)
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


def rounds(recipe: Recipe, respond: Respond) -> Callable[[list[Any], Any], dict[str, Any]]:
    """Return the ``rollout_func``: rounds of one turn of every live dialogue, then all tool calls.

    Each turn is TRL's own ``generate`` over the left-padded histories.
    """
    dialogue = recipe.dialogue

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        starts, _, _ = trainer._tokenize_prompts(prompts)
        histories = [list(start) for start in starts]
        own: list[list[int]] = [[] for _ in starts]
        calls = [0] * len(starts)
        live = list(range(len(starts)))
        while live:
            turns, _ = trainer._generate_single_turn([histories[i] for i in live], None, {}, 1)
            asked: list[tuple[int, Call]] = []
            for i, turn in zip(live, turns, strict=True):
                kept = turn[: dialogue.response_tokens - len(own[i])]
                histories[i] += kept
                own[i] += [1] * len(kept)
                call = _call(trainer.processing_class, kept, calls[i] < dialogue.tool_calls)
                if call:
                    asked.append((i, call))
            observations = respond([call for _, call in asked])
            live = []
            for (i, _), observation in zip(asked, observations, strict=True):
                limit = min(dialogue.result_tokens, dialogue.response_tokens - len(own[i]) - 1)
                _, tokens = talk.result_tokens(trainer.processing_class, observation, limit)
                if len(tokens) <= limit:
                    histories[i] += tokens.tolist()
                    own[i] += [0] * len(tokens)
                    calls[i] += 1
                    live.append(i)
        responses = [
            history[len(start) :] for history, start in zip(histories, starts, strict=True)
        ]
        return {
            "prompt_ids": starts,
            "completion_ids": responses,
            "logprobs": None,
            "env_mask": own,
        }

    return rollout


def _call(tokenizer: Any, turn: list[int], allowed: bool) -> Call | None:
    text = tokenizer.decode(turn)
    closed = any(stop in text for stop in talk.stop_strings(tokenizer))
    ended = turn[-1] == tokenizer.eos_token_id
    _, call = talk.read_turn(
        text.removesuffix(tokenizer.eos_token) if ended else text,
        StopReason.END if ended else StopReason.STOP if closed else StopReason.LENGTH,
        talk.forged(tokenizer),
    )
    return call if allowed else None


# ---------------------------------------------------------------- what TRL does


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


def update(trainer: Peer, trees: Sequence[Tree], rewards: Sequence[float]) -> float:
    """Return the seconds of ``step`` without sampling, on the leaves of ``trees``.

    TRL lays the trajectories out and computes the advantages by itself, before the clock starts.
    """
    trainer.given = laid_out(trainer, trees, rewards)
    try:
        return step(trainer, [])
    finally:
        trainer.given = None


def laid_out(
    trainer: Peer, trees: Sequence[Tree], rewards: Sequence[float]
) -> list[dict[str, Tensor]]:
    """Return the micro-batches that TRL makes of trajectories that it has not sampled."""
    trainer.trajectories, trainer.rewards = _as_sampled(trees), list(rewards)
    trainer.model.train()
    examples = [example(tree.question) for tree in trees for _ in tree.leaves]
    try:
        whole: Any = trainer._generate_and_score_completions(examples)
    finally:
        trainer.trajectories = trainer.rewards = None
    shuffled: Any = shuffle_sequence_dict(whole)
    parts: list[Any] = split_tensor_dict(shuffled, trainer.shape.micro_batches)
    return parts


def _as_sampled(trees: Sequence[Tree]) -> tuple[Any, ...]:
    """Return these trees' leaves in the form that TRL's ``_generate`` returns."""
    prompts, responses, own, texts = [], [], [], []
    for tree in trees:
        for trajectory in tree.trajectories():
            nodes = trajectory[1:]
            prompts.append(trajectory[0].tokens.tolist())
            responses.append([int(token) for node in nodes for token in node.tokens])
            own.append([int(node.kind == TURN) for node in nodes for _ in node.tokens])
            text = "".join(node.text for node in nodes)
            texts.append([{"role": "assistant", "content": text}])
    return prompts, responses, own, texts, None, {}, None, []
