"""Compare the logits of the written directory with those of the old tensors.

One model is loaded as a user would, from the output's files; the other is built from its config and
filled with the source's tensors by name. Where the old checkpoint had an adapter, the second one
adds it as the forward pass does, not to the weights.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from temper_legacy_shim.checkpoints.files.lazy import LazyTensor, LowRankSum, as_torch
from temper_legacy_shim.checkpoints.huggingface import model_directory
from temper_legacy_shim.checkpoints.huggingface.names import OWN_CODE, asks_for_code
from temper_legacy_shim.checkpoints.plan import Plan
from temper_legacy_shim.errors import VerificationError

_NUM_TOKENS = 16
_TOLERANCE = 1e-4
"""Tolerance of float32 logits relative to the largest: folding an adapter reorders sums."""
_VALUE_HEAD = "v_head.summary."
_AUTO = {
    "language_model": "AutoModelForCausalLM",
    "trl_value_model": "AutoModelForCausalLM",
    "value_model": "AutoModelForTokenClassification",
}


@torch.no_grad()
def check_logits(directory: Path, plan: Plan) -> str:
    """Compare logits of random tokens.

    Returns:
        The sentence about the comparison, for the receipt.

    Raises:
        VerificationError: a weight was not taken, or logits differ.
    """
    head = plan.model.head
    auto = getattr(transformers, _AUTO.get(head, "AutoModelForSequenceClassification"))
    config, written, report = _loaded(directory, auto)
    heads = _value_head(model_directory.read_weights(directory)), _value_head(plan.model.weights)
    faults = [
        str(name)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        for name in report[kind]
    ]
    faults = [name for name in faults if heads[0] is None or not name.startswith(_VALUE_HEAD)]
    if faults:
        raise VerificationError(
            f"transformers did not take every weight of {directory}: {sorted(faults)[:5]}."
        )
    ids = torch.randint(
        0, config.vocab_size, (1, _NUM_TOKENS), generator=torch.Generator().manual_seed(0)
    )
    target = _outputs(written, ids, value_head=heads[0])
    other = _outputs(_from_source(auto, config, written, plan), ids, value_head=heads[1])
    largest = max(_difference(directory, what, target[what], other[what]) for what in other)
    return (
        f"{' and '.join(other)} of {_NUM_TOKENS} random tokens in transformers differ from the "
        f"source's by {largest:.2g} at most"
    )


def _difference(directory: Path, what: str, target: Tensor, other: Tensor) -> float:
    scale = max(float(other.abs().max()), 1e-6)
    difference = float((target - other).abs().max())
    if not difference <= _TOLERANCE * scale:
        raise VerificationError(
            f"{what} of {directory} differ from the source's by {difference:.3g} (the largest is "
            f"{scale:.3g})."
        )
    return difference


def _value_head(tensors: Mapping[str, LazyTensor]) -> tuple[Tensor, Tensor] | None:
    """Weight [1, hidden] and bias [1] of TRL's value head; None without one."""
    if f"{_VALUE_HEAD}weight" not in tensors:
        return None
    return _float(tensors[f"{_VALUE_HEAD}weight"]), _float(tensors[f"{_VALUE_HEAD}bias"])


def _loaded(
    directory: Path, auto: Any
) -> tuple[transformers.PretrainedConfig, nn.Module, dict[str, Any]]:
    """Load config, model and report without code from the checkpoint."""
    try:
        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
        model, report = auto.from_pretrained(
            directory,
            dtype=torch.float32,
            output_loading_info=True,
            trust_remote_code=False,
            attn_implementation="eager",
        )
    except (OSError, ValueError, ImportError) as error:
        reason = OWN_CODE if asks_for_code(directory) else f"{type(error).__name__}: {error}"[:300]
        raise VerificationError(
            f"transformers does not load {directory}: {reason}. Without --verify-logits it is "
            "written."
        ) from error
    return config, model, report


def _outputs(
    model: nn.Module, ids: Tensor, *, value_head: tuple[Tensor, Tensor] | None
) -> dict[str, Tensor]:
    """Compute logits [1, T, vocabulary or labels], and values [1, T, 1] of a TRL value head."""
    model.eval()
    result = model(input_ids=ids, output_hidden_states=value_head is not None)
    if value_head is None:
        return {"logits": result.logits.float()}
    weight, bias = value_head
    return {
        "logits": result.logits.float(),
        "values": nn.functional.linear(result.hidden_states[-1].float(), weight, bias),
    }


def _from_source(
    auto: type, config: transformers.PretrainedConfig, written: nn.Module, plan: Plan
) -> nn.Module:
    """Return a model filled by name; experts that transformers fuses stay as they are."""
    model: nn.Module = auto.from_config(  # type: ignore[attr-defined]
        config, dtype=torch.float32, trust_remote_code=False, attn_implementation="eager"
    )
    model.load_state_dict(written.state_dict())
    targets = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers()),
    }
    for name, tensor in plan.model.weights.items():
        if name in targets:
            base = tensor.base if isinstance(tensor, LowRankSum) else tensor
            targets[name].copy_(as_torch(base).to(targets[name].dtype))
            if isinstance(tensor, LowRankSum):
                _add_in_forward(model, name, tensor)
    return model


def _add_in_forward(model: nn.Module, name: str, tensor: LowRankSum) -> None:
    down, up, scale = _float(tensor.down), _float(tensor.up), tensor.scale
    module = model.get_submodule(name.removesuffix(".weight"))
    if not isinstance(module, nn.Linear):
        with torch.no_grad():
            module.get_parameter("weight").add_(scale * up @ down)
        return

    def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + scale * (inputs[0] @ down.T) @ up.T

    module.register_forward_hook(add)


def _float(tensor: LazyTensor) -> Tensor:
    return as_torch(tensor).float()
