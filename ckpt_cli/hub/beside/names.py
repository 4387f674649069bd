"""The names of files beside weights: what is an asset, what no model needs, and what is neither for certain."""

from __future__ import annotations

import os
import re

from ckpt_cli.hub.beside.copied import copied_name

CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
ROUTER_CONFIG = "router_config.json"
"""The parts of a Router of sentence-transformers, each in a folder of its own."""

AUXILIARY = "ae.safetensors"
"""BAGEL's image decoder, which no training changes: the one weights file that is passed on as it is."""

OWN_CONFIGS = {"gliner_config.json": "GLiNER", "open_clip_config.json": "open_clip"}
"""What libraries build a model from in place of config.json, and which: nothing else has a file of such a name."""

PARAMS = "params.json"
"""The same of the first loaders of LLaMA and Mistral, and what many programs call the arguments of a run: its content tells."""

VOCABULARIES = frozenset(
    {
        "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model",
        "spm.model", "spm_char.model", "prophetnet.tokenizer", "byte_maps.json", "vocab-src.json", "tekken.json",
    }
)  # fmt: skip
"""What makes a tokenizer: the vocabularies that the tokenizers of transformers read, alone or with files of `OF_VOCABULARY`."""

OF_VOCABULARY = frozenset(
    {
        "merges.txt", "added_tokens.json", "special_tokens_map.json", "bpe.codes", "dict.txt", "emoji.json", "entity_vocab.json",
        "normalizer.json", "source.spm", "target.spm", "target_vocab.json", "vocab-tgt.json", "word_shape.json",
        "word_pronunciation.json", "artists.json", "genres.json", "lyrics.json",
    }
)  # fmt: skip
"""What belongs to a vocabulary and is no tokenizer alone."""

ASSET_NAMES = (
    VOCABULARIES
    | OF_VOCABULARY
    | {
        "config.json", "generation_config.json", TOKENIZER_CONFIG, "preprocessor_config.json", "processor_config.json",
        "video_preprocessor_config.json", "audio_tokenizer_config.json", "image_processor.json", "feature_extractor.json",
        "chat_template.json", "chat_template.jinja", "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json",
        "configuration.json", "dataset_statistics.json", "LICENSE", "LICENSE.txt", "NOTICE", "llm_config.json", "vit_config.json",
        "policy_preprocessor.json", "policy_postprocessor.json", "artifact.metadata", "config_setfit.json", ROUTER_CONFIG,
        "model_config.yaml",
    }
    | OWN_CONFIGS.keys()
)  # fmt: skip
"""What trainers write into a checkpoint's own folder. tests/test_asset_names.py compares them with what transformers reads.

Others are read by lerobot, ColBERT, SetFit and NeMo.
"""

ASSET_PATTERN = re.compile(r".*\.(jinja|tiktoken|spm)")
PICKLED = frozenset({"vocab.pkl", "vocab.bin"})
"""Vocabularies that old tokenizers kept as pickles, which are never passed on."""

TEMPLATE_FOLDER = "additional_chat_templates"
CODE_FOLDER = "custom_generate"
"""Code for generation, which transformers reads from a folder of its own, as it does with more than one chat template."""

ROBOT_FOLDER = "experiment_cfg"
"""What policies for robots were trained on: GR00T scales observations and actions with it."""

ROBOT_ASSETS = "assets"
"""The same of openpi, in a folder per data set."""

OF_ROBOT_PROCESSOR = ("statistics.json", "embodiment_id.json")
"""The same of GR00T since N1.6, whose processor reads them beside its config; alone they may be of any program."""

OF_FOLDERS = {
    TEMPLATE_FOLDER: re.compile(r".*\.jinja"),
    CODE_FOLDER: re.compile(r".*\.py|requirements\.txt"),
    ROBOT_FOLDER: re.compile(r"metadata\.json"),
    ROBOT_ASSETS: re.compile(r"([^/]+/){1,2}norm_stats\.json"),
}
"""What is read there, by the path in the folder."""

WEIGHT_SUFFIXES = frozenset(
    {
        ".safetensors", ".bin", ".pt", ".pth", ".th", ".ckpt", ".distcp", ".h5", ".msgpack", ".npz", ".npy", ".pkl", ".pickle",
        ".gguf", ".ggml", ".llamafile", ".onnx", ".onnx_data", ".data", ".ot", ".tflite", ".mlmodel", ".pdparams", ".nemo", ".engine",
        ".tar", ".zip", ".gz", ".zst",
    }
)  # fmt: skip
"""Weights in any form, and archives, which may hold them: never an asset."""

