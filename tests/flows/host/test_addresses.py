import logging
import subprocess
import sys

import pytest

from flows.host.addresses import without_password


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("ssh://worker:s3cr3t@host:22/cache", "ssh://worker@host:22/cache"),
        ("http://worker:s3cr3t@host:5000/", "http://host:5000/"),
        ("https://s3cr3t@host", "https://host"),
        ("redis://:s3cr3t@host", "redis://@host"),
        ("postgresql+psycopg2://u:s3/cr@3t@[::1]:1/runs", "postgresql+psycopg2://u@[::1]:1/runs"),
        ("s3://bucket/a?X-Amz-Signature=s3cr3t&part=1", "s3://bucket/a?X-Amz-Signature=***&part=1"),
        ("https://host/a?sv=1&sig=s3cr3t%2B#page", "https://host/a?sv=1&sig=***#page"),
        ("https://host/#access_token=s3cr3t", "https://host/#access_token=***"),
        ("host=db user=worker password=s3cr3t", "host=db user=worker password=***"),
        ("AccountName=a;AccountKey=s3cr3t==;B=c", "AccountName=a;AccountKey=***;B=c"),
        (
            "'http://u:s3cr3t@a' and url: /x?token=s3cr3t (caused by E('x'))",
            "'http://a' and url: /x?token=*** (caused by E('x'))",
        ),
    ],
)
def test_password_is_left_out(address, shown):
    assert without_password(address) == shown
    assert without_password(shown) == shown


@pytest.mark.parametrize(
    "address",
    [
        "/mnt/shared/ledger",
        "sqlite:////home/me/a@b/.beamline/mlflow.db",
        "http://127.0.0.1:5000/#/experiments/1/runs?searchFilter=tags.`a` = 'b@c'",
        "ssh://worker@host:22/home/a@b",
        "abfss://container@account.dfs.core.windows.net/ledger",
        "remote://far/ledger",
        "a budget of sampled_tokens=200 for me@example.org",
    ],
)
def test_other_addresses_stay(address):
    assert without_password(address) == address


LOGGING = """
import logging
from flows import end_import_phase

end_import_phase()
end_import_phase()
logging.basicConfig(format="%(name)s %(message)s")
try:
    raise OSError("no http://u:s3cr3t@host")
except OSError:
    logging.getLogger("library").exception("call of %s", "http://u:s3cr3t@host/a?token=s3cr3t")
raise LookupError("ssh://u:s3cr3t@host")
"""


def test_logs_and_tracebacks_have_no_password():
    ran = subprocess.run([sys.executable, "-c", LOGGING], capture_output=True, text=True)
    assert "s3cr3t" not in ran.stderr
    assert "library call of http://host/a?token=***" in ran.stderr
    assert "OSError: no http://host" in ran.stderr
    assert ran.stderr.endswith("LookupError: ssh://u@host\n")
    assert not hasattr(logging.Handler.format, "__wrapped__"), "tests have logs of their own"
