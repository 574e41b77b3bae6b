"""Configurations in which the conformance tests run this engine."""

from collections.abc import Mapping

from temper_engine_api.capabilities import Capability
from temper_engine_api.layout import Layout
from temper_engine_api.specs import OffloadSpec


def _make_layouts(sizes: tuple[int, ...], name: str, fields: Mapping[str, object]) -> list[Layout]:
    return [Layout(name=f"{name}.{size}", world_size=size, fields=fields) for size in sizes]


LAYOUTS = (
    *_make_layouts((1, 2, 4), "fsdp1", {"strategy": "fsdp1"}),
    Layout(name="fsdp1-hybrid.4", world_size=4, fields={"strategy": "fsdp1", "fsdp_size": 2}),
    Layout(name="fsdp1-replicated.2", world_size=2, fields={"strategy": "fsdp1", "fsdp_size": 1}),
    Layout(name="hybrid.4", world_size=4, fields={"fsdp_size": 2}),
    Layout(
        name="hybrid-no-reshard.4",
        world_size=4,
        fields={"fsdp_size": 2, "reshard_after_forward": False},
    ),
    Layout(name="replicated.2", world_size=2, fields={"fsdp_size": 1}),
    *_make_layouts((2, 4), "no-reshard", {"reshard_after_forward": False}),
    Layout(
        name="together.2", world_size=2, fields={"wrap_together": 2, "reshard_after_forward": False}
    ),
    Layout(
        name="together.4",
        world_size=4,
        fields={"wrap_together": 2, "activation_checkpointing": True},
    ),
    Layout(
        name="reshard-to-2.4",
        world_size=4,
        fields={"reshard_after_forward": 2, "forward_prefetch": 1},
    ),
    Layout(
        name="ep.2",
        world_size=2,
        fields={"expert_parallel": True},
        without=frozenset({Capability.ADAPTER_ON_EXPERTS}),
    ),
    Layout(
        name="ep-hybrid.4",
        world_size=4,
        fields={"expert_parallel": True, "fsdp_size": 2},
        without=frozenset({Capability.ADAPTER_ON_EXPERTS}),
    ),
    Layout(
        name="ep-sp2-checkpointed.4",
        world_size=4,
        fields={"expert_parallel": True, "sequence_parallel": 2, "activation_checkpointing": True},
        without=frozenset({Capability.ADAPTER_ON_EXPERTS}),
    ),
    Layout(name="sp2.2", world_size=2, fields={"sequence_parallel": 2}),
    Layout(name="sp2.4", world_size=4, fields={"sequence_parallel": 2}),
    Layout(name="sp4.4", world_size=4, fields={"sequence_parallel": 4}),
    Layout(name="sp2-fsdp1.4", world_size=4, fields={"sequence_parallel": 2, "strategy": "fsdp1"}),
    Layout(
        name="sp2-fsdp1-hybrid.4",
        world_size=4,
        fields={"sequence_parallel": 2, "strategy": "fsdp1", "fsdp_size": 2},
    ),
    Layout(name="sp2-hybrid.4", world_size=4, fields={"sequence_parallel": 2, "fsdp_size": 2}),
    Layout(name="sp2-replicated.2", world_size=2, fields={"sequence_parallel": 2, "fsdp_size": 1}),
    Layout(
        name="sp2-no-reshard.2",
        world_size=2,
        fields={"sequence_parallel": 2, "reshard_after_forward": False},
    ),
    *_make_layouts((1, 2), "logits-kept", {"head_keeps_logits": True}),
    # By default a chunk has more positions than any test in the kit.
    *_make_layouts((1, 2), "head-chunks", {"head_chunk_tokens": 64}),
    *_make_layouts(
        (1, 2),
        "checkpointed",
        {
            "activation_checkpointing": True,
            "checkpointing_keeps_products": True,
            "offload_activations": True,
        },
    ),
    *_make_layouts((1, 2), "optimizer-on-cpu", {"offload": OffloadSpec(optimizer_on_cpu=True)}),
)
"""`nox -s nightly` tests all layouts, and `dev.py test` tests a sample of them."""
