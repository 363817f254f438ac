"""The engine whose policy is on servers, of either kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from params.schema.agent import EngineSettings
from tasks.engines.contract import Engine, check_room
from tasks.engines.servers.fleet import Fleet
from tasks.engines.servers.weights_check import ServedPolicy, reference_of
from tasks.engines.turns import Drawn, TurnRequest, TurnSession
from tasks.policy import checkpoint, token_ids
from tasks.trees import marks

if TYPE_CHECKING:
    from tasks.ledger.artifacts import Artifact
    from tasks.policy.resident import Learner


class ServersEngine:
    """Samples from one policy on servers."""

    def __init__(
        self,
        fleet: Fleet,
        lanes: int,
        model: Any,
        tokenizer: Any,
        folder: Callable[[], Path],
        digest: str,
    ) -> None:
        """``folder`` returns the folder with all weights of the policy, ``digest`` names them.

        ``model``: the policy in memory, which servers are held against.
        """
        self.fleet, self.lanes, self.model, self.tokenizer = fleet, lanes, model, tokenizer
        self.folder, self.digest = folder, digest
        self.texts = marks.token_texts(
            tokenizer, model.config.get_text_config(decoder=True).vocab_size
        )

    def replicas(self, most: int) -> Sequence[Engine]:
        """Return this engine once for each of the recipe's lanes."""
        return [self] * max(1, min(most, self.lanes))

    def pieces(self) -> list[str]:
        """Return the text of each token of the vocabulary."""
        return self.texts

    def sample(self, turns: Sequence[TurnRequest]) -> list[Drawn]:
        """Sample turns; results are in their order."""
        return self.fleet.sample(turns, self._described, self.digest)

    @contextmanager
    def session(
        self, paths: int, context: int, temperature: float, top_p: float, stop: Sequence[str]
    ) -> Iterator[TurnSession]:
        """Open a session; see ``tasks.engines.Engine``."""
        check_room(self.model.config, context)
        self.fleet.load(self._described, self.digest)
        yield TurnSession(self, paths, context, temperature, top_p, stop)

    def _described(self) -> ServedPolicy:
        """Return what servers need of the policy, and what they are held against."""
        folder = self.folder().absolute()
        reference = reference_of(folder, self.model, self.fleet.kind)
        ids = token_ids.of(self.model)
        return ServedPolicy(folder, self.digest, ids, self.texts, reference)

    def release(self) -> None:
        """Do nothing: the servers have memory of their own."""


@cache
def fleet_at(addresses: tuple[str, ...], kind: str) -> Fleet:
    """Return this process's fleet; each iteration opens an engine of its own over it."""
    return Fleet(addresses, kind)


def open_servers(settings: EngineSettings, actor: Learner, policy: Artifact) -> ServersEngine:
    """Return an engine over the servers of the settings; an adapter is merged into a folder."""
    return ServersEngine(
        fleet_at(settings.addresses, settings.kind),
        settings.lanes,
        actor.model,
        actor.tokenizer,
        partial(checkpoint.whole, policy),
        policy.digest,
    )
