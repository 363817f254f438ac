"""Measure the page of a large run: its bytes, and the seconds until its first picture.

    python -m benchmarks.page                  # Chromium and its driver have to be installed

The tables of a run are made up: 5,000 trajectories of some 400 sampled tokens in 25 iterations, in
trees of 8 leaves. The page is written from them, and Chromium opens it several times. The first
picture is the icicle of the tree that the page opens with; times are from the start of the
navigation. It prints JSON: bytes of the page, seconds to write it, and seconds of each opening, of
which the first is in a browser that has just started.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from flows.pages import page
from tasks import recipes
from tasks.policy.tiny import build_tokenizer
from tasks.trees.tree import Tree
from tests import made_run
from tests.page.browser import Opened, started

RECIPE = "tiny"
LEAVES = 8
ITERATIONS = 25
WORDS = "alpha beta gamma delta count price apples boxes minus plus seven eleven total rest".split()


def forest(trajectories: int, tokens: int, encode: Any, seed: int = 0) -> list[list[Tree]]:
    """Make the trees of each iteration, of random words, some ``tokens`` new tokens a leaf."""
    random = np.random.default_rng(seed)
    questions = trajectories // LEAVES // ITERATIONS

    def said() -> str:
        return " ".join(random.choice(WORDS, 2 * tokens // 3))

    return [
        [
            made_run.tree(
                encode, random, f"q{number}-{i}", said()[:200], (said(), "2+2"), leaves=LEAVES
            )
            for i in range(questions)
        ]
        for number in range(ITERATIONS)
    ]


def measure(trajectories: int, tokens: int, repetitions: int) -> dict[str, Any]:
    """Write the page of a made-up run and open it ``repetitions`` times."""
    recipe = recipes.load(RECIPE, Path("params"))
    assert recipe.prepare.policy.kind == "tiny"
    tokenizer = build_tokenizer([" ".join(WORDS)], recipe.prepare.policy)
    trees = forest(trajectories, tokens, lambda text: tokenizer.encode(text))
    leaves = sum(len(tree.leaves) for each in trees for tree in each)
    sampled = sum(len(node.logprobs) for each in trees for tree in each for node in tree.nodes)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree("params", Path(folder, "params"))
        os.chdir(folder)
        made_run.write(folder, RECIPE, trees, tokenizer)
        began = time.perf_counter()
        file = page.write_run(RECIPE, recipe)
        written = time.perf_counter() - began
        text = file.read_text()
        browser = started()
        try:
            pictures = [_first_picture(browser, file) for _ in range(repetitions)]
        finally:
            browser.quit()
    return {
        "trajectories": leaves,
        "sampled_tokens": sampled,
        "iterations_in_page": text.count('id="block-'),
        "bytes": len(text.encode()),
        "seconds_to_write": round(written, 1),
        "seconds_to_first_picture": [round(each, 2) for each in pictures],
        "load": round(os.getloadavg()[0], 1),
    }


def _first_picture(browser: Any, file: Path) -> float:
    shown = Opened(browser, file).drawn("icicle")
    drawn = "return performance.getEntriesByName('drawn-icicle')[0].startTime"
    return float(shown.run(drawn)) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__)
    parser.add_argument("--trajectories", type=int, default=5000)
    parser.add_argument("--tokens", type=int, default=400, help="of a trajectory, about")
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    measurements = measure(args.trajectories, args.tokens, args.repetitions)
    print(json.dumps(measurements, indent=1))


if __name__ == "__main__":
    main()
