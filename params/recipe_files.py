"""The files of recipes: what a recipe and its base say together, and the whole file of it.

``params/<recipe>.yaml`` says what a user wrote. With ``base:`` it says only what differs from
another recipe; ``params/resolved/<recipe>.yaml`` then has all of it, with the comments of the base.
That file is generated and belongs into commits: DVC, and whoever reads an old run, takes the values
from there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from params import merged_text, strict_yaml, suggestions
from params.merging import merge
from params.schema.base import PARAMS, SOURCES
from params.schema.defaults import ENTRY, defaults
from params.schema.recipe import TABLES, older_form
from params.whole_file import BASE, RESOLVED, says_base, whole_file

MISSING = object()  # there is no such key
LONGEST = 100  # characters of a name
MOST_BASES = 3  # one above the other
GENERATED = "# Generated from {} by `python -m flows.recipe {} --write`: edit these instead."


@dataclass(frozen=True)
class RecipeFile:
    """A recipe as its own file says it."""

    name: str
    file: Path
    text: str
    values: dict[str, Any]


@dataclass(frozen=True)
class ChangedKey:
    """A value that differs from the base's."""

    key: str  # "reinforce.iterations"
    value: Any  # MISSING where the key is gone
    before: Any  # in the last base; MISSING where it is new
    file: Path  # that says so


@dataclass(frozen=True)
class Resolved:
    """A recipe with its bases."""

    chain: tuple[RecipeFile, ...]  # the recipe, its base, that one's base

    @property
    def values(self) -> dict[str, Any]:
        """What the files say together; keys with a default may be missing."""
        return self.levels()[-1]

    @property
    def has_base(self) -> bool:
        return len(self.chain) > 1

    def text(self) -> str:
        """Return the whole recipe as a file, with the comments of its bases.

        Raises ValueError, with file and remedy, for what cannot be put into the text of a base.
        """
        if not self.has_base:
            return self.chain[0].text
        text = self.chain[-1].text
        for written, values in zip(reversed(self.chain[:-1]), self.levels()[1:], strict=True):
            text = merged_text.merged(text, written.text, values, str(written.file))
        text = merged_text.completed(text, _left_out(self.values))
        files = " and ".join(written.file.name for written in self.chain)
        heads = [GENERATED.format(files, self.chain[0].name)]
        own, *bases = [
            (written.file.name, merged_text.head(written.text)) for written in self.chain
        ]
        heads += [own[1], *(f"# {file} says of itself:\n{head}" for file, head in bases if head)]
        return "\n#\n".join(filter(None, heads)) + f"\n\n{text}"

    def levels(self) -> list[dict[str, Any]]:
        """Return what holds with each file of the chain, the last base first."""
        levels = [self.chain[-1].values]
        for written in reversed(self.chain[:-1]):
            levels.append(merge(levels[-1], written.values))
        return levels

    def origin(self, path: Sequence[str]) -> Path:
        """Return the file that says what a key is, or has its section."""
        values = [_at(level, path) for level in self.levels()]
        files = [written.file for written in reversed(self.chain)]
        changed = [i for i in range(1, len(values)) if values[i] != values[i - 1]]
        is_nowhere = values[-1] is MISSING and not changed  # so the recipe itself lacks it
        return files[-1] if is_nowhere else files[max(changed, default=0)]

    def changes(self) -> Iterator[str]:
        """Yield a line for each value that differs from the base's, with the file that says it."""
        if not self.has_base:
            yield f"{self.chain[0].file} has no base: it is the whole recipe"
            return
        yield "# " + " <- ".join(written.file.as_posix() for written in reversed(self.chain))
        differences = self.differences()
        for each in differences:
            yield f"{each.key}: {shown(each.value)}  # {each.file}; was {shown(each.before)}"
        if not differences:
            yield "nothing differs"

    def differences(self) -> list[ChangedKey]:
        """Return what differs from the last base, in the order of the whole file."""
        return [
            ChangedKey(".".join(path), now, before, self.origin(path))
            for path, before, now in _differences(self.chain[-1].values, self.values, ())
        ]


def shown(value: Any) -> str:
    """Return a value as one line."""
    return "nothing" if value is MISSING else json.dumps(value, ensure_ascii=False)


def names(folder: Path = PARAMS) -> list[str]:
    """Return the names of the recipes in ``folder``, sorted."""
    return sorted(p.stem for p in folder.glob("*.yaml") if p.stem not in TABLES)


def read(name: str, folder: Path = PARAMS) -> dict[str, Any]:
    """Return the values that a recipe and its bases say together. Raises as ``resolve``."""
    return resolve(name, folder).values


def resolve(name: str, folder: Path = PARAMS) -> Resolved:
    """Read a recipe with its bases.

    Raises ValueError with file, reason and remedy: for an unknown recipe or base, bases in a circle
    or too many of them, invalid YAML, and an older form.
    """
    return Resolved(_chain(name, folder))


