"""Chromium without a window, and a page that it opens from a file."""

import json
import shutil
import sys
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

AXE = Path(sys.prefix) / "axe" / "axe.min.js"  # make test-page puts it there
SECONDS = 120  # that a page may take on a loaded machine
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("headless=new", "no-sandbox", "disable-dev-shm-usage", "window-size=1280,1000")


def started():
    """Start the browser by its own driver. Raises RuntimeError where either is missing."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    driver = shutil.which("chromedriver")
    if not program or not driver:
        raise RuntimeError(
            "pages are tested in Chromium, which is missing here, or its driver is: on Debian, "
            "apt install chromium chromium-driver"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in FLAGS:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options, webdriver.ChromeService(driver))


class Opened:
    """A page in the browser: what it shows, and what it did."""

    def __init__(self, browser, file, place=""):
        self.browser = browser
        browser.get("about:blank")
        for log in ("browser", "performance"):
            browser.get_log(log)
        browser.get(f"{Path(file).absolute().as_uri()}{place}")

    def run(self, script, *arguments):
        return self.browser.execute_script(script, *arguments)

    def until(self, script, *arguments):
        """Wait until a script returns what counts as true; return it."""
        return WebDriverWait(self.browser, SECONDS, 0.05).until(
            lambda browser: browser.execute_script(script, *arguments)
        )

    def drawn(self, name):
        """Wait until a figure is drawn."""
        self.until("return performance.getEntriesByName(arguments[0]).length > 0", f"drawn-{name}")
        return self

    def text(self, name):
        return self.run("return document.getElementById(arguments[0]).textContent", name)

    def place(self):
        """The iteration, question and leaf in the address."""
        return self.run("return Object.fromEntries(new URLSearchParams(location.hash.slice(1)))")

    def press(self, key, **expected):
        """Press a key; wait until the address has what is expected."""
        self.run(
            "document.body.dispatchEvent(new KeyboardEvent('keydown',"
            "{key: arguments[0], bubbles: true, cancelable: true}))",
            key,
        )
        if expected:
            wanted = {name: str(value) for name, value in expected.items()}
            self.until(
                "const place = new URLSearchParams(location.hash.slice(1)), wanted = arguments[0];"
                "return Object.entries(wanted).every(([name, one]) => place.get(name) === one)",
                wanted,
            )
        return self

    def type(self, name, text):
        """Write into a field of the search."""
        self.run(
            "const field = document.getElementById(arguments[0]); field.value = arguments[1];"
            "field.dispatchEvent(new Event('input', {bubbles: true}))",
            *(name, text),
        )

    def violations(self):
        """What axe finds against its rules of accessibility: rule, and the first element."""
        self.run(AXE.read_text())
        return self.browser.execute_async_script(
            "const done = arguments[0], said = one => [one.id, one.nodes[0].html];"
            "axe.run().then(found => done(found.violations.map(said)))"
        )

    def requests(self):
        """The addresses that the page has asked for, its own aside."""
        log = self.browser.get_log("performance")
        entries = [json.loads(one["message"])["message"] for one in log]
        sent = [one for one in entries if one["method"] == "Network.requestWillBeSent"]
        asked = [one["params"]["request"]["url"].partition("#")[0] for one in sent]
        return [url for url in asked if url != self.browser.current_url.partition("#")[0]]

    def complaints(self):
        """What the console has: errors, warnings, violations of the policy."""
        return [entry["message"] for entry in self.browser.get_log("browser")]
