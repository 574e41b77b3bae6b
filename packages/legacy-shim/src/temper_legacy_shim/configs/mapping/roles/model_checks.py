"""Check the model: fields of its config.json, chat template arguments, signs of images or audio.

Models that the target engine rejects are recognized by their names and by the config.json of a
local folder, with the facts of docs/models.md. An unknown name is not reported:
``temper-train --check`` examines the model itself.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.rl.rl_facts import response_key
from temper_legacy_shim.configs.mapping.roles.roles import is_megatron
from temper_legacy_shim.configs.reading.config_values import Plain

NEUTRAL: tuple[Plain, ...] = (None, False, 0, "", [], {})
"""Values that switch nothing on."""

_FIELD = re.compile(
    r"(actor_rollout_ref\.model|critic\.model|model)\.override_config\.(model_config\.)?(?P<field>.+)"
)
_POSITIONS = "max_position_embeddings"
_OF_THE_MACHINE = ("attn_implementation", "use_cache", "torch_dtype")
"""Fields of the computation, which do not change the model."""
_TEMPLATE = "data.apply_chat_template_kwargs"


def find_model_fields(draft: Draft) -> None:
    """Report a question for each field that changes the model, which nothing here reads."""
    for key in draft.old.origin:
        result = _FIELD.fullmatch(key)
        if result is None or result["field"] in _OF_THE_MACHINE or draft.old.get(key) in NEUTRAL:
            continue
        if result["field"] == _POSITIONS:
            _find_positions(draft, key)
            continue
        draft.find("override-config", key, value=draft.old.get(key))


def _find_positions(draft: Draft, key: str) -> None:
    """Ask if the model's position limit is below the longest sample; else report a note."""
    lengths = (draft.integer("data.max_prompt_length"), draft.integer(response_key(draft)))
    longest = sum(length for length in lengths if length is not None)
    limit = config_json(draft.text("actor_rollout_ref.model.path")).get(_POSITIONS)
    if isinstance(limit, int) and limit < longest:
        draft.find(
            "override-positions", key, value=draft.old.get(key), limit=limit, longest=longest
        )


def find_template_arguments(draft: Draft) -> None:
    """Report a question for arguments of the chat template: False changes a prompt as True does."""
    arguments = draft.old.get(_TEMPLATE)
    if not isinstance(arguments, dict) or not arguments:
        return
    for name, value in arguments.items():
        draft.find(
            "chat-template-kwargs", f"{_TEMPLATE}.{name}", source=_TEMPLATE, name=name, value=value
        )


def config_json(model: str) -> dict[str, object]:
    """Load the config.json of a local model folder; empty if that is impossible."""
    if not model:
        return {}
    try:
        file = Path(os.path.expandvars(model)).expanduser() / "config.json"
        fields = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError, RuntimeError):
        # Not the name of a file here, or a damaged file: temper-train --check reports it.
        return {}
    return fields if isinstance(fields, dict) else {}


_WORDS = (
    "vl[am]?", "omni", "o-2_6", "minicpm-?[vo]", "janus", "ovis", "ui-?tars", "gui-(owl|r1|actor)",
    "pi0", "vision", "visual", "video", "audio", "speech", "asr", "tts", "ocr", "r1-?v", "aria",
    "eagle-?2(\\.5)?", "blip-?", "step-?3", "points-reader", "points-1\\.5", "florence-?", "fuyu",
    "bagel", "emu-?[23]", "n?vila", "chameleon", "xgen-mm", "mm-(eureka|r1)", "qwen-image", "keye",
    "sa2va",
)  # fmt: skip
"""Words that mean something only next to digits, signs or ends (not in ``reveal``)."""
_FAMILIES = (
    "llava", "intern-?vl", "qwen-?vl", "deepseek-?vl", "pixtral", "paligemma", "medgemma",
    "gemma-?3n", "gemma-?4(?![\\db])", "smolvlm", "idefics", "molmo", "openvla", "longvila",
    "multimodal", "instructblip", "moondream", "xcomposer", "cogvlm", "cogagent", "mllama",
    "ultravox", "whisper", "voxtral", "videollama", "videochat", "perception-lm", "nvlm", "qvq",
    "onevision", "kosmos", "mplug", "olmocr", "salmonn", "cosmos-reason", "kimi-?k2\\.[5-9]",
    "qwen-?3[._][5-9](?![\\d.]*b)", "llama-?4(?![\\db])", "llama-?3\\.2-(11|90)b",
    "gemma-?3-(4|12|27)b", "mistral-small-(3\\.[1-9]|4(?!\\d)|[^/]*-250[3-9])",
    "magistral-small-(2509|25[1-9]\\d|1\\.2)", "devstral-small-2-", "ministral-3(?![\\db])",
    "mistral-medium-3", "mistral-large-3(?!\\d)", "glm-?4v", "-4\\.\\dv(?![a-z\\d])",
    "\\db?-?v(?![a-z\\d])",
)  # fmt: skip
_NAMES = re.compile(
    rf"(?<![a-z])({'|'.join(_WORDS)})\d*(?![a-z])|{'|'.join(_FAMILIES)}", re.IGNORECASE
)
_PATHS = (
    "actor_rollout_ref.model.path",
    "model.path",
    "model.partial_pretrain",
    "critic.model.path",
)
_KEYS = ("data.image_key", "data.video_key", "data.audio_key")
_SETTINGS = re.compile(
    r"mm_preprocessor|limit_images|vision_tower|limit_mm_per_prompt|mm_processor|return_multi_modal_inputs|image_patch_size|freeze_vision"
    r"|num_images_in_input|model\.vla$"
)
_DATA = re.compile(
    r"geo3k|geometry3k|llava|vqa|deepeyes|mm-eureka|multimodal|screenspot|infigui|libero|coco|refcoco|mathvista",
    re.IGNORECASE,
)

