"""Read and write the teacher's folder, ``models/<recipe>/teacher``.

The policy that is trained learns from the teacher's probabilities (docs/own-algorithm.md). The
folder has ``teacher.json`` (what the recipe says of it; null if there is none) and, but for a
teacher behind a server, its files in ``policy``, an ordinary transformers folder. The stage
``champion`` writes it from the recipe, so a commit records which teacher its run had.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from params.schema.prepare import PretrainedPolicy
from params.schema.teacher import PretrainedTeacher, RunTeacher, ServerTeacher, Teacher
from tasks.ledger.artifacts import Artifact
from tasks.policy import local_policy
from tasks.policy.champion import written

RECORD = "teacher.json"
SOURCE = "source_digest"  # of the folder that the recipe names


def write(folder: Path, settings: Teacher | None, restore: Callable[[str, Path], None]) -> None:
    """Replace ``folder``; ``restore(digest, target)`` brings back the files of a policy.

    Raises ValueError or OSError where the teacher cannot be had.
    """
    record = settings.model_dump() if settings else None
    if record and (local := local_policy.at(settings)):
        record[SOURCE] = local.digest
    with written(folder, RECORD, record) as partial:
        if isinstance(settings, RunTeacher):
            restore(settings.digest, partial / "policy")
        elif isinstance(settings, PretrainedTeacher):
            _fetch(settings, partial / "policy")


def _fetch(settings: PretrainedTeacher, folder: Path) -> None:
    from tasks.policy.load_model import fetch_policy, save_model  # with torch

    given = settings.model_dump() | {"context": 1}  # which a teacher does not sample with
    model, tokenizer = fetch_policy(PretrainedPolicy.model_validate(given))
    save_model(model, folder)
    tokenizer.save_pretrained(folder)


def of(folder: Path, settings: Teacher | None) -> Artifact | ServerTeacher | None:
    """Return the recipe's teacher: its files in ``folder``, or where it is asked; None: none.

    Raises ValueError where the stage champion has not run.
    """
    kept = policy(folder)
    return settings if isinstance(settings, ServerTeacher) else kept


def policy(folder: Path) -> Artifact | None:
    """Return the files of the teacher in ``folder``; None if it has none.

    Raises ValueError where the stage champion has not run.
    """
    file = folder / RECORD
    if not file.exists():
        raise ValueError(f"{file} does not exist: run the stage that makes it, champion, first")
    record = json.loads(file.read_text())
    return Artifact.at(folder / "policy") if record and record["kind"] != "server" else None


def check_tokens(teacher: Path, learner: Path) -> None:
    """Raise ValueError unless the teacher has all of the learner's tokens, with the same ids.

    It may have further ones: transformers adds some when it loads a tokenizer by its architecture.
    The sizes of their vocabularies may differ, too: those of a family are padded differently.
    """
    from tasks.policy.load_model import load_tokenizer  # with transformers

    theirs, ours = (load_tokenizer(folder).get_vocab() for folder in (teacher, learner))
    if lacking := sorted(ours.items() - theirs.items(), key=lambda item: item[1]):
        (token, number), count = lacking[0], len(lacking)
        raise ValueError(
            f"the recipe's teacher has another tokenizer than the policy: it lacks {count} tokens, "
            f"the first of which is {token!r} with the id {number}: name a teacher of the same "
            "family in teacher"
        )
