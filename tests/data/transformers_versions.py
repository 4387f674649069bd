"""Names, shapes and configs that versions of transformers save, without weights: `python -m tests.data.transformers_versions TABLE.json.xz`.

Run in the root of the repository once for each version of transformers, with torch, in an environment of that version. It adds the version
to the table, or replaces it: tiny models of `MODELS` and of `MORE`, each with the config.json, the tensors of its files, those in memory
(what a training saves), and which of the latter share their storage. What a version does not know is left out.
"""

from __future__ import annotations

import copy
import json
import lzma
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from tests.architectures import DENSE, GROUPS, EXPERTS, IMAGES, MODELS, QWEN_IMAGES, QWEN_TEXT, SEQ2SEQ, WORDS, build

LLAMA, QWEN2 = {**DENSE, "model_type": "llama"}, {**DENSE, "model_type": "qwen2"}
SIGLIP = {**IMAGES, "model_type": "siglip_vision_model", "vision_use_head": False}
AUDIO = {
    "num_mel_bins": 8, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "d_model": 32, "max_source_positions": 16,
}  # fmt: skip
MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llava_onevision": ("LlavaOnevisionForConditionalGeneration", "llava_onevision", {"text_config": QWEN2, "vision_config": SIGLIP}),
    "smolvlm": ("SmolVLMForConditionalGeneration", "smolvlm", {"text_config": {**LLAMA, "pad_token_id": 0}, "vision_config": IMAGES, "pad_token_id": 0}),
    "glm4v": (
        "Glm4vForConditionalGeneration",
        "glm4v",
        {"text_config": QWEN_TEXT, "vision_config": {**QWEN_IMAGES, "image_size": 8}},
    ),
    "glm4v_moe": (
        "Glm4vMoeForConditionalGeneration",
        "glm4v_moe",
        {"text_config": {**QWEN_TEXT, **EXPERTS, **GROUPS}, "vision_config": {**QWEN_IMAGES, "image_size": 8}},
    ),
    "qwen2_audio": ("Qwen2AudioForConditionalGeneration", "qwen2_audio", {"text_config": QWEN2, "audio_config": AUDIO}),
    "got_ocr2": (
        "GotOcr2ForConditionalGeneration",
        "got_ocr2",
        {
            "text_config": QWEN2,
            "vision_config": {
                "hidden_size": 32, "output_channels": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4,
                "mlp_dim": 48, "window_size": 2, "global_attn_indexes": [1],
            },
        },
    ),  # fmt: skip
    "colpali": (
        "ColPaliForRetrieval",
        "colpali",
        {
            "vlm_config": {
                "model_type": "paligemma", "text_config": {**DENSE, "model_type": "gemma"}, "vision_config": SIGLIP, "projection_dim": 32,
            },
            "embedding_dim": 8,
        },
    ),  # fmt: skip
    "colqwen2": (
        "ColQwen2ForRetrieval",
        "colqwen2",
        {
            "vlm_config": {"model_type": "qwen2_vl", "text_config": QWEN_TEXT, "vision_config": {**QWEN_IMAGES, "embed_dim": 32, "mlp_ratio": 2}},
            "embedding_dim": 8,
        },
    ),
    "llava, tied": (
        "LlavaForConditionalGeneration",
        "llava",
        {"text_config": {**QWEN2, "tie_word_embeddings": True}, "vision_config": SIGLIP, "tie_word_embeddings": True},
    ),
    "t5, untied": (
        "T5ForConditionalGeneration",
        "t5",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64, "tie_word_embeddings": False},
    ),
    "clip, vision": ("CLIPVisionModel", "clip_vision_model", IMAGES),
    "siglip, vision": ("SiglipVisionModel", "siglip_vision_model", IMAGES),
    "clip, text": ("CLIPTextModelWithProjection", "clip_text_model", {**WORDS, "projection_dim": 8}),
    "marian": ("MarianMTModel", "marian", {**SEQ2SEQ, "decoder_start_token_id": 1, "pad_token_id": 0, "eos_token_id": 1}),
    "wav2vec2": (
        "Wav2Vec2ForCTC",
        "wav2vec2",
        {
            **WORDS, "conv_dim": [8, 8], "conv_kernel": [3, 3], "conv_stride": [2, 2], "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
        },
    ),  # fmt: skip
}  # fmt: skip
LEFT_OUT = ("llama4", "falcon_h1", "jamba", "minimax", "idefics3", "phimoe", "ernie4_5_moe", "qwen3_next", "deepseek_v2", "roberta", "mistral")
"""Models of `MODELS` that no test of older versions is about, or whose older configs transformers 5 cannot read."""


def flat(options: dict[str, Any]) -> dict[str, Any]:
    """Older configs of Qwen2-VL have what is said of the language model at the top."""
    rest = copy.deepcopy(options)
    return {**rest.pop("text_config"), **rest}


def described(kind: str, model_type: str, options: dict[str, Any]) -> dict[str, Any]:
    from safetensors import safe_open

    try:
        model = build(kind, model_type, options)
    except AttributeError:
        model = build(kind, model_type, flat(options))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        (path,) = Path(folder).glob("*.safetensors")
        with safe_open(path, "pt") as file:
            files = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}
    state, owners, shared = model.state_dict(), {}, {}
    for name, tensor in state.items():
        owner = owners.setdefault((tensor.data_ptr(), tensor.shape) if tensor.numel() else name, name)
        if owner != name:
            shared[name] = owner
    integers = [name for name, tensor in state.items() if not tensor.is_floating_point()]
    return {
        "config": config,
        "files": files,
        "memory": {name: list(tensor.shape) for name, tensor in state.items()},
        "shared": shared,
        "integers": integers,
    }


def main(path: Path) -> None:
    import transformers

    warnings.filterwarnings("ignore")
    table = json.loads(lzma.decompress(path.read_bytes())) if path.exists() else {}
    found = table[transformers.__version__] = {}
    models = {name: entry for name, entry in MODELS.items() if name not in LEFT_OUT}
    for name, (kind, model_type, options) in sorted({**models, **MORE}.items()):
        try:
            found[name] = described(kind, model_type, dict(options))
        except (KeyError, AttributeError, ImportError) as error:
            print(f"{transformers.__version__} has no {name}: {type(error).__name__} {error}")
    text = json.dumps(dict(sorted(table.items())), separators=(",", ":"), sort_keys=False)
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
