"""What an error of huggingface_hub means, in a sentence, and what helps."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from ckpt_cli.errors import CkptError, PushFailed

TOKENS = "https://huggingface.co/settings/tokens"
STORAGE = re.compile(r"storage|quota|disk usage|billing|payment", re.IGNORECASE)
"""What a refusal for lack of space speaks of; the Hub says 403 then too."""

NETWORK = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "ssl", "socket")
"""The libraries whose errors, without an answer of the Hub, are those of the connection."""

LATER = "try again later"


@contextlib.contextmanager
def explained(repo: str, again: str, token: str | None = None) -> Iterator[None]:
    """Makes every error of the block a PushFailed; ``again`` is the command that goes on. The token never gets into a message."""
    try:
        yield
    except CkptError:
        raise
    except Exception as error:
        answer = _answer(error)
        message, cure = _no_answer(error) if answer is None else _meaning(answer, str(error), repo)
        said = _said(error, answer)
        details = [said.replace(token, "***") if token else said] if said and said not in message else []
        raise PushFailed(message, details=details, hint=f"{cure}, then run: {again}") from error


def _answer(error: BaseException | None) -> Any:
    """The answer of the Hub that an error is about: its own, or that of what caused it."""
    seen = 0
    while error is not None and seen < 20:
        response = getattr(error, "response", None)
        if isinstance(getattr(response, "status_code", None), int):
            return response
        error, seen = error.__cause__ or error.__context__, seen + 1
    return None


def _meaning(answer: Any, text: str, repo: str) -> tuple[str, str]:
    """What an answer of the Hub means, and what helps."""
    status, kind = answer.status_code, answer.headers.get("X-Error-Code", "")
    if kind == "GatedRepo":
        return f"{repo} is gated, and the account of the token has no access to it", f"ask for access at {_home(answer)}/{repo}"
    if status == 402 or (status == 403 and STORAGE.search(_message(answer) + text)):
        return "the storage of the account is used up, or its plan does not allow this", "free some, or change the plan"
    if status == 401 and kind != "RepoNotFound":
        return "the Hub does not accept the token: it is wrong, or has expired", "log in again with `hf auth login`, or set HF_TOKEN"
    if status in (401, 404):
        return f"the Hub has no {repo} that this token may see", "check the name, and what the token may do"
    if status == 403:
        return f"the token may not write to {repo}", f"make one with write access ({TOKENS})"
    if status == 409:
        return f"something else changed {repo} at the same time", LATER
    if status in (413, 507):
        return "the Hub has no room for this upload: a file is too large, or the storage is full", "free some, or lower --max-shard-size"
    if status == 429:
        wait = answer.headers.get("Retry-After", "")
        return "the Hub's rate limit is reached", f"wait {wait} seconds" if wait.isdecimal() else "wait some minutes"
    if status >= 500:
        return f"the Hub has trouble (HTTP {status})", LATER
    return f"the Hub refused the upload (HTTP {status})", "see what it says above"


def _no_answer(error: Exception) -> tuple[str, str]:
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and len(chain) < 20:
        chain.append(cause)
    if any(type(each).__module__.split(".")[0] in NETWORK or isinstance(each, (ConnectionError, TimeoutError)) for each in chain):
        return "there is no connection to the Hub, or it broke", "check the network, a proxy and HF_ENDPOINT"
    if any(STORAGE.search(str(each)) for each in chain):
        return "the storage of the account is used up, or its plan does not allow this", "free some, or change the plan"
    return "the upload failed", "see what huggingface_hub says above"


def _said(error: Exception, answer: Any) -> str:
    """What the Hub, or huggingface_hub, said, in a line."""
    text = _message(answer) if answer is not None else ""
    cause = error.__cause__ if answer is None and isinstance(error, RuntimeError) and error.__cause__ is not None else error
    return next((line.strip() for line in (text or str(cause)).splitlines() if line.strip()), type(error).__name__)[:500]


def _message(answer: Any) -> str:
    """The Hub's own words, without those that huggingface_hub adds."""
    said = answer.headers.get("X-Error-Message")
    if not said:
        with contextlib.suppress(Exception):
            said = answer.json().get("error")
    return said if isinstance(said, str) else ""


def _home(answer: Any) -> str:
    """The address of the Hub that answered."""
    found = re.match(r"https?://[^/]+", str(answer.url))
    return found[0] if found is not None else "https://huggingface.co"
