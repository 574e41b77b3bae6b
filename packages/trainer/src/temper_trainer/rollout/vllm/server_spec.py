"""Build the ServerSpec for a run or a teacher from the configuration."""

from collections.abc import Mapping
from pathlib import Path

from transformers import AutoConfig, PreTrainedTokenizerBase

from temper_engine_api.errors import ConfigError
from temper_engine_api.model_files import drop_quantization
from temper_engine_api.process_folders import open_temporary_folder
from temper_engine_api.vision_language import has_image_encoder
from temper_trainer.config.distillation import TeacherConfig
from temper_trainer.config.rollout import VllmConfig
from temper_trainer.config.run import INFERENCE_TASKS, LOOPBACK
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.redaction import list_registered_secrets
from temper_trainer.rollout.hf_model import (
    check_experts,
    get_language_model_class,
    read_end_token_ids,
)
from temper_trainer.rollout.vllm.messages import Argument, ServerSpec
from temper_trainer.rollout.vllm.served_adapters import ServedAdapter

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def build_server_spec(config: TrainerConfig, *, tokenizer: PreTrainedTokenizerBase) -> ServerSpec:
    """Build the spec for all replicas of a run's sampler.

    Raises:
        ConfigError: If the base of the adapter has no weights on disk, or there is no end token.
    """
    model, vllm = config.actor.engine.model, config.rollout.vllm
    is_adapter = config.weight_sync.content == "adapter"
    # Servers load weights from disk if none are published, and always below an adapter.
    load_format = "auto" if is_adapter or config.task in INFERENCE_TASKS else vllm.load_format
    if is_adapter and model.path is None:
        raise ConfigError(
            "weight_sync.content is adapter, but actor.engine.model.path is not set, so servers "
            "have no base model: set weight_sync.content=full, or save the base as a Hugging Face "
            "directory."
        )
    model_config = (
        AutoConfig.for_model(**model.to_config_fields())
        if model.path is None
        else AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    )
    text_config = model_config.get_text_config()
    check_experts(text_config, routing_replay=config.rollout.routing_replay)
    max_length = vllm.max_model_len or min(
        _count_max_tokens(config), text_config.max_position_embeddings
    )
    arguments = _build_arguments(config, max_length=max_length, load_format=load_format)
    if has_image_encoder(model_config.model_type):
        arguments["language_model_only"] = True  # no memory for images, which no prompt has
    files: dict[str, bytes] = {}
    is_published = not is_adapter and config.task not in INFERENCE_TASKS
    if is_published and drop_quantization(model_config):
        # vLLM would round the published weights to the format in the model's directory.
        if load_format != "dummy":
            raise ConfigError(
                f"rollout.vllm.load_format is {load_format}, but the weights in {model.path} are "
                "quantized and those that the trainer publishes are not: set it to dummy."
            )
        files = _make_config_files(model_config, tokenizer)
    elif model.path is not None:
        arguments |= {
            "model": model.path,
            **_choose_tokenizer(config.data.tokenizer.path or model.path),
        }
    elif load_format != "dummy":
        raise ConfigError(
            f"rollout.vllm.load_format is {load_format}, but actor.engine.model.path is not set, "
            "so there are no weights to load: set it to dummy."
        )
    else:
        auto_class = get_language_model_class(model_config)
        model_config.architectures = [auto_class._model_mapping[type(model_config)].__name__]
        files = _make_config_files(model_config, tokenizer)
    arguments |= vllm.engine_kwargs
    return ServerSpec(
        arguments=arguments,
        files=files,
        end_token_ids=tuple(
            sorted(read_end_token_ids(model, tokenizer_end=tokenizer.eos_token_id))
        ),
        max_length=max_length,
        vocab_size=text_config.vocab_size,
        sleep_level=vllm.sleep_level,
        has_expert_choices=config.rollout.routing_replay == "sampler",
        environment=_make_environment(eager=vllm.enforce_eager),
        secrets=_find_secrets(arguments),
    )


def build_teacher_server_spec(
    name: str, teacher: TeacherConfig, *, config: TrainerConfig
) -> ServerSpec:
    """Build the spec for all replicas of a teacher, which load weights from disk.

    Raises:
        ConfigError: If there is no model directory.
    """
    model, vllm, distillation = teacher.engine.model, config.rollout.vllm, config.distillation
    if model.path is None:
        raise ConfigError(
            f"teachers.{name}.backend is vllm, but teachers.{name}.engine.model.path is not set: "
            "set it to a model directory."
        )
    model_config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    text_config = model_config.get_text_config()
    max_length = min(_count_max_tokens(config), text_config.max_position_embeddings)
    arguments: dict[str, Argument] = {
        "model": model.path,
        "dtype": _DTYPES[teacher.engine.precision.compute],
        "tensor_parallel_size": teacher.num_workers,
        "max_model_len": max_length,
        "enforce_eager": vllm.enforce_eager,
        "max_logprobs": max(distillation.loss.num_teacher_tokens, 1),
        "trust_remote_code": model.trust_remote_code,
        # vLLM would otherwise take sampling defaults from the model's generation_config.json.
        "generation_config": "vllm",
        "disable_log_stats": True,
        "skip_tokenizer_init": True,
    }
    if has_image_encoder(model_config.model_type):
        arguments["language_model_only"] = True
    return ServerSpec(
        arguments=arguments | _make_memory_arguments(vllm),
        end_token_ids=(),
        max_length=max_length,
        vocab_size=text_config.vocab_size,
        environment=_make_environment(eager=vllm.enforce_eager),
    )


