"""Adapter of verl's FSDP2 engine with the language-model head, tested with verl 0.9.1.

verl has no platform for the CPU, so `verl_cpu` adds one through verl's registry.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from temper_engine_api.batch import PackedBatch, SequenceBatch
from temper_engine_api.objective import HeadOutput, HeadOutputs, MicroBatchLoss
from temper_engine_api.weights import NamedWeight
from tools.other_engines.adapter import AdaptedEngine, align_to_labels, select_positions
from tools.other_engines.verl_cpu import register_cpu_platform

OUTPUT_NAMES = {
    HeadOutput.LOGPROB: "log_probs",
    HeadOutput.ENTROPY: "entropy",
    HeadOutput.LOGSUMEXP: "logsumexp",
}
"""Outputs of verl's language-model head by our name for them; the last is the adapter's."""

SCHEDULES = {"constant": "constant", "cosine": "cosine"}
"""verl's schedules by our name for them."""


class VerlFSDPEngine(AdaptedEngine):
    """verl's FSDPEngineWithLMHead with packed sequences (`use_remove_padding`)."""

    head_outputs: ClassVar[frozenset[HeadOutput]] = frozenset(OUTPUT_NAMES)
    model_attribute: ClassVar[str] = "module"

    def _build_other_engine(self, model_path: str) -> None:
        register_cpu_platform()
        from verl.trainer.config import CheckpointConfig
        from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
        from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

        spec, schedule = self.config.optimizer, self.config.schedule
        precision = self.config.precision
        model = HFModelConfig(
            path=model_path,
            load_tokenizer=False,
            # verl's default, flash_attention_2, needs a GPU.
            override_config={"attn_implementation": "sdpa"},
            use_remove_padding=True,
            enable_gradient_checkpointing=False,
        )
        settings = FSDPEngineConfig(
            strategy="fsdp2",
            use_remove_padding=True,
            # The compiled entropy takes half a minute of compilation in each process.
            use_torch_compile=False,
            full_determinism=self.config.deterministic,
            mixed_precision={
                "param_dtype": precision.compute,
                "reduce_dtype": precision.reduce,
                "buffer_dtype": precision.buffers,
            },
        )
        optimizer = FSDPOptimizerConfig(
            lr=spec.lr if spec else 0.0,
            betas=spec.betas if spec else (0.9, 0.999),
            weight_decay=spec.weight_decay if spec else 0.0,
            # verl always clips; an infinite limit changes no gradient.
            clip_grad=(spec.clip_grad_norm if spec else None) or math.inf,
            override_optimizer_config={"eps": spec.eps} if spec else None,
            lr_scheduler_type=SCHEDULES.get(schedule.kind, "constant"),
            lr_warmup_steps=schedule.num_warmup_steps,
            total_training_steps=schedule.total_steps or 1,
            min_lr_ratio=schedule.min_lr_ratio,
        )
        self._other_engine = FSDPEngineWithLMHead(model, settings, optimizer, CheckpointConfig())
        self._other_engine.initialize()

    @contextmanager
    def _enter_other_mode(self, mode: Literal["train", "eval"]) -> Iterator[None]:
        context: AbstractContextManager[object] = (
            # By default verl drops the gradients at the end of train_mode.
            self._other_engine.train_mode(zero_grad_on_exit=False)
            if mode == "train"
            else self._other_engine.eval_mode()
        )
        with context:
            yield

    def _run_micro_batches(
        self,
        batch: PackedBatch,
        *,
        requested_outputs: frozenset[HeadOutput],
        micro_batch_loss: MicroBatchLoss | None,
        forward_only: bool,
        reduce_gradients: bool,
    ) -> list[HeadOutputs] | None:
        self._check_outputs(requested_outputs)
        model = self._other_model
        was_training = model.training
        # verl leaves dropout on in a forward pass inside train_mode.
        model.train(was_training and not forward_only)
        try:
            # verl would form its own micro-batches, so each call gets one of the plan's.
            return [
                self._run_micro_batch(
                    micro,
                    requested_outputs=requested_outputs,
                    micro_batch_loss=micro_batch_loss,
                    forward_only=forward_only,
                )
                for micro in batch.iterate_micro_batches()
            ]
        finally:
            model.train(was_training)

    def _run_micro_batch(
        self,
        micro: SequenceBatch,
        *,
        requested_outputs: frozenset[HeadOutput],
        micro_batch_loss: MicroBatchLoss | None,
        forward_only: bool,
    ) -> HeadOutputs:
        is_training = micro_batch_loss is not None and not forward_only
        mask = select_positions(micro, is_training=is_training)
        results: list[HeadOutputs] = []

        def compute_loss(
            *,
            model_output: dict[str, Tensor] | None = None,
            student_logits: Tensor | None = None,
            **context: object,
        ) -> object:
            if student_logits is not None:
                # verl's call for distillation, with logits [1, T, V] divided by the temperature.
                return {"logsumexp": student_logits.logsumexp(-1)}
            assert model_output is not None
            outputs = HeadOutputs(
                columns={
                    name: align_to_labels(model_output[OUTPUT_NAMES[name]].values().float(), mask)
                    for name in requested_outputs
                }
            )
            results.append(outputs.detach())
            loss = torch.zeros(()) if micro_batch_loss is None else micro_batch_loss(outputs, micro)
            return loss, {}

        self._other_engine.forward_backward_batch(
            build_tensordict(micro, requested_outputs=requested_outputs),
            compute_loss,
            forward_only=forward_only,
        )
        return results[0]

    def _apply_gradients(self, *, lr: float) -> float:
        scheduler, kind = self._other_engine.lr_scheduler, self.config.schedule.kind
        self._set_learning_rate(
            lr,
            [factor(self.num_schedule_steps) for factor in scheduler.lr_lambdas]
            if kind in SCHEDULES
            else None,
        )
        return float(self._other_engine.optimizer_step())

    def _zero_gradients(self) -> None:
        self._other_engine.optimizer_zero_grad()

    def _iterate_weights(self) -> Iterator[NamedWeight]:
        tensors, _ = self._other_engine.get_per_tensor_param()
        for name, tensor in tensors:
            yield NamedWeight(name=name, tensor=tensor)

    def _write_state(self, directory: str) -> list[str]:
        before = set(Path(directory).rglob("*"))
        self._other_engine.save_checkpoint(local_path=directory)
        return self._list_files(directory, before=before)

    def _read_state(self, directory: str) -> None:
        self._other_engine.load_checkpoint(local_path=directory, del_local_after_load=False)

    def close(self) -> None:
        """Drop the engine; verl has no call for it."""
        self._other_engine = None


def build_tensordict(micro: SequenceBatch, *, requested_outputs: Collection[HeadOutput]) -> Any:
    """Convert a micro-batch to a TensorDict that verl runs as one micro-batch."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.utils.dataset.dataset_utils import DatasetPadMode

    offsets = micro.sequence_starts.long()

    def nest(column: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(column.contiguous(), offsets)

    data = TensorDict(
        {
            "input_ids": nest(micro.tokens),
            "position_ids": nest(micro.get_position_ids()),
            "loss_mask": nest(micro.loss_mask.long()),
            "temperature": micro.temperature,
        },
        batch_size=[micro.num_sequences],
    )
    tensordict_utils.assign_non_tensor(
        data,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=micro.num_sequences,
        use_remove_padding=True,
        use_fused_kernels=False,
        pad_mode=DatasetPadMode.NO_PADDING,
        calculate_entropy=HeadOutput.ENTROPY in requested_outputs,
        distillation_use_topk=HeadOutput.LOGSUMEXP in requested_outputs,
    )
    return data
