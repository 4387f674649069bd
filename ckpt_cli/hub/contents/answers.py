"""What a server said in place of a file: a download that does not look at the status saves a page or a message under the file's name."""

from __future__ import annotations

import re
from typing import Any

from ckpt_cli.names import printable

MAX_ANSWER = 2000
"""Characters of a message. A page may be longer, and is known by its beginning."""
SHOWN = 60

PAGE = re.compile(r"\s*(<!doctype html|<html[\s>])", re.IGNORECASE)
OF_STORE = re.compile(r"\s*(<\?xml[^>]*>\s*)?<Error>\s*<Code>")
"""How stores that speak the S3 protocol refuse."""

MESSAGE = re.compile(
    # The words of a status, also with its number, as "404: Not Found".
    r"((http(/[\d.]+)?|error)\W+)?([45]\d\d\W+)?(bad request|unauthori[sz]ed|forbidden|not found|method not allowed|request time-?out"
    r"|too many requests|internal server error|bad gateway|service (temporarily )?unavailable|gateway time-?out|access denied"
    # What hubs say instead.
    r"|(entry|file|page|model|repo(sitory)?|revision|resource) not found|invalid (credentials|rev id).*|invalid username or password"
    r"|access to (model|dataset|repo(sitory)?)\b.*|request (has )?expired|(we had to )?rate[ -]limit.*"
    r"|internal error\b.*|upstream (request time-?out|connect error.*)|stream timeout|error code\W+\d+)[.!]?"
    r"|(found|see other|moved permanently|temporary redirect|permanent redirect)\W+redirecting to .*",
    re.IGNORECASE,
)
"""All that a text of this kind says, in one line."""

TOLD = frozenset({"error", "errors", "message", "detail", "details", "msg", "error_message", "error_description"})
BESIDE_TOLD = frozenset({"status", "statuscode", "status_code", "code", "error_code", "path", "timestamp", "success", "ok"}) | {
    "requestid", "request_id", "documentation_url", "type", "title", "instance", "url", "trace_id", "data",
}  # fmt: skip
"""What is said beside the words, in lower case: no config has only such entries."""


def answer_in(text: str) -> str | None:
    """The answer that a text is, in a few words; None for any other text.

    >>> answer_in("404: Not Found")
    "what a server said: '404: Not Found'"
    >>> answer_in("Not found are: {% for m in messages %}{{ m }}{% endfor %}")
    """
    # A template may well write a page.
    if PAGE.match(text) and "{%" not in text:
        return "a page in HTML"
    if OF_STORE.match(text) or (len(text) <= MAX_ANSWER and MESSAGE.fullmatch(text.strip())):
        return _said(text)
    return None


def answer_of(content: Any) -> str | None:
    """The same of parsed JSON: a text, or an object with nothing but the words of a refusal.

    >>> answer_of({"error": "Repository not found"})
    "what a server said: 'Repository not found'"
    >>> answer_of({"error": 17, "not": 3})
    """
    if isinstance(content, str):
        return answer_in(content)
    if not isinstance(content, dict) or not content or not {str(key).lower() for key in content} <= TOLD | BESIDE_TOLD:
        return None
    words = (value for key, value in content.items() if key.lower() in TOLD and isinstance(value, str) and value)
    word = next(words, None)
    return _said(word) if word is not None else None


def _said(text: str) -> str:
    line = " ".join(text.split())
    return f"what a server said: '{printable(line[:SHOWN])}{'...' if len(line) > SHOWN else ''}'"
