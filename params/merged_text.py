"""Write the values of a recipe into the text of its base, whose comments and layout stay.

A comment behind a value of the recipe takes the place of the base's; one on a line of its own is
for readers of the recipe's file alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from params import strict_yaml
from params.merging import NAMED, Path, Way, is_dropped, way_of, whole
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
    comment: str = ""  # on the line of its key

    def inner(self, key: str) -> ParsedText:
        """Return the value of a key."""
        assert isinstance(self.node, yaml.MappingNode)
        name, node = next(entry for entry in self.node.value if entry[0].value == key)
        comment = _comment(self.text, name, node)
        return ParsedText(self.text, self.values[key], node, comment)


def merged(base: str, own: str, values: Mapping[str, Any], where: str) -> str:
    """Return the text of ``base`` with what ``own`` says in place, which has ``values``.

    Both are sound texts of recipes. The comments before the first key are of neither.

    Raises ValueError for what cannot be put there; ``where`` is the file of ``own`` in its message.
    """
    lower, upper = _parsed(base), _parsed(own)
    text = f"{_mapping(lower, upper, ())}\n"
    if not _says(text, values):
        raise ValueError(
            f"{where} cannot be written into the text of its base: write its sections with their "
            "keys in lines, its texts in double quotes, and no .nan"
        )
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
        inner = own.inner(name)
        block = f"{_key(name)}:{_written(inner, (*above, name), column, inner.comment)}"
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
        return _section(base.inner(name), inner, key, path)
    return _exchanged(base.inner(name), key, inner, path)


def _section(base: ParsedText, own: ParsedText, key: yaml.Node, path: Path) -> str:
    """Return an entry that is a mapping in both."""
    text, node, body = base.text, base.node, _mapping(base, own, path)
    assert isinstance(node, yaml.MappingNode)
    begin = text[key.start_mark.index : node.start_mark.index]
    comment = own.comment or base.comment
    if node.flow_style or body == EMPTY:
        begin = f"{text[key.start_mark.index : key.end_mark.index]}: "
        return f"{begin}{body}{f' {comment}' if comment else ''}"
    if own.comment:
        first, _, rest = begin.partition("\n")
        begin = f"{first.removesuffix(base.comment).rstrip()} {comment}\n{rest}"
    return f"{begin}{body}"


def _exchanged(base: ParsedText, key: yaml.Node, own: ParsedText, path: Path) -> str:
    """Return an entry with another value.

    The comment on the key's line stays, unless the recipe has one there, or it is that of a section
    of another kind.
    """
    begin = base.text[key.start_mark.index : key.end_mark.index]
    many_lines = "\n" in base.text[key.end_mark.index : _end(base.text, key, base.node)]
    is_section = isinstance(base.node, yaml.MappingNode) and many_lines
    stays = not is_section or (len(path) == 1 and path[0] in NAMED)
    comment = own.comment or (base.comment if stays else "")
    return f"{begin}:{_written(own, path, key.start_mark.column, comment)}"


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
        block = f"{' ' * deeper}{_moved(text, start.column, deeper)}"
        return f"{behind}\n{block if _stays(chr(10) + block, value) else _dumped(value, deeper)}"
    if isinstance(node, yaml.ScalarNode) and node.style in ("|", ">"):
        first, _, rest = text.partition("\n")
        lines = rest.lstrip(" ")
        moved = _moved(lines, len(rest) - len(lines), deeper)
        style, block = first.partition("#")[0].rstrip(), f"{' ' * deeper}{moved}"
        if "+" not in style and _stays(f"{style}\n{block}", value):
            return f" {style}{behind}\n{block}"
    return f" {(_json(value) if chr(10) in text else text) or 'null'}{behind}"


def _says(text: str, values: Any) -> bool:
    """Return whether a text has these values."""
    try:
        return bool(strict_yaml.parse(text, "it") == values)
    except ValueError:
        return False


def _stays(block: str, value: Any) -> bool:
    """Return whether what is behind a colon has this value also where other keys follow.

    A moved block does not if a comment or a line of a text stood left of it, or if a text ends with
    blank lines.
    """
    return _says(f"it: {block}\nnext: 0", {"it": value, "next": 0})


def _dumped(value: Any, column: int) -> str:
    """Return a section or a list as a block whose entries stand in lines, without comments."""
    if isinstance(value, Mapping):
        entries = [f"{_key(name)}: {_json(inner)}" for name, inner in value.items()]
    else:
        entries = [f"- {_json(inner)}" for inner in value]
    return "\n".join(f"{' ' * column}{entry}" for entry in entries)


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
        if is_dropped(name, base.values[name], own.values, above):
            continue
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


def _comment(text: str, key: yaml.Node, node: yaml.Node) -> str:
    """Return the comment on the line of a key; "" for none."""
    if isinstance(node, yaml.ScalarNode) and node.style in ("|", ">"):
        begin = node.start_mark.index + 1  # behind it may be a sign, and a width
    elif isinstance(node, yaml.CollectionNode) and not node.flow_style:
        begin = text.index(":", key.end_mark.index) + 1
    else:
        begin = _end(text, key, node)
    rest = text[begin : _line_end(text, begin)].lstrip(" \t+-0123456789").rstrip()
    return rest if rest.startswith("#") else ""


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
