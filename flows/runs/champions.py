"""Register and find champions: versions of the MLflow model that has the recipe's name.

The alias ``champion`` names the current version. A version holds no weights: its source is
``dvc://models/<recipe>/trained@<commit>``, its tags are the commit, DVC's digest and the verdict's
figures, and the files come from DVC's cache or remote. Only flows/commands/retrain.py imports this
module, because only a retraining moves the alias; people load the champion with ``champion``.

The registry is in the tracking store. An unreachable one raises RegistryError, which ends no run:
the champion in the recipe is then the one to beat, and ``promote`` refuses to replace a champion
that the candidate was not compared with.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.host import files
from flows.host.addresses import without_password
from flows.runs import cache, git, recipe_values, worktree
from flows.tracking import run, store
from flows.tracking.run import COMMIT, DIGEST
from params.schema.champion import Champion

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

ALIAS = "champion"
PROMOTED = "beamline.promoted"  # tag of a version that the alias has moved to
FILES = Path(".beamline/champions")
LOCK = Path(".beamline/registry")  # one run of this checkout promotes at a time
PINNED = re.compile(r"^champion:.*\n(?:[ \t]+.*\n)*", re.MULTILINE)  # in a recipe's file


class RegistryError(RuntimeError):
    """The registry is unreachable or refuses a request."""


class OvertakenError(RegistryError):
    """Another run became the champion after the candidate was compared with the previous one."""


# ---------------------------------------------------------------- the champion


def current(recipe: str) -> Champion | None:
    """Return the champion of a recipe, or None. Raises RegistryError.

    Raises ValueError for a version whose source cannot be restored: neither in DVC nor a folder of
    this machine. Such a folder is added to DVC's cache.
    """
    with _registry() as client:
        number = _aliased(client, recipe)
        if number is None:
            return None
        held = client.get_model_version(recipe, str(number))
    source, tags = held.source or "", held.tags
    if DIGEST in tags:
        return Champion(version=number, commit=tags.get(COMMIT), digest=tags[DIGEST])
    folder = Path(source.removeprefix("file://"))
    if not folder.is_dir():
        raise ValueError(
            f"version {number} of the model {recipe} has the source {source!r} and no tag "
            f"{DIGEST}: set this tag to DVC's digest of its folder, or register a folder that is "
            "there"
        )
    return Champion(version=number, commit=tags.get(COMMIT), digest=cache.keep(folder))


def fetch(recipe: str, into: Path) -> Champion | None:
    """Write the recipe's champion into the recipe's file ``into``, under its key ``champion``.

    The stage ``champion`` restores its files from there, so the run's commit records what it was
    compared with. The rest of the file stays as it is; a file that leaves the key out gets it at
    its end. Raises as ``current``, and ValueError for a file that has the key twice.
    """
    current_champion = current(recipe)
    text = into.read_text()
    entry = f"champion: {_inline(current_champion)}\n"
    written, times = PINNED.subn(entry, text)
    if times > 1:
        raise ValueError(f"{into} has {times} lines that begin with 'champion:': keep one")
    if not times and current_champion:
        written = text.rstrip("\n") + "\n" + entry
    if written != text:
        with files.replaced(into) as partial:
            partial.write_text(written)
    return current_champion


def _inline(champion: Champion | None) -> str:
    return json.dumps(champion.model_dump() if champion else None)  # JSON is YAML, too


def champion(recipe: str, folder: Path = FILES) -> Path:
    """Return a folder with the champion's files, which transformers can load.

    They are restored from DVC's cache or remote into ``folder``, once a version. Raises as
    ``current``, and ValueError where there is no champion or DVC lacks the files.
    """
    current_champion = current(recipe)
    if current_champion is None:
        raise ValueError(f"the recipe {recipe} has no champion yet: a retraining promotes one")
    target = folder / f"{recipe}-{current_champion.version}-{current_champion.digest[:8]}"
    if not target.exists():
        with files.replaced(target) as partial:
            cache.restore(current_champion.digest, partial)
    return target


# ---------------------------------------------------------------- promotion


def promote(recipe: str, commit: str, *, back: bool = False) -> str:
    """Make the policy of a run's ``commit`` the champion if its verdict allows; return a message.

    ``commit``: or a branch. Registers a version for the commit once, and moves the alias to it
    once, and only from the champion that the verdict compares with: a replay, or a run that another
    one has overtaken, moves nothing. With ``back`` it moves in any case. Raises OvertakenError,
    RegistryError, and ValueError for a commit without a verdict or a policy.
    """
    commit = git.resolve(commit)
    file = f"reports/{recipe}/verdict.json"
    try:
        verdict = json.loads(git.content(commit, file))
    except (json.JSONDecodeError, RecursionError):
        raise ValueError(f"{file} of commit {commit} is no JSON, as a run writes") from None
    if not verdict["promote"]:
        return f"not promoted: {verdict['reason']}"
    digests = git.digests_at(commit, recipe)
    policy = f"models/{recipe}/trained"
    if policy not in digests:
        raise ValueError(f"dvc.lock of commit {commit} has no {policy}: is it a run of {recipe}?")
    compared = verdict["champion"]["version"] if verdict["champion"] else None
    with worktree.one_at_a_time(LOCK), _registry() as client:
        standing = _aliased(client, recipe)
        known = _of_commit(client, recipe, commit)
        if known is not None and standing == known:
            return f"version {known} of {recipe} is the champion already"
        if known is not None and _was_champion(client, recipe, known) and not back:
            return f"not promoted: version {known} of {recipe} has been the champion once"
        if standing != compared and not back:
            raise OvertakenError(
                f"not promoted: the champion of {recipe} is {_named(standing)}, and the candidate "
                f"was compared with {_named(compared)}: run again to compare them"
            )
        if known is None:
            tags = _tags(commit, digests[policy], verdict)
            told = recipe_values.of_version(recipe, commit, verdict)
            known = _register(client, recipe, f"dvc://{policy}@{commit}", tags, told)
        client.set_registered_model_alias(recipe, ALIAS, str(known))
        client.set_model_version_tag(recipe, str(known), PROMOTED, "true")
    return f"version {known} of {recipe} is the champion now: {verdict['reason']}"


def _was_champion(client: MlflowClient, recipe: str, number: int) -> bool:
    return PROMOTED in client.get_model_version(recipe, str(number)).tags


def _named(number: int | None) -> str:
    return "nobody" if number is None else f"version {number}"


def _tags(commit: str, digest: str, verdict: Mapping[str, Any]) -> dict[str, str]:
    figures = {name: value for name, value in verdict.items() if name != "gates"}
    return {
        COMMIT: commit,
        DIGEST: digest,
        **{f"verdict.{name}": value for name, value in run.flatten(figures).items()},
    }


def _register(
    client: MlflowClient, recipe: str, source: str, tags: Mapping[str, str], description: str
) -> int:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(recipe)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    made = client.create_model_version(recipe, source, tags=dict(tags), description=description)
    return int(made.version)


# ---------------------------------------------------------------- the registry


@contextmanager
def _registry() -> Iterator[MlflowClient]:
    uri = store.store_uri()
    try:
        store.check_reachable(uri, unreachable=True)
        yield store.connect(uri)
    except Exception as error:
        from mlflow.exceptions import MlflowException  # `connect` settles how it is imported

        if not isinstance(error, MlflowException | OSError | sqlite3.Error):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise RegistryError(
            without_password(f"the model registry {uri} cannot be used ({reason}): ")
            + "the champion stays; the same call may be repeated"
        ) from error


def _aliased(client: MlflowClient, recipe: str) -> int | None:
    """Return the version that the alias names, or None."""
    from mlflow.exceptions import MlflowException

    try:
        number = client.get_registered_model(recipe).aliases.get(ALIAS)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return None if number is None else int(number)


def _of_commit(client: MlflowClient, recipe: str, commit: str) -> int | None:
    """Return the version that was registered for a commit, or None."""
    held: list[ModelVersion] = list(client.search_model_versions(f"name = '{recipe}'"))
    numbers = [int(each.version) for each in held if each.tags.get(COMMIT) == commit]
    return min(numbers, default=None)
