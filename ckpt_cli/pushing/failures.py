"""What an error of huggingface_hub means, in a sentence, and what helps."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt_cli.errors import CkptError, PushFailed

HOME = "https://huggingface.co"
TOKENS = f"{HOME}/settings/tokens"
STORAGE = re.compile(r"storage|quota|disk usage|billing|payment", re.IGNORECASE)
"""What a refusal for lack of space speaks of; the Hub says 403 then too."""

NETWORK = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "ssl", "socket")
"""The libraries whose errors, without an answer of the Hub, are those of the connection."""

STATUS = re.compile(r"HTTP status (?:client|server) error \(([0-9]{3})")
"""How hf_xet, which uploads by itself, tells what was answered."""

LATER = "try again later"

USED_UP = ("the storage of the account is used up, or its plan does not allow this", "free some, or change the plan")


@dataclass(frozen=True, slots=True)
class Answer:
    """What the Hub answered: the HTTP status, its code and its words for what is wrong, and the seconds to wait, where it says so."""

    status: int
    code: str = ""
    said: str = ""
    wait: str = ""
    home: str = HOME


@contextlib.contextmanager
def explained(repo: str, again: str, token: str | None = None) -> Iterator[None]:
    """Makes every error of the block a PushFailed; ``again`` is the command that goes on. The token never gets into a message."""
    try:
        yield
    except CkptError:
        raise
    except Exception as error:
        chain = list(_chain(error))
        answer = next((found for each in chain if (found := _answer(each)) is not None), None)
        message, cure = _no_answer(chain) if answer is None else _meaning(answer, repo)
        said = answer.said if answer is not None and answer.said else _said(chain)
        details = [said.replace(token, "***") if token else said] if said not in message else []
        raise PushFailed(message, details=details, hint=f"{cure}, then run: {again}") from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and what it came from."""
    for _ in range(20):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _answer(error: BaseException) -> Answer | None:
    """The answer of the Hub that an error is about."""
    response = getattr(error, "response", None)
    if response is None or not isinstance(getattr(response, "status_code", None), int):
        found = STATUS.search(str(error))
        return Answer(int(found[1])) if found is not None else None
    headers, home = response.headers, re.match(r"https?://[^/]+", str(response.url))
    said = headers.get("X-Error-Message")
    if not said:
        with contextlib.suppress(Exception):
            said = response.json().get("error")
    return Answer(
        response.status_code,
        headers.get("X-Error-Code", ""),
        said if isinstance(said, str) else "",
        headers.get("Retry-After", ""),
        home[0] if home is not None else HOME,
    )


def _meaning(answer: Answer, repo: str) -> tuple[str, str]:
    """What an answer of the Hub means, and what helps."""
    status = answer.status
    if answer.code == "GatedRepo":
        return f"{repo} is gated, and the account of the token has no access to it", f"ask for access at {answer.home}/{repo}"
    if status == 402 or (status == 403 and STORAGE.search(answer.said)):
        return USED_UP
    if status == 401 and answer.code != "RepoNotFound":
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
        return "the Hub's rate limit is reached", f"wait {answer.wait} seconds" if answer.wait.isdecimal() else "wait some minutes"
    if status >= 500:
        return f"the Hub has trouble (HTTP {status})", LATER
    return f"the Hub refused the upload (HTTP {status})", "see what it says above"


def _no_answer(chain: list[BaseException]) -> tuple[str, str]:
    if any(type(each).__module__.split(".")[0] in NETWORK or isinstance(each, (ConnectionError, TimeoutError)) for each in chain):
        return "there is no connection to the Hub, or it broke", "check the network, a proxy and HF_ENDPOINT"
    if any(STORAGE.search(str(each)) for each in chain):
        return USED_UP
    return "the upload failed", "see what huggingface_hub says above"


def _said(chain: list[BaseException]) -> str:
    """What huggingface_hub says, in a line: the first error that is not only about the file at which it happened."""
    error = chain[1] if isinstance(chain[0], RuntimeError) and len(chain) > 1 else chain[0]
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:500]
