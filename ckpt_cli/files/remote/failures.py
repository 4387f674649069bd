"""What went wrong with a request, in words that hold no URL, header or body: those may contain signatures."""

from __future__ import annotations

import re

from ckpt_cli.errors import CkptError, NotFound, SourceChanged, Unreadable
from ckpt_cli.hub_ids import of_address
from ckpt_cli.urls import Address

STATUS = re.compile(r"status code: (\d{3})")
CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")
RETRIES = re.compile(r"after (\d+) retries")
EMPTY = re.compile(r'Path "(?P<key>.*)" contained empty path segment', re.DOTALL)
ILLEGAL = re.compile(r'Error parsing Path "(?P<key>.*)": Encountered illegal character sequence "(?P<what>.*)" whilst', re.DOTALL)
"""What obstore says of a key that it met in a listing, and that it has no name for: then it lists nothing of the folder."""

CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for a public bucket, AWS_SKIP_SIGNATURE=true",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS; for a public bucket, GOOGLE_SKIP_SIGNATURE=true",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
}
"""Where obstore takes credentials from, by the scheme of an address."""

FAMILY = {"s3a": "s3", "gcs": "gs", "azure": "az", "abfs": "az", "abfss": "az"}
NO_ADDRESS = ("dns error", "failed to lookup", "Name or service not known", "nodename nor servname", "Temporary failure in name resolution")
"""What libraries say of a host that cannot be looked up."""

OFFLINE = ("ConnectError", "ConnectionError", "ProxyError", "NetworkError", "ClientConnectorError", "OfflineModeIsEnabled")
"""Exceptions of httpx, requests, aiohttp and huggingface_hub, all without a base that Python knows."""

ALLOW_NETWORK = "unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE, which forbid using the network"
"""Either of the two puts huggingface_hub offline."""

AUTHORITIES = ("//169.254.16", "//169.254.170.2", "/latest/api/token", "//metadata.google.internal", "//login.microsoftonline.com")
"""What is asked for credentials when the environment has none."""


def failure(error: BaseException, address: Address, what: str) -> CkptError:
    """An exception of obstore or fsspec as a CkptError. ``what`` says what was tried: "reading failed"."""
    text, kind = str(error), type(error).__name__
    status = int(found[1]) if (found := STATUS.search(text)) else _status_of(error)
    code = found[1] if (found := CODE.search(text)) else None
    family = FAMILY.get(address.scheme, address.scheme)
    if code in ("NoSuchBucket", "ContainerNotFound"):
        return NotFound("there is no such bucket", path=f"{address.scheme}://{address.root}")
    if any(sign in text for sign in AUTHORITIES) or kind == "NoCredentialsError":
        return Unreadable(f"{what}: no credentials were found", path=address.url, hint=CREDENTIALS.get(family))
    if status in (401, 403) or kind in ("PermissionDeniedError", "UnauthenticatedError", "PermissionError", "GatedRepoError"):
        said = ", ".join(str(each) for each in (status, code) if each)
        hint = CREDENTIALS.get(family) if kind == "UnauthenticatedError" or status == 401 else None
        hint = hint or "ask its owner for access; some stores also answer this if the file does not exist"
        return Unreadable(f"{what}: access was denied{f' ({said})' if said else ''}", path=address.url, hint=hint)
    if isinstance(error, FileNotFoundError) or status == 404 or kind in ("RepositoryNotFoundError", "EntryNotFoundError"):
        return NotFound("no such file", path=address.url)
    if kind == "PreconditionError" or status == 412:
        return SourceChanged("a source file changed while it was being read", path=address.url)
    if kind == "InvalidPathError" and (found := EMPTY.search(text) or ILLEGAL.search(text)) is not None:
        return _nameless(found, address, what)
    again = f" after {found[1]} retries" if (found := RETRIES.search(text)) else ""
    if status is not None:
        said = ", ".join(str(each) for each in (status, code) if each)
        where = status in (301, 307) and family == "s3"
        hint = "the bucket is in another region: set AWS_REGION" if where else "try again later" if status in (429, 503) else None
        return Unreadable(f"{what}: the server answered {said}{again}", path=address.url, hint=hint)
    if "timed out" in text or "TimedOut" in text or isinstance(error, TimeoutError) or kind.endswith("Timeout"):
        return Unreadable(f"{what}: no answer in time{again}", path=address.url)
    if any(sign in text for sign in NO_ADDRESS):
        return Unreadable(f"{what}: its host has no address{again}", path=address.url, hint=_to_reach(address, kind))
    if "error sending request" in text or "ConnectError" in text or _is_offline(error):
        return Unreadable(f"{what}: there is no connection{again}", path=address.url, hint=_to_reach(address, kind))
    if "error decoding response body" in text or "IncompleteBody" in text:
        return Unreadable(f"{what}: the connection was cut{again}", path=address.url, hint="try again later")
    if kind == "NotSupportedError":
        return Unreadable(f"{what}: the server cannot send parts of files", path=address.url, hint="download it first")
    return Unreadable(f"{what} ({kind})", path=address.url)


def _nameless(said: re.Match[str], address: Address, what: str) -> Unreadable:
    """The error for a key that is no path. What is there may be a part of what is meant, so the rest is not read without it."""
    key, odd = f"{address.scheme}://{address.root}/{said['key']}", said.groupdict().get("what")
    why = "is empty" if odd is None else f"is {odd}" if odd in (".", "..") else f"contains {odd}"
    text, hint = f"{what}: a name in the key {key} {why}", f"move what is at {key} to another key, or delete it"
    return Unreadable(text, path=address.url, expected="keys with a name between any two slashes", hint=hint)


def _to_reach(address: Address, kind: str) -> str:
    """What to do about a host that was not reached; ``kind`` is the name of the exception."""
    if address.scheme != "hf":
        return "check the name of the host, and the network"
    named = of_address(address.url)
    cached = f"{named.advice()}; or " if named is not None and named.cached is not None else ""
    if kind == "OfflineModeIsEnabled":
        return f"{cached}{ALLOW_NETWORK}"
    return f"{cached}check the network; HF_ENDPOINT names another host than huggingface.co"


def _is_offline(error: BaseException) -> bool:
    """Whether there was no connection, as the exception or what caused it says."""
    chain: list[BaseException] = []
    while error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__ or error
    return any(isinstance(each, ConnectionError) or type(each).__name__ in OFFLINE for each in chain)


def _status_of(error: BaseException) -> int | None:
    """The HTTP status that an exception of requests, aiohttp or httpx carries."""
    for holder in (getattr(error, "response", None), error):
        status = getattr(holder, "status_code", None) or getattr(holder, "status", None)
        if isinstance(status, int) and 100 <= status < 600:
            return status
    return None