_PARTS = re.compile(
    r"(vision|visual|audio|speech|image|video|vit|vq)_(config|tower|encoder|backbone|model)|visual"
    r"|(mm_vision|mm_audio)_tower|(thinker|talker)_config|(img|audio)_processor|num_mel_bins"
)
"""Blocks of a config.json that describe an encoder of images, video or sound."""
_CLASSES = re.compile(
    r"VL(?![a-z])|VLM|Vision|Audio|Speech|Image|Video|Omni|Multimodal|Llava|Whisper|MiniCPM[VO]$"
)
_TYPES = re.compile(
    r"(?<![a-z])vl(?![a-z])|qwen_?vl|internvl|llava|omni|whisper|minicpm[vo]$|\dv(?![a-z])"
)


TEXT_PART_TYPES = frozenset(
    {"gemma3", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"}
)
"""Types of config.json for models whose text part FSDPEngine trains.

A copy of `VISION_LANGUAGE_TYPES`, because translations need no package of an engine.
"""
_TEXT_PART_NAMES = re.compile(
    r"qwen-?(2|2[._]5|3)[-_]?vl(?![a-z])|qwen-?3[._]5(?![\d.]*b)|gemma-?3-(4|12|27)b",
    re.IGNORECASE,
)


def _has_text_part(model: str) -> bool:
    """Check the config.json of a local folder, or else the name."""
    model_type = config_json(model).get("model_type")
    if model_type is not None:
        return str(model_type) in TEXT_PART_TYPES
    return _TEXT_PART_NAMES.search(model) is not None


def find_images(draft: Draft) -> None:
    """Ask about every sign of images, video or sound in model, config.json, data and settings."""
    models, others = dict(_model_signs(draft)), list(_other_signs(draft))
    if not models and not others:
        return
    if not others and not is_megatron(draft) and all(map(_is_general, models)):
        draft.find("text-part", models=" and ".join(models))
    else:
        draft.find("images", names="; ".join(dict.fromkeys([*models.values(), *others])))
    if any(_has_text_part(_text(draft, key)) for key in _PATHS[:2]):
        _find_trained_encoder(draft)


def _is_general(model: str) -> bool:
    """Check if a model with an encoder is mostly trained on text: there is no other Qwen3.5."""
    model_type = config_json(model).get("model_type", "")
    return re.search(r"qwen-?3[._]5", str(model_type or model), re.IGNORECASE) is not None


_FREEZE = "actor_rollout_ref.actor.freeze_vision_tower"
_NOT_IN_ENCODER = re.compile(r"vis|vit")
"""Patterns of exclude_modules that leave an encoder without adapter, such as ``.*visual.*``."""


def _find_trained_encoder(draft: Draft) -> None:
    """Report that the old run trained the encoder, by the rules of each release."""
    if draft.old.family.startswith("generation"):
        return
    megatron = is_megatron(draft)
    if not draft.old.has(_FREEZE):
        reason = f"{draft.old.version} had no setting that froze it"
    elif not draft.switch(_FREEZE):
        reason = f"{_FREEZE} is false"
    elif megatron:
        reason = f"Megatron did not read {_FREEZE}"
    elif draft.since("v0.8.0"):
        reason = f"{draft.old.version} did not read {_FREEZE}"
    elif draft.text("trainer.use_legacy_worker_impl") == "disable":
        reason = f"the engines of {draft.old.version} did not read {_FREEZE}"
    else:
        return
    model = "actor_rollout_ref.model" if draft.old.has("actor_rollout_ref.model") else "model"
    if (draft.integer(f"{model}.{'lora.rank' if megatron else 'lora_rank'}") or 0) > 0:
        excluded = f"{model}.{'lora.exclude_modules' if megatron else 'exclude_modules'}"
        if not _NOT_IN_ENCODER.search(draft.text(excluded)):
            draft.find("vision-tower.adapter", _FREEZE, reason=reason)
        return
    draft.find("vision-tower.trained", _FREEZE, reason=reason)


def _model_signs(draft: Draft) -> Iterator[tuple[str, str]]:
    """Yield each model that has an encoder, and the sign of it."""
    for key in _PATHS:
        model = _text(draft, key) if key == _PATHS[0] or draft.old.is_set(key) else ""
        if _NAMES.search(model):
            yield model, f"the model is {model}"
        elif part := _part(config_json(model)):
            yield model, f"the model is {model}, whose config.json says {part}"


def _other_signs(draft: Draft) -> Iterator[str]:
    yield from (f"{key} is set" for key in _KEYS if draft.old.is_set(key) and draft.text(key))
    files = " ".join(
        text
        for key in ("data.train_files", "data.val_files", "data.path")
        if (text := _text(draft, key))
    )
    if _DATA.search(files):
        yield f"the data are {files[:80]}"
    if _DATA.search(draft.config_name):
        yield f"the configuration is {draft.config_name}"
    # A limit or a cache of 0 also occurs in text runs.
    given = [
        key
        for key in draft.old.origin
        if _SETTINGS.search(key) and draft.text(key) not in ("", "0", "0.0")
    ]
    if given:
        yield f"{', '.join(given[:3])} {'is' if len(given) == 1 else 'are'} set"


def _text(draft: Draft, key: str) -> str:
    """Return a value; a shell variable is replaced by the value from the script."""
    return draft.expanded.get(key) or draft.text(key)


def _part(fields: Mapping[str, object]) -> str:
    for key, value in fields.items():
        if value and _PARTS.fullmatch(key):
            return key
    model_type = str(fields.get("model_type", ""))
    if _TYPES.search(model_type):
        return f"model_type {model_type}"
    classes = fields.get("architectures")
    for name in map(str, classes if isinstance(classes, list) else ()):
        if _CLASSES.search(name) or (
            name.endswith("ForConditionalGeneration") and "text_config" in fields
        ):
            return name
    return ""


_LAYERS = "has sparse, chunked or pure state-space layers"
_MEGATRON = (
    "is none of the models that MegatronEngine trains (Qwen2, Qwen2.5, Qwen3, Qwen3-MoE, "
    "Qwen3-Next, Llama 2 and 3, Mistral, Mixtral, Gemma 3, GLM-4.5, DeepSeek-V3, gpt-oss, "
    "Nemotron-H)"
)

_DISTILLED = re.compile(r"distill", re.IGNORECASE)
"""Such as DeepSeek-R1-Distill-Qwen-7B: a Qwen or Llama under the name of its teacher."""
_REFUSED: tuple[tuple[str, str, str], ...] = (
    (r"llama[-_]?4|(?:falcon[-_]?)?mamba|jamba", "llama4\\w*|(falcon_)?mamba\\d?|jamba", _LAYERS),
    (r"deepseek[-_]?(v3[._]2|v4)", "deepseek_v32|deepseek_v4", _LAYERS),
)
"""Models that FSDPEngine refuses with a sampler: names, model types, and the reason."""
_NOT_MEGATRON = (
    (
        r"qwen[-_]?3[._][5-9]|kimi[-_](linear|k2)|falcon[-_]?h1|deepseek[-_]?(v2|coder[-_]v2)"
        r"|minimax[-_]?m2|command[-_]?[ar](?![a-z])|aya[-_]|gemma(?![-_]?3)|phi[-_]?[34]|olmoe?"
        r"|glm[-_]?4(?![._][5-9])|glm[-_]?4[._]7[-_]flash|glm[-_]?5|smollm|exaone|granite"
        r"|internlm|baichuan|mimo[-_]|seed[-_]oss"
        r"|qwen[-_]?(1[._]5|2)[-_](moe|57b)"
    ),
    (
        r"qwen3_5\w*|kimi_\w*|falcon_h1|deepseek_v2|minimax_m2|cohere\d?|gemma|gemma[24]\w*|phi3"
        r"|olmo\w*|glm|glm4|glm4_moe_lite|glm_moe_dsa|smollm3|exaone\w*|granite\w*|qwen2_moe"
        r"|mimo|seed_oss"
    ),
)


def find_refused_models(draft: Draft) -> None:
    """Warn about a model that the run would end with, before it is downloaded and converted."""
    engine = "MegatronEngine" if draft.old.family.endswith("megatron") else "FSDPEngine"
    for key, model, reason in _refused(draft, is_megatron=engine == "MegatronEngine"):
        draft.report(
            "hazard",
            "model-path",
            f"{engine} refuses the model {model}: it {reason}. See docs/models.md for those that "
            "it trains.",
            key,
        )


def _refused(draft: Draft, *, is_megatron: bool) -> Iterator[tuple[str, str, str]]:
    for key in _PATHS:
        model = (draft.expanded.get(key) or draft.text(key)) if draft.old.is_set(key) else ""
        model_type = str(config_json(model).get("model_type", ""))
        rows = (*_REFUSED, (*_NOT_MEGATRON, _MEGATRON)) if is_megatron else _REFUSED
        name = "" if _DISTILLED.search(model) else model.rstrip("/").rpartition("/")[2]
        for names, types, reason in rows:
            if (
                re.fullmatch(types, model_type)
                if model_type
                else re.search(rf"(?<![a-z])(?:{names})(?![a-z])", name, re.IGNORECASE)
            ):
                yield key, model, reason
                break
