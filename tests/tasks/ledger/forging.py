"""Records as somebody else might write them: changed, with a digest that is right."""

import json

from blake3 import blake3

from tasks.ledger.artifacts import RECORD


def forge(place, change):
    """Change the record of a folder by ``change(record)``, and give it the digest that it needs."""
    record = json.loads((place / RECORD).read_text())
    record.pop("digest")
    change(record)
    text = json.dumps(record, sort_keys=True)
    record["digest"] = blake3(text.encode()).hexdigest(16)
    (place / RECORD).unlink()
    (place / RECORD).write_text(json.dumps(record))


def put(entry, value):
    """Return a change that sets an entry, given by its path ("artifacts", "table", "file")."""

    def change(record):
        *parents, last = entry
        for name in parents:
            record = record[name]
        record[last] = value

    return change


WRONG = [None, [], {}, 4, -1, 0.5, True, "x", [None], {"x": None}]
FILES = ["", ".", "..", "../x", "/etc/hostname", "weights/a.bin", "a\\b", "..\\x", ".hidden"]
FILES += ["record.json", "retired", "signature", "a\0b", "a\nb", "\udc80", "x" * 300]
# What may be changed by whoever can write a record, since it decides no path and no key.
FREE = {"duration", "finished", "host", "metrics"}
ENTRIES = [
    *((name,) for name in ("verb", "key", "step", "inputs", "sources", "artifacts")),
    *((name,) for name in sorted(FREE)),
    *(("step", name) for name in ("recipe", "stage", "iteration", "seed")),
    *(("inputs", name) for name in ("step", "source", "size")),
    ("artifacts", "table"),
    *(("artifacts", "table", name) for name in ("file", "digest", "size")),
    ("metrics", "loss"),
]
