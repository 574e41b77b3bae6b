"""Test that invalid settings, and settings without effect, are refused."""

from collections.abc import Callable

import pytest

from temper_engine_api.errors import ConfigError
from temper_engine_api.objective import Aggregation, AggregationMode
from temper_engine_api.specs import (
    EngineConfig,
    LoraSpec,
    ModelSpec,
    OffloadSpec,
    OptimizerSpec,
    PrecisionSpec,
    ScheduleSpec,
)
from temper_engine_api.topology import Axis


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (ModelSpec, r"exactly one of model.path \(now None\) and model.architecture \(now \{\}\)"),
        (
            lambda: ModelSpec(path="m", architecture={"model_type": "qwen2"}),
            r"exactly one of model.path \(now 'm'\)",
        ),
        (
            lambda: ModelSpec(architecture={"hidden_size": 8}),
            r"model.architecture has no model_type: add it",
        ),
        (
            lambda: ModelSpec(path="m", model_type="critic"),
            r"^model.model_type is 'critic', but must be 'language_model', 'value_model' or",
        ),  # type: ignore[arg-type]
        (
            lambda: ScheduleSpec(kind="sine"),
            r"^schedule.kind is 'sine', but must be 'constant', 'linear', 'cosine' or 'wsd'\.$",
        ),  # type: ignore[arg-type]
        (
            lambda: ScheduleSpec(advance="epoch"),
            r"^schedule.advance is 'epoch', but must be 'update' or 'rl_step'\.$",
        ),  # type: ignore[arg-type]
        (
            lambda: ScheduleSpec(kind="linear", total_steps=4.5),
            r"^schedule.total_steps is 4.5, but must be a whole number or null",
        ),  # type: ignore[arg-type]
        (
            lambda: PrecisionSpec(compute="fp8"),
            r"^precision.compute is 'fp8', but must be 'bf16', 'fp16' or 'fp32'\.$",
        ),  # type: ignore[arg-type]
        (
            lambda: OffloadSpec(load_optimizer_in="foo"),
            r"^offload.load_optimizer_in is 'foo', but must be 'optimizer_step' or 'train_",
        ),  # type: ignore[arg-type]
        (
            lambda: LoraSpec(rank=4.5, alpha=8.0),
            r"^lora.rank is 4.5, but must be a whole number\.$",
        ),  # type: ignore[arg-type]
        (
            lambda: OptimizerSpec(betas=(0.9, 0.9, 0.9)),
            r"^optimizer.betas is \(0.9, 0.9, 0.9\), but must be two numbers",
        ),  # type: ignore[arg-type]
        (
            lambda: EngineConfig(model=ModelSpec(path="m"), device="gpu"),
            r"^device is 'gpu', but must be 'auto', 'cpu' or 'cuda'\.$",
        ),  # type: ignore[arg-type]
        (
            lambda: EngineConfig(model=ModelSpec(path="m"), collective_timeout_s=-1),
            r"^collective_timeout_s is -1, but must be above 0",
        ),
        (
            lambda: LoraSpec(rank=2, alpha=8.0, target_modules="(q"),
            r"^lora.target_modules is '\(q', which is not a regular expression: missing",
        ),
        (
            lambda: LoraSpec(rank=2, alpha=8.0, exclude_modules="*"),
            r"^lora.exclude_modules is '\*', which is not a regular expression: nothing",
        ),
        (lambda: OptimizerSpec(lr=-1.0), r"^optimizer.lr is -1.0, but must be at least 0"),
        (
            lambda: OptimizerSpec(betas=(0.9, 1.0)),
            r"betas are \(0.9, 1.0\), .*betas in \[0, 1\)",
        ),
        (lambda: OptimizerSpec(clip_grad_norm=0.0), r"clip_grad_norm is 0.0, but must be above 0"),
        (
            lambda: OptimizerSpec(max_consecutive_skips=-1),
            r"max_consecutive_skips is -1, but must be at least 0",
        ),
        (lambda: OptimizerSpec(weight_decay=-0.1), r"weight_decay is -0.1, but must be at least 0"),
        (lambda: ScheduleSpec(kind="cosine"), r"kind is cosine, which needs schedule.total_steps"),
        (
            lambda: ScheduleSpec(total_steps=9),
            r"total_steps has no effect with schedule.kind constant",
        ),
        (
            lambda: ScheduleSpec(kind="linear", warmup_steps=9, total_steps=9),
            r"total_steps \(9\) must exceed the warmup \(9 steps\)",
        ),
        (lambda: ScheduleSpec(warmup_steps=-1), r"warmup_steps is -1, but must be at least 0"),
        (
            lambda: ScheduleSpec(kind="linear", total_steps=9, min_lr_ratio=1.5),
            r"min_lr_ratio is 1.5, but must be in \[0, 1\]",
        ),
        (
            lambda: OptimizerSpec(arguments={"momentum": 0.9}),
            r"\['momentum'\] have no effect with optimizer.name adamw",
        ),
        (
            lambda: OptimizerSpec(name="sgd"),
            r"optimizer.name is 'sgd', but must be adamw, or the dotted path of a class",
        ),
        (
            lambda: OptimizerSpec(name="torch.optim.SGD", eps=1e-5),
            r"optimizer.eps has no effect with optimizer.name torch.optim.SGD",
        ),
        (
            lambda: OptimizerSpec(name="torch.optim.SGD", arguments={"lr": 1.0}),
            r"must not contain lr, weight_decay or params",
        ),
        (
            lambda: ScheduleSpec(warmup_steps=1, warmup_ratio=0.1, kind="linear", total_steps=9),
            r"both set the length of the warmup",
        ),
        (
            lambda: ScheduleSpec(warmup_ratio=0.1),
            r"warmup_ratio is 0.1, which needs schedule.total_steps",
        ),
        (
            lambda: ScheduleSpec(kind="wsd", total_steps=9),
            r"decay_steps is None and schedule.kind wsd: wsd needs the number of its decay steps",
        ),
        (
            lambda: ScheduleSpec(kind="cosine", total_steps=9, decay_steps=2),
            r"no other kind has any",
        ),
        (
            lambda: ScheduleSpec(kind="wsd", total_steps=9, warmup_steps=5, decay_steps=5),
            r"and leave schedule.decay_steps \(5\)",
        ),
        (
            lambda: PrecisionSpec(initial_loss_scale=8.0),
            r"have no effect with precision.compute bf16: only fp16 scales its loss",
        ),
        (
            lambda: PrecisionSpec(compute="fp16", initial_loss_scale=0.0),
            r"initial_loss_scale is 0.0, but must be above 0",
        ),
        (
            lambda: PrecisionSpec(compute="fp16", parameters="bf16"),
            r"use fp32 master weights with fp16",
        ),
        (
            lambda: OffloadSpec(optimizer=True, optimizer_on_cpu=True),
            r"^offload.optimizer has no effect with offload.optimizer_on_cpu",
        ),
        (
            lambda: OffloadSpec(load_optimizer_in="train_mode"),
            r"load_optimizer_in has no effect without offload.optimizer",
        ),
        (lambda: LoraSpec(rank=8), r"lora.rank is 8, but lora.alpha is not set"),
        (
            lambda: LoraSpec(alpha=8.0),
            r"lora.alpha is 8.0, but lora.rank is 0, so it has no effect",
        ),
        (lambda: LoraSpec(rank=-1), r"lora.rank is -1, but must be at least 0"),
        (lambda: LoraSpec(rank=8, alpha=0.0), r"lora.alpha is 0.0, but must be above 0"),
        (
            lambda: LoraSpec(rank=8, alpha=8.0, path="adapter"),
            r"lora.rank has no effect with lora.path 'adapter'",
        ),
        (
            lambda: LoraSpec(dora=True),
            r"lora.dora is True, but lora.rank is 0, so it has no effect: set lora.rank",
        ),
        (
            lambda: LoraSpec(path="a", rslora=True),
            r"lora.rslora is True, but lora.path is 'a', whose adapter_config.json decides it",
        ),
        (lambda: LoraSpec(rank=8, alpha=8.0, target_modules=()), r"lora.target_modules is empty"),
        (
            lambda: LoraSpec(target_parameters=("down_proj",)),
            r"lora.target_parameters is \('down_proj',\), but lora.rank is 0",
        ),
        (
            lambda: LoraSpec(rank=8, alpha=8.0, dropout=0.1, target_parameters=("down_proj",)),
            r"lora.dropout is 0.1, which PEFT does not",
        ),
        (
            lambda: LoraSpec(rank=8, alpha=8.0, dora=True, target_parameters=("down_proj",)),
            r"lora.dora is True, which PEFT does not",
        ),
        (
            lambda: LoraSpec(rank=8, alpha=8.0, dropout=1.0),
            r"lora.dropout is 1.0, but must be in \[0, 1\)",
        ),
        (lambda: Axis(size=2, rank=2), r"the rank on an axis is 2, but must be in \[0, 2\)"),
        (lambda: Aggregation(horizon=8), r"horizon has no effect with aggregation token_mean"),
        (
            lambda: Aggregation(mode=AggregationMode.SEQUENCE_MEAN_TOKEN_SUM_NORM),
            r"divides by a fixed horizon, which is None: set horizon",
        ),
    ],
)
def test_invalid_setting_is_refused_with_its_reason(
    build: Callable[[], object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build()


def test_adapter_may_target_only_experts() -> None:
    assert LoraSpec(
        rank=8, alpha=8.0, target_modules=(), target_parameters=("experts.down_proj",)
    ).is_enabled


def test_defaults_make_sense() -> None:
    assert (OptimizerSpec().lr, ScheduleSpec().kind, LoraSpec().rank) == (1e-6, "constant", 0)
