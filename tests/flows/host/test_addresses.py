import subprocess
import sys

import pytest
from sqlalchemy import make_url

from flows.host.addresses import address_without_password, without_password


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
        ("https://me@corp.com:s3cr3t/@host/a", "https://host/a"),
        ("ssh://u:s3cr3t@host/home/a@b", "ssh://u@host/home/a@b"),
        (
            "mssql+pyodbc:///?odbc_connect=UID%3Du%3BPWD%3Ds3cr3t%3BServer%3Dh",
            "mssql+pyodbc:///?odbc_connect=UID%3Du%3BPWD%3D***%3BServer%3Dh",
        ),
    ],
)
def test_password_is_left_out(address, shown):
    assert without_password(address) == shown
    assert address_without_password(address) == shown
    assert address_without_password(shown) == shown


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://me@corp.com:S3CRET@db.host/x",
        "postgresql://bob:4711/S3CRET@db/x",
        'postgresql://u:pa"S3CRET@h/db',
        "postgresql://u:S3CRET word@h/db",
        "mysql+pymysql://u:5#S3CRET@h/db?charset=a@b",
        "postgresql+psycopg2://u:S3CRET@h/d@b",
        "mssql+pyodbc://u:?S3CRET/:@[::1]:1433/db",
    ],
)
def test_address_of_a_database_is_read_as_sqlalchemy_does(address):
    shown = address_without_password(address)
    assert "S3CRET" in make_url(address).password
    assert make_url(shown) == make_url(address)._replace(password=None)
    assert "S3CRET" not in shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "'http://u:s3cr3t@a' and url: /x?token=s3cr3t (caused by E('x'))",
            "'http://a' and url: /x?token=*** (caused by E('x'))",
        ),
        ("{'password': 's3cr3t', 'port': 1}", "{'password': '***', 'port': 1}"),
        ('{"a": "{\\"api_key\\": \\"s3cr3t\\"}"}', '{"a": "{\\"api_key\\": \\"***\\"}"}'),
        ("connect(password='s3 cr3t', port=1)", "connect(password='***', port=1)"),
        ("no postgresql://me@corp.com:4711/s3cr3t@h", "no postgresql://me@corp.com@h"),
        ("http://u:s3cr3t@a,https://s3cr3t@b", "http://a,https://b"),
        ("'no http://u:s3cr3t@h\\nfoo@bar'", "'no http://h\\nfoo@bar'"),
    ],
)
def test_password_in_a_text_is_left_out(text, shown):
    assert without_password(text) == shown
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
    assert address_without_password(address) == address


@pytest.mark.parametrize(
    "text",
    [
        r"'no http://x:5000\nfoo@bar'",
        "['http://x:5000','me@bar'] <http://x:5000>, me@bar",
        "postgresql://h:5432/db,postgresql://me@g/x",
        "{'passwords': 3, 'eos_token': '<end>', 'password': None}",
    ],
)
def test_other_texts_stay(text):
    assert without_password(text) == text


def test_passwords_of_the_configuration_are_left_out_wherever_they_are(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", r"postgresql://u:pa ss%2Fw\1@h/db")
    monkeypatch.setenv("PREFECT_API_URL", "https://aT0ken@host/api?key=an0ther")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "admin:t0pS3cret")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "five5")
    text = r"pa ss%2Fw\1 pa ss/w\1 pa+ss%2Fw%5C1 pa%20ss%2Fw%5C1 'pa ss/w\\1'"
    assert without_password(text) == "*** *** *** *** '***'"
    text = r"aT0ken admin:t0pS3cret xt0pS3cretx five5 postgresql://u:pa ss%2Fw\1@h/db"
    assert without_password(text) == "*** *** x***x five5 postgresql://u@h/db"
    monkeypatch.delenv("PREFECT_API_AUTH_STRING")
    assert without_password("t0pS3cret") == "t0pS3cret", "the configuration may change"


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


def test_an_import_alone_leaves_logs_as_they_are():
    code = "import logging, flows.host.addresses"
    look = f"{code}; print(hasattr(logging.Handler.format, '__wrapped__'))"
    ran = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True)
    assert ran.stdout == "False\n"


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "all_proxy"])
def test_password_of_a_proxy_is_left_out(monkeypatch, variable):
    monkeypatch.setenv(variable, "http://me:s3cr3t-word@proxy:3128")
    assert without_password("proxy refused s3cr3t-word") == "proxy refused ***"
