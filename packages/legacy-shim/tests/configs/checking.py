"""Run ``temper-train --check`` on a translated file, with made-up files and models.

It is the command itself, ``temper_trainer.__main__.main``, with the written file; the only keys
that are given next to it say where, below the folder, the data and the models lie. They hold as
much as a check reads.
"""

import contextlib
import io
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import yaml
from pyarrow import parquet
from safetensors.numpy import save
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from temper_legacy_shim.configs import Translation
from temper_legacy_shim.configs.reading.config_values import Plain, flatten, hydra_text
from temper_legacy_shim.configs.report import yaml_of

REWARD = (
    "def {name}(data_source=None, solution_str=None, ground_truth=None, extra_info=None, "
    "**more):\n    return 0.0\n"
)
TOOLS = (
    "tools:\n  - tool_schema:\n      type: function\n      function: {name: search, description: "
    "finds, parameters: {type: object}}\n"
)
MESSAGES = [{"role": role, "content": "1"} for role in ("user", "assistant")]
_CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 64,
    # As many heads as the largest numbers of ranks that share a sequence divide.
    "hidden_size": 128,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
}
_EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 64,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 2,
}
"""Fields of a model whose experts a launch divides."""
_ADAPTER = {
    "adapter_config.json": json.dumps(
        {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    ).encode(),
    # A check compares names and shapes with those of the model.
    "adapter_model.safetensors": save(
        {
            f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{side}.weight": zeros
            for layer in range(2)
            for module in ("q_proj", "v_proj")
            for side, zeros in (("A", np.zeros((8, 128), "f4")), ("B", np.zeros((128, 8), "f4")))
        }
    ),
}
_WORDS = ("<unk>", "<pad>", "<eos>", "1", "2")
_TOKENIZER = {
    "tokenizer.json": Tokenizer(
        WordLevel({word: number for number, word in enumerate(_WORDS)}, unk_token="<unk>")
    ).to_str(),
    "tokenizer_config.json": json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>"}
    ),
    "chat_template.jinja": (
        "{% if tools %}{{ tools }}{% endif %}{% for message in messages %}{{ message.content "
        "}}<eos>{% endfor %}"
    ),
}
MODEL = {
    "config.json": json.dumps(_CONFIG),
    **_TOKENIZER,
}
"""The files of a model directory that a check reads, without its weights."""


def _model(values: dict[str, Plain]) -> dict[str, bytes]:
    """Return the files of a model that has what the settings divide."""
    has_experts = any(
        key.endswith(".expert_parallel") and value != 1 for key, value in values.items()
    )
    config = {**_CONFIG, **_EXPERTS} if has_experts else _CONFIG
    files = {name: text.encode() for name, text in MODEL.items()}
    files["config.json"] = json.dumps(config).encode()
    files["model.safetensors"] = _weights(has_experts=has_experts)
    return files


