"""Side files with tensors of the model, compared with those that are written: the adapter and head of one language.

Loaders put what is in such a file in the place of the model's own. It is passed on where that changes nothing, or where it is for
something else than the model is by itself; what is of another step, or of one of the checkpoints of an average, is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ckpt_cli.discover.forms.tensors_beside import TensorsBeside, others_trained
from ckpt_cli.drafting.draft import Draft, Options, Setting
from ckpt_cli.names import few, plural
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor


def with_fitting_side_tensors(draft: Draft, setting: Setting[Options]) -> Draft:
    """Without the side files whose tensors are those of other weights, and with what is said of these."""
    files, notes = dict(draft.assets.files), list[Note]()
    beside = [each for each in draft.opened.beside if files.get(each.name) == each.path]
    if not beside or draft.is_adapter:
        return draft
    held: dict[str, Sequence[Tensor]] = {name: (tensor,) for name, tensor in draft.tensors.items()}
    held |= {name: combination.tensors for name, combination in draft.combinations.items()}
    is_second = bool(draft.combinations) or draft.opened.live is not None
    others = [each for each in beside if not _stands_for_main(each, setting)]
    for each in (each for each in beside if each not in others):
        if not (differing := each.differing(held)):
            continue
        kept = each.is_own and not is_second
        if not kept:
            del files[each.name]
        notes.append(_other_note(each, differing, kept=kept, is_average=bool(draft.combinations)))
    of_others = [each for each in others if is_second or not each.is_own]
    if of_others and (why := _trained_on(draft, setting, of_others[0].tensors())) is not None:
        text = f"{few([each.name for each in of_others], 3)}: {_go(of_others)} with {why}"
        notes.append(Note("warning", "other-tensors", f"{text}; what a model is with both was never trained"))
    return replace(draft, assets=replace(draft.assets, files=files), notes=(*draft.notes, *notes))


def _stands_for_main(each: TensorsBeside, setting: Setting[Options]) -> bool:
    """Whether a file is to have the values of the model's own tensors: of what these are for, or written by the run at some time."""
    of_base = setting.base is not None and each.path.is_relative_to(setting.base.folder)
    return bool(each.is_main) or not (each.is_own or (of_base and each.is_main is False))


def _other_note(each: TensorsBeside, differing: Sequence[str], *, kept: bool, is_average: bool) -> Note:
    count = plural(len(each.tensors()), "tensor")
    text = f"{each.path} is not written: {len(differing)} of its {count} have other values than {_what(is_average)} ({few(differing, 2)})"
    how = f"without asking for {each.for_what}, the output is loaded with its own"
    if kept:
        text = f"{each.path}: {len(differing)} of its {count} have other values than the weights beside it ({few(differing, 2)})"
        how = f"whoever asks for {each.for_what} gets those of the file"
    return Note("warning", "other-tensors", f"{text}; {how}")


def _what(is_average: bool) -> str:
    return "some of what is averaged" if is_average else "the weights that are"


def _trained_on(draft: Draft, setting: Setting[Options], beside: Collection[str]) -> str | None:
    """The weights that files for something else were trained on, if those that are written are others."""
    combined = {name: each.tensors for name, each in draft.combinations.items() if name not in beside}
    sources = [{name: tensors[number] for name, tensors in combined.items()} for number in range(_count(combined))]
    if any(others_trained(sources[0], other, beside) for other in sources[1:]):
        return "the weights of one checkpoint, and these are an average"
    if setting.of_base is None or setting.base is None:
        return None
    own = {name: tensor for name, tensor in draft.tensors.items() if name not in draft.from_base}
    return f"the weights of {setting.base.folder}, and these differ" if others_trained(own, setting.alike(draft)[0], beside) else None


def _count(combined: Mapping[str, Sequence[Tensor]]) -> int:
    return min((len(tensors) for tensors in combined.values()), default=0)


def _go(files: Sequence[TensorsBeside]) -> str:
    return "it goes" if len(files) == 1 else "they go"
