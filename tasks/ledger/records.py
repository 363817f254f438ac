"""Records: what a folder of the ledger says about itself, written with a digest and checked.

A record is a JSON object. It has the digest of its other entries, and the name, digest and size of
each artifact. Paths are built from the folder that the record lies in. A record of a sub-step must
agree with its folder's name and with the key of its own inputs; one of a sealed folder (see
``Ledger.seal``) has only the folder's name and the artifacts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from blake3 import blake3
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from tasks.ledger import keys
from tasks.ledger.artifacts import DIGEST_BYTES, RECORD, Record, digest, irregular, size

RETIRED = "retired"  # a file with the names of the artifacts that were dropped on purpose
DELIVERED = "delivered"  # a file with the mirror that has this sub-step
SIGNATURE = "signature"  # an object beside a record in the mirror
MARKS = (RECORD, RETIRED, DELIVERED, SIGNATURE)
SUB_STEP = re.compile(rf"\d{{4,}}-.+-[0-9a-f]{{{keys.KEY_LETTERS}}}")  # other folders are sealed
LONGEST = 200  # bytes of a name; file systems allow 255, and temporary names are longer
DEEPEST = 20  # levels of objects and lists in a record
SHOWN = 80  # characters of a name in a message


def is_plain(name: object) -> bool:
    """Return whether ``name`` can be that of an artifact or a sealed folder."""
    return is_part(name) and not str(name).startswith(".") and name not in MARKS


def is_part(name: object) -> bool:
    """Return whether ``name`` names an entry of a folder, and nothing outside of it."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and not {"/", "\\"} & set(name)
        and name.isprintable()
        and len(name.encode()) <= LONGEST
    )


# ---------------------------------------------------------------- what a record must have


def _plain(name: str) -> str:
    if not is_plain(name):
        raise ValueError("no plain file name")
    return name


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Artifact(_Checked):
    file: Annotated[str, AfterValidator(_plain)]
    digest: Annotated[str, Field(pattern=f"^[0-9a-f]{{{2 * DIGEST_BYTES}}}$")]
    size: Annotated[int, Field(ge=0)]  # bytes, of a folder those of its files


class _Sealed(_Checked):
    verb: str
    artifacts: dict[str, _Artifact]


class _Step(_Checked):
    recipe: str
    stage: str
    iteration: int
    seed: int


class _SubStep(_Sealed):
    """Verbs may add entries; those that several verbs have are checked."""

    model_config = ConfigDict(extra="allow")

    key: str
    step: _Step
    inputs: dict[str, str]
    sources: dict[str, str]
    duration: float
    finished: float
    host: str
    metrics: dict[str, float] = {}
    seconds: dict[str, float] = {}
    questions: list[str] = []
    cursor: int = 0
    profile: list[dict[str, float]] = []
    curve: list[dict[str, float]] = []
    rows: list[dict[str, Any]] = []
    groups_with_spread: int = 0
    without_spread: list[str] = []
    another_batch: bool = False
    promote: bool = False
    reason: str = ""


def _fault(record: Record, folder: Path) -> str:
    """Return what is wrong with a record of ``folder``; "" if nothing is."""
    sealed = not SUB_STEP.fullmatch(folder.name)
    try:
        (_Sealed if sealed else _SubStep).model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        where = ascii(".".join(map(str, first["loc"])))[:SHOWN]
        return f"entry {where}: {first['type']}"
    for name, artifact in record["artifacts"].items():
        if name not in (artifact["file"], Path(artifact["file"]).stem):
            return "an artifact has the file of another one"
    if (record["verb"] if sealed else _name(record)) != folder.name:
        return "it is of another folder"
    return "" if sealed else _contradiction(record, folder)


def _name(record: Record) -> str:
    return f"{record['step']['iteration']:04d}-{record['verb']}-{record['key']}"


def _contradiction(record: Record, folder: Path) -> str:
    step, inputs = record["step"], record["inputs"]
    stage_parts = Path(step["recipe"], step["stage"]).parts
    if folder.parent.parts[-len(stage_parts) :] != stage_parts:
        return "it is of another stage"
    if record["key"] != keys.key_of(inputs):
        return "its key is not that of its inputs"
    if inputs.get("step") != drawn(step["iteration"], step["seed"]):
        return "its seed or iteration is not that of its inputs"
    if inputs.get("source") != keys.sources_digest(record["sources"]):
        return "its sources are not those of its inputs"
    return ""


def drawn(iteration: int, seed: int) -> str:
    """Return what iteration and seed contribute to a key."""
    return json.dumps({"iteration": iteration, "seed": seed})