def _build_arguments(
    config: TrainerConfig, *, max_length: int, load_format: str
) -> dict[str, Argument]:
    vllm = config.rollout.vllm
    optional: dict[str, Argument] = {
        "max_num_batched_tokens": vllm.max_num_batched_tokens,
        "enable_chunked_prefill": vllm.enable_chunked_prefill,
    }
    arguments: dict[str, Argument] = {
        "dtype": _DTYPES[config.rollout.dtype],
        "max_num_seqs": config.rollout.max_concurrent,
        "tensor_parallel_size": vllm.tensor_parallel_size,
        "max_model_len": max_length,
        "enforce_eager": vllm.enforce_eager,
        "enable_prefix_caching": vllm.enable_prefix_caching,
        "enable_sleep_mode": vllm.sleep_level > 0,
        "load_format": load_format,
        "trust_remote_code": config.actor.engine.model.trust_remote_code,
        # Training divides logits by the temperature too. Raw log-probs are before temperature and
        # truncation, processed ones after both.
        "logprobs_mode": "raw_logprobs"
        if config.sampling.temperature == 1
        else "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,
        "seed": 0,
    }
    if config.weight_sync.content == "adapter":
        adapter = ServedAdapter.from_spec(config.actor.engine.lora)
        if adapter is None or adapter.server_rank is None:
            raise ConfigError(
                "weight_sync.content is adapter, but the rank of actor.engine.lora cannot be read, "
                "or vLLM does not serve it: set weight_sync.content=full."
            )
        arguments |= {
            "enable_lora": True,
            # Two, because the new adapter is added before the old one is removed.
            "max_loras": 2,
            "max_lora_rank": adapter.server_rank,
        }
    arguments |= {name: value for name, value in optional.items() if value is not None}
    return arguments | _make_memory_arguments(vllm)


def _make_memory_arguments(vllm: VllmConfig) -> dict[str, Argument]:
    """Return the arguments that decide the size of a server's KV cache."""
    if vllm.kv_cache_bytes is not None:
        # With a fixed size vLLM ignores the fraction, but still refuses to start if less than that
        # is free: by default 0.92, which a server or an actor on the same GPU does not leave.
        return {"kv_cache_memory_bytes": vllm.kv_cache_bytes, "gpu_memory_utilization": 0.1}
    if vllm.gpu_memory_utilization is not None:
        return {"gpu_memory_utilization": vllm.gpu_memory_utilization}
    return {}


def _find_secrets(arguments: Mapping[str, Argument]) -> tuple[str, ...]:
    """Return the secrets of this process that are in arguments; servers need no others."""
    texts = [value for value in arguments.values() if isinstance(value, str)]
    return tuple(
        secret for secret in list_registered_secrets() if any(secret in text for text in texts)
    )


def _count_max_tokens(config: TrainerConfig) -> int:
    """Return the largest sequence length: prompt, completion, and one token more."""
    # log-probs of a given sequence are requested with max_tokens=1, as vLLM samples at least one.
    completion = config.max_completion_tokens
    if config.data.eval_sources or config.task == "eval":
        completion = max(completion, config.run.eval_sampling.max_tokens)
    return config.data.max_prompt_tokens + completion + 1


def _choose_tokenizer(path: str) -> dict[str, Argument]:
    """Return the tokenizer argument; without a tokenizer servers cannot look for stop texts."""
    if any((Path(path) / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return {"tokenizer": path}
    return {"skip_tokenizer_init": True}


def _make_config_files(config: object, tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    with open_temporary_folder("config") as folder:
        config.save_pretrained(folder)  # type: ignore[attr-defined]
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def _make_environment(*, eager: bool) -> dict[str, str]:
    """Return environment variables that configure vLLM."""
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the server's process
        "VLLM_NO_USAGE_STATS": "1",
        # Replicas on one host must not bind to the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": LOOPBACK,  # all workers of a server are on one host and connect here
    }
    return variables | ({"TORCHDYNAMO_DISABLE": "1"} if eager else {})
