"""Read DVC's settings, and say what is wrong in them: the file, the key, the value and the remedy.

DVC itself names neither the file nor, mostly, the value.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.host.addresses import without_password

# how DVC's schema begins to say what is wrong -> what it means
MEANINGS = {
    "Unsupported URL type": "which is no kind of store that DVC knows",
    "extra keys": "which is no setting of DVC",
    "expected a dictionary": "where a section of settings belongs",
}
NO_URL = "expected 'url'"  # DVC's words for a remote without one


def load(folder: Path = Path(".dvc")) -> Any:
    """Return DVC's settings of a checkout, merged from all of its files, as DVC's ``Config``.

    Raises ValueError with everything that is wrong in them.
    """
    from dvc.config import Config, ConfigError

    try:
        return Config(str(folder) if folder.is_dir() else None)
    except (ConfigError, OSError) as error:
        reason = without_password(_one_line(error))
        raise ValueError("\n".join(faults(folder)) or f"DVC's settings: {reason}") from None


def faults(folder: Path) -> list[str]:
    """Return what is wrong in DVC's settings of a checkout, a line a fault."""
    from dvc.config import Config, ConfigError, get_compiled_schema, merge
    from voluptuous import MultipleInvalid

    read, lines = {}, []
    for file in _files(folder):
        try:
            read[file] = Config.load_file(str(file))
        except FileNotFoundError:
            continue
        except (ConfigError, OSError) as error:
            reason = without_password(_one_line(error)).removeprefix("config file error: ")
            lines.append(f"{file} cannot be read as settings of DVC ({reason}): correct the file")
    merged: dict[str, Any] = {str(key): {} for key in get_compiled_schema().schema}
    for settings in read.values():
        merge(merged, settings)
    try:
        get_compiled_schema()(merged)
    except MultipleInvalid as invalid:
        lines += [_explained(error.path, error.msg, read) for error in invalid.errors]
    return lines


def unknown_default(folder: Path = Path(".dvc")) -> str:
    """Return what is wrong with a default remote that names no remote; "" where it names one."""
    settings = load(folder)
    name = settings["core"].get("remote")
    if not name or name in settings["remote"]:
        return ""
    file = next((file for file in reversed([*_files(folder)]) if _names(file, name)), folder)
    known = ", ".join(settings["remote"]) or "there is none"
    return (
        f"{file}: core.remote = '{name}', which is the name of no remote ({known}): correct it, or "
        f"add that remote (dvc remote add --local {name} ADDRESS)"
    )


def _names(file: Path, remote: str) -> bool:
    from dvc.config import Config

    return file.is_file() and _value(Config.load_file(str(file)), ["core", "remote"]) == remote


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of settings that DVC reads; later ones override earlier ones."""
    from dvc.config import Config

    for level in Config.SYSTEM_LEVELS:
        yield Path(Config.get_dir(level), Config.CONFIG)
    yield folder / Config.CONFIG
    yield folder / Config.CONFIG_LOCAL


def _explained(given: Sequence[Hashable], reason: str, read: Mapping[Path, Any]) -> str:
    """Return a line on a setting that DVC refuses; ``read`` has the content of each file."""
    path = [*map(str, given), *(["url"] if reason.startswith("Unsupported URL") else [])]
    having = [file for file, settings in read.items() if _value(settings, path) is not None]
    file, key = having[-1] if having else "DVC's settings", ".".join(path)
    if reason == NO_URL:
        return f"{file}: {key} has no url: add it (dvc remote modify {path[-1]} url ADDRESS)"
    value = _value(read[having[-1]], path) if having else ""
    setting = key if isinstance(value, Mapping) else without_password(f"{key} = '{value}'")
    meaning = next(
        (meaning for start, meaning in MEANINGS.items() if reason.startswith(start)),
        f"which DVC does not take ({reason})",
    )
    return f"{file}: {setting}, {meaning}: correct it, or remove that line"


def _value(settings: Any, path: Sequence[str]) -> Any:
    """Return the value at a path of keys, or None."""
    for key in path:
        settings = settings.get(key) if isinstance(settings, Mapping) else None
    return settings


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
