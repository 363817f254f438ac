"""Show addresses of stores and servers without the passwords in them.

In a text, such as a log line, passwords are recognised by where they stand, and those of this
process's configuration wherever they are.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import traceback
from functools import lru_cache, wraps
from types import TracebackType
from urllib.parse import quote, quote_plus, unquote, unquote_plus

# Environment variables with an address, and with a secret.
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
ADDRESSES = ("BEAMLINE_STORE", "MLFLOW_TRACKING_URI", "PREFECT_API_URL", *PROXIES)
SECRETS = (
    "BEAMLINE_SERVER_TOKEN",
    "BEAMLINE_STORE_KEY",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "PREFECT_API_AUTH_STRING",
    "PREFECT_API_KEY",
)
SHORTEST = 6  # characters of a secret that is searched for: shorter ones are parts of words

DATABASE = re.compile(
    r"(?:cockroachdb|mariadb|mssql|mysql|oracle|postgres(?:ql)?|redshift|sqlite)(?:\+\w+)?"
)
HOST = re.compile(r"(?:\[[^\]]*\]|[^:]*)(?::\d*)?")
SCHEME = r"\b[a-zA-Z][\w+.-]*://"
# In a text an address ends at white space, also as "\n" in a quoted text, at a quote or bracket
# that closes something, and where the next address begins.
IN_TEXT = re.compile(
    rf"{SCHEME}(?:(?!{SCHEME})(?:[^\s\"'>)\\]|\\(?![nrt])|[\"'>)](?![\s\"'>)\]}},:;]|$)))*"
)

NAME = (
    r"(?:x-(?:amz|goog)-[\w-]+|sig|auth|pwd|pass(?:wd|word|phrase)?"
    r"|(?:(?:access|api|auth|id|refresh|security|session)[_-]?)?token"
    r"|[\w-]*(?:password|secret|signature|credential|(?:access|account|api|private)[_-]?key)"
    r"[\w-]*)"
)
# each NAME has one of them; most lines have none, and it takes no time to see that
WORDS = ("x-amz-", "x-goog-", "sig", "auth", "pwd", "pass", "token", "secret", "credential", "key")
# name=value, also with "=" quoted, as in odbc_connect=UID%3Du%3BPWD%3Dvalue%3B
PARAMETER = re.compile(
    rf"(?i)((?:(?<![\w-])|(?<=%[0-9a-f]{{2}})){NAME}(?:=|%3D))"
    r"((?<==)\{[^}]*\}|(?<==)[^\s&#;,'\")]+|(?<=%3D)(?:(?!%3B)[^\s&#;,'\")])+)"
)
# "name": "value" and name='value', also with the quotes escaped
ENTRY = re.compile(
    rf"(?i)((?:(?<![\w-])){NAME}(?:\\?[\"'])?\s*[:=]\s*b?(?P<quote>\\?[\"']))"
    r"((?:(?!(?P=quote))(?:\\.|[^\\\n]))+)"
)


def address_without_password(address: str) -> str:
    """Return an address without its password, with HTTP without the user, too.

    What remains is an address of the same place. Secret parameters such as ``token=`` or
    ``X-Amz-Signature=`` get the value ``***``.
    """
    scheme, separator, rest = address.partition("://")
    if separator:
        user_info = _user_info(scheme, rest)
        user = user_info.partition(":")[0]
        if _is_http(scheme) and user_info:
            rest = rest[len(user_info) + 1 :]
        elif user != user_info:
            rest = user + rest[len(user_info) :]
    return PARAMETER.sub(r"\1***", f"{scheme}{separator}{rest}")


def _is_http(scheme: str) -> bool:
    return scheme.lower() in ("http", "https")


def _user_info(scheme: str, rest: str) -> str:
    """Return what stands before the "@" of an address, "user" or "user:password"; "" for nothing.

    SQLAlchemy takes anything up to an "@" for a database's password, even what looks like a port
    and a path. Other addresses are read as urllib does. Both parts may contain "@".
    """
    if DATABASE.fullmatch(scheme):
        start = re.match("[^:/]*:[^@]*@", rest)
        return rest[: _find("[/?]", rest, start.end())].rpartition("@")[0] if start else ""
    user, _, host = rest[: _find("[/?#]", rest)].rpartition("@")
    # where the port is no number, a password has an unquoted "/", "?" or "#"
    return user if HOST.fullmatch(host) else rest.rpartition("@")[0]


def _find(pattern: str, text: str, start: int = 0) -> int:
    matched = re.compile(pattern).search(text, start)
    return matched.start() if matched else len(text)


def without_password(text: str) -> str:
    """Return a text without the passwords of the addresses in it and those of the configuration.

    Entries such as ``"password": "…"`` and parameters such as ``token=`` get the value ``***``, as
    do the passwords that this process's environment variables have, wherever they are.
    """
    if known := _known(*map(os.environ.get, ADDRESSES + SECRETS)):
        text = known.sub("***", text)
    if "://" in text:
        text = IN_TEXT.sub(lambda matched: address_without_password(matched[0]), text)
    lowered = text.lower()
    if any(word in lowered for word in WORDS):
        text = PARAMETER.sub(r"\1***", ENTRY.sub(r"\1***", text))
    return text


@lru_cache(maxsize=8)
def _known(*values: str | None) -> re.Pattern[str] | None:
    """Return a pattern of the secrets in the values of ADDRESSES and SECRETS; None without any."""
    given = [value or "" for value in values]
    secrets = {secret for value in given[: len(ADDRESSES)] for secret in _secrets_of(value)}
    for value in given[len(ADDRESSES) :]:
        secrets |= {value.strip(), value.strip().partition(":")[2]}  # "user:password", or a token
    forms = {form for secret in secrets for form in _forms(secret) if len(form) >= SHORTEST}
    longest_first = sorted(forms, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if forms else None


def _secrets_of(address: str) -> set[str]:
    """Return the secrets of an address: its password, an HTTP user without one, parameters."""
    scheme, _, rest = address.partition("://")
    user, separator, password = _user_info(scheme, rest).partition(":")
    token = user if _is_http(scheme) and not separator else ""
    return {password, token, *(value for _, value in PARAMETER.findall(address))}


def _forms(secret: str) -> set[str]:
    """Return a secret as it may be quoted in an address, or in a Python or JSON text."""
    plain = {secret, unquote(secret), unquote_plus(secret)}
    return plain | {quoted for each in plain for quoted in _quoted(each)}


def _quoted(text: str) -> tuple[str, ...]:
    in_address = quote(text), quote(text, safe=""), quote_plus(text)
    return *in_address, repr(text)[1:-1], json.dumps(text)[1:-1]


def keep_passwords_from_logs() -> None:
    """Leave passwords out of this process's logs and of the traceback that may end it.

    Libraries log addresses that fail, through formatters of their own, so the text is changed where
    every handler gets it from its formatter.
    """
    formatted = logging.Handler.format
    if not hasattr(formatted, "__wrapped__"):

        @wraps(formatted)
        def format(handler: logging.Handler, record: logging.LogRecord) -> str:
            return without_password(formatted(handler, record))

        logging.Handler.format = format  # type: ignore[assignment, method-assign]
    sys.excepthook = _print_exception


def _print_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    text = "".join(traceback.format_exception(kind, error, trace))
    print(without_password(text), end="", file=sys.stderr)