OTHER_FORMS = re.compile(
    # Weights for engines and devices, and archives.
    r"pb|pt2|keras|hdf5|params?|pte|task|litertlm|mnn|ncnn|plan|trt|exl[23]|torchscript|mlpackage|mlmodelc|rknn|om|dlc|hef|xnnpack|vmfb"
    r"|caffemodel|int[48]|weights?|tgz|tbz2?|txz|xz|bz2|lz4|lzma|br|7z|rar"
)
COPIES = re.compile(
    r".*(~|\.(bak|orig|old|backup|save|tmp|part(ial)?|rej|crdownload|incomplete|disabled)[0-9]*|\.part[0-9]+(of[0-9]+)?)"
    r"|.*( \([0-9]+\)| copy( [0-9]+)?|[ ._-](bak|backup|orig|old))(\.[^.]*)?|(copy|backup) of .*",
    re.ASCII | re.IGNORECASE,
)
"""Copies of files that users and programs put aside."""

MAX_UNKNOWN = 64 << 20
"""Bytes of a file of which nothing tells what it is; what is larger may be weights."""

OF_CODES = re.compile(
    r"(hf_)?quant(ize|ization)?_?(cfg|config|strategy|settings|map)?\.json|quanto_qmap\.json|gptq_config\.json|smash_config\.json"
)
"""What ModelOpt, AutoGPTQ, AutoAWQ, HQQ, Quanto and others write beside weights that they quantised, and engines take for true."""

NO_ASSETS = re.compile(
    r".*\.index(\.[\w-]+)?\.json|adapter_config\.json|lora_train_meta\.json|(trainer|rng|data\w*|extra)_state\.json|\w+_results\.json"
    r"|events\.out\.tfevents\..*|.*\.log|(\w+_log|logging)\.jsonl"
    r"|(fsdp|ds|deepspeed|zero|accelerate|trainer|training|train|run)(_config|_args)?\.(json|ya?ml)|args\.json"
    r"|openvino_.*|(ov|genai|mlc-chat)[_-]config\.json|(ndarray|tensor)-cache\.json|imatrix.*|checklist\.chk"
    r"|(latest|LATEST|last)(_\w+)?(\.txt)?|checkpoint_tracker\.json|ckpt_contents\.json|metadata\.json"
    # What MLflow writes beside the folder of a model: its own description, and how to build the process that serves it.
    r"|MLmodel|(conda|python_env)\.yaml|(serving_)?input_example\.json|registered_model_meta",
    re.ASCII,
)
"""What belongs to other weights than those that are written, or to a training."""

OF_TRAINING = re.compile(
    # Logs, tables, pictures, scripts and settings of a run, data, and what describes the folder itself.
    r".*\.(jsonl|log|out|err|csv|tsv|md|rst|html?|pdf|png|jpe?g|gif|svg|webp|wav|mp3|mp4|py|pyc|sh|bash|slurm|sbatch|ipynb|patch|diff"
    r"|ya?ml|toml|ini|cfg|conf|env|lock|pid|tmp|bak|swp|sha256|md5|parquet|arrow|db|sqlite3?|wandb|done|prof|pstats"
    r"|aria2|st|lftp-pget-status|incomplete|part|partial|crdownload|opdownload|download)"
    r"|(readme|licen[cs]e|notice|use_policy|copying|changelog|requirements|authors|citation)([._-].*)?"
    r"|(.*[._-])?(results?|metrics|history|hparams|progress|scores?|predictions|samples|summary|timing|timers?|trace|loss(es)?|logs?"
    r"|states?|status|args|arguments)([._-]?[0-9]+)?\.(json|txt)"
    r"|(optim(izer)?|scheduler|trainer|training|train|eval(uation)?|wandb|dataloader|sampler|fsdp|ds|deepspeed|megatron|zero|adapter|lora"
    r"|checkpoint|ckpt|epoch|step|global_step|iteration|iter|version|commit|git|pip|environment)s?([._-].*)?\.(json|txt)"
    r"|(.*[._-])?(steps?|epochs?|iterations?|iter|done|finished|completed?|success|saved|tag|latest|version)([._-].*)?(\.txt)?"
    r"|modelcard\.json|nohup.*|makefile|dockerfile|hostfile.*",
    re.ASCII | re.IGNORECASE,
)
"""What lies beside config and tokenizer of a checkpoint in any run, and no loader reads."""


