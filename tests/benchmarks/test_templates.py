"""The table of what a run says of chat templates as they are, which docs/own-dialect.md shows."""

import pytest

from benchmarks import templates
from tests.checkout import ROOT

REFUSED = {  # template -> the dialects in which it is refused
    "smolvlm": {"tags", "native"},
    "no-generation-prompt": {"tags", "native"},
    "gemma": {"tags", "native"},
    "granite": {"native"},
}


@pytest.mark.parametrize("shown", templates.TEMPLATES, ids=lambda shown: shown.name)
def test_a_template_is_taken_or_refused_as_the_page_says(shown, monkeypatch):
    monkeypatch.delenv(templates.VOCABULARY, raising=False)  # gpt-oss: make test-data
    page = (ROOT / "docs/own-dialect.md").read_text()
    for dialect, text, taken in templates.outcomes(shown):
        assert taken == (dialect.split(",")[0] not in REFUSED.get(shown.name, ()))
        assert templates.row(shown, dialect, text, taken) in page
