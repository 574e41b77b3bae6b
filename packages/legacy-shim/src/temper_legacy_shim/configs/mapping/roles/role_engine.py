"""The engine of each role: its model and precision, then optimizer and layout."""

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.roles.role_layout import (
    set_fsdp,
    set_megatron,
    set_offload,
    set_workers,
)
from temper_legacy_shim.configs.mapping.roles.role_optimizer import set_optimizer, set_schedule
from temper_legacy_shim.configs.mapping.roles.roles import OldRole, fsdp_block, is_megatron
from temper_legacy_shim.configs.mapping.rules import apply_rules
from temper_legacy_shim.configs.reading.config_values import from_home


def build_role(draft: Draft, role: OldRole) -> None:
    """Set everything of one role."""
    _model(draft, role)
    if role.is_trained:
        set_optimizer(draft, role)
        set_schedule(draft, role)
    _precision(draft, role)
    set_offload(draft, role)
    if is_megatron(draft):
        set_megatron(draft, role)
    else:
        set_fsdp(draft, role)
    set_workers(draft, role)


def _model(draft: Draft, role: OldRole) -> None:
    engine = role.engine
    if role.name != "ref":  # the group ref=frozen takes the actor's
        key = next(
            (
                key
                for key in (f"{role.model}.path", f"{role.model}.partial_pretrain")
                if draft.text(key)
            ),
            f"{role.model}.path",
        )
        path = draft.text(key)
        if path:
            here = from_home(path)
            draft.put(
                f"{engine}.model.path", here, rule="model-path", old=[key], verbatim=here == path
            )
        elif role.name == "actor":
            draft.find("model-path.missing", f"{role.model}.path", model=role.model)
        is_refused = is_megatron(draft) and draft.switch(f"{role.model}.trust_remote_code")
        facts = {"remote_code": "refused" if is_refused else "taken"}
        blocks = role.blocks(draft)
        apply_rules(draft, "trust-remote-code", "nccl-timeout", blocks=blocks, facts=facts)
        if role.name == "actor":
            _tokenizer(draft, role)
        if role.name == "critic":
            draft.put(f"{engine}.model.model_type", "value_model", rule="critic", old=[])


def _tokenizer(draft: Draft, role: OldRole) -> None:
    key = f"{role.model}.tokenizer_path"
    path = draft.text(key)
    if path and path != draft.text(f"{role.model}.path"):
        here = from_home(path)
        draft.put(
            "data.tokenizer.path", here, rule="tokenizer-path", old=[key], verbatim=here == path
        )


def _precision(draft: Draft, role: OldRole) -> None:
    fsdp = fsdp_block(draft, role)
    engine = f"{role.engine}.precision"
    words = {
        "bf16": "bf16",
        "bfloat16": "bf16",
        "fp16": "fp16",
        "float16": "fp16",
        "half": "fp16",
        "fp32": "fp32",
        "float32": "fp32",
    }
    compute = words.get(
        draft.text(f"{fsdp}.mixed_precision.param_dtype") or draft.text(f"{fsdp}.dtype") or "bf16",
        "bf16",
    )
    old = [f"{fsdp}.mixed_precision.param_dtype", f"{fsdp}.dtype"]
    draft.put(f"{engine}.compute", compute, rule="compute-dtype", old=old)
    if not role.is_trained or is_megatron(draft):
        return
    master = words.get(draft.text(f"{fsdp}.model_dtype") or "fp32", "fp32")
    if master == "fp16" or (master == "bf16" and compute == "fp16"):
        master = "fp32"
    draft.put(f"{engine}.parameters", master, rule="master-dtype", old=[f"{fsdp}.model_dtype"])
    reduce = words.get(draft.text(f"{fsdp}.mixed_precision.reduce_dtype") or "fp32", "fp32")
    draft.put(
        f"{engine}.reduce",
        "bf16" if reduce == "bf16" else "fp32",
        rule="reduce-dtype",
        old=[f"{fsdp}.mixed_precision.reduce_dtype"],
    )