# ---------------------------------------------------------------- write and read


def write(folder: Path, target: Path, entries: Mapping[str, Any]) -> Record:
    """Write the record of ``folder``, which is or will be renamed to ``target``; return it.

    ``artifacts`` are added: what is in the folder, but marks and hidden files. Raises ValueError
    for an artifact that is or has a link, and for entries that could not be read again.
    """
    record = json.loads(json.dumps({**entries, "artifacts": _artifacts(folder)}))
    text = json.dumps({**record, "digest": _digest(record)}, indent=1)
    try:
        parsed_record = parse(text.encode(), target)
    except ValueError as error:
        raise ValueError(f"{target}: the record cannot be kept: {error}") from None
    partial = folder / f".{RECORD}.partial"
    partial.write_text(text)
    partial.replace(folder / RECORD)
    return parsed_record


def parse(content: bytes, folder: Path) -> Record:
    """Return the record that ``content`` is, as that of ``folder``, with the paths of artifacts.

    Raises ValueError with the reason where it is malformed, or of another folder.
    """
    try:
        record = json.loads(content)
        if not isinstance(record, dict) or _depth(record) > DEEPEST:
            raise ValueError("it is no JSON object, or too deep")
        if record.pop("digest", None) != _digest(record):
            raise ValueError("it has no digest of its own, or another one")
    except UnicodeDecodeError:
        raise ValueError("it is no text") from None
    except RecursionError:
        raise ValueError("it is too deep") from None
    if fault := _fault(record, folder):
        raise ValueError(fault)
    for artifact in record["artifacts"].values():
        artifact["path"] = str(folder / artifact.pop("file"))
    return record


def load(folder: Path) -> Record | None:
    """Return the record of ``folder``, or None without one; artifacts are not checked.

    Raises ValueError as ``parse``, and OSError for a file that cannot be read.
    """
    file = folder / RECORD
    if not os.path.lexists(file):
        return None
    if irregular(file) or folder.is_symlink():
        raise ValueError("it is a link or no file")
    return parse(file.read_bytes(), folder)


def read(folder: Path) -> Record | None:
    """Return the record in ``folder`` if all its artifacts are there and unchanged, else None."""
    try:
        record = load(folder)
        fault = record and damaged(folder, record)
    except (OSError, ValueError) as error:
        print(f"{folder / RECORD} is damaged ({error}): {folder.name} runs again")
        return None
    if record and fault:
        print(f"{fault} is missing or damaged: {record['verb']} runs again")
        return None
    return record


def damaged(folder: Path, record: Record) -> Path | None:
    """Return the first artifact in ``folder`` that differs from its record, or None.

    Retired artifacts do not count. An artifact that is or has a link is damaged.
    """
    dropped = retired(folder)
    for name, artifact in record["artifacts"].items():
        path = folder / file_name(artifact)
        if name not in dropped and not _is_whole(path, artifact):
            return path
    return None


def _is_whole(path: Path, artifact: Mapping[str, Any]) -> bool:
    try:
        return (
            os.path.lexists(path)
            and not irregular(path)
            and size(path) == artifact["size"]
            and digest(path) == artifact["digest"]
        )
    except OSError:
        return False


def file_name(artifact: Mapping[str, Any]) -> str:
    """Return the name that an artifact of a record has in its folder."""
    return Path(artifact["path"]).name


def retired(folder: Path) -> set[str]:
    """Return the names of the artifacts that were dropped from ``folder``."""
    mark = folder / RETIRED
    if not os.path.lexists(mark) or irregular(mark):
        return set()
    return names_of(mark.read_bytes())


def names_of(mark: bytes) -> set[str]:
    """Return the names in the content of a file RETIRED."""
    return set(mark.decode(errors="replace").split("\n"))


def _artifacts(folder: Path) -> dict[str, dict[str, Any]]:
    """Return name -> file, digest and size of the artifacts in ``folder``."""
    paths = [
        path for path in sorted(folder.iterdir()) if path.name not in MARKS and path.name[0] != "."
    ]
    for path in paths:
        if odd := irregular(path):
            raise ValueError(f"{odd} is a link or no file: artifacts are files and folders")
    names = [path.stem for path in paths]
    unique = len(set(names)) == len(names)
    return {
        path.stem if unique else path.name: {
            "file": path.name,
            "digest": digest(path),
            "size": size(path),
        }
        for path in paths
    }


def _digest(record: Record) -> str:
    text = json.dumps(record, sort_keys=True)
    return blake3(text.encode()).hexdigest(DIGEST_BYTES)


def _depth(value: Any) -> int:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, parts), default=0)
