"""Call a verb as a flow does, without Prefect."""

from dataclasses import fields


def call(verb, inputs, step, **arguments):
    """Return the record of ``verb(step, inputs(...), ...)``; arguments are told apart by name."""
    names = {entry.name for entry in fields(inputs)}
    given = {name: value for name, value in arguments.items() if name in names}
    others = {name: value for name, value in arguments.items() if name not in names}
    return verb.fn(step, inputs(**given), **others)
