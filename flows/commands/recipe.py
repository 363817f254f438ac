"""Print what holds in a recipe: the whole of it, with what its base says and the comments there.

``beamline recipe RECIPE`` prints it as one file. ``--changed`` prints what differs from the base,
and which file says so. ``--write`` writes the whole file to ``params/resolved/``, from which DVC
reads a recipe with a base, and lists the recipe in ``params.yaml``; a run does both by itself.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flows import end_import_phase, exit_fast
from flows.runs import recipe_list
from params import recipe_files

PARAMS = Path("params")


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit status. 2: no such recipe, or an unsound one."""
    parser = argparse.ArgumentParser(
        prog="beamline recipe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", help="params/<recipe>.yaml")
    parser.add_argument("--changed", action="store_true", help="only what differs from the base")
    parser.add_argument("--write", action="store_true", help="write the file that DVC reads")
    args = parser.parse_args(arguments)
    try:
        recipe = recipe_files.resolve(args.recipe, PARAMS)
        if args.write:
            lines = list(recipe_list.write(args.recipe)) or [f"{args.recipe} is written already"]
        elif args.changed:
            lines = list(recipe.changes())
        else:
            lines = [recipe.text().rstrip("\n")]
    except ValueError as error:
        print(f"recipe: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    end_import_phase()
    exit_fast(main(sys.argv[1:]))
