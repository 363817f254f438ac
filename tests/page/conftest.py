"""Pages of made-up runs, opened in one browser."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from flows.pages import page_file
from tasks import recipes
from tests import made_run
from tests.checkout import ROOT
from tests.page.browser import Opened, started

RECIPE = "tiny"


@pytest.fixture(scope="session")
def browser():
    running = started()
    yield running
    running.quit()


@pytest.fixture
def emulated(browser):
    """Have the browser show a window of some size, in the light or in the dark."""

    def emulate(width=1280, height=1000, scheme="light"):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    yield emulate
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.fixture
def opened(browser):
    """Open a page's file."""
    return lambda file, place="": Opened(browser, file, place)


@pytest.fixture(scope="session")
def written(tmp_path_factory, tokenizer):
    """Write the page of a run with these trees; return its file."""

    def write(iterations, with_tokenizer=True, numbers=(), links=None, curve="", agents=None):
        folder = tmp_path_factory.mktemp("run")
        shutil.copytree(ROOT / "params", folder / "params")
        data = made_run.write(folder, RECIPE, iterations, tokenizer if with_tokenizer else None)
        if curve:
            (data / "curve.csv").write_text(curve)
        if agents:
            made_run.write_evaluation(folder, RECIPE, agents)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            recipe = recipes.load(RECIPE, Path("params"))
            return folder / page_file.write_run(RECIPE, recipe, links, numbers)

    return write


@pytest.fixture(scope="session")
def grown(tokenizer):
    """Grow a tree whose texts are encoded by the tokenizer."""
    random = np.random.default_rng(0)

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    return lambda name, *texts, **sizes: made_run.tree(encode, random, name, *texts, **sizes)
