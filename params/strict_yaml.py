"""Read the YAML that people write: decimal numbers, each key once, no references.

YAML 1.1, which PyYAML reads by default, takes 1:30 for 90, 010 for 8, and no and on for booleans.
Here these are texts, as are 0x1F and 1_000; the schema refuses them where a number or a boolean
belongs. A key that is
written twice, an alias (``*name``) or a tag (``!!name``) is refused: the first hides a value, and a
few lines of aliases can stand for billions of values.
"""

from __future__ import annotations

import functools
import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

LARGEST = 2**17  # bytes of a file
DEEPEST = 32  # mappings and lists inside one another
DAY = re.compile(r"\d{4}-\d\d-\d\d|\d{4}-\d\d?-\d\d?(?:[Tt]|[ \t]+)\d\d?:.*")  # no text to DVC
# halves of characters, what Unicode keeps free for programs, and controls but for tab and line ends
NO_CHARACTER = re.compile("[\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
SIGNS = ("=", "<<")  # of no text to DVC, either, which then cannot read the file
SHOWN = 60  # characters of a value in a message


class Loader(yaml.SafeLoader):
    """PyYAML's loader with null, booleans and decimal numbers of YAML 1.2; the rest are texts."""


Loader.yaml_implicit_resolvers = {}
DIGITS = "-+0123456789"
for tag, first, pattern in (
    ("null", ["~", "n", "N", ""], r"~|null|Null|NULL|"),
    ("bool", list("tTfF"), r"true|True|TRUE|false|False|FALSE"),
    ("int", list(DIGITS), r"[-+]?(?:0|[1-9][0-9]*)"),
    (
        "float",
        list(f"{DIGITS}."),
        r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)\.[0-9]*|(?:0|[1-9][0-9]*)(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    ),
):
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(rf"(?:{pattern})$"), first)


def read(file: Path) -> Any:
    """Parse a YAML file. Raises ValueError with all faults, each with file, line and remedy."""
    return parse(read_text(file), str(file))


def read_text(file: Path) -> str:
    """Return the text of a YAML file. Raises ValueError for one that is too large or not UTF-8."""
    check_regular(file)
    if (size := file.stat().st_size) > LARGEST:
        raise ValueError(f"{file} has {size:,} bytes: a file of parameters has at most {LARGEST:,}")
    with file.open("rb") as binary:
        content = binary.read(LARGEST)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        wrong = f"byte 0x{content[error.start]:02x} in line {line}"
        raise ValueError(f"{file} is not UTF-8 ({wrong}): save it as UTF-8") from None


def check_regular(file: Path) -> None:
    """Raise ValueError for what is no regular file, such as a pipe, which would never end.

    Nor is a file that the kernel makes while it is read, such as /proc/kmsg, which has no size.
    """
    if not file.is_file() or (not file.stat().st_size and _has_content(file)):
        raise ValueError(f"{file} is no regular file: put one there")


def _has_content(file: Path) -> bool:
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return bool(os.read(descriptor, 1))
    except OSError:  # nothing yet: it waits for more
        return True
    finally:
        os.close(descriptor)


def parse(text: str, where: str) -> Any:
    """Return the values of a YAML text; ``where`` names it in errors.

    Raises ValueError with all faults, one line each.
    """
    try:
        values, faults = _parsed(text)
        if not faults:
            return deepcopy(values)
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not valid YAML: {error}") from None
    except ValueError as error:  # a number of thousands of digits
        faults = (f": a value cannot be read ({error}): correct it",)
    raise ValueError("\n".join(f"{where}{fault}" for fault in faults))


@functools.cache  # a run reads the same few files again and again
def _parsed(text: str) -> tuple[Any, tuple[str, ...]]:
    """Return the values of a YAML text, and its faults; no values where there are faults."""
    events = list(_events(text))
    if faults := [*_references(events), *_colons(events), *_days(events), *_signs(events)]:
        return None, tuple(faults)
    loader = OfEvents(events)
    node = loader.get_single_node()
    faults = [*_doubtful_keys(node, "")] if node else []
    values = loader.construct_document(node) if node and not faults else None
    return values, tuple(faults)


def _events(text: str) -> Iterator[yaml.Event]:
    """Yield the parts of a YAML text, up to one that is nested too deep.

    PyYAML's time grows with the square of the depth.
    """
    depth = 0
    for event in yaml.parse(text, Loader):
        yield event
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            return


