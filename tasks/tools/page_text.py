"""Print the text of a page. A program of its own, because pages are hostile.

    python -I page_text.py KIND CHARSET SECONDS MEBIBYTES CHARACTERS < page

KIND is "html" or "plain"; CHARSET may be "". A page that is nested a million levels deep, or made
to be slow, ends this process and not the run. It opens no file and no connection.
"""

import re
import resource
import sys

# Attributes of a tag that the parser sees: it compares each with all before it, so that 100,000 of
# them would take it half a minute. No page needs more for its text.
MOST_ATTRIBUTES = 500
_VALUE = rb"\"[^\"]*+(?:\"|\Z)|'[^']*+(?:'|\Z)|[^\s>]++"
_ATTRIBUTE = rb"[\s/]*+[^\s/>][^\s/>=]*+(?:\s*+=\s*+(?:%b)?+)?+" % _VALUE
# A comment; or a tag, its attributes beyond the most, and what is no tag after the tag of a script.
# Every match ends where the part ends that it reads, so that nothing is read twice.
_PART = re.compile(
    rb"(?is)<!--.*?(?:-->|\Z)"
    rb"|(?P<tag><(?:(?P<raw>script|style|textarea|title)(?=[\s/>])|[a-z][^\s/>]*+)"
    rb"(?:%(one)b){0,%(most)d}+)(?:%(one)b)*+"
    rb"(?P<text>(?(raw)[\s/]*+>(?:.*?(?=</(?P=raw))|.*)|))"
    % {b"one": _ATTRIBUTE, b"most": MOST_ATTRIBUTES}
)
MORE_PLACES = True  # tables and short paragraphs count, too: an agent looks for facts


def limit(seconds: int, mebibytes: int) -> None:
    """Bound this process's processor time, memory and files."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (mebibytes * 2**20, mebibytes * 2**20))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def decoded(page: bytes, charset: str) -> str:
    """Return the characters of a page; UTF-8 where the charset is unknown."""
    try:
        return page.decode(charset or "utf-8", "replace")
    except (LookupError, ValueError):
        return page.decode("utf-8", "replace")


def html_text(page: bytes, charset: str) -> str:
    """Return title and text of a page of HTML; "" where it has none."""
    import trafilatura  # slow to import, and plain text does without

    page = _PART.sub(lambda part: (part["tag"] or part[0]) + (part["text"] or b""), page)
    source = decoded(page, charset) if charset else page
    tree = trafilatura.load_html(source)
    if tree is None:
        return ""
    title = " ".join((tree.findtext(".//title") or "").split())
    text = trafilatura.extract(
        tree, include_comments=False, include_tables=True, favor_recall=MORE_PLACES, fast=True
    )
    text = text or trafilatura.html2txt(source)
    return "\n".join(part for part in (title, text) if part)


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit status."""
    kind, charset, seconds, mebibytes, characters = arguments
    limit(int(seconds), int(mebibytes))
    page = sys.stdin.buffer.read()
    text = decoded(page, charset) if kind == "plain" else html_text(page, charset)
    sys.stdout.buffer.write(text[: int(characters)].encode("utf-8", "replace"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
