"""The findings of `verify`: every code with its severity, the level that finds it, and what it means. docs/findings.md lists them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckpt_cli.errors import CkptError, FindingsError, NotFetched, Unreadable
from ckpt_cli.hub.second_component import RECOMPUTED
from ckpt_cli.names import plural
from ckpt_cli.results.verify import Finding
from ckpt_cli.tensors.records import DamagedRecord

Severity = Literal["error", "warning", "info"]
Level = Literal["headers", "full", "against", "base"]


@dataclass(frozen=True, slots=True)
class Kind:
    """What a code stands for; ``advice`` is what to do about it."""

    severity: Severity
    level: Level
    meaning: str
    advice: str = ""


AGAIN = "merge again, or copy the folder again"

UNLESS_MEANT = "merge again, unless it was changed on purpose"
MOVE, COMPARE = "move it away", "compare it with the original file"

KINDS: dict[str, Kind] = {
    # -- headers: names, sizes, headers and JSON; no weight byte is read
    "damaged-file": Kind("error", "headers", "a file of weights or state is truncated, or its header is broken or wrong", AGAIN),
    "empty-file": Kind("error", "headers", "a weights file that holds no tensor", AGAIN),
    "unread-file": Kind("error", "headers", "a weights file with a dtype or shape that is not supported: its content was not checked"),
    "damaged-index": Kind("error", "headers", "the index cannot be read, lacks what loaders read, or points outside of the folder", AGAIN),
    "damaged-config": Kind("error", "headers", "config.json cannot be read", "restore it from the run or the base"),
    "damaged-manifest": Kind("warning", "headers", "ckpt-manifest.json cannot be read, so it proves nothing", AGAIN),
    "damaged-side-file": Kind(
        "error",
        "headers",
        "a file of the tokenizer, the processor or the code is empty, cut off, cannot be read, or holds something else than its name says",
        "get it again from the base",
    ),
    "partial-tokenizer": Kind(
        "error",
        "headers",
        "a tokenizer lacks a file that its class reads: it does not load, or has an empty vocabulary",
        "copy the whole tokenizer from the run or the base",
    ),
    "lacks-processor": Kind(
        "warning",
        "headers",
        "there is a tokenizer, but nothing that makes the inputs of the model of images, sounds or videos: AutoProcessor fails",
        "copy the files of the processor from the run or the base",
    ),
    "lacks-named-file": Kind(
        "error",
        "headers",
        "a file beside the weights names another one, such as the numbers that a policy scales with, which is not there: it does not load",
        "copy that file from the run or the base that the first one is from",
    ),
    "lacks-part": Kind(
        "warning",
        "headers",
        "modules.json names a folder that is not there, or that has lost its weights: the model does not load",
        "copy the folder from the run or the base",
    ),
    "lacks-code": Kind(
        "warning",
        "headers",
        "auto_map of a config, or code that it names, names a module or a class that is not there: trust_remote_code=True fails",
        "copy the code from the run or the base",
    ),
    "near-name": Kind(
        "warning",
        "headers",
        "a file whose name is nearly that of a side file which is missing: other letters, a suffix more, a second download",
        "rename it, if it is that file",
    ),
    "changed-side-file": Kind(
        "warning", "headers", "a file beside the weights has changed since it was written", "merge again, unless it was changed on purpose"
    ),
    "lfs-pointer": Kind("error", "headers", "a Git LFS pointer stands in place of a file", "git lfs pull, in its repository"),
    "file-pointer": Kind(
        "error", "headers", "a pointer of git-annex or git-xet, or the text of a link, stands in place of a file", "get the file itself"
    ),
    "unfinished-download": Kind(
        "error",
        "headers",
        "a download tool keeps account of what a file still lacks (.aria2 and the like): its parts were not all fetched",
        "finish the download, or delete the tool's file if this one is known to be whole",
    ),
    "unreadable-file": Kind(
        "error", "headers", "the system does not allow this file to be read: it was not checked", "make it readable, then verify again"
    ),
    "missing-file": Kind("error", "headers", "a file that the index or the manifest names is not there", AGAIN),
    "missing-index": Kind("error", "headers", "parts of a model without an index: nothing shows that they are complete", AGAIN),
    "part-of-set": Kind("error", "headers", "weights that are one part of a set, by their names or headers", "get the whole set"),
    "changed-size": Kind("error", "headers", "the size of a file of weights or state has changed since it was written", AGAIN),
    "other-manifest": Kind("warning", "headers", "ckpt-manifest.json lists none of the weights here: it is that of another folder", MOVE),
    "stale-file": Kind("error", "headers", "a weights file that belongs to no index: loaders may read it instead", MOVE),
    "leftover-index": Kind("warning", "headers", "an index none of whose files is here, beside other weights: it is not used", MOVE),
    "misplaced-tensor": Kind("error", "headers", "index and files disagree about which file holds a tensor", AGAIN),
    "duplicate-tensor": Kind("error", "headers", "two files of one model hold the same tensor", "move the older file away"),
    "empty-weights": Kind(
        "error", "headers", "weights without elements, as DeepSpeed ZeRO stage 3 leaves them", "save again with gathered weights"
    ),
    "sparse-file": Kind("warning", "headers", "parts of a weights file were never written: an interrupted copy", COMPARE),
    "unwritten-weights": Kind(
        "error", "headers", "tensors that are not zeros in a trained model were never written: an interrupted copy", "copy the file again"
    ),
    "index-total": Kind("warning", "headers", "the total size in the index (bytes) is not that of the tensors"),
    "mixed-exports": Kind(
        "warning",
        "headers",
        "files of one model have the same kinds of weights in different dtypes: they may be from two exports",
        COMPARE,
    ),
    "missing-tensor": Kind("error", "headers", "the model class has this tensor, but the weights lack it", AGAIN),
    "optional-tensor": Kind(
        "warning",
        "headers",
        "the model class has this tensor, but the weights lack it, and loaders set it to its initial value without a word",
        "merge again with --carry-from-base, if the training had values of it",
    ),
    "recomputed-tensor": Kind(
        "info",
        "headers",
        "the weights lack this tensor, which models compute anew, count with, or do not use",
    ),
    "less-than-model": Kind("error", "headers", "an average lacks a tensor that the model beside it has"),
    "cut-tensor": Kind(
        "error", "headers", "a tensor is not whole: it has another shape than the config asks for, which others of the model fit", COMPARE
    ),
    "wrong-shape": Kind(
        "error", "headers", "the shapes of tensors are not those that the config asks for", "restore config.json from the run"
    ),
    "misread-square": Kind(
        "warning",
        "headers",
        "older versions of transformers store these with two dimensions exchanged; newer ones see that by the shape, which is square here",
        "load it with the version of transformers that saved it",
    ),
    "replaced-tensors": Kind(
        "warning", "headers", "the class of this model_type has tensors in whose place a class that transformers lacks may have others"
    ),
    "extra-tensor": Kind("warning", "headers", "the model class has no place for this tensor: loaders ignore it"),
    "unlisted-tensor": Kind(
        "warning",
        "headers",
        "a name that is not among those shipped for the class; where transformers can build it, verify can tell whether it has it",
    ),
    "buffer-differs": Kind("warning", "headers", "the model class computes this anew from config.json, with other values than are stored"),
    "buffer-agrees": Kind("info", "headers", "the model class has no place for this, as it computes the same values from config.json"),
    "extra-layer": Kind(
        "warning", "headers", "a layer or expert beyond those of the config: loaders leave it out", "restore config.json from the run"
    ),
    "prefixed-names": Kind(
        "error", "headers", "the model's names begin with a prefix that the class does not have: loaders find no tensor", AGAIN
    ),
    "unknown-names": Kind("error", "headers", "no tensor has a name that the model class knows", "rename them: ckpt merge --key-map"),
    "doubled-prefix": Kind("warning", "headers", "names have the prefix of the base model one time too many", AGAIN),
    "not-proved": Kind(
        "warning", "headers", "a tensor that the class usually has is not there; where transformers can build the class, verify can tell"
    ),
    "mixed-names": Kind("error", "headers", "names of two kinds in one model, such as fused and single experts: loaders fail", AGAIN),
    "second-tensor": Kind(
        "error", "headers", "two tensors for one parameter, such as gamma and weight of a norm: loaders use one without a word", AGAIN
    ),
    "no-layers": Kind("warning", "headers", "layers of config.json, or those before others, are not there: one part of a model, maybe"),
    "uneven-layers": Kind("warning", "headers", "a layer lacks tensors that most layers of its stack have"),
    "unusual-count": Kind(
        "warning", "headers", "a count in config.json is no whole number, and the class is not one of transformers: most loaders fail"
    ),
    "odd-count": Kind(
        "error", "headers", "a count in config.json (layers, heads, experts, sizes) is no whole number: loaders fail", "correct config.json"
    ),
    "odd-setting": Kind(
        "error",
        "headers",
        "a number in a config is NaN, or infinite where it decides what is computed: results are NaN or wrong",
        "correct it in the config",
    ),
    "unbuildable-config": Kind(
        "warning", "headers", "transformers has the class, but cannot build it from config.json: loading fails too", "correct config.json"
    ),
    "unasked-class": Kind("warning", "headers", "transformers has the class, but this machine lacks what it needs to build it"),
    "other-model-type": Kind("warning", "headers", "config.json names a class of another model_type: loaders choose by the type"),
    "no-scales": Kind("warning", "headers", "config.json, or a file beside it, says that weights are quantised, but there are no scales"),
    "odd-dtype": Kind("warning", "headers", "weights that are integers, complex numbers or codes where a model has floats"),
    "missing-layers": Kind(
        "error", "headers", "layers or experts that config.json counts are not there, or tensors that one layer alone lacks", AGAIN
    ),
    "extra-layers": Kind("warning", "headers", "more layers than config.json counts", "restore config.json from the run"),
    "extra-experts": Kind("warning", "headers", "more experts than config.json counts", "restore config.json from the run"),
    "class-rows": Kind("warning", "headers", "the classifier does not have num_classes rows, or labels are missing", "correct config.json"),
    "vocabulary-rows": Kind("warning", "headers", "the embedding does not have vocab_size rows", "correct config.json"),
    "no-prediction-layers": Kind("warning", "headers", "config.json asks for more layers of multi-token prediction than are there"),
    "lost-head": Kind("warning", "headers", "the output head is not there, and config.json, or the version that wrote it, does not tie it"),
    "no-tower": Kind("warning", "headers", "config.json has a part (vision, audio) for which there are no tensors"),
    "left-out": Kind(
        "info", "headers", "tensors that were left out on purpose (filters, a key map, --allow-missing): loaders that need them miss them"
    ),
    "partial-output": Kind("warning", "headers", "the output was made from one that had been written without some tensors"),
    "damaged-adapter": Kind("error", "headers", "LoRA factors and adapter_config.json do not match", "export the adapter again"),
    "partial-adapter": Kind(
        "warning", "headers", "layers without LoRA factors, and nothing says that they were left out", "look for the adapter's other files"
    ),
    "unknown-setting": Kind(
        "warning", "headers", "adapter_config.json has a setting that ckpt does not know, and which may change the result"
    ),
    "lora-alpha": Kind("warning", "headers", "two files say other alphas of the adapters", "correct the one that is wrong"),
    "unfused-adapters": Kind(
        "warning",
        "headers",
        "adapters of a kind that ckpt does not fuse, alone or beside weights: what loads the model leaves them out",
        "merge them with the program that made them",
    ),
    "adapter-twice": Kind(
        "error",
        "headers",
        "adapter_config.json lies beside weights that this adapter was fused into: transformers adds it again",
        "merge with -o instead of --in-place, or move adapter_config.json away",
    ),
    "adapter-on-top": Kind(
        "warning",
        "headers",
        "adapter_config.json lies beside the weights of a model: transformers loads an adapter on top of them or in their place",
        "move adapter_config.json away, unless the weights are to be loaded with this adapter",
    ),
    "expert-layout": Kind("warning", "headers", "nothing says how Unsloth laid out lora_B of fused experts, and shapes cannot tell"),
    "config-dtype": Kind(
        "error",
        "headers",
        "config.json names a dtype that most weights do not have: loaders cast to it",
        "correct the dtype in config.json",
    ),
    "vocabulary": Kind("error", "headers", "the tokenizer produces ids for which the embedding has no row", "take both from one model"),
    "token-ids": Kind(
        "warning", "headers", "a config, or a file beside the vocabulary, names special tokens for which the embedding has no row"
    ),
    "placeholder-ids": Kind("warning", "headers", "config.json and the tokenizer have other ids for the place of images or sounds"),
    "processor-numbers": Kind("warning", "headers", "config.json and a processor have other numbers: the model cannot take what it makes"),
    "no-end": Kind(
        "warning",
        "headers",
        "generation_config.json lacks the eos_token_id that config.json has, which is not used beside it: texts never end",
        "add eos_token_id to generation_config.json",
    ),
    "added-tokens": Kind("info", "headers", "added tokens of the tokenizer have ids beyond the rows of the embedding"),
    "tied-alone": Kind(
        "warning",
        "headers",
        "a tensor is stored that the config ties to another, which is not: transformers takes it for both, other loaders find neither",
        "merge it again with --key-map, which gives it the name of the other",
    ),
    "tied-stored": Kind("info", "headers", "a tensor is stored although the config ties it to another"),
    "other-weights": Kind("info", "headers", "weights beside the model that belong to no index"),
    "other-model": Kind(
        "warning",
        "headers",
        "another weights file could also be the model: its tensors or samples of their values differ, or it was not compared",
        "move one of them away",
    ),
    "other-tensors": Kind(
        "warning", "headers", "the adapter of the model's own language in a side file has other tensors than the model", "remove the file"
    ),
    "no-config": Kind("info", "headers", "there is no config.json to compare the weights with"),
    "lacks-config": Kind(
        "warning", "headers", "a model folder without config.json: transformers cannot load it", "copy the config.json of the model into it"
    ),
    "no-model-config": Kind(
        "warning",
        "headers",
        "config.json is none of a model, such as the settings of a training: transformers cannot load the folder",
        "put the config.json of the model in its place",
    ),
    "unloaded-name": Kind(
        "warning",
        "headers",
        "weights under a name that what loads models of this config does not look for: from_pretrained passes over them",
        "give them the name that is looked for, or name them when loading",
    ),
    "own-tensor": Kind("info", "headers", "a tensor of a class that transformers lacks: that of its model type has no place for it"),
    "not-compared": Kind("info", "headers", "the tensors of the model class are unknown; the message says why"),
    # -- full: every byte is read
    "non-finite": Kind(
        "error", "full", "a tensor holds NaN or infinite values", "find out where they come from: use --against with the source"
    ),
    "non-finite-in-source": Kind("warning", "full", "a tensor holds NaN or infinite values, and the source has them too"),
    "infinite-mask": Kind("info", "full", "a mask that attention adds: zeros (or ones) and minus infinity, and nothing else"),
    "all-zero": Kind("warning", "full", "all elements of a matrix are zero: it may never have been loaded or trained"),
    "zero-tail": Kind("warning", "full", "a file's part of a matrix ends in zeros: an interrupted copy", COMPARE),
    "negative-variance": Kind(
        "warning", "full", "a running variance is below 0, as extrapolation leaves it: batch normalisation makes NaN of that", RECOMPUTED
    ),
    "zero-rows": Kind("info", "full", "the last rows of an embedding or a head are zero, as padding is"),
    "zeros": Kind("info", "full", "all elements of a vector or a bias are zero, or of a matrix that is zero in the source too"),
    "constant": Kind("info", "full", "all elements of a tensor are equal, as in norms when training begins"),
    "wrong-checksum": Kind("error", "full", "the bytes of a tensor or a header are not those that were written", AGAIN),
    "replicas-differ": Kind(
        "error", "full", "ranks hold different values of what should be replicas", "find out which files are from another save"
    ),
    "tied-differ": Kind("warning", "full", "the config ties two tensors whose values differ: a loader ignores one of them"),
    # -- against: every byte is compared with the source
    "different-values": Kind("error", "against", "a tensor does not hold the values of its source", AGAIN),
    "different-shape": Kind("error", "against", "a tensor has another shape than in the source", AGAIN),
    "different-dtype": Kind("error", "against", "the dtype of a tensor is not the requested one, or not one that a cast gives", AGAIN),
    "different-scale": Kind("error", "against", "adapter_config.json scales LoRA differently from the run", "export the adapter again"),
    "other-arguments": Kind(
        "error", "against", "config.json says other numbers than the run's arguments", "merge it again with the --base of this model"
    ),
    "other-settings": Kind(
        "error",
        "against",
        "config.json uses weights of these shapes otherwise than that of the source: rotary embedding, norms, heads, ties",
        UNLESS_MEANT,
    ),
    "other-side-file": Kind("warning", "against", "a file beside the weights is not that of the source, or missing", UNLESS_MEANT),
    "changed-source": Kind("info", "against", "a file that the output was made from has changed in size or time, or is gone"),
    "lost-tensor": Kind("error", "against", "the source has this tensor, but the output lacks it", AGAIN),
    "unproved-tensor": Kind(
        "error", "against", "the source has no such tensor, so nothing proves it", "ask for what the source has, or leave it out"
    ),
    # -- base: differences are no findings, but for those that are no numbers, a base of another model, and what only the base has
    "other-base": Kind(
        "error", "base", "the base is another model: its names and shapes differ", "pass the model that training started from"
    ),
    "unlike-base": Kind(
        "warning",
        "base",
        "samples of matrices have nothing in common with those of the base: another base, or trained from scratch",
        "pass the model that training started from",
    ),
    "unlike-layer": Kind(
        "warning", "base", "a matrix unlike that of the base, where other layers are like theirs: another model's, or new"
    ),
    "base-settings": Kind(
        "warning", "base", "config.json and that of the base use weights of these shapes differently: rotary embedding, norms, heads"
    ),
    "generation-settings": Kind(
        "warning", "base", "settings for generation that config.json of the base has, and no file here: generate() makes other texts"
    ),
    "other-end": Kind(
        "warning", "base", "the tokenizer ends texts otherwise than that of the base, at a token where generation does not end"
    ),
    "other-names": Kind("warning", "base", "the base has tensors of these shapes under other names: values were not compared"),
    "missing-of-base": Kind(
        "error", "base", "the base has this tensor, which is missing, and no class was compared that works without it", AGAIN
    ),
    "left-out-of-base": Kind(
        "warning", "base", "only the base has this tensor, and something says that a model may do without: the message says what"
    ),
    "not-a-number": Kind("warning", "base", "a difference is NaN or infinite: one side holds such values", "pass --full, which finds them"),
}


def finding(code: str, message: str, *, tensor: str | None = None, file: str | None = None, **numbers: float | str) -> Finding:
    """A finding of a known code; ``numbers`` are what was measured."""
    return Finding(code=code, severity=KINDS[code].severity, message=message, tensor=tensor, file=file, numbers=numbers)


def unread(code: str, error: CkptError, file: str | None) -> Finding:
    """A file that could not be read: ``code``, unless its content was never fetched or the system refused."""
    code = error.code if isinstance(error, NotFetched) else "unreadable-file" if isinstance(error, Unreadable) else code
    expected = f", expected {error.expected}" if error.expected and code == "damaged-file" else ""
    return finding(code, f"{error.message}{expected}", tensor=error.tensor, file=file)


def refuse_wrong(found: Sequence[Finding], output: Path, asked: Sequence[str], *, stands: bool = False) -> None:
    """Raise CorruptFile for an output made of damaged files, FindingsError for one that is wrong otherwise.

    ``asked`` are the options that the check is for; ``stands``: the output has its name.
    """
    errors = [item for item in found if item.severity == "error"]
    damaged = [item for item in errors if item.numbers.get("damaged") == "source"]
    details = [f"{item.code}: {': '.join(filter(None, (item.tensor, item.file, item.message)))}" for item in errors]
    after = "the output stands as it is, for you to look at" if stands else "nothing was published"
    if damaged:
        raise DamagedRecord(
            f"{plural(len(damaged), 'record')} of the checkpoint cannot be what was saved: {after}",
            path=damaged[0].file,
            tensor=damaged[0].tensor,
            hint="get the file again: it was damaged after it was saved",
            details=details,
        )
    if errors:
        raise FindingsError(
            f"the output has {plural(len(errors), 'error')}: {after}",
            path=output,
            hint=None if stands else f"leave out {' and '.join(asked)} to look at such an output, with ckpt verify",
            details=details,
        )
