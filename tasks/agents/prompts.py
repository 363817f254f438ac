"""Prompts are files: ``<name>.txt`` in a folder, with placeholders such as ``$question``.

They are ``string.Template``: a dollar sign that is none of a placeholder is written ``$$``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Template

FOLDER = Path("params/prompts/agents")
ACTS = "acts"  # the prompt that describes a world's acts


def load(placeholders_of: Mapping[str, Iterable[str]], folder: Path = FOLDER) -> dict[str, str]:
    """Read the prompts that are wanted: name -> text.

    ``placeholders_of``: name -> placeholders. Raises ValueError with all faults, one line each: a
    file that is missing or empty, a placeholder that is missing, unknown or half-written.
    """
    faults = [
        line
        for name, given in placeholders_of.items()
        for line in _faults(folder, name, set(given))
    ]
    if faults:
        raise ValueError("\n".join(faults))
    return {
        name: _file(folder, name).read_text(encoding="utf-8").strip() for name in placeholders_of
    }


def load_acts(environments: Iterable[str], folder: Path = FOLDER) -> dict[str, str]:
    """Return what agents are told of the acts of a world whose acts are free text.

    It is the file ``acts_<environment>.txt``; without one, the tool's own description has to do.
    Raises ValueError as ``load``.
    """
    names = [f"acts_{name}" for name in environments if _file(folder, f"acts_{name}").is_file()]
    texts = load(dict.fromkeys(names, ()), folder).values()
    return dict(zip([ACTS], texts, strict=False))


def fill(prompt: str, **values: str) -> str:
    """Return a prompt with its placeholders filled; what a value quotes of them stays text."""
    return Template(prompt).substitute(values)


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.txt"


def _faults(folder: Path, name: str, placeholders: set[str]) -> list[str]:
    file = _file(folder, name)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return [f"{file} cannot be read ({error}): write the prompt there, in UTF-8"]
    if not text.strip():
        return [f"{file} is empty: write the prompt"]
    template = Template(text)
    identifiers = set(template.get_identifiers())
    faults = [f"{file}: ${name} is missing: add it" for name in sorted(placeholders - identifiers)]
    known = ", ".join(f"${name}" for name in sorted(placeholders)) or "none"
    faults += [
        f"{file}: ${name} is unknown: use {known}, or write a dollar sign as $$"
        for name in sorted(identifiers - placeholders)
    ]
    if not template.is_valid():
        faults.append(f"{file}: a $ begins no placeholder: write a dollar sign as $$")
    return faults
