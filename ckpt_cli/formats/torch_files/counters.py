"""Numbers that an average of weights keeps about itself: no weights, and where they are 0 the average has not begun."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ckpt_cli.formats.torch_files.averages import COUNTER, is_averaged_model
from ckpt_cli.names import DDP
from ckpt_cli.tensors.component import Component, Note
from ckpt_cli.tensors.reading import element_bytes
from ckpt_cli.tensors.tensor import Tensor


def without_counter(component: Component) -> Component:
    """A component that is the state of torch's ``AveragedModel`` as the model in it, whatever format it is in."""
    if not is_averaged_model(component.tensors):
        return component
    counter = component.tensors[COUNTER]
    short = {name: name.removeprefix(DDP) for name in component.tensors if name != COUNTER}
    tensors = {
        new: replace(tensor, name=new, alias_of=short.get(tensor.alias_of or "", tensor.alias_of))
        for old, new in short.items()
        for tensor in (component.tensors[old],)
    }
    return replace(component, tensors=tensors, notes=(*component.notes, *begun_notes([counter])))


def begun_notes(counters: Iterable[Tensor]) -> list[Note]:
    """A warning if an average has not begun, by its counters: what it holds then is a copy of the model."""
    unbegun = next((counter for counter in counters if counter.numel == 1 and not any(element_bytes(counter))), None)
    if unbegun is None:
        return []
    what = f"{unbegun.name} is {'False' if unbegun.dtype.kind == 'bool' else '0'}: the average has not begun"
    return [Note("warning", "average-not-begun", f"{what}, and these are weights of the model from when it was made or last copied")]
