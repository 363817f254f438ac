"""Call a verb with its inputs by name."""

from dataclasses import fields


def call(verb, inputs, step, **arguments):
    """Return the record of ``verb(step, inputs(...), ...)``; arguments are told apart by name."""
    names = {entry.name for entry in fields(inputs)}
    given = {name: value for name, value in arguments.items() if name in names}
    others = {name: value for name, value in arguments.items() if name not in names}
    return verb(step, inputs(**given), **others)
