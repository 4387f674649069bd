"""From Megatron's tensors to those of the hub, as views of pieces, proved in both directions before anything is written.

Every tensor of Megatron must have a row and the row's shape, and is used once; every tensor that the class has in its layers and
experts must come out, once. A padded vocabulary is cut to the size in the config.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from ckpt_cli.boxes import shape_text
from ckpt_cli.errors import Inconsistent, MissingTensors, Unsupported
from ckpt_cli.hub.classes.tying import ties_embeddings
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.megatron.architectures import ARCHITECTURES, Architecture, architecture_of
from ckpt_cli.hub.megatron.names import OUTPUT, OUTPUT_BIAS, Parsed, common_wrapper, parsed
from ckpt_cli.hub.megatron.rows import CRITIC, CRITIC_BIAS, TOP, Row, Rows
from ckpt_cli.hub.megatron.sizes import sizes_of
from ckpt_cli.names import few, plural, printable
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.tensors.views import concatenated, sliced

NATIVE = "--names native writes them as they are"
SAME_MODEL = "config.json may be that of another model: pass the --base of this one"


def hub_tensors_of_megatron(tensors: Mapping[str, Tensor], config: Config, why_not: str = "") -> dict[str, Tensor]:
    """The tensors under the names of the hub, for the model type of ``config``; ``why_not`` says why there is none.

    Raises Unsupported without a config, for model types and tensors that no row names, Inconsistent for shapes that the config does not
    say, MissingTensors for tensors of the class that do not come out.
    """
    architecture = architecture_of(config)
    if architecture is None:
        raise _unknown_class(config, why_not)
    return _Conversion(architecture, config).run(tensors)


def _unknown_class(config: Config, why_not: str) -> Unsupported:
    kind = config.get("model_type")
    if kind is None:
        because = f": {why_not}" if why_not else ""
        text = f"Megatron's tensors get the names of the hub by a config.json, and there is none{because}"
        return Unsupported(text, expected="config.json of the model", hint=f"pass --base DIR with the base model; {NATIVE}")
    text = f"what Megatron calls the tensors of the model type {printable(kind)[:40]} is not known here"
    return Unsupported(text, expected=f"one of {', '.join(ARCHITECTURES)}", hint=NATIVE)


class _Conversion:
    """One model on its way: the rows of its class, and what came out so far."""

    def __init__(self, architecture: Architecture, config: Config) -> None:
        self._architecture = architecture
        self._sizes = sizes_of(config)
        self._tied = ties_embeddings(config)
        self._top: Rows = TOP
        self._origins: dict[str, str] = {}
        self._made: dict[str, Tensor] = {}

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        wrapper = common_wrapper(tensors)
        places = {name: parsed(name.removeprefix(wrapper)) for name in tensors}
        layers = self._size("L", next(iter(tensors)))
        head = tensors.get(wrapper + OUTPUT)
        if head is not None and head.shape[:1] == (1,) and self._sizes.get("V") != 1:
            self._top = (*CRITIC, *(CRITIC_BIAS if wrapper + OUTPUT_BIAS in tensors else ()))
            self._tied = False
        for name, place in places.items():
            row = self._row(name, place, layers)
            self._check_shape(name, tensors[name], row)
            for target, part in zip(row.targets, self._cut(tensors[name], row), strict=True):
                self._add(name, _target(target, place, layers), part)
        self._check_complete(layers, {place.layer for place in places.values() if place.where == "prediction"}, next(iter(tensors)))
        return self._made

    def _rows(self, place: Parsed, layers: int) -> Rows:
        if place.where == "top":
            return self._top
        if place.where == "prediction":
            return (*self._architecture.prediction, *self._architecture.layer(layers + place.layer))
        return self._architecture.layer(place.layer)

    def _row(self, name: str, place: Parsed, layers: int) -> Row:
        if place.where == "layer" and place.layer >= layers:
            text = f"it is of layer {place.layer}, and config.json says {plural(layers, 'layer')}"
            raise Inconsistent(text, tensor=name, expected=f"layers 0 to {layers - 1}", hint=SAME_MODEL)
        if place.expert is not None and place.expert >= (experts := self._size("E", name)):
            text = f"it is of expert {place.expert}, and config.json says {plural(experts, 'expert')}"
            raise Inconsistent(text, tensor=name, expected=f"experts 0 to {experts - 1}", hint=SAME_MODEL)
        known = place.where != "prediction" or self._architecture.prediction
        row = next((row for row in self._rows(place, layers) if place.rest in row.sources), None) if known else None
        if row is None:
            raise Unsupported(
                "no tensor of the model class in config.json is known for this one of Megatron",
                tensor=name,
                expected="a tensor that the class has in this layer",
                hint=f"pass the --base of this model if config.json is another's; {NATIVE}",
            )
        return row

    def _size(self, symbol: str, name: str) -> int:
        if symbol not in self._sizes:
            raise Inconsistent(f"config.json does not say the size {WORDS.get(symbol, symbol)}", tensor=name, hint=SAME_MODEL)
        return self._sizes[symbol]

    def _check_shape(self, name: str, tensor: Tensor, row: Row) -> None:
        wanted = tuple(self._size(symbol, name) for symbol in row.shape)
        padded = row.cut == "rows" and len(tensor.shape) == len(wanted) and tensor.shape[1:] == wanted[1:] and tensor.shape[0] >= wanted[0]
        if tensor.shape != wanted and not padded:
            text = f"it is {shape_text(tensor.shape)}, by config.json it is {'at least ' if row.cut == 'rows' else ''}{shape_text(wanted)}"
            raise Inconsistent(text, tensor=name, expected="the config.json of this model", hint=SAME_MODEL)

    def _cut(self, tensor: Tensor, row: Row) -> Sequence[Tensor]:
        if row.cut == "rows":
            return [sliced(tensor, 0, 0, self._sizes["V"])]
        if row.cut == "halves":
            middle = tensor.shape[0] // 2
            return [sliced(tensor, 0, 0, middle), sliced(tensor, 0, middle, tensor.shape[0])]
        return self._heads(tensor) if row.cut == "heads" else [tensor]

    def _heads(self, tensor: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values: a group holds the rows of its queries, then those of its key, then those of its value."""
        groups, width = self._sizes["G"], self._sizes["d"]
        queries = self._sizes["H"] // groups * width
        starts = range(0, groups * (queries + 2 * width), queries + 2 * width)
        spans = ((0, queries), (queries, queries + width), (queries + width, queries + 2 * width))
        return [concatenated([sliced(tensor, 0, start + first, start + last) for start in starts], 0) for first, last in spans]

    def _add(self, name: str, target: str, part: Tensor) -> None:
        if target in self._made:
            text = f"it would be {target}, and so would {self._origins[target]}"
            raise Inconsistent(text, tensor=name, expected="one tensor of each kind", hint="tensors of two models may be mixed")
        self._origins[target] = name
        self._made[target] = part

    def _check_complete(self, layers: int, predicted: set[int], name: str) -> None:
        """Raise MissingTensors for tensors of the class that no tensor of Megatron became."""
        lacking = list(itertools.islice((target for target in self._expected(layers, predicted) if target not in self._made), 1000))
        if lacking:
            raise MissingTensors(
                f"{plural(len(lacking), 'tensor')} of the class in config.json found in none of Megatron's: {few(lacking, 3)}",
                expected="a checkpoint with all layers and experts of config.json",
                hint=SAME_MODEL,
            )

    def _expected(self, layers: int, predicted: set[int]) -> Iterator[str]:
        """The names that must come out. Counts of the config are checked against what is there before they are counted to."""
        for row in self._top:
            yield from (target for target in row.targets if not (self._tied and OUTPUT in row.sources))
        for layer in range(layers):
            yield from self._of_layer(self._architecture.layer(layer), layer)
            if layer > len(self._made):
                return
        for number in sorted(predicted):
            yield from self._of_layer((*self._architecture.prediction, *self._architecture.layer(layers + number)), layers + number)

    def _of_layer(self, rows: Rows, layer: int) -> Iterator[str]:
        for row in rows:
            for target in row.targets:
                if "{e}" not in target:
                    yield f"model.layers.{layer}.{target}"
                    continue
                for expert in range(min(self._size("E", target), len(self._made) + 1)):
                    yield f"model.layers.{layer}.{target.replace('{e}', str(expert))}"


WORDS = {"V": "vocab_size", "h": "hidden_size", "L": "num_hidden_layers", "f": "intermediate_size", "E": "of experts", "qkv": "of heads"}
"""What config.json calls some of the sizes."""


def _target(target: str, place: Parsed, layers: int) -> str:
    """The whole name on the hub; a layer of multi-token prediction follows those of the decoder."""
    if place.where == "top":
        return target
    layer = place.layer + (layers if place.where == "prediction" else 0)
    return f"model.layers.{layer}.{target.replace('{e}', str(place.expert))}"
