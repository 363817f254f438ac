"""Write a recipe of your own, the smallest that runs: what differs from another recipe.

``beamline new NAME --from RECIPE`` writes ``params/NAME.yaml``, with comments for what one usually
changes, its whole file, and its entry in ``params.yaml``. It asks nothing and overwrites nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from flows import end_import_phase, exit_fast
from flows.runs import recipe_list
from params import new_recipe
from params.whole_file import whole_file

PARAMS = Path("params")
DEFAULT = "tiny"


def make(name: str, base: str) -> Iterator[str]:
    """Write the recipe; yield a line for each file, and the commands that one calls next.

    Raises ValueError before anything is written.
    """
    new_recipe.check_name(name, PARAMS)
    text, file = new_recipe.text_of(name, base, PARAMS), PARAMS / f"{name}.yaml"
    with file.open("x", encoding="utf-8", newline="") as new:
        new.write(text)
    yield f"wrote {file}"
    yield from recipe_list.write(name)
    yield from (
        "",
        f"beamline recipe {name} --changed  # what differs from {base}",
        f"make plan RECIPE={name}",
        f"make run RECIPE={name}",
        f"git add {file} {whole_file(name, PARAMS)} {recipe_list.OWN}  # to keep it",
    )


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit status. 2: a name or a base that cannot be."""
    parser = argparse.ArgumentParser(
        prog="beamline new",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", help="of the recipe, for params/NAME.yaml")
    parser.add_argument(
        "--from", dest="base", default=DEFAULT, metavar="RECIPE", help=f"its base ({DEFAULT})"
    )
    args = parser.parse_args(arguments)
    try:
        for line in make(args.name, args.base):
            print(line)
    except (ValueError, FileExistsError) as error:
        print(f"new: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    end_import_phase()
    exit_fast(main(sys.argv[1:]))
