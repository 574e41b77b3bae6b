"""Test packed attention in real models against eager attention, one sequence at a time."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_api.specs import ModelSpec, Scalar
from temper_engine_fsdp.model import packed_attention
from temper_engine_fsdp.model.huggingface_model import build_model, read_attention_dropout
from temper_engine_fsdp.model.pack_layout import PackLayout

CPU = torch.device("cpu")
LENGTHS = (7, 1, 12, 7, 3)
COMMON: Mapping[str, Scalar] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MAMBA: Mapping[str, Scalar] = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 4,  # shorter than the sequences, so that a state is carried from chunk to chunk
}
LINEAR: Mapping[str, Scalar] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "full_attention_interval": 2,
}
FAMILIES: Mapping[str, Mapping[str, Scalar | list[str]]] = {
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "llama": {"model_type": "llama"},
    "llama-all-heads": {"model_type": "llama", "num_key_value_heads": 4},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral-window": {"model_type": "mistral", "sliding_window": 4},
    "gemma": {"model_type": "gemma"},
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 2,
    },
    "gpt-oss": {"model_type": "gpt_oss", "sliding_window": 4, "num_local_experts": 4},
    "gemma2": {
        "model_type": "gemma2",
        "sliding_window": 4,
        "attn_logit_softcapping": 0.5,
        "query_pre_attn_scalar": 1,
    },
    "qwen3-next": {"model_type": "qwen3_next", "num_experts": 0, **LINEAR},
    "qwen3.5": {"model_type": "qwen3_5_text", **LINEAR},
    "nemotron-h": {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "full_attention"],
        **MAMBA,
    },
}
STATEFUL = ("qwen3-next", "qwen3.5", "nemotron-h")
"""Families with layers that carry a state along the tokens."""


def packed_model(family: str) -> PreTrainedModel:
    packed_attention.register_kernels()
    model = build_model(
        ModelSpec(architecture={**COMMON, **FAMILIES[family]}),  # type: ignore[dict-item]
        attention=packed_attention.SDPA_VARLEN,
    )
    # Large enough that attention and states matter.
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model


def eager_twin(model: PreTrainedModel) -> PreTrainedModel:
    config = type(model.config).from_dict(model.config.to_dict())
    twin = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def packed_hidden(
    model: PreTrainedModel, tokens: Tensor, *, packing: PackLayout | None = None
) -> Tensor:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    output = model.base_model(
        input_ids=tokens[None],
        position_ids=positions[None],
        attention_mask=None,
        use_cache=False,
        packing=packing or PackLayout(LENGTHS, device=CPU),
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def hidden_one_by_one(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    return torch.cat(
        [model.base_model(input_ids=t[None]).last_hidden_state[0] for t in tokens.split(LENGTHS)]
    )


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 61, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_of_a_pack_equal_those_of_separate_sequences(
    family: str, tokens: Tensor
) -> None:
    model = packed_model(family).eval()
    torch.testing.assert_close(
        packed_hidden(model, tokens),
        hidden_one_by_one(eager_twin(model), tokens),
        rtol=2e-5,
        atol=2e-5,
    )


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "family", ["qwen2", "qwen3", "llama", "mistral-window", "gpt-oss", "gemma2", *STATEFUL]
)
def test_gradients_of_a_pack_equal_those_of_separate_sequences(
    family: str, checkpointing: bool, tokens: Tensor
) -> None:
    model = packed_model(family)
    twin = eager_twin(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    packed_hidden(model, tokens).cos().sum().backward()
    hidden_one_by_one(twin, tokens).cos().sum().backward()
    for (name, parameter), reference in zip(
        model.base_model.named_parameters(), twin.base_model.parameters()
    ):
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", ["qwen3", "mistral-window", "gpt-oss", *STATEFUL])
def test_padding_to_rounded_lengths_changes_no_gradient(family: str, tokens: Tensor) -> None:
    model, twin = packed_model(family).train(), packed_model(family).train()
    twin.load_state_dict(model.state_dict())
    rounded = PackLayout(LENGTHS, device=CPU, rounds_lengths=True)
    assert sum(bucket.num_rows for bucket in rounded.buckets) == 128 * len(LENGTHS)
    packed_hidden(model, tokens, packing=rounded).cos().sum().backward()
    packed_hidden(twin, tokens).cos().sum().backward()
    for (name, own), other in zip(
        model.base_model.named_parameters(), twin.base_model.parameters()
    ):
        assert own.grad is not None, name
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=2e-5)


def test_no_mask_over_the_pack_is_built(tokens: Tensor) -> None:
    model = packed_model("qwen2").eval()
    seen: list[object] = []
    model.base_model.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    packed_hidden(model, tokens)
    assert seen == [None]


def test_torch_varlen_on_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="torch_varlen needs CUDA"):
        packed_attention.choose_kernel("torch_varlen", device=CPU, compute="bf16", dropout=0.0)


@pytest.mark.parametrize(
    ("device", "compute", "dropout", "expected"),
    [
        ("cpu", "bf16", 0.0, packed_attention.SDPA_VARLEN),
        ("cuda", "fp32", 0.0, packed_attention.SDPA_VARLEN),
        ("cuda", "bf16", 0.0, packed_attention.TORCH_VARLEN),
        # The variable-length kernel would only refuse it in the first training call.
        ("cuda", "bf16", 0.1, packed_attention.SDPA_VARLEN),
        ("cuda", "fp16", 0.1, packed_attention.SDPA_VARLEN),
    ],
)
def test_auto_is_the_variable_length_kernel_on_cuda_in_16_bits_without_dropout(
    device: str, compute: str, dropout: float, expected: str
) -> None:
    chosen = packed_attention.choose_kernel(
        "auto", device=torch.device(device), compute=compute, dropout=dropout
    )
    assert chosen == expected


def test_torch_varlen_for_a_model_with_dropout_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no dropout, but the model sets it to 0\.1"):
        packed_attention.choose_kernel(
            "torch_varlen", device=torch.device("cuda"), compute="bf16", dropout=0.1
        )


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("qwen2", {}, 0.0),
        ("qwen2", {"attention_dropout": 0.2}, 0.2),
        ("qwen2", {"classifier_dropout": 0.2, "hidden_dropout": 0.2}, 0.0),
        ("gpt2", {"attn_pdrop": 0.3}, 0.3),
        ("biogpt", {"attention_probs_dropout_prob": 0.4}, 0.4),
    ],
)
def test_attention_dropout_is_found_under_the_names_of_each_family(
    model_type: str, fields: Mapping[str, Scalar], expected: float
) -> None:
    config = AutoConfig.for_model(model_type, **fields)
    assert read_attention_dropout(config) == expected


class ReadsBack(TorchDispatchMode):
    """Count the operations that would sync the host with a device."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        self.num += func in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.equal.default,
        )
        return func(*args, **(kwargs if isinstance(kwargs, dict) else {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_does_not_read_values_from_its_tensors(family: str, tokens: Tensor) -> None:
    model, packing = packed_model(family), PackLayout(LENGTHS, device=CPU)
    # Computed on the host, on first use.
    assert packing.token_index.device == packing.row_index.device == CPU
    with ReadsBack() as reads:
        packed_hidden(model, tokens, packing=packing).sum().backward()
    assert reads.num == 0


def test_attention_on_a_cpu_computes_16_bit_inputs_in_float32(tokens: Tensor) -> None:
    model = packed_model("qwen2").eval()
    seen: set[torch.dtype] = set()

    class SeesAttention(TorchDispatchMode):
        def __torch_dispatch__(
            self,
            func: OpOverload,
            types: object,
            args: tuple[object, ...] = (),
            kwargs: object = None,
        ) -> object:
            if "scaled_dot_product" in func.name():
                seen.update(arg.dtype for arg in args if isinstance(arg, Tensor))
            return func(*args, **(kwargs or {}))  # type: ignore[dict-item]

    with torch.no_grad():
        exact = packed_hidden(model, tokens)
        with SeesAttention():
            rounded = packed_hidden(model.to(torch.bfloat16), tokens)
    assert seen == {torch.float32}
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0.0, atol=0.1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"s_aux": torch.zeros(4), "softcap": 30.0},
            "Module passes s_aux to its attention, which packed attention does not support",
        ),
        ({"block_indices": torch.zeros(1)}, "passes block_indices to its attention"),
        ({"is_causal": False}, "attends to later tokens"),
        ({"packing": None}, "does not pass the keyword arguments of the model to its attention"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("kernel", [packed_attention.SDPA_VARLEN, packed_attention.TORCH_VARLEN])
def test_unsupported_attention_options_are_refused(
    kernel: str, arguments: dict[str, object], sentence: str
) -> None:
    packed_attention.register_kernels()
    query = torch.zeros(1, 4, 30, 8)
    known = {
        "scaling": 1.0,
        "packing": PackLayout(LENGTHS, device=CPU),
        "position_ids": torch.zeros(1, 30),
        "use_cache": False,
    }
    with pytest.raises(CapabilityError, match=sentence):
        AttentionInterface()[kernel](
            torch.nn.Module(), query, query, query, None, **{**known, **arguments}
        )


def test_mask_built_by_the_model_is_refused() -> None:
    with pytest.raises(CapabilityError, match="passes an attention mask to its attention"):
        packed_attention.sdpa_varlen_forward(
            torch.nn.Module(),
            *torch.zeros(3, 1, 4, 30, 8),
            torch.zeros(30, 30),
            scaling=1.0,
            packing=PackLayout(LENGTHS, device=CPU),
        )
