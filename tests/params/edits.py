"""Parsed YAML with other values, for tests of what reads it."""

import copy

REMOVED = object()


def edited(values, changes):
    """Return a copy with other values, as ``section__key=value``; ``REMOVED`` deletes a key."""
    values = copy.deepcopy(values)
    for path, value in changes.items():
        *sections, key = path.split("__")
        place = values
        for section in sections:
            place = place[section]
        if value is REMOVED:
            del place[key]
        else:
            place[key] = value
    return values
