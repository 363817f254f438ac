"""Show addresses of stores and servers without the passwords in them.

Passwords are recognised by where they stand, so text of libraries that quote an address is made
safe, too.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
from functools import wraps
from types import TracebackType

# A password may contain "/" and "@" (SQLAlchemy allows both); a port, with a path behind it, is
# none. With HTTP, a name without a password is often a token.
PASSWORD = r':(?!\d+[/?#])[^\s"]*'
HTTP_USER = re.compile(rf"(https?://)[^\s/?#:@]*(?:{PASSWORD})?@")
USER = re.compile(rf"(://[^\s/?#:@]*){PASSWORD}@")
PARAMETER = re.compile(
    r"(?i)(?<![\w-])((?:x-(?:amz|goog)-[\w-]+|sig|auth|pwd|pass(?:wd|word|phrase)?"
    r"|(?:(?:access|api|auth|id|refresh|security|session)[_-]?)?token"
    r"|[\w-]*(?:password|secret|signature|credential|(?:access|account|api|private)[_-]?key)"
    r"[\w-]*)=)[^\s&#;,'\")]+"
)


def without_password(text: str) -> str:
    """Return an address, or a text with addresses, without passwords.

    The password between "://" and "@" is left out, with HTTP the user, too; what remains is an
    address of the same place. Secret parameters such as ``token=`` or ``X-Amz-Signature=`` get the
    value ``***``.
    """
    text = USER.sub(r"\1@", HTTP_USER.sub(r"\1", text))
    return PARAMETER.sub(r"\1***", text)


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
