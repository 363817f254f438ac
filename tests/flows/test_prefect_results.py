"""What Prefect has stored of a sub-step is never believed."""

import json

from tests import toy_project as toy


def test_record_of_the_ledger_is_returned_whatever_prefect_stored(api, tmp_path):
    """In the real engine; ``tests/flows/prefect_run.py`` changes the stored result."""
    ran = toy.run(tmp_path, "python", "-m", "tests.flows.prefect_run", "199", PREFECT_API_URL=api)
    assert ran.returncode == 0, ran.stdout
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert counts["calls"] > 40
    assert counts == {**counts, "equal": counts["calls"], "cached": counts["calls"], "ran": 1}
