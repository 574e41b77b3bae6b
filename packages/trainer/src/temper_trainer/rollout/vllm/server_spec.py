"""From the trainer's settings to what a server needs: arguments of vLLM, and a model directory without weights."""

import tempfile
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from temper_engine_api.errors import ConfigError
from temper_trainer.config.distillation import TeacherConfig
from temper_trainer.config.ranges import LOOPBACK
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.rollout.hf_model import read_end_token_ids
from temper_trainer.rollout.vllm.messages import Argument, ServerSpec

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM's max_lora_rank may be."""


def build_server_spec(config: TrainerConfig, *, tokenizer: PreTrainedTokenizerBase) -> ServerSpec:
    """What every replica of a run is started from.

    Raises:
        ConfigError: the adapter's base has no weights on disk, or no token could end a completion.
    """
    model, vllm = config.actor.engine.model, config.rollout.vllm
    is_adapter = config.weight_sync.content == "adapter"
    # Where nothing is published, and under an adapter, the servers read the weights themselves.
    load_format = "auto" if is_adapter or config.task in ("eval", "generate") else vllm.load_format
    if is_adapter and model.path is None:
        raise ConfigError(
            "weight_sync.content is adapter, but actor.engine.model.path is not set, so servers have no base to put it on: use full, or "
            "save the base as a Hugging Face directory first."
        )
    if model.path is not None:
        text_config = AutoConfig.from_pretrained(
            model.path, trust_remote_code=model.trust_remote_code
        ).get_text_config()
    else:
        text_config = AutoConfig.for_model(**model.architecture)
    max_length = vllm.max_model_len or min(
        _count_max_tokens(config), text_config.max_position_embeddings
    )
    arguments = _build_arguments(config, max_length=max_length, load_format=load_format)
    files: dict[str, bytes] = {}
    if model.path is not None:
        arguments |= {
            "model": model.path,
            **_choose_tokenizer(config.data.tokenizer.path or model.path),
        }
    elif load_format != "dummy":
        raise ConfigError(
            f"rollout.vllm.load_format is {load_format}, but actor.engine.model.path is not set, so there are no weights to load: use "
            "dummy."
        )
    else:
        text_config.architectures = [
            AutoModelForCausalLM._model_mapping[type(text_config)].__name__
        ]
        files = _make_config_files(text_config, tokenizer)
    return ServerSpec(
        arguments=arguments | dict(vllm.engine_kwargs),
        files=files,
        end_token_ids=tuple(
            sorted(read_end_token_ids(model, tokenizer_end=tokenizer.eos_token_id))
        ),
        max_length=max_length,
        vocab_size=text_config.vocab_size,
        sleep_level=vllm.sleep_level,
        environment=_make_environment(eager=vllm.enforce_eager),
    )


def build_teacher_server_spec(
    name: str, teacher: TeacherConfig, *, config: TrainerConfig
) -> ServerSpec:
    """What every replica of a teacher is started from; it reads its weights from disk.

    Raises:
        ConfigError: there is no model directory.
    """
    model, vllm, distillation = teacher.engine.model, config.rollout.vllm, config.distillation
    if model.path is None:
        raise ConfigError(
            f"teachers.{name}.backend is vllm, but teachers.{name}.engine.model.path is not set: give a model directory."
        )
    text_config = AutoConfig.from_pretrained(
        model.path, trust_remote_code=model.trust_remote_code
    ).get_text_config()
    max_length = min(_count_max_tokens(config), text_config.max_position_embeddings)
    top_k = distillation.top_k if distillation.needs_top_k else 0
    arguments: dict[str, Argument] = {
        "model": model.path,
        "dtype": _DTYPES[teacher.engine.precision.compute],
        "tensor_parallel_size": teacher.num_workers,
        "max_model_len": max_length,
        "enforce_eager": vllm.enforce_eager,
        "max_logprobs": max(top_k, 1),
        "trust_remote_code": model.trust_remote_code,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "skip_tokenizer_init": True,
    }
    if vllm.kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = vllm.kv_cache_bytes
    if vllm.gpu_memory_utilization is not None:
        arguments["gpu_memory_utilization"] = vllm.gpu_memory_utilization
    return ServerSpec(
        arguments=arguments,
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
        "gpu_memory_utilization": vllm.gpu_memory_utilization,
        "kv_cache_memory_bytes": vllm.kv_cache_bytes,
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
        # Raw is before temperature and truncation, processed is after both: one of them is what training needs.
        "logprobs_mode": "raw_logprobs"
        if config.sampling.temperature == 1
        else "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,
        "seed": 0,
    }
    if config.weight_sync.content == "adapter":
        rank = config.actor.engine.lora.rank
        arguments |= {
            "enable_lora": True,
            "max_loras": 2,
            "max_lora_rank": next(size for size in _LORA_RANKS if size >= rank),
        }
    return arguments | {name: value for name, value in optional.items() if value is not None}


def _count_max_tokens(config: TrainerConfig) -> int:
    """Tokens of a prompt with its completion, and one more that the canary draws."""
    completion = config.max_completion_tokens
    if config.data.eval is not None or config.task == "eval":
        completion = max(completion, config.run.eval_sampling.max_tokens)
    return config.data.max_prompt_tokens + completion + 1


def _choose_tokenizer(path: str) -> dict[str, Argument]:
    """Servers decode only where stop texts are looked for; a directory without a tokenizer does for everything else."""
    if any((Path(path) / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return {"tokenizer": path}
    return {"skip_tokenizer_init": True}


def _make_config_files(config: object, tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)  # type: ignore[attr-defined]
        tokenizer.save_pretrained(directory)
        return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def _make_environment(*, eager: bool) -> dict[str, str]:
    """Return variables of vLLM's own that every server of a run has."""
    found = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine in the server's own process
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # no thread bound to a core that a replica shares
        "VLLM_HOST_IP": LOOPBACK,  # where its workers meet; all of them are on the server's machine
    }
    return found | ({"TORCHDYNAMO_DISABLE": "1"} if eager else {})
