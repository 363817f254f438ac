"""Where the first policy of a recipe comes from: its model on the hub, and that model's licence.

Only what somebody has said is shown: the recipe (``prepare.policy``), the metadata of a GGUF file,
or the card beside the weights. Nothing is taken from a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, try_to_load_from_cache

HUB = "https://huggingface.co"
CARD = "README.md"  # beside weights, on the hub, too
LICENSE = "general.license"  # a key of a GGUF file, with an identifier of the hub


@dataclass(frozen=True)
class PolicyOrigin:
    """What is known of the first policy; None where nobody says it."""

    described: str  # Markdown, behind "from"
    base_model: str | None = None  # its name on the hub
    revision: str | None = None  # its commit there
    license: str | None = None  # an identifier of the hub
    stated_in: str = ""  # where the licence is stated


def origin_of(policy: Mapping[str, Any]) -> PolicyOrigin:
    """Return what is known of a recipe's section ``prepare.policy``."""
    if policy["kind"] != "pretrained":
        return PolicyOrigin("random weights")
    if gguf := policy.get("gguf"):
        return _of_gguf(policy, gguf)
    if policy["revision"] is not None:
        name, revision = policy["name"], policy["revision"]
        file = try_to_load_from_cache(name, CARD, revision=revision)
        license, stated_in = _of_card(file if isinstance(file, str) else None, "of its card")
        return PolicyOrigin(f"{_linked(name)} at `{revision}`", name, revision, license, stated_in)
    known = policy.get("origin")
    license, stated_in = _of_card(Path(policy["name"], CARD), f"of its folder's {CARD}")
    folder = f"`{policy['name']}`, a folder"
    return PolicyOrigin(_with(known, folder), known, None, license, stated_in)


def _of_gguf(policy: Mapping[str, Any], file: str) -> PolicyOrigin:
    """Return what is known of a GGUF file, on the hub or in a folder or package of this machine."""
    name, revision = policy["name"], policy["revision"]
    known = policy.get("origin")
    at = f" at `{revision}`" if revision else ""
    place = _linked(name) if "/" in name and revision else f"`{name}`"
    license = _license_in(_path_of(name, file, revision))
    stated_in = f"`{LICENSE}` of the file" if license else ""
    return PolicyOrigin(_with(known, f"`{file}` of {place}{at}"), known, None, license, stated_in)


def _with(known: str | None, held: str) -> str:
    return f"{_linked(known)}, as {held}" if known else held


def _linked(name: str) -> str:
    return f"[{name}]({HUB}/{name})"


def _path_of(name: str, file: str, revision: str | None) -> Path | None:
    """Return where a GGUF file is on this machine, or None."""
    from tasks.policy.gguf_file import source_of  # with torch

    here = Path(source_of(name), file)
    if here.is_file():
        return here
    cached = try_to_load_from_cache(name, file, revision=revision) if "/" in name else None
    return Path(cached) if isinstance(cached, str) else None


def _license_in(file: Path | None) -> str | None:
    """Return the licence that the metadata of a GGUF file state, or None."""
    if file is None:
        return None
    from gguf import GGUFReader

    field = GGUFReader(file).fields.get(LICENSE)
    return str(field.contents()) if field else None


def _of_card(file: Path | str | None, where: str) -> tuple[str | None, str]:
    """Return the licence that a model's card states, and where; None where it states none."""
    if file is None or not Path(file).is_file():
        return None, ""
    try:
        license = ModelCard.load(file, ignore_metadata_errors=True).data.get("license")
    except Exception as error:  # of a header that is no YAML, or a text that is no UTF-8
        print(f"{file}: its header cannot be read ({type(error).__name__}), so no licence is known")
        return None, ""
    several = license if isinstance(license, list) else [license]
    told = [each for each in several if isinstance(each, str) and each.strip()]
    return (", ".join(told), f"`license` {where}") if told else (None, "")
