"""Layouts in which the conformance kit runs this engine. Importing this does not import torch."""

from temper_engine_api.layout import Layout

LAYOUTS = (
    Layout(name="tp2", world_size=2, fields={"tensor_parallel": 2}),
    Layout(name="tp2-sp", world_size=2, fields={"tensor_parallel": 2, "sequence_parallel": True}),
    Layout(name="pp2", world_size=2, fields={"pipeline_parallel": 2}),
    Layout(name="pp2-vpp2", world_size=2, fields={"pipeline_parallel": 2, "virtual_pipeline": 2}),
    Layout(name="cp2", world_size=2, fields={"context_parallel": 2}),
    Layout(name="dp2-distopt", world_size=2, fields={"distributed_optimizer": True}),
    Layout(
        name="pp2-uneven", world_size=2, fields={"pipeline_parallel": 2, "layers_per_stage": (1, 3)}
    ),
    Layout(name="ep2", world_size=2, fields={"expert_parallel": 2}),
    Layout(
        name="tp2-sp-ep2",
        world_size=2,
        fields={
            "tensor_parallel": 2,
            "sequence_parallel": True,
            "expert_parallel": 2,
            "expert_tensor_parallel": 1,
        },
    ),
    Layout(
        name="tp2-sp-padded",
        world_size=2,
        fields={"tensor_parallel": 2, "sequence_parallel": True, "remove_padding": False},
    ),
    Layout(
        name="cp2-padded", world_size=2, fields={"context_parallel": 2, "remove_padding": False}
    ),
    Layout(
        name="pp2-recompute", world_size=2, fields={"pipeline_parallel": 2, "recompute": "layers"}
    ),
    Layout(name="tp2-pp2", world_size=4, fields={"tensor_parallel": 2, "pipeline_parallel": 2}),
    Layout(
        name="tp2-sp-pp2-ep2",
        world_size=4,
        fields={
            "tensor_parallel": 2,
            "sequence_parallel": True,
            "pipeline_parallel": 2,
            "expert_parallel": 2,
            "expert_tensor_parallel": 1,
        },
    ),
    Layout(name="tp2-cp2", world_size=4, fields={"tensor_parallel": 2, "context_parallel": 2}),
    Layout(
        name="pp2-dp2-distopt",
        world_size=4,
        fields={"pipeline_parallel": 2, "distributed_optimizer": True},
    ),
)
