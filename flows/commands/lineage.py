"""Trace a metric, a model or a file back to the commit that restores it.

``beamline lineage WHAT`` prints the chain: benchmark result, checkpoint, iteration, trees,
questions, dataset, commit, parameters, MLflow run. Each link has its digest and, after "$", the
command that restores it.

``--restore`` copies WHAT to ``.beamline/lineage/<commit>``, from git, DVC's cache or its remote.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace

from flows import end_import_phase, exit_fast
from flows.runs import provenance, provenance_subject
from params.given_numbers import from_zero
from tasks.trees.words import printable


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit status. 2: WHAT is not found."""
    parser = argparse.ArgumentParser(
        prog="beamline lineage",
        description=__doc__,
        epilog=provenance_subject.FORMS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", metavar="WHAT", help="a metric, a model or a file")
    parser.add_argument("--at", metavar="REV", help="in the run of this branch or commit")
    parser.add_argument("--recipe", help="of the metric, where several recipes have it")
    parser.add_argument("--iteration", type=from_zero, metavar="N", help="of this iteration")
    parser.add_argument("--all", action="store_true", help="the ids of all questions")
    parser.add_argument("--restore", action="store_true", help="restore a copy; prints its path")
    parser.add_argument("--json", action="store_true", help="for programs, with all ids")
    args = parser.parse_args(arguments)
    try:
        subject = provenance_subject.find(args.what, args.at, args.recipe)
        if args.restore:
            print(printable(str(provenance_subject.restore(subject))))
            return 0
        every = args.all or args.json
        links = provenance.chain(replace(subject, iteration=args.iteration, every=every))
    except (ValueError, ConnectionError) as error:
        print(f"lineage: {printable(str(error))}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps([asdict(link) for link in links], indent=1))
    else:
        print(printable("\n".join(str(link) for link in links)))
    return 0


if __name__ == "__main__":
    end_import_phase()
    exit_fast(main(sys.argv[1:]))
