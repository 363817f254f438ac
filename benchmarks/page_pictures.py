"""Take the pictures of docs/tracking.md#the-page-of-a-run from the page of a run.

    python -m benchmarks.page_pictures reports/tiny/page.html      # after make run

It writes docs/page_results.png and docs/page_trees.png. ``--place`` is the leaf that is shown, as
in the address of the page: ``"iteration=12&question=train-00007&leaf=1"``.
"""

from __future__ import annotations

import argparse
import base64
from pathlib import Path
from typing import Any

from tests.page.browser import Opened, started

BOX = """
const all = arguments[0].map(name => document.querySelector(name).getBoundingClientRect());
const top = Math.min(...all.map(one => one.top)) + scrollY;
const height = Math.max(...all.map(one => one.bottom)) + scrollY - top;
return {x: 0, y: top, width: innerWidth, height, scale: 1}
"""
PICTURES = {"page_results.png": ["header", "#curves"], "page_trees.png": ["#forest"]}


def take(browser: Any, shown: Opened, parts: list[str], file: Path) -> None:
    """Write a picture of some parts of a page and of what is between them."""
    parameters = {"clip": shown.run(BOX, parts), "captureBeyondViewport": True}
    taken = browser.execute_cdp_cmd("Page.captureScreenshot", parameters)
    file.write_bytes(base64.b64decode(taken["data"]))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.page_pictures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("page", type=Path, help="a file that beamline page has written")
    parser.add_argument("--place", default="", help="of the leaf that is shown")
    parser.add_argument("--tint", default="entropy", help="of the tokens")
    args = parser.parse_args()
    browser = started()
    try:
        shown = Opened(browser, args.page, f"#{args.place}").drawn("curves")
        shown.run("showTint(arguments[0])", args.tint)
        for name, parts in PICTURES.items():
            take(browser, shown, parts, Path("docs", name))
    finally:
        browser.quit()


if __name__ == "__main__":
    main()
