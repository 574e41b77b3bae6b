"""The training state of an old FSDP role that trained an adapter: its weights and moments under the names of PEFT's file.

The optimiser numbers every parameter or unit of the model, frozen ones too, and keeps a state of those alone that were trained: the halves
of the adapter, in the order of the model's modules.
"""

from collections.abc import Mapping

from temper_legacy_shim.checkpoints import fsdp
from temper_legacy_shim.checkpoints.adapters import PEFT_PREFIX, Adapter
from temper_legacy_shim.checkpoints.lazy import LazyTensor
from temper_legacy_shim.checkpoints.megatron_moments import check_masters, read_megatron_adapter_optimizer
from temper_legacy_shim.checkpoints.model import OldModel
from temper_legacy_shim.checkpoints.moments import OldOptimizer, read_trained_leaves
from temper_legacy_shim.checkpoints.optimizer_files import check_is_beside_weights
from temper_legacy_shim.errors import LayoutError, UsageError

_SIDES = {".lora_A": "lora_A", ".lora_B": "lora_B"}


def adapter_weights(adapter: Adapter, model: OldModel) -> dict[str, LazyTensor]:
    """Both halves of every module by PEFT's names.

    Raises:
        UsageError: of a kind that no engine trains.
    """
    tables = [module for module, pair in adapter.pairs.items() if pair.is_embedding or module == "lm_head"]
    others = [*tables, *adapter.whole, *(["biases"] if adapter.lacks_biases else [])]
    if others:
        raise UsageError(
            f"{model.role.path} trained {', '.join(others[:3])} beside its linear layers below the head, which no "
            "engine resumes: use --to peft or --to hf and start a new run from it."
        )
    found: dict[str, LazyTensor] = {}
    for module, pair in adapter.pairs.items():
        found[f"{PEFT_PREFIX}{module}.lora_A.weight"] = pair.down
        found[f"{PEFT_PREFIX}{module}.lora_B.weight"] = pair.up
    return found


def adapter_optimizer(model: OldModel, weights: Mapping[str, LazyTensor]) -> OldOptimizer:
    """Moments and masters of the adapter's halves, by the names of ``weights``.

    Raises:
        LayoutError: they can't be told apart; says why, for the receipt.
    """
    role = model.role
    if role.dist_folders:
        read = read_megatron_adapter_optimizer(model)
        if read.moments.keys() != weights.keys():
            raise LayoutError(f"the optimizer keeps moments of {len(read.moments)} tensors, but the adapter has {len(weights)}")
        check_masters(read.masters, weights)
        return read
    if "optim" not in role.fsdp_files:
        raise LayoutError("the old checkpoint has none that tells what belongs to an adapter")
    check_is_beside_weights(role)
    raw = fsdp.read_weights(role.fsdp_files["model"], where=role.path)
    leaves = [key for key in raw if any(side in key for side in _SIDES)]
    read = read_trained_leaves(role, raw, leaves=leaves)
    moments = {_peft_name(key): kept for key, kept in read.moments.items()}
    if moments.keys() != weights.keys():
        raise LayoutError(f"the optimizer keeps moments of {len(moments)} tensors, but the adapter has {len(weights)}")
    return OldOptimizer(moments=moments, settings=read.settings)


def _peft_name(key: str) -> str:
    """From ``[base_model.model.]MODULE.lora_A[.default].weight``."""
    bare = key.removeprefix(PEFT_PREFIX).removesuffix(".weight")
    module, _, half = bare.rpartition(".lora_")
    return f"{PEFT_PREFIX}{module}.lora_{half.partition('.')[0]}.weight"