@cache
def _weights(*, has_experts: bool) -> bytes:
    """Return the weights of a model, because checks compare their names and shapes."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (64, 128),
        "model.norm.weight": (128,),
        "lm_head.weight": (64, 128),
    }
    for layer in (f"model.layers.{number}" for number in range(2)):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{norm}.weight"] = (128,)
        for module in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"{layer}.self_attn.{module}.weight"] = (128, 128)
            if module != "o_proj" and not has_experts:
                shapes[f"{layer}.self_attn.{module}.bias"] = (128,)
        for norm in ("q_norm", "k_norm") if has_experts else ():
            shapes[f"{layer}.self_attn.{norm}.weight"] = (2,)
        if has_experts:
            shapes[f"{layer}.mlp.gate.weight"] = (64, 128)
        mlps = [f"experts.{index}." for index in range(64)] if has_experts else [""]
        width = 16 if has_experts else 48
        for mlp in mlps:
            for module in ("gate_proj", "up_proj"):
                shapes[f"{layer}.mlp.{mlp}{module}.weight"] = (width, 128)
            shapes[f"{layer}.mlp.{mlp}down_proj.weight"] = (128, width)
    return save({name: np.zeros(shape, "f2") for name, shape in shapes.items()})


def command(translation: Translation, folder: Path, *, name: str) -> list[str]:
    """Write the file and everything that it reads, and return temper-train's arguments.

    Args:
        translation: with settings.
        folder: takes the file and everything that it names.
        name: of the file.
    """
    (folder / f"{name}.yaml").write_text(yaml_of(translation))
    moved = put_files(flatten(yaml.safe_load(yaml_of(translation))), folder)
    return ["--config-dir", str(folder), "--config-name", name, *moved, "--check"]


def put_files(values: dict[str, Plain], folder: Path) -> list[str]:
    """Put what settings name into a folder, and return the overrides that lead there.

    Args:
        values: settings of temper-train by dotted key.
        folder: takes the files; run the command in it.
    """
    for tracker in ("wandb", "mlflow", "trackio"):  # a check asks whether the library is installed
        (folder / tracker).mkdir(exist_ok=True)
        (folder / tracker / "__init__.py").touch()
    return [f"{key}={hydra_text(value)}" for key, value in _moved(values, folder)]


def _moved(values: dict[str, Plain], folder: Path) -> Iterator[tuple[str, Plain]]:
    for key, value in values.items():
        if key.endswith(".paths") and isinstance(value, list):
            kind = values.get(key.removesuffix("paths") + "name", "jsonl")
            yield (
                key,
                [
                    _put(str(item), folder, content=_data(values, is_parquet=kind == "parquet"))
                    for item in value
                ],
            )
        elif key.endswith(".engine.model.path") and isinstance(value, str):
            for name, content in _model(values).items():
                position = _put(value, folder, content=content, below=name)
            yield key, position
        elif key.endswith(".engine.lora.path") and isinstance(value, str):
            for name, content in _ADAPTER.items():
                position = _put(value, folder, content=content, below=name)
            yield key, position
        elif key == "data.tokenizer.path" and isinstance(value, str):
            for name, content in _TOKENIZER.items():
                position = _put(value, folder, content=content.encode(), below=name)
            yield key, position
        elif key == "data.tools_path" and isinstance(value, str):
            yield key, _put(value, folder, content=TOOLS.encode())
        elif key == "reward.arguments.path" and isinstance(value, str) and value.endswith(".py"):
            program = REWARD.format(name=values.get("reward.arguments.name") or "compute_score")
            yield key, _put(value, folder, content=program.encode())


def _data(values: dict[str, Plain], *, is_parquet: bool) -> bytes:
    """Return a file of rows with every field that any source of the configuration names.

    It has one row, or those of a step, which a run of epochs needs.
    """
    row: dict[str, object] = {
        "question": "1",
        "answer": "1",
        "chosen": "1",
        "rejected": "2",
        "data_source": "openai/gsm8k",
    }
    routes = [key.split(".")[1] for key in values if key.startswith("teachers.")]
    for key, field in values.items():
        if not isinstance(field, str) or not re.fullmatch(r"(data|warm_start)\..*_key", key):
            continue
        texts: dict[str, object] = {
            "messages_key": MESSAGES,
            "rejected_key": "2",
            "route_key": next(iter(routes), "1"),
        }
        if values.get(
            "data.tools_path"
        ):  # tools are only for prompts that are chat messages, as in the old files
            texts["prompt_key"] = MESSAGES[:1]
        _set(row, field, texts.get(key.rpartition(".")[2], "1"))
    size = values.get("batching.prompts_per_step", 64) if values.get("run.total_epochs") else 1
    rows = [row] * (size if isinstance(size, int) else 1)
    if not is_parquet:
        return "\n".join(map(json.dumps, rows)).encode()
    sink = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def _set(row: dict[str, object], field: str, value: object) -> None:
    outer, dot, inner = field.partition(".")
    below = row.setdefault(outer, {}) if dot else None
    if isinstance(below, dict):
        _set(below, inner, value)
    else:
        row[field] = value


def _put(path: str, folder: Path, *, content: bytes, below: str = "") -> str:
    """Return a place below the folder for a path, with something there."""
    if "://" in path:
        return path
    position = re.sub(r"\$\{?[\w:.]*\}?|\.\.", "set", path).lstrip("/~") or "set"
    position += "/file" * (not below and (folder / position).is_dir())
    target = folder / position / below
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    return position


def run(arguments: list[str]) -> tuple[int, str]:
    """Return the exit code of the command in this process and what it said on standard error.

    The first line, which says that the command checks its settings, is left out.
    """
    from temper_trainer.__main__ import main

    given = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(given):
        code = main(arguments)
    return code, re.sub(r"\Atemper-train \S+: checking\n", "", given.getvalue())
