"""Check the model and tokenizer folders of a configuration without importing torch."""

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from temper_engine_api.specs import ModelSpec
from temper_engine_api.vision_language import VISION_LANGUAGE_TYPES
from temper_trainer.checkpoint.weight_files import find_damaged_weights
from temper_trainer.config.data import DataConfig, TokenizerConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.rollout.vllm.served_adapters import find_adapter_problems

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_ADDRESS = "https://huggingface.co/"
_NAME_WITHOUT_OWNER = re.compile(r"[\w.-]+")


_VOCABULARIES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "tekken.json")
"""File patterns that cover the vocabulary files for all transformers tokenizers."""


_WITHOUT_VOCABULARY = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
"""Classes whose tokens are bytes or characters."""


_MODEL_TYPE_FILES = ("auto_mappings.py", "configuration_auto.py")
"""Files of transformers that list its model types, by version."""


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields of a config.json that models use for the number of experts in a layer."""


def find_model_problems(config: TrainerConfig) -> Iterator[str]:
    """Yield what is wrong with model folders and the tokenizer folder."""
    for name, engine in config.models.items():
        if problem := _find_model_problem(f"{name}.engine.model", engine.model):
            yield problem
    for name, teacher in config.teachers.items():
        path = teacher.engine.model.path
        if path is not None and _is_model(path) and not has_vocabulary(Path(path)):
            yield (
                f"teachers.{name}.engine.model.path is {path}, which has no tokenizer files, so "
                "its tokens cannot be compared with the policy's: copy the tokenizer's files there."
            )
    yield from _find_position_problems(config)
    yield from _find_served_parallelism_problems(config)
    # After a warm start, the model that it saved is the adapter's base model.
    has_base = config.actor.engine.model.path is not None or config.warm_start is not None
    if config.weight_sync.content == "adapter":
        if not has_base:
            yield (
                "weight_sync.content is adapter, but actor.engine.model.path is not set, so "
                "servers have no base to put the adapter on: set weight_sync.content=full, or save "
                "the base as a Hugging Face directory first."
            )
        yield from find_adapter_problems(
            config.actor.engine.lora,
            key="actor.engine.lora",
            model_type=str(read_model_fields(config.actor.engine.model).get("model_type")),
        )
    for name, role in config.trained_roles.items():
        adapter = role.engine.lora.path
        if adapter is None:
            continue
        if not (Path(adapter) / "adapter_config.json").is_file():
            yield (
                f"{name}.engine.lora.path is {adapter}, but there is no PEFT adapter in that "
                "folder (no adapter_config.json): correct the path."
            )
        elif damage := find_damaged_weights(Path(adapter)):
            yield f"{name}.engine.lora.path: {damage}"
    yield from _find_tokenizer_problems(
        config.data.tokenizer, model_path=config.actor.engine.model.path
    )


def has_vocabulary(folder: Path) -> bool:
    """Return True if a folder has a tokenizer's files."""
    if any(any(folder.glob(pattern)) for pattern in _VOCABULARIES):
        return True
    config = read_json_fields(folder / "tokenizer_config.json")
    return config.get("tokenizer_class") in _WITHOUT_VOCABULARY


