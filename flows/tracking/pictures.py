"""Log figures to MLflow; those that were drawn before, of the same data, are taken from files.

Drawing takes seconds: longer than all else in a stage whose sub-steps are all known.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.tracking import paper_figures, run_figures
from flows.tracking.run import Run
from tasks.ledger import artifacts, keys

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path(".beamline/pictures")  # <recipe>/<stage>/<key>/<name>.png: those of the last run
DRAWN_BY = (run_figures, paper_figures)


def log(
    run: Run, recipe: str, stage: str, data: Any, draw: Callable[[], Mapping[str, Figure]]
) -> None:
    """Log the figures that ``draw`` returns, by name without ending.

    data: all that decides the figures, as ``json`` takes it.
    """
    folder = FOLDER / recipe / stage / _key(data)
    if not folder.is_dir():
        artifacts.remove(folder.parent)
        partial = folder.with_name(f".{folder.name}.partial")
        for name, figure in draw().items():
            run_figures.save(figure, partial / f"{name}.png")
        partial.mkdir(parents=True, exist_ok=True)
        partial.rename(folder)
    for file in sorted(folder.iterdir()):
        run.log_file(file)


def _key(data: Any) -> str:
    """Return a digest of the data, the code that draws them, and matplotlib's version."""
    code = [keys.source_digest(Path(str(module.__file__))) for module in DRAWN_BY]
    text = json.dumps([data, code, version("matplotlib")], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
