"""`publish`: the output whose parts were written by `merge` or `average`, each with ``--part``, gets its name; or it is pushed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from typing_extensions import Unpack

from ckpt_cli.commands.verify import verify
from ckpt_cli.errors import UsageError, within_memory
from ckpt_cli.given import PathLike, boundary, options_of, paths_of, progress_of
from ckpt_cli.names import few, plural
from ckpt_cli.output.options import PublishKeywords, PublishOptions
from ckpt_cli.output.parts import Published, publish_parts
from ckpt_cli.output.publish import overflow_notes
from ckpt_cli.output.writer import Written
from ckpt_cli.paths import absolute
from ckpt_cli.progress import Progress
from ckpt_cli.pushing.card import run_of, steps_of
from ckpt_cli.pushing.destination import Destination, refuse_several
from ckpt_cli.pushing.folder import manifest_of
from ckpt_cli.pushing.upload import delivered
from ckpt_cli.results.checkpoint import NoteInfo
from ckpt_cli.results.verify import VerifyResult
from ckpt_cli.results.written import FileInfo, PublishedFolder, PublishResult


@boundary
@within_memory
def publish(
    outputs: PathLike | Sequence[PathLike], *, progress: Progress | None = None, **options: Unpack[PublishKeywords]
) -> PublishResult:
    """Publish outputs once all parts of all of them are written. It is no error if that was done before, which a note says.

    ``outputs`` are the folders that the parts were given with ``-o``; ``options`` are those of `PublishKeywords`. With ``push_to_hub`` the
    output, also one that was there before, is verified and pushed, as `merge` does. Raises NotFound, MissingParts, Inconsistent,
    CorruptFile, OutputError.
    """
    chosen, progress = options_of(PublishOptions, options), progress_of(progress)
    folders = [Path(absolute(path)) for path in paths_of(outputs, "OUTPUT")]
    if not folders:
        raise UsageError("there is no output to publish", expected="the folders that the parts were given with -o")
    to = Destination.of(chosen)
    refuse_several(to, folders)
    done = publish_parts(folders, overwrite=chosen.overwrite)
    push, verified = None, tuple[VerifyResult, ...]()
    if to is not None:
        manifest = manifest_of(folders[0])
        to = to.of_step(next(reversed(steps_of(manifest)), None), run_of(manifest))
        verified = (verify(folders[0], full=True, progress=progress),)
        push = delivered(folders[0], to, verified, progress)
    return PublishResult(
        outputs=tuple(
            PublishedFolder(
                output=str(each.folder),
                parts=each.parts,
                files=tuple(FileInfo(name=name, bytes=size) for name, size in each.files.items()),
                tensors=each.tensors,
                verified=verified,
            )
            for each in done
        ),
        notes=(
            *(note for each in done for note in _counted(each)),
            *(
                NoteInfo(level="warning", code="no-parts", text=f"no parts of {each.folder} are waiting: it was there before")
                for each in done
                if not each.parts and to is None
            ),
        ),
        push=push,
    )


def _counted(done: Published) -> list[NoteInfo]:
    """What the parts counted while they wrote, and were allowed to."""
    written = Written(dict(done.files), done.overflows, done.non_finite)
    notes = [NoteInfo.of(note) for note in overflow_notes(written)]
    if done.non_finite:
        text = f"NaN or infinite values of the checkpoints are in {plural(len(done.non_finite), 'tensor')}: {few(sorted(done.non_finite))}"
        notes.append(NoteInfo(level="warning", code="non-finite", text=text))
    return notes
