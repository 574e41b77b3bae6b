"""Whether transformers computes from the written directory what the old checkpoint's tensors give: two ways to the same logits.

One model is loaded as a user would, from the output's files; the other is built from its config and filled with the source's tensors by
name. Where the old checkpoint had an adapter, the second one adds it as the forward pass does, not to the weights.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from temper_legacy_shim.checkpoints.lazy import LazyTensor, LowRankSum
from temper_legacy_shim.checkpoints.names import OWN_CODE, asks_for_code
from temper_legacy_shim.checkpoints.plan import Plan
from temper_legacy_shim.checkpoints.torch_tensors import as_torch
from temper_legacy_shim.errors import VerificationError

_NUM_TOKENS = 16
_TOLERANCE = 1e-4
"""Of float32 logits, relative to the largest: folding an adapter reorders sums."""
_AUTO = {"language_model": "AutoModelForCausalLM", "value_model": "AutoModelForTokenClassification"}


@torch.no_grad()
def check_logits(directory: Path, plan: Plan) -> str:
    """Compare logits of random tokens.

    Returns:
        What was verified, for the receipt.

    Raises:
        VerificationError: a weight was not taken, or logits differ.
    """
    head = plan.model.head
    auto = getattr(transformers, _AUTO.get(head, "AutoModelForSequenceClassification"))
    config, written, report = _loaded(directory, auto)
    faults = [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]
    if faults:
        raise VerificationError(f"transformers did not take every weight of {directory}: {sorted(map(str, faults))[:5]}.")
    ids = torch.randint(0, config.vocab_size, (1, _NUM_TOKENS), generator=torch.Generator().manual_seed(0))
    ours = _logits(written, ids)
    theirs = _logits(_from_source(auto, config, written, plan), ids)
    scale = max(float(theirs.abs().max()), 1e-6)
    difference = float((ours - theirs).abs().max())
    if not difference <= _TOLERANCE * scale:
        raise VerificationError(f"logits of {directory} differ from the source's by {difference:.3g} (largest logit {scale:.3g}).")
    return f"logits of {_NUM_TOKENS} random tokens in transformers differ from the source's by {difference:.2g} at most"


def _loaded(directory: Path, auto: Any) -> tuple[transformers.PretrainedConfig, nn.Module, dict[str, Any]]:
    """What a user would load, but for code of the checkpoint's own: its config, its model, and what became of the weights."""
    try:
        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
        model, report = auto.from_pretrained(
            directory, dtype=torch.float32, output_loading_info=True, trust_remote_code=False, attn_implementation="eager"
        )
    except (OSError, ValueError, ImportError) as error:
        reason = OWN_CODE if asks_for_code(directory) else f"{type(error).__name__}: {error}"[:300]
        raise VerificationError(f"transformers does not load {directory}: {reason}. Without --verify-logits it is written.") from error
    return config, model, report


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    model.eval()
    logits: Tensor = model(input_ids=ids).logits
    return logits.float()


def _from_source(auto: type, config: transformers.PretrainedConfig, written: nn.Module, plan: Plan) -> nn.Module:
    """A model filled from the source by name; experts that transformers fuses when it loads keep what it made of them."""
    model: nn.Module = auto.from_config(config, dtype=torch.float32, trust_remote_code=False, attn_implementation="eager")  # type: ignore[attr-defined]
    model.load_state_dict(written.state_dict())
    targets = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
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
