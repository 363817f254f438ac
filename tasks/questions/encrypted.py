"""Decrypt records of sets that are published encrypted, which keeps them out of training data.

``xor_canary``: a text is encrypted by XOR of its UTF-8 bytes with those of the record's field
``canary``, repeated, and then written in base64 (xbench-DeepSearch, arXiv 2506.13651; its card on
the hub refers to xbench_evals.py of github.com/xbench-ai/xbench-evals).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Collection, Mapping
from itertools import cycle

from tasks.questions.faults import Fault, Place, RecordError
from tasks.questions.fields import Record, text

CANARY = "canary"  # the field of the key
REMEDY = "fetch the file anew, or set decode to null in the set's row if its texts are plain"


def decrypted(record: Record, how: str, fields: Collection[str], location: Place) -> Record:
    """Return the record with the plain texts of ``fields``, which are dotted paths.

    Raises RecordError for a field, or a key, that is missing or cannot be decrypted.
    """
    read = DECODERS[how]
    plain = {field: read(record, field, location) for field in fields}
    return {**record, **plain}  # a key that equals the whole path goes before its parts


def _xor_canary(record: Record, field: str, location: Place) -> str:
    key = text(record, CANARY, location).encode()
    written = text(record, field, location)
    try:
        encrypted = base64.b64decode(written, validate=True)
        return bytes(a ^ b for a, b in zip(encrypted, cycle(key), strict=False)).decode()
    except (binascii.Error, ValueError) as error:
        detail = f" ({error})"
        raise RecordError(Fault(location, "cannot be decrypted", REMEDY, field, detail)) from None


DECODERS: Mapping[str, Callable[[Record, str, Place], str]] = {"xor_canary": _xor_canary}
DECODER_FIELDS: Mapping[str, tuple[str, ...]] = {"xor_canary": (CANARY,)}  # that they read besides