def _chain(name: str, folder: Path) -> tuple[RecipeFile, ...]:
    chain = [_written(name, folder)]
    while BASE in chain[-1].values:
        last, base = chain[-1], chain[-1].values[BASE]
        if not isinstance(base, str):
            raise ValueError(f"{last.file}: 'base' = {base!r}: write the name of a recipe")
        known = [written.name for written in chain]
        shown = " -> ".join([*known, base])
        if base in known:
            raise ValueError(f"{last.file}: 'base' = {base!r} leads in a circle ({shown})")
        if len(chain) > MOST_BASES:
            raise ValueError(
                f"{last.file}: 'base' = {base!r}: more than {MOST_BASES} bases one above the other "
                f"({shown}): write one of them whole (python -m flows.recipe {base} prints it)"
            )
        if base not in names(folder):
            raise ValueError(
                f"{last.file}: 'base' = {base!r} is no recipe"
                f"{suggestions.meant(base, names(folder))}: recipes here: {names(folder)}"
            )
        chain.append(_written(base, folder))
    return tuple(chain)


def check_name(name: str, folder: Path) -> None:
    """Raise ValueError for a name that is no recipe's: it would get into params.yaml and paths."""
    if name in TABLES:
        raise ValueError(f"{folder / name}.yaml is no recipe but a table; recipes: {names(folder)}")
    if Path(name).name != name or not name.isprintable() or len(name) > LONGEST:
        raise ValueError(
            f"{name[:LONGEST]!r} is no name of a recipe: write the name alone, as 'mine' for "
            f"{folder}/mine.yaml, with at most {LONGEST} characters"
        )
    if name == SOURCES.name:
        raise ValueError(
            f"a recipe can't be called '{name}': its outputs would be written to {SOURCES}/, where "
            "your own files are; rename the recipe"
        )


def _written(name: str, folder: Path) -> RecipeFile:
    check_name(name, folder)
    file = folder / f"{name}.yaml"
    if not file.exists():
        raise ValueError(
            f"no recipe '{name}': {file} does not exist{suggestions.meant(name, names(folder))}; "
            f"recipes here: {names(folder)}"
        )
    text = strict_yaml.read_text(file).replace("\r\n", "\n")
    values = strict_yaml.parse(text, str(file))
    if not isinstance(values, dict):
        raise ValueError(f"{file} is no recipe: write its sections as keys, as in {TABLES[0]}.yaml")
    if changes := older_form(values):
        lines = "\n".join(f"{file}: {change}" for change in changes)
        raise ValueError(f"{file} has an older form; change it as follows:\n{lines}")
    if BASE in values and not says_base(file):  # who asks before anything is installed looks there
        raise ValueError(f"{file}: write 'base: {values[BASE]}' at the beginning of a line")
    return RecipeFile(name, file, text, values)


def _left_out(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that a recipe leaves out, with their defaults.

    Keys of sections that it does not have are not among them.
    """
    every = {key: (key.split("."), value) for key, value in defaults().items() if ENTRY not in key}
    return {
        key: value
        for key, (path, value) in every.items()
        if _at(values, path) is MISSING and isinstance(_at(values, path[:-1]), Mapping)
    }


def _at(values: Any, path: Sequence[str]) -> Any:
    """Return the value at a path; MISSING where there is none."""
    for part in path:
        if not isinstance(values, Mapping) or part not in values:
            return MISSING
        values = values[part]
    return values


def _differences(
    before: Any, now: Any, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Yield path, value before and value now of what differs; of a section that is gone, all."""
    if isinstance(before, Mapping) and before and isinstance(now, Mapping) and now:
        for key in {**now, **before}:
            values = before.get(key, MISSING), now.get(key, MISSING)
            yield from _differences(*values, (*path, key))
    elif before != now:
        default = defaults().get(".".join(path), MISSING)
        yield path, before, default if now is MISSING else now


# ---------------------------------------------------------------- the whole file


def is_stale(name: str, folder: Path = PARAMS) -> bool:
    """Return whether the whole file says something else than the recipe and its bases."""
    whole = whole_file(name, folder)
    if whole.parent == folder:
        return (folder / RESOLVED / f"{name}.yaml").exists()
    return not whole.exists() or whole.read_text() != resolve(name, folder).text()


def refresh(name: str, folder: Path = PARAMS) -> bool:
    """Write the whole file anew where it is stale; return whether it was.

    Raises ValueError as ``resolve``; the file then stays as it was.
    """
    if not is_stale(name, folder):
        return False
    whole = folder / RESOLVED / f"{name}.yaml"
    if whole_file(name, folder) != whole:
        whole.unlink()
        return True
    whole.parent.mkdir(exist_ok=True)
    partial = whole.with_name(f".{whole.name}.{os.getpid()}.partial")
    partial.write_text(resolve(name, folder).text(), encoding="utf-8", newline="")
    partial.replace(whole)
    return True


def refresh_all(folder: Path = PARAMS) -> None:
    """Write the whole files of all recipes anew; those of unsound recipes stay as they were."""
    for name in names(folder):
        with suppress(ValueError, OSError):  # as of a folder that is called mine.yaml
            refresh(name, folder)


def differs(name: str, folder: Path = PARAMS) -> bool:
    """Return whether the whole file has other values than the recipe and its bases."""
    whole = whole_file(name, folder)
    if whole.parent == folder:
        return False
    now = strict_yaml.parse(resolve(name, folder).text(), str(whole))
    return not whole.exists() or strict_yaml.read(whole) != now