ARRAYS = (".pkl", ".pickle", ".joblib", ".npy", ".npz")
"""Endings of small files that a library fits after the training (a classifier, a projection), and of much that a trainer keeps."""

SETTINGS = re.compile(r"(config|hyper_?params|model([_-]config)?|preprocessor)\.ya?ml", re.ASCII)
"""What models of ESPnet, SpeechBrain and others are built from, and what many runs were started with."""


def folder_read(name: str) -> str | None:
    """The folder below the top in which a loader finds a file, by the path there; None if nothing looks for it.

    >>> [folder_read(name) for name in ("assets/droid/norm_stats.json", "custom_generate/generate.py", "1_Pooling/config.json")]
    ['assets', 'custom_generate', None]
    """
    folder, _, inside = name.partition("/")
    return folder if folder in OF_FOLDERS and OF_FOLDERS[folder].fullmatch(inside) is not None else None


def is_doubtful(name: str) -> bool:
    """Whether a file that is no asset, and is not passed on, may be needed all the same.

    >>> [is_doubtful(name) for name in ("pca.npy", "label_encoder.pkl", "config.yaml")]
    [True, True, True]
    >>> [is_doubtful(name) for name in ("rng_state_0.pkl", "train_losses.npy", "train.yaml", "scheduler.pkl")]
    [False, False, False, False]
    """
    stem, end = os.path.splitext(name)
    if SETTINGS.fullmatch(name) is not None:
        return True
    as_text = f"{stem}.json"
    return end in ARRAYS and not name.startswith(".") and (OF_TRAINING.fullmatch(as_text) or NO_ASSETS.fullmatch(as_text)) is None


def has_weight_suffix(name: str) -> bool:
    """Whether a file holds weights, or may, by the end of its name."""
    return os.path.splitext(name)[1] in WEIGHT_SUFFIXES


def is_put_aside(name: str) -> bool:
    """Whether a file is no known one, but by its name a copy of one, an archive, or weights in a form that is not usual.

    >>> [is_put_aside(name) for name in ("model.safetensors.orig", "config (1).json", "qwen.tgz", "model.gguf.part1of2")]
    [True, True, True, True]
    >>> [is_put_aside(name) for name in ("model.safetensors", "ice_text.model", "tokenizer.model.v3", "tokenizer.json")]
    [False, False, False, False]
    """
    if is_asset_name(name) or has_weight_suffix(name) or NO_ASSETS.fullmatch(name) is not None:
        return False
    ends = name.lower().split(".")[1:]
    return _is_copy(name) or any(f".{end}" in WEIGHT_SUFFIXES or OTHER_FORMS.fullmatch(end) for end in ends)


def is_asset_name(name: str) -> bool:
    """Whether a file is an asset by its name alone, wherever it lies.

    >>> [is_asset_name(name) for name in ("bpe.codes", "qwen.tiktoken", "hf_quant_config.json", "trainer_state.json")]
    [True, True, True, False]
    """
    known = name in ASSET_NAMES or OF_CODES.fullmatch(name) is not None
    return known or (ASSET_PATTERN.fullmatch(name) is not None and not _is_copy(name))


def _is_copy(name: str) -> bool:
    return COPIES.fullmatch(name) is not None or copied_name(name) is not None


def is_unknown(name: str) -> bool:
    """Whether nothing tells of a file what it is, so that a loader may need it.

    >>> [is_unknown(name) for name in ("ice_text.model", "action_statistics.json", "vocab.pkl")]
    [True, True, True]
    >>> [is_unknown(name) for name in ("README.md", "scheduler.pt", "eval_results.json", "train.sh")]
    [False, False, False, False]
    """
    if name in PICKLED:
        return True
    if is_asset_name(name) or name.startswith(".") or has_weight_suffix(name) or is_put_aside(name):
        return False
    return NO_ASSETS.fullmatch(name) is None and OF_TRAINING.fullmatch(name) is None
