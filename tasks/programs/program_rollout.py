"""Roll out questions by programs: each episode of a question is a leaf of its tree.

Programs run side by side and ask at the gateway; here, in the thread that called, their answers are
sampled in rounds (request_queue.py). When all have ended, trees are made of what was sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from params.schema.base import Frozen
from tasks.engines import Engine
from tasks.programs.asking import FixedSampling
from tasks.programs.assembling import tree_of
from tasks.programs.episodes import EpisodeLimits, ProgramEpisode
from tasks.programs.gateway import Gateway
from tasks.programs.launching import Launcher
from tasks.programs.opening import OpenProgram
from tasks.programs.program_branching import BRANCHING, BranchPoint
from tasks.programs.request_queue import RequestQueue
from tasks.programs.sampling_rounds import Counts, Rounds
from tasks.programs.walls import PORT
from tasks.rollouts.beaming import BEAMING
from tasks.rollouts.paths import Setting
from tasks.trees.tree import Question, Tree


def grow_programs(
    questions: Sequence[Question],
    engine: Engine,
    setting: Setting,
    top_p: float,
    program: OpenProgram,
    dialect: Mapping[str, Frozen],
    advance: Callable[[int], object] = lambda finished: None,
) -> tuple[list[Tree], Counts]:
    """Run ``leaves`` episodes of every question, and return the trees.

    Questions are rolled out in batches whose episodes fit into ``rollout.rows``. ``advance`` is
    called with the number of questions that have just been finished. Raises RuntimeError where the
    program cannot be run, and ValueError where its requests may not fit into the policy's context.
    """
    counts, trees = Counts(), []
    with program.lent() as (launcher, sockets):
        per_batch = max(1, setting.rollout.rows // setting.rollout.leaves)
        for start in range(0, len(questions), per_batch):
            batch = questions[start : start + per_batch]
            desk = Desk(batch, engine, setting, top_p, launcher, dialect)
            trees += desk.run(sockets)
            counts.add(desk.rounds.counts)
            advance(len(batch))
    return trees, counts


class Desk:
    """A batch of episodes: their programs, the gateway at which they ask, and the engine."""

    def __init__(
        self,
        questions: Sequence[Question],
        engine: Engine,
        setting: Setting,
        top_p: float,
        launcher: Launcher,
        dialect: Mapping[str, Frozen],
    ) -> None:
        self.questions, self.setting = questions, setting
        self.launcher, self.settings = launcher, launcher.settings
        dialogue = setting.dialogue
        limits = EpisodeLimits(
            self.settings.requests,
            self.settings.prompt_tokens,
            dialogue.response_tokens,
            dialogue.tool_calls,
        )
        self.episodes = [
            ProgramEpisode(question, leaf, setting.seed, limits)
            for question in questions
            for leaf in range(setting.rollout.leaves)
        ]
        self.points: list[BranchPoint] = []
        self.queue = RequestQueue([], self.settings.lanes, self.settings.patience)
        self.sampling = FixedSampling(
            setting.rollout.temperature, top_p, dialogue.turn_tokens, self.settings.ignored
        )
        self.rounds = Rounds(
            self.episodes,
            engine,
            setting.tokenizer,
            setting.dialogue,
            self.sampling,
            self.settings,
            dialect,
            self.queue,
        )

    def run(self, sockets: Path) -> list[Tree]:
        """Run all episodes, and return the tree of each question."""
        settings, launcher = self.settings, self.launcher
        with ExitStack() as stack:
            gateway = Gateway(self.queue, self.sampling, sockets, settings.listen)
            stack.enter_context(gateway)
            host = f"[{settings.listen}]" if ":" in settings.listen else settings.listen
            address = f"{host}:{gateway.port}" if settings.trusted else f"127.0.0.1:{PORT}"

            def endpoint(episode: ProgramEpisode) -> Mapping[str, Any]:
                return gateway.endpoint(episode, address, settings.seconds)

            def ended(episode: ProgramEpisode) -> None:
                gateway.forget(episode)
                for following in self.queue.end(episode):
                    launcher.start(following)

            launcher.serve(endpoint, self.queue.started, ended)
            wave = self._first_wave()
            while wave:
                for episode in self.queue.begin(wave):
                    launcher.start(episode)
                self._serve(stack)
                self.rounds.fill(wave, stack)
                wave = self._next_wave(wave)
        self.rounds.counts.early_rounds += self.queue.early
        self.rounds.counts.idle += self.queue.idle
        return [self._tree(number) for number in range(len(self.questions))]

    def _of_question(self, number: int) -> list[ProgramEpisode]:
        leaves = self.setting.rollout.leaves
        return self.episodes[number * leaves : (number + 1) * leaves]

    def _tree(self, number: int) -> Tree:
        """Return the tree of a question, with the decisions where it branched."""
        episodes, setting = self._of_question(number), self.setting
        question = self.questions[number]
        tree, places = tree_of(question, episodes, setting.tokenizer, setting.policy_steps)
        for point in self.points:
            if point.episode in episodes:
                parts = places[point.episode.index][point.answer]
                end = min(end for end in parts if end >= point.tokens)
                tree.decisions.append(replace(point.decision, node=parts[end]))
        return tree

    # ------------------------------------------------------------ which episodes run together

    def _first_wave(self) -> list[ProgramEpisode]:
        """Return the episodes that begin at once: all of them where the row does not branch."""
        initial = BEAMING[self.setting.branching].initial(self.setting.rollout)
        return [episode for episode in self.episodes if episode.index < initial]

    def _next_wave(self, ended: Sequence[ProgramEpisode]) -> list[ProgramEpisode]:
        """Return the branches of episodes that have ended; else those that fill up the budget."""
        wave: list[ProgramEpisode] = []
        for number in range(len(self.questions)):
            episodes = self._of_question(number)
            free = [episode for episode in episodes if not episode.answers]
            of_question = [episode for episode in ended if episode in episodes]
            if not free or not of_question:
                continue
            everyone = [episode for episode in episodes if episode.answers]
            where = BRANCHING[self.setting.branching]
            points = where(of_question, everyone, len(free), self.setting)
            self.points += points
            begun = 0
            for point in points:
                for branch in free[begun : begun + point.decision.added]:
                    branch.branch(point.episode, point.answer, point.tokens)
                begun += point.decision.added
            wave += free[:begun] if begun else free
        return wave

    def _serve(self, stack: ExitStack) -> None:
        """Sample rounds until all episodes have ended."""
        while True:
            self.launcher.look()
            requests = self.queue.take()
            if requests is None:
                self.launcher.look()  # why all have ended, where none could run
                return
            if requests:
                self.rounds.sample(requests, stack)
            for episode in self.queue.late(self.settings.seconds):
                self.launcher.kill(episode)
