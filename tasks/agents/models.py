"""Choose and open the models that agents ask: policies of this machine, or servers'."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from params.run_folders import RunFolders
from params.schema.chat import ChatEndpoint, ChatLimits
from params.schema.reading import validate
from params.schema.recipe import Recipe
from tasks import recipes
from tasks.chat import open_chat
from tasks.chat.contract import ChatModel
from tasks.engines.chat import open_policy
from tasks.ledger.artifacts import Artifact

TRAINED = "trained"
PUBLISHED = ("initial", "cold_start", TRAINED)  # policies of a recipe, in models/<recipe>


@dataclass(frozen=True)
class ModelChoice:
    """A model that was chosen, not opened yet: the folder of a policy, or one behind a server."""

    name: str  # in tables
    held: Path | ChatEndpoint

    def identity(self) -> Artifact | ChatEndpoint:
        """Return what decides its answers, for keys. Raises ValueError for a missing folder."""
        return Artifact.at(self.held) if isinstance(self.held, Path) else self.held


def choose(word: str, recipe: str, name: str = "", key_variable: str | None = None) -> ModelChoice:
    """Return the model that a word of the command line stands for.

    ``name`` is that of the model at a server; of a policy, how tables name it. Raises ValueError,
    with the remedy, for a policy that is not there, and an address that cannot be used.
    """
    if word.startswith(("http://", "https://")):
        given = {"kind": "endpoint", "url": word, "name": name, "key_variable": key_variable}
        return ModelChoice(name, validate(ChatEndpoint, given, word))
    folder = RunFolders(recipe).models / word if word in PUBLISHED else Path(word)
    if not (folder / "config.json").is_file():
        remedy = f"run `make run RECIPE={recipe}` first, or name a folder or a server's address"
        raise ValueError(f"{folder} holds no policy (no config.json): {remedy}")
    return ModelChoice(name or folder.as_posix(), folder)


@contextmanager
def open_model(
    choice: ModelChoice, recipe: Recipe, limits: ChatLimits, account: str
) -> Iterator[ChatModel]:
    """Open a model for the length of the block.

    ``limits``: how a server is asked; what it is asked for counts on ``account``. Raises ValueError
    where a key is not set, and RuntimeError or ValueError for a policy that cannot be loaded.
    """
    if isinstance(choice.held, Path):
        agent, rows = recipes.agent_of(recipe), recipe.reinforce.rollout.rows
        with open_policy(choice.held, agent, rows, choice.name) as policy:
            yield policy
    else:
        with open_chat([choice.held], limits, "--model", account) as (model,):
            yield model
