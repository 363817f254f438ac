"""The base class of the settings of your files, and the types of their numbers."""

from params.schema.base import (
    Flag,
    Float,
    Frozen,
    Integer,
    NonNegative,
    Positive,
    PositiveFloat,
    Probability,
)

__all__ = [
    "Flag",
    "Float",
    "Frozen",
    "Integer",
    "NonNegative",
    "Positive",
    "PositiveFloat",
    "Probability",
]
