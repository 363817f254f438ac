"""Where a metric, a model or a file came from, back to the commit that gives it again.

``python -m flows.lineage WHAT`` prints the chain: benchmark result, checkpoint, iteration, trees,
questions, dataset, commit, parameters, MLflow run. Each link has its digest and, after "$", the
command that brings it back.

``--restore`` copies what WHAT is into ``.beamline/lineage/<commit>``, from git, DVC's cache or its
remote.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace

from flows.runs import provenance


def main(arguments: list[str]) -> int:
    """The command line; returns the exit status. 2: WHAT is nothing that a run has made."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.lineage",
        description=__doc__,
        epilog=provenance.FORMS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", metavar="WHAT", help="a metric, a model or a file")
    parser.add_argument("--at", metavar="REV", help="in the run of this branch or commit")
    parser.add_argument("--recipe", help="whose metric, where several have it")
    parser.add_argument("--iteration", type=int, metavar="N", help="of this iteration")
    parser.add_argument("--all", action="store_true", help="the ids of all questions")
    parser.add_argument("--restore", action="store_true", help="bring it back; prints where")
    parser.add_argument("--json", action="store_true", help="for programs, with all ids")
    chosen = parser.parse_args(arguments)
    try:
        asked = provenance.find(chosen.what, chosen.at, chosen.recipe)
        if chosen.restore:
            print(provenance.restore(asked))
            return 0
        every = chosen.all or chosen.json
        links = provenance.chain(replace(asked, iteration=chosen.iteration, every=every))
    except (ValueError, ConnectionError) as error:
        print(f"lineage: {error}", file=sys.stderr)
        return 2
    if chosen.json:
        print(json.dumps([asdict(link) for link in links], indent=1))
    else:
        print("\n".join(str(link) for link in links))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