class OfEvents(Loader):
    """A loader of what has been parsed already."""

    def __init__(self, events: Sequence[yaml.Event]) -> None:
        super().__init__("")
        self.left = deque(events)

    def check_event(self, *choices: Any) -> bool:
        return bool(self.left) and (not choices or isinstance(self.left[0], choices))

    def peek_event(self) -> yaml.Event | None:
        return self.left[0] if self.left else None

    def get_event(self) -> yaml.Event | None:
        return self.left.popleft() if self.left else None


def _references(events: Sequence[yaml.Event]) -> Iterator[str]:
    """Yield a fault for each alias and tag, and for nesting that is too deep."""
    depth = 0
    known = set()
    for event in events:
        line = f", line {event.start_mark.line + 1 if event.start_mark else '?'}"
        if isinstance(event, yaml.AliasEvent) and event.anchor not in known:
            known.add(event.anchor)
            yield f"{line}: the alias '*{event.anchor}' stands for other values: write them out"
        elif tag := getattr(event, "tag", None):
            yield f"{line}: the tag '{tag}' is not read: remove it; quotes make a text"
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > DEEPEST:
            yield f"{line}: more than {DEEPEST} lists and mappings inside one another: remove some"
            return


def _colons(events: Sequence[yaml.Event]) -> Iterator[str]:
    """Yield a fault for each unquoted text with a colon inside brackets, which DVC cannot read."""
    brackets = []  # of each list and mapping around an event: whether it is written in brackets
    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            brackets.append(event.flow_style)
        elif isinstance(event, yaml.CollectionEndEvent):
            brackets.pop()
        elif isinstance(event, yaml.ScalarEvent) and any(brackets) and _has_colon(event):
            line = event.start_mark.line + 1 if event.start_mark else "?"
            yield f", line {line}: {event.value} stands in brackets: write it in quotes"


def _days(events: Sequence[yaml.Event]) -> Iterator[str]:
    """Yield a fault for each unquoted day or sign, which DVC cannot write, or read."""
    for event in events:
        if not isinstance(event, yaml.ScalarEvent) or event.style:
            continue
        is_day = DAY.fullmatch(event.value)
        if is_day or event.value in SIGNS:
            line = event.start_mark.line + 1 if event.start_mark else "?"
            kind = "a date" if is_day else "a sign"
            yield f", line {line}: {event.value} is {kind} to DVC: write it in quotes"


def _signs(events: Sequence[yaml.Event]) -> Iterator[str]:
    """Yield a fault for each text with what is no character, which no tokenizer or prompt takes."""
    for event in events:
        if isinstance(event, yaml.ScalarEvent) and (found := NO_CHARACTER.search(event.value)):
            line = event.start_mark.line + 1 if event.start_mark else "?"
            shown = repr(event.value[:SHOWN])
            sign = f"U+{ord(found[0]):04X}"
            yield f", line {line}: {shown} has {sign}, which is no character of a text: remove it"


def _has_colon(event: yaml.ScalarEvent) -> bool:
    return not event.style and ":" in event.value


def _doubtful_keys(node: yaml.Node, above: str) -> Iterator[str]:
    """Yield a fault for each key that is no text, or is written twice in its mapping."""
    if isinstance(node, yaml.SequenceNode):
        for number, entry in enumerate(node.value):
            yield from _doubtful_keys(entry, f"{above}{number}.")
    if not isinstance(node, yaml.MappingNode):
        return
    first: dict[str, tuple[int, yaml.Node]] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.tag != "tag:yaml.org,2002:str":
            written = key.value if isinstance(key, yaml.ScalarNode) else "a list or a mapping"
            mapping = above.removesuffix(".") or "the file"
            yield f", line {line}: the key {written} of {mapping} is not a text: write it in quotes"
            continue
        path = f"{above}{key.value}"
        if key.value in first:
            before, other = first[key.value]
            values = f"{_shown(other)} in line {before}, {_shown(value)} here"
            yield f", line {line}: the key '{path}' is written twice ({values}): keep one"
        first.setdefault(key.value, (line, value))
        yield from _doubtful_keys(value, f"{path}.")


def _shown(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        return "a section" if isinstance(node, yaml.MappingNode) else "a list"
    return repr(node.value[:SHOWN])