def has_chat_template(data: DataConfig, *, model_path: str | None) -> bool:
    """Return True if the run has a chat template, or if that cannot be known here.

    Args:
        data: The run's template and tokenizer.
        model_path: Folder of the actor's model, whose tokenizer is used by default.
    """
    if data.chat_template is not None:
        return True
    if data.tokenizer.kind != "pretrained":
        return False  # a tokenizer that the run trains has none
    path = data.tokenizer.path or model_path
    if path is None or not Path(path).is_dir():
        return True  # the missing folder is reported separately
    folder = Path(path)
    if any((folder / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    return bool(read_json_fields(folder / "tokenizer_config.json").get("chat_template"))


def read_position_limit(config: TrainerConfig) -> tuple[int, str] | None:
    """Return the longest sequence that the sampler takes, and a clause on what limits it.

    The limit is rollout.vllm.max_model_len, or the positions in the config.json of the actor.

    Returns:
        None if neither says it, or if other arguments of vLLM may.
    """
    path = config.actor.engine.model.path
    if config.rollout.sampler == "vllm":
        max_length = config.rollout.vllm.max_model_len
        if max_length is not None:
            return max_length, f"rollout.vllm.max_model_len is {max_length}"
        if config.rollout.vllm.engine_kwargs:
            return None
    if path is None or not _is_model(path):
        return None
    # A damaged file is reported as a problem of the model.
    text_fields = select_text_fields(read_json_fields(Path(path) / "config.json"))
    positions = text_fields.get("max_position_embeddings")
    if not isinstance(positions, int):
        return None
    reason = f"{positions} positions (max_position_embeddings in its config.json)"
    return positions, f"the model in {path} has {reason}"


def iterate_completion_limits(config: TrainerConfig) -> Iterator[tuple[str, int]]:
    """Yield the key and the value of each limit on single completions, of runs without turns."""
    if not config.generates_completions or config.all_environments:
        return
    if config.task != "eval" or config.run.eval_sampled:
        yield "sampling.max_tokens", config.sampling.max_tokens
    if config.data.eval_sources:
        yield "run.eval_sampling.max_tokens", config.run.eval_sampling.max_tokens


def _find_position_problems(config: TrainerConfig) -> Iterator[str]:
    """Yield limits on completions that leave no position for a prompt."""
    positions, reason = read_position_limit(config) or (None, "")
    for key, limit in iterate_completion_limits(config):
        if positions is not None and limit >= positions:
            yield (
                f"{key} is {limit}, but {reason}, and a prompt needs some of these positions: "
                f"lower {key}."
            )


def _find_served_parallelism_problems(config: TrainerConfig) -> Iterator[str]:
    """Yield why vLLM could not divide the attention heads of a model among GPUs."""
    if config.generates_completions and config.rollout.sampler == "vllm":
        size = config.rollout.vllm.tensor_parallel_size
        yield from _find_head_problems(
            "rollout.vllm.tensor_parallel_size", size, role="actor", model=config.actor.engine.model
        )
    for name, teacher in config.teachers.items():
        if teacher.backend == "vllm":
            yield from _find_head_problems(
                f"teachers.{name}.num_workers",
                teacher.num_workers,
                role=f"teachers.{name}",
                model=teacher.engine.model,
            )


def _find_head_problems(key: str, size: int, *, role: str, model: ModelSpec) -> Iterator[str]:
    location = (
        f"in {role}.engine.model.architecture"
        if model.path is None
        else f"of the model in {model.path}"
    )
    num_heads = select_text_fields(read_model_fields(model)).get("num_attention_heads")
    if isinstance(num_heads, int) and num_heads % size:
        yield (
            f"{key} is {size}, which does not divide the {num_heads} attention heads {location}: "
            "choose a divisor."
        )


def _find_tokenizer_problems(
    tokenizer: TokenizerConfig, *, model_path: str | None
) -> Iterator[str]:
    if tokenizer.kind != "pretrained":
        return
    if tokenizer.path is not None and not Path(tokenizer.path).is_dir():
        yield (
            f"data.tokenizer.path is {tokenizer.path}, which is not a directory: give the folder "
            "of a tokenizer."
        )
        return
    path = tokenizer.path or model_path
    if path is None:
        yield (
            "data.tokenizer.kind is pretrained, but neither data.tokenizer.path nor "
            "actor.engine.model.path is set: set one of them, or set data.tokenizer.kind=bpe with "
            "data.tokenizer.vocab_size to train one."
        )
    elif (tokenizer.path is not None or _is_model(path)) and not has_vocabulary(Path(path)):
        key = "actor.engine.model.path" if tokenizer.path is None else "data.tokenizer.path"
        yield (
            f"{key} is {path}, which has no tokenizer files (such as tokenizer.json): copy the "
            "tokenizer's files there, or set data.tokenizer.path to the folder that has them."
        )


def _find_model_problem(key: str, model: ModelSpec) -> str | None:
    if model.path is None:
        return _describe_unknown_type(f"{key}.architecture.model_type", model.architecture)
    path, folder = model.path, Path(model.path)
    if folder.is_file():
        remedy = "give the folder of a Hugging Face model."
        if _is_model(str(folder.parent)):
            remedy = f"write {folder.parent}, its folder."
        return f"{key}.path is {path}, which is a file: {remedy}"
    if not _is_model(path):
        remedy = "correct the path, or put the model there first."
        if _is_model(f"{path}/huggingface"):
            remedy = f"write {path}/huggingface, the model of that run."
        if folder.name == "huggingface":
            remedy = f"finish the run with run.dir={folder.parent} first, or give another model."
        if path.startswith(_HUB_ADDRESS):
            # A browser shows addresses such as ADDRESS/OWNER/NAME/tree/main.
            name = "/".join(path.removeprefix(_HUB_ADDRESS).split("/")[:2])
            remedy = f"write {name}, the name of the model on the Hub."
        if _HUB_NAME.fullmatch(path) and not folder.exists():
            remedy = (
                "if it is the name of a model on the Hugging Face Hub, run hf download "
                f"{path} --local-dir models/{path.rpartition('/')[2]} and give that folder."
            )
        if _NAME_WITHOUT_OWNER.fullmatch(path) and not folder.exists():
            remedy = (
                "correct the path, put the model there first, or write OWNER/"
                f"{path} if it is a model on the Hugging Face Hub."
            )
        return (
            f"{key}.path is {path}, but there is no Hugging Face model in that folder (no "
            f"config.json): {remedy}"
        )
    try:
        text = (folder / "config.json").read_text(encoding="utf-8")
        if text.startswith("\ufeff"):
            raise ValueError("it starts with a byte order mark: save it as UTF-8 without BOM")
        model_config = json.loads(text)
    except ValueError as error:
        return f"{key}.path: {folder}/config.json is not JSON ({error}): copy or download it again."
    if not isinstance(model_config, dict):
        return (
            f"{key}.path: {folder}/config.json is a {type(model_config).__name__}, but must be a "
            "JSON object: download it again."
        )
    # The text part of these is trained. A server of a teacher answers text alone.
    is_usable = str(model_config.get("model_type")) in VISION_LANGUAGE_TYPES
    if not (is_usable or key.startswith("teachers.")) and (
        entry := _find_multimodal_entry(model_config)
    ):
        *others, last = sorted(VISION_LANGUAGE_TYPES)
        return (
            f"{key}.path is {path}, whose config.json has {entry}: a multimodal model. Engines "
            f"train the text part of {', '.join(others)} and {last} only: give the folder of one "
            "of these, or of a text model."
        )
    if not (model.trust_remote_code and "auto_map" in model_config) and (
        problem := _describe_unknown_type(f"{key}.path: model_type", model_config)
    ):
        return problem
    damage = find_damaged_weights(folder)
    return None if damage is None else f"{key}.path: {damage}"


def _is_model(path: str) -> bool:
    return (Path(path) / "config.json").is_file()


def _describe_unknown_type(key: str, model_config: Mapping[str, object]) -> str | None:
    """Return a message if the installed transformers does not know a model type, else None."""
    name, known = model_config.get("model_type"), _list_model_types()
    if not isinstance(name, str) or not known or name in known:
        return None
    return (
        f"{key} is {name!r}, which the installed transformers does not know: correct it, or "
        "install a transformers that has it. A model with custom code needs "
        "model.trust_remote_code=true."
    )


@cache
def _list_model_types() -> frozenset[str]:
    """Return the model types that transformers knows, read from its source.

    Importing transformers takes 3 to 14 s. If the source has an unexpected form, the result is
    empty and the check is skipped: an unknown type is then reported when the model is loaded.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return frozenset()
    folder = Path(spec.origin).parent / "models" / "auto"
    names: set[str] = set()
    for file in _MODEL_TYPE_FILES:
        text = (folder / file).read_text(encoding="utf-8") if (folder / file).is_file() else ""
        names |= set(re.findall(r'"([\w.-]+)"[,:]\s*"\w+Config"', text))
    return frozenset(names)


def read_json_fields(path: Path) -> Mapping[str, object]:
    """Return the fields of a JSON file; empty if it is absent or damaged.

    Loading it reports the damage with a better message.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def read_model_fields(model: ModelSpec) -> Mapping[str, object]:
    """Return the fields of a model's config.json, or its architecture if it has no folder."""
    if model.path is None:
        return model.architecture
    return read_json_fields(Path(model.path) / "config.json")


def has_experts(model: ModelSpec) -> bool:
    """Return True if the text part of a model has layers with several experts."""
    fields = select_text_fields(read_model_fields(model))
    counts = [fields.get(name) for name in _EXPERT_COUNTS]
    return any(isinstance(count, int) and count > 1 for count in counts)


def select_text_fields(model_config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the settings of the text part from the fields of a config.json.

    Files of vision-language models have them in ``text_config``. All other files, and older files
    of Qwen2-VL and Qwen2.5-VL, have them at the top level.
    """
    text_config = model_config.get("text_config")
    is_split = str(model_config.get("model_type")) in VISION_LANGUAGE_TYPES
    if not is_split or not isinstance(text_config, dict):
        return model_config
    # Models read this one at the top. transformers may write another value below text_config.
    name = "tie_word_embeddings"
    fields = {key: value for key, value in text_config.items() if key != name}
    return fields | ({name: model_config[name]} if name in model_config else {})


_MULTIMODAL_KEY_PATTERN = re.compile(
    r"(vision|visual|audio|speech|image|video|vit|vq)_(config|tower|encoder|backbone|model)|visual"
    r"|(mm_vision|mm_audio)_tower|(thinker|talker)_config|(img|audio)_processor|num_mel_bins"
)
"""Blocks that configure an encoder of images, video or sound."""


_MULTIMODAL_CLASS_PATTERN = re.compile(
    r"VL(?![a-z])|VLM|Vision|Audio|Speech|Image|Video|Omni|Multimodal|Llava|Whisper|MiniCPM[VO]$"
)


_MULTIMODAL_TYPE_PATTERN = re.compile(
    r"(?<![a-z])vl(?![a-z])|qwen_?vl|internvl|llava|omni|whisper|minicpm[vo]$|\dv(?![a-z])"
)


def _find_multimodal_entry(fields: Mapping[str, object]) -> str:
    for key, value in fields.items():
        if value and _MULTIMODAL_KEY_PATTERN.fullmatch(key):
            return key
    model_type = str(fields.get("model_type", ""))
    if _MULTIMODAL_TYPE_PATTERN.search(model_type):
        return f"model_type {model_type}"
    classes = fields.get("architectures")
    for name in map(str, classes if isinstance(classes, list) else ()):
        if _MULTIMODAL_CLASS_PATTERN.search(name) or (
            name.endswith("ForConditionalGeneration") and "text_config" in fields
        ):
            return name
    return ""
