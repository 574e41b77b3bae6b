"""Models that the engine of the translation refuses, by their names and by the config.json of a local folder.

The facts are those of docs/models.md. A name that is not known here says nothing:
``temper-train --check`` looks at the model itself.
"""

import re
from collections.abc import Iterator

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.model_checks import config_json

_LAYERS = "has linear, sparse, chunked or state-space layers"
_EXPERTS = "has experts whose weights the engine can neither load nor send to the sampler"
_SINKS = "has attention sinks"
_LOGITS = "caps or scales its logits"
_MEGATRON = "is none of the models that MegatronEngine trains (Qwen2, Qwen2.5, Qwen3, Qwen3-MoE, Llama 2 and 3, Mistral)"

_DISTILLED = re.compile(r"distill", re.IGNORECASE)
"""Such as DeepSeek-R1-Distill-Qwen-7B: a Qwen or Llama under the name of its teacher."""
_REFUSED: tuple[tuple[str, str, str], ...] = (
    (r"gpt[-_]?oss", "gpt_oss", _SINKS),
    (r"qwen[-_]?3[-_]next|qwen[-_]?3[._][5-9]", "qwen3_next|qwen3_5\\w*", _LAYERS),
    (
        r"kimi[-_]linear|llama[-_]?4|nemotron[-_]?(h|3|nano)|mamba|jamba|falcon[-_]?h1",
        "kimi_linear|llama4\\w*|nemotron_h|mamba\\d?|jamba|falcon_h1",
        _LAYERS,
    ),
    (r"deepseek[-_]?(v3[._]2|v4)", "deepseek_v32|deepseek_v4", _LAYERS),
    (r"deepseek[-_]?(v2|v3|r1|coder[-_]v2)|moonlight|kimi[-_]?k2", "deepseek_v[23]|kimi_k2", _EXPERTS),
    (r"mixtral|glm[-_]?4[._][5-9]|minimax[-_]?m2", "mixtral|glm4_moe\\w*|minimax_m2", _EXPERTS),
    (r"gemma[-_]?2(?!\d)|command[-_]?[ar](?![a-z])|aya[-_]", "gemma2|cohere\\d?", _LOGITS),
)
"""Models that FSDPEngine refuses in a run with a sampler: patterns of names and of model types, and the reason."""
_NOT_MEGATRON = (
    r"gemma|phi[-_]?[34]|olmoe?|glm[-_]?4|smollm|exaone|granite|internlm|baichuan|mimo[-_]|seed[-_]oss|qwen[-_]?(1[._]5|2)[-_](moe|57b)",
    "gemma\\w*|phi3|olmo\\w*|glm\\w*|smollm3|exaone\\w*|granite\\w*|qwen2_moe|mimo|seed_oss",
)
_PATHS = ("actor_rollout_ref.model.path", "critic.model.path", "model.path", "model.partial_pretrain")


def find_refused_models(draft: Draft) -> None:
    """Warn about a model that the run would end with, before it is downloaded and converted."""
    engine = "MegatronEngine" if draft.old.family.endswith("megatron") else "FSDPEngine"
    for key, model, reason in _refused(draft, is_megatron=engine == "MegatronEngine"):
        draft.report(
            "hazard", "model-path", f"{engine} refuses the model {model}: it {reason}. See docs/models.md for those that it trains.", key
        )


def _refused(draft: Draft, *, is_megatron: bool) -> Iterator[tuple[str, str, str]]:
    for key in _PATHS:
        model = (draft.expanded.get(key) or draft.text(key)) if draft.old.is_set(key) else ""
        model_type = str(config_json(model).get("model_type", ""))
        rows = (*_REFUSED, (*_NOT_MEGATRON, _MEGATRON)) if is_megatron else _REFUSED
        name = "" if _DISTILLED.search(model) else model.rstrip("/").rpartition("/")[2]
        for names, types, reason in rows:
            if re.fullmatch(types, model_type) if model_type else re.search(rf"(?<![a-z])(?:{names})(?![a-z])", name, re.IGNORECASE):
                yield key, model, reason
                break
