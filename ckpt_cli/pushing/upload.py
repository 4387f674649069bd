"""Pushing an output to the Hub, as one commit: a branch never holds half of a model.

What was uploaded before an interruption is not uploaded again: the Hub knows files (LFS) or their chunks (Xet) by their content.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ckpt_cli import __version__, shell
from ckpt_cli.errors import CkptError, PushFailed
from ckpt_cli.files.manifest import NAME as MANIFEST
from ckpt_cli.files.manifest import Manifest, read_manifest
from ckpt_cli.files.source import size_of
from ckpt_cli.names import few
from ckpt_cli.progress import Progress, stages
from ckpt_cli.pushing import card
from ckpt_cli.pushing.beside import Beside
from ckpt_cli.pushing.destination import MAIN, Destination, check_ready, imported
from ckpt_cli.pushing.failures import explained
from ckpt_cli.pushing.folder import add_card, files_of, manifest_of, public_manifest
from ckpt_cli.results.checkpoint import NoteInfo
from ckpt_cli.results.envelope import ErrorInfo
from ckpt_cli.results.verify import VerifyResult
from ckpt_cli.results.written import PushInfo


def planned(to: Destination) -> PushInfo:
    """What a dry run says of a push."""
    return PushInfo(asked=to.repo, repo=to.repo, branch=to.branch, url=_url(to.repo, to.branch))


def delivered(
    folder: Path, to: Destination, verified: Sequence[VerifyResult], progress: Progress | None = None, *, strict: bool = False
) -> PushInfo:
    """Push an output that was verified, with its card; an error is a part of the result, since the output stands.

    What verification found is such an error if it is of error level, with ``strict`` also a warning.
    """
    started = time.monotonic()
    try:
        manifest = manifest_of(folder)
        _refuse_wrong(folder, verified, strict=strict)
        add_card(folder, manifest, verified)
        pushed = push(folder, to, progress, strict=strict)
    except CkptError as error:
        return not_delivered(folder, to, error, time.monotonic() - started)
    return pushed.model_copy(update={"seconds": time.monotonic() - started})


def _refuse_wrong(folder: Path, verified: Sequence[VerifyResult], *, strict: bool) -> None:
    """Raise PushFailed for an output that is not what it should be."""
    for severity in ("error", "warning")[: 2 if strict else 1]:
        found = [item for one in verified for item in one.of_severity(severity)]
        if found:
            text = f"the output is not pushed, since its verification found {severity}s{' (--strict)' if severity == 'warning' else ''}"
            hint = f"see what is wrong: ckpt verify {shell.path(folder)} --full"
            raise PushFailed(text, path=folder, details=[f"{item.code}: {item.message}" for item in found], hint=hint)


def not_delivered(folder: Path, to: Destination, error: CkptError, seconds: float = 0.0) -> PushInfo:
    """The result for an output that was not pushed."""
    if error.path is None:
        error.path = str(folder)
    return planned(to).model_copy(update={"error": ErrorInfo.of(error), "seconds": seconds})


def push(folder: Path, to: Destination, progress: Progress | None = None, *, strict: bool = False) -> PushInfo:
    """Push the files of an output to a repository, which is made if there is none, as one commit.

    What ckpt wrote there before and this output does not have is removed in the same commit; a card that people wrote stays. Raises
    PushFailed, also for other files there that loaders would take instead of these or on top of them (with ``strict`` for any that
    belong to a model), and what reading the output raises.
    """
    check_ready()
    hub, manifest = imported(), manifest_of(folder)
    token = hub.get_token()
    api = hub.HfApi(token=token, library_name="ckpt", library_version=__version__)
    names = files_of(folder, manifest)
    total = sum(size_of(folder / name) for name in names)
    with explained(to.repo, to.again(folder), token), _quiet(bars=stages(progress).pushing(total, to.repo)):
        repo = api.create_repo(to.repo, private=True if to.private else None, exist_ok=True).repo_id
        _check_privacy(api, repo, to, folder)
        if to.branch != MAIN:
            api.create_branch(repo, branch=to.branch, exist_ok=True)
        there = list(api.list_repo_files(repo, revision=to.branch))
        beside = Beside.of(there, manifest, _manifest_there(api, repo, to.branch) if MANIFEST in there else None)
        _refuse_taken(repo, [*beside.taken, *(beside.left if strict else ())], to.again(folder))
        keeps_card = card.NAME in there and not card.is_own(_card_there(api, repo, to.branch))
        names = [name for name in names if not (name == card.NAME and keeps_card)]
        content: dict[str, str | bytes] = {name: str(folder / name) for name in names}
        content[MANIFEST] = public_manifest(folder, manifest)
        operations = [hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=data) for name, data in content.items()]
        operations += [hub.CommitOperationDelete(path_in_repo=name) for name in beside.stale]
        done = api.create_commit(repo, operations, commit_message=_summary(manifest), revision=to.branch)
    return PushInfo(
        asked=to.repo,
        repo=repo,
        branch=to.branch,
        url=_url(repo, to.branch),
        commit=done.oid,
        files=len(content),
        bytes=total,
        card=("kept" if keeps_card else "written" if card.NAME in content else None),
        removed=beside.stale,
        notes=(NoteInfo(level="warning", code="left-in-repository", text=_left(repo, beside.left)),) if beside.left else (),
    )


def _refuse_taken(repo: str, names: Sequence[str], again: str) -> None:
    """Raise PushFailed if a repository has files that would be loaded with what is pushed, and that ckpt did not write."""
    if names:
        hint = f"remove them there, or choose another repository, then run: {again}"
        raise PushFailed(f"{repo} has files that loaders would take instead of this output, or with it: {few(names)}", hint=hint)


def _left(repo: str, names: Sequence[str]) -> str:
    return f"{repo} also has files of a model that are not of this output, and they stay: {few(names)}"


def _manifest_there(api: Any, repo: str, branch: str) -> Manifest | None:
    """The manifest that the repository has, None if nobody can read it."""
    with tempfile.TemporaryDirectory() as folder:
        path = api.hf_hub_download(repo, MANIFEST, revision=branch, cache_dir=folder)
        with contextlib.suppress(CkptError):
            return read_manifest(Path(path).parent)
    return None


def _check_privacy(api: Any, repo: str, to: Destination, folder: Path) -> None:
    """Raise PushFailed if the output should be private and the repository, which was there before, is public."""
    if to.private and not api.repo_info(repo).private:
        hint = f"make it private in its settings on the Hub, or choose another one, then run: {to.again(folder)}"
        raise PushFailed(f"{repo} is public, so --private cannot be kept", hint=hint)


def _card_there(api: Any, repo: str, branch: str) -> str:
    """The card that the repository has."""
    with tempfile.TemporaryDirectory() as folder:
        path = api.hf_hub_download(repo, card.NAME, revision=branch, cache_dir=folder)
        return Path(path).read_bytes().decode("utf-8", "surrogateescape")


def _summary(manifest: Any) -> str:
    steps = card.steps_of(manifest)
    what = f"average up to step {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}" if steps else "checkpoint"
    return f"Upload {what}, made by ckpt {__version__}"


def _url(repo: str, branch: str) -> str:
    home = f"{imported().constants.ENDPOINT}/{repo}"
    return home if branch == MAIN else f"{home}/tree/{branch}"


@contextlib.contextmanager
def _quiet(*, bars: bool) -> Iterator[None]:
    """huggingface_hub says nothing meanwhile, but for progress bars where they do not disturb a display of ours.

    Bars go away when they are done, as ours do: the result says what was pushed.
    """
    import huggingface_hub
    import huggingface_hub.utils

    utils: Any = huggingface_hub.utils

    close = utils.tqdm.close

    def vanish(bar: Any) -> None:
        bar.leave = False
        close(bar)

    disabled, level = utils.are_progress_bars_disabled(), utils.logging.get_verbosity()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        utils.logging.set_verbosity_error()
        if not bars:
            utils.disable_progress_bars()
        utils.tqdm.close = vanish
        try:
            yield
        finally:
            utils.tqdm.close = close
            utils.logging.set_verbosity(level)
            if not disabled:
                utils.enable_progress_bars()
