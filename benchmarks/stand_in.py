"""Make a policy that knows nothing, to see that a recipe runs before a GPU is asked for.

    python -m benchmarks.stand_in models/stand-in

writes a small Qwen2 with random weights into a folder, with the control tokens and the chat
template of Qwen2.5 (or of another family: --family qwen3). It learns nothing. A recipe names the
folder as ``prepare.policy: {name: models/stand-in, revision: null}`` (docs/own-agent.md).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from params.schema.prepare import TinyPolicy
from tasks.policy.tiny import build_policy
from tests.tasks.dialects import families

CONTEXT = 2048  # tokens
SEED = 0
SIZES = {"hidden": 64, "layers": 2, "heads": 4, "key_value_heads": 2, "feed_forward": 128}


def make(folder: Path, family: str) -> None:
    """Write model and tokenizer into a folder."""
    tokenizer = families.tokenizer(family)
    settings = TinyPolicy(kind="tiny", vocabulary=len(tokenizer), context=CONTEXT, **SIZES)
    build_policy(settings, tokenizer, SEED).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where it is written")
    parser.add_argument("--family", default="qwen2.5", choices=[*families.FAMILIES])
    args = parser.parse_args(arguments)
    make(args.folder, args.family)
    print(
        f"wrote {args.folder}: a policy that knows nothing, with the chat template of {args.family}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
