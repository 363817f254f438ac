"""Write the values of a recipe into the text of its base, whose comments and layout stay."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from params import strict_yaml
from params.merging import Path, Way, is_dropped, way_of, whole
from params.whole_file import BASE

WORD = re.compile(r"[A-Za-z_][\w-]*")  # a key that needs no quotes anywhere
NUMBER = re.compile(r"[-+.\d][\w.+-]*")  # a scalar that is written the same way everywhere
EMPTY = "{}"
STEP = 2  # columns that a section's keys are further right


@dataclass(frozen=True)
class ParsedText:
    """A YAML text with the values in it."""

    text: str
    values: Any
    node: yaml.Node

    def inner(self, key: str) -> ParsedText:
        """Return the value of a key."""
        assert isinstance(self.node, yaml.MappingNode)
        node = next(value for name, value in self.node.value if name.value == key)
        return ParsedText(self.text, self.values[key], node)


def merged(base: str, own: str, values: Mapping[str, Any]) -> str:
    """Return the text of ``base`` with what ``own`` says in place, which has ``values``.

    Both are sound texts of recipes. The comments before the first key are of neither.
    """
    lower, upper = _parsed(base), _parsed(own)
    text = f"{_mapping(lower, upper, ())}\n"
    if strict_yaml.parse(text, "it") != values:
        raise AssertionError(f"this text has not the merged values:\n{text}")
    return text


def head(text: str) -> str:
    """Return the comments before the first key of a text, without blank lines around them."""
    node = yaml.compose(text, strict_yaml.Loader)
    return text[: node.start_mark.index if node else len(text)].strip()


def _parsed(text: str) -> ParsedText:
    node = yaml.compose(text, strict_yaml.Loader)
    assert node is not None
    return ParsedText(text, strict_yaml.parse(text, "it"), node)


# ---------------------------------------------------------------- block mappings


def _mapping(base: ParsedText, own: ParsedText, above: Path) -> str:
    """Return a mapping of the base with the keys of the other, from its first key to its end."""
    assert isinstance(base.node, yaml.MappingNode)
    if base.node.flow_style:
        return _flow(base, own, above)
    column = base.node.start_mark.column
    text, entries = "", base.node.value
    for number, (key, value) in enumerate(entries):
        last = number + 1 == len(entries)
        end = _line_end(base.text, _end(base.text, key, value))
        gap = "" if last else base.text[end : entries[number + 1][0].start_mark.index]
        if entry := _entry(base, own, key, value, above):
            text += entry + gap
        else:  # the comments behind it are those of the next key
            text = text.rstrip(" ") + gap.removeprefix("\n") if text else gap.lstrip("\n ")
    text = text.rstrip()
    for name in _added(base, own, above):
        block = f"{_key(name)}:{_written(own.inner(name), (*above, name), column, '')}"
        text += f"\n{' ' * column}{block}" if text else block
    return text or EMPTY


def _entry(base: ParsedText, own: ParsedText, key: yaml.Node, value: yaml.Node, above: Path) -> str:
    """Return an entry of the base to the end of its line, with what holds; "" for none."""
    text, name = base.text, key.value
    end = _line_end(text, _end(text, key, value))
    written = text[key.start_mark.index : end]
    if is_dropped(name, base.values[name], own.values, above):
        return ""
    if name not in own.values:
        return written
    path, inner = (*above, name), own.inner(name)
    way = way_of(path, base.values[name], inner.values, True)
    if way is Way.UNSET:
        return ""
    if way is Way.MERGED:
        body = _mapping(base.inner(name), inner, path)
        in_braces = isinstance(value, yaml.CollectionNode) and value.flow_style
        tail = text[_end(text, key, value) : end] if in_braces else ""
        before = text[key.start_mark.index : value.start_mark.index]
        return f"{before if body != EMPTY else f'{written[: len(name)]}: '}{body}{tail}"
    return _exchanged(base, key, value, inner, path)


def _exchanged(
    base: ParsedText, key: yaml.Node, value: yaml.Node, own: ParsedText, path: Path
) -> str:
    """Return an entry with another value.

    The comment on the key's line stays, unless it is that of a section of another kind.
    """
    begin = base.text[key.start_mark.index : key.end_mark.index]
    line = base.text[key.end_mark.index : _line_end(base.text, key.end_mark.index)]
    one_line = "\n" not in base.text[key.end_mark.index : _end(base.text, key, value)]
    if one_line:
        line = line[_end(base.text, key, value) - key.end_mark.index :]
    is_section = isinstance(value, yaml.MappingNode) and not one_line
    comment = "" if is_section or "#" not in line else line[line.index("#") :]
    return f"{begin}:{_written(own, path, key.start_mark.column, comment.strip())}"


def _added(base: ParsedText, own: ParsedText, above: Path) -> list[str]:
    """Return the keys that the base does not have."""
    return [name for name in own.values if name not in base.values and (*above, name) != (BASE,)]


def _written(own: ParsedText, path: Path, column: int, comment: str) -> str:
    """Return what stands behind the colon of a key in ``column``, with a comment of its line."""
    value, node = whole(path, own.values), own.node
    behind = f" {comment}" if comment else ""
    if value != own.values or (not value and isinstance(node, yaml.CollectionNode)):
        return f" {_json(value)}{behind}"
    start, end, deeper = node.start_mark, _end(own.text, None, node), column + STEP
    text = own.text[start.index : end]
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        text = own.text[start.index : _line_end(own.text, end)]
        return f"{behind}\n{' ' * deeper}{_moved(text, start.column, deeper)}"
    if isinstance(node, yaml.ScalarNode) and node.style in ("|", ">"):
        first, _, rest = text.partition("\n")
        lines = rest.lstrip(" ")
        moved = _moved(lines, len(rest) - len(lines), deeper)
        return f" {first}{behind}\n{' ' * deeper}{moved}"
    return f" {(_json(value) if chr(10) in text else text) or 'null'}{behind}"


def _moved(block: str, column: int, to: int) -> str:
    """Return a block, whose first line has no indentation, with the others moved sideways."""
    first, *others = block.split("\n")
    return "\n".join(
        [first, *(f"{' ' * to}{line[column:]}" if line.strip() else "" for line in others)]
    )


# ---------------------------------------------------------------- mappings in braces


def _flow(base: ParsedText, own: ParsedText, above: Path) -> str:
    """Return a mapping in braces with the keys of the other; what does not change stays."""
    assert isinstance(base.node, yaml.MappingNode)
    entries = []
    for key, value in base.node.value:
        name = key.value
        text = base.text[value.start_mark.index : value.end_mark.index]
        if name in own.values:
            path, inner = (*above, name), own.inner(name)
            way = way_of(path, base.values[name], inner.values, True)
            if way is Way.UNSET:
                continue
            merges = way is Way.MERGED
            text = _flow(base.inner(name), inner, path) if merges else _short(inner, path)
        entries.append(f"{_key(name)}: {text or 'null'}")
    entries += [
        f"{_key(name)}: {_short(own.inner(name), (*above, name))}"
        for name in _added(base, own, above)
    ]
    return f"{{{', '.join(entries)}}}"


def _short(own: ParsedText, path: Path) -> str:
    """Return a value as it may stand in braces."""
    node = own.node
    text = own.text[node.start_mark.index : node.end_mark.index]
    is_number = isinstance(node, yaml.ScalarNode) and not node.style and NUMBER.fullmatch(text)
    return text if is_number else _json(whole(path, own.values))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # JSON is YAML, too


def _key(name: str) -> str:
    return name if WORD.fullmatch(name) else _json(name)


# ---------------------------------------------------------------- where things end


def _end(text: str, key: yaml.Node | None, node: yaml.Node) -> int:
    """Return where a value ends, without the blank lines and comments behind it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        above, below = last if isinstance(last, tuple) else (None, last)
        return _end(text, above, below)
    begin, end = node.start_mark.index, node.end_mark.index
    if begin == end and key is not None:  # nothing behind the colon
        return text.index(":", key.end_mark.index) + 1
    return begin + len(text[begin:end].rstrip())


def _line_end(text: str, at: int) -> int:
    """Return where the line of a position ends, its comment included."""
    end = text.find("\n", at)
    return end if end >= 0 else len(text)


# ---------------------------------------------------------------- keys that are left out


def completed(text: str, left_out: Mapping[str, Any]) -> str:
    """Return a text with the keys that it leaves out: sections in lines, others in a comment."""
    if not left_out:
        return text
    lines = [
        f"{'# ' if '.' in key else ''}{key}: {_json(value)}" for key, value in left_out.items()
    ]
    lines.sort(key=lambda line: line.startswith("#"))
    return "\n".join([text.rstrip("\n"), "", "# left out, so these hold:", *lines, ""])
