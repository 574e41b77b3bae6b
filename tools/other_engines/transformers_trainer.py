"""Adapter of transformers' Trainer, tested with transformers 5.17.0.

Trainer has one public call for a training, `train()`. The adapter calls the steps of its loop one
by one: `training_step`, clipping by its accelerator, and the optimizer.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from temper_engine_api.batch import PackedBatch, SequenceBatch
from temper_engine_api.objective import HeadOutput, HeadOutputs, MicroBatchLoss
from temper_engine_api.specs import OptimizerSpec
from temper_engine_api.weights import NamedWeight
from tools.other_engines.adapter import AdaptedEngine, align_to_labels, select_positions

SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
"""Trainer's schedules by our name for them; the last two end at 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One pass of Trainer, whose loss function gets the model's output only."""

    micro: SequenceBatch
    requested_outputs: frozenset[HeadOutput]
    micro_batch_loss: MicroBatchLoss | None
    is_training: bool


class TransformersTrainerEngine(AdaptedEngine):
    """transformers' Trainer with padded micro-batches and a loss function of its caller."""

    head_outputs: ClassVar[frozenset[HeadOutput]] = frozenset(
        {HeadOutput.LOGPROB, HeadOutput.ENTROPY, HeadOutput.LOGSUMEXP}
    )
    model_attribute: ClassVar[str] = "model"

    _call: _Call
    _outputs: HeadOutputs

    def _build_other_engine(self, model_path: str) -> None:
        from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

        spec, schedule = self.config.optimizer or OptimizerSpec(), self.config.schedule
        self._folder = tempfile.mkdtemp(prefix="trainer-")
        arguments = TrainingArguments(
            output_dir=self._folder,
            use_cpu=True,
            bf16=self.config.precision.compute == "bf16",
            learning_rate=spec.lr,
            adam_beta1=spec.betas[0],
            adam_beta2=spec.betas[1],
            adam_epsilon=spec.eps,
            weight_decay=spec.weight_decay,
            # 0 is Trainer's value for no clipping.
            max_grad_norm=spec.clip_grad_norm or 0.0,
            lr_scheduler_type=SCHEDULES.get(schedule.kind, "constant"),
            warmup_steps=schedule.num_warmup_steps,
            full_determinism=self.config.deterministic,
            report_to=[],
            disable_tqdm=True,
        )
        model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32, local_files_only=True
        )
        trainer: Any = Trainer(model=model, args=arguments, compute_loss_func=self._compute_loss)
        trainer.create_optimizer_and_scheduler(schedule.total_steps or 1)
        trainer.model_wrapped, trainer.optimizer = trainer.accelerator.prepare(
            trainer.model, trainer.optimizer
        )
        self._other_engine = trainer

    @contextmanager
    def _enter_other_mode(self, mode: Literal["train", "eval"]) -> Iterator[None]:
        self._other_engine.model_wrapped.train(mode == "train")
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
        trainer, model = self._other_engine, self._other_engine.model_wrapped
        was_training, results = model.training, []
        try:
            for micro in batch.iterate_micro_batches():
                self._call = _Call(
                    micro=micro,
                    requested_outputs=requested_outputs,
                    micro_batch_loss=micro_batch_loss,
                    is_training=micro_batch_loss is not None and not forward_only,
                )
                if forward_only:
                    # Trainer's evaluation loop does this before prediction_step.
                    model.eval()
                    trainer.prediction_step(model, pad_inputs(micro), prediction_loss_only=True)
                else:
                    trainer.training_step(model, pad_inputs(micro))
                results.append(self._outputs.detach())
        finally:
            model.train(was_training)
        return results

    def _compute_loss(
        self, outputs: Any, labels: Tensor, num_items_in_batch: object = None
    ) -> Tensor:
        """Compute the loss of the current micro-batch from padded logits [B, L, V]."""
        micro, loss = self._call.micro, self._call.micro_batch_loss
        is_token = torch.arange(labels.shape[1]) < micro.lengths[:, None]
        logits = outputs.logits[is_token].float() / micro.temperature[micro.sequence_index][:, None]
        logs = torch.log_softmax(logits, dim=-1)
        columns = {
            # The last token's label is that of the next sequence, which the mask leaves out.
            HeadOutput.LOGPROB: logs.gather(1, micro.tokens.roll(-1)[:, None])[:, 0],
            HeadOutput.ENTROPY: -(logs.exp() * logs).sum(-1),
            HeadOutput.LOGSUMEXP: logits.logsumexp(-1),
        }
        mask = select_positions(micro, is_training=self._call.is_training)
        self._outputs = HeadOutputs(
            columns={
                name: align_to_labels(columns[name], mask) for name in self._call.requested_outputs
            }
        )
        return torch.zeros(()) if loss is None else loss(self._outputs, micro)

    def _apply_gradients(self, *, lr: float) -> float:
        trainer, schedule = self._other_engine, self.config.schedule
        has_schedule = schedule.kind in SCHEDULES and schedule.min_lr_ratio == 0.0
        self._set_learning_rate(
            lr,
            [factor(self.num_schedule_steps) for factor in trainer.lr_scheduler.lr_lambdas]
            if has_schedule
            else None,
        )
        # The calls of Trainer's loop, which takes the step whether or not the norm is finite.
        norm = trainer.accelerator.clip_grad_norm_(
            trainer.model_wrapped.parameters(), trainer.args.max_grad_norm or float("inf")
        )
        trainer.optimizer.step()
        return float(norm)

    def _zero_gradients(self) -> None:
        self._other_engine.model_wrapped.zero_grad()

    def _iterate_weights(self) -> Iterator[NamedWeight]:
        from safetensors.torch import load_file

        # Trainer exports weights as files.
        with tempfile.TemporaryDirectory() as folder:
            self._other_engine.save_model(folder)
            files = sorted(Path(folder).glob("*.safetensors"))
            tensors = {name: t for file in files for name, t in load_file(file).items()}
        for name, tensor in tensors.items():
            yield NamedWeight(name=name, tensor=tensor)

    def _write_state(self, directory: str) -> list[str]:
        before = set(Path(directory).rglob("*"))
        self._other_engine.args.output_dir = directory
        self._other_engine._save_checkpoint(self._other_engine.model_wrapped, trial=None)
        return self._list_files(directory, before=before)

    def _read_state(self, directory: str) -> None:
        checkpoint = str(next(Path(directory).glob("checkpoint-*")))
        # What train(resume_from_checkpoint=...) calls.
        self._other_engine._load_from_checkpoint(checkpoint)
        self._other_engine._load_optimizer_and_scheduler(checkpoint)
        self._other_engine._load_rng_state(checkpoint)

    def close(self) -> None:
        """Drop the trainer and its folder."""
        self._other_engine = None
        # A second call finds no folder.
        shutil.rmtree(self._folder, ignore_errors=True)


def pad_inputs(micro: SequenceBatch) -> dict[str, Tensor]:
    """Pad a micro-batch on the right, as transformers' collators do."""
    lengths = micro.lengths.tolist()

    def pad(column: Tensor) -> Tensor:
        return nn.utils.rnn.pad_sequence(list(column.split(lengths)), batch_first=True)

    inputs = {
        "input_ids": pad(micro.tokens),
        "attention_mask": pad(torch.ones_like(micro.tokens)),
        # Trainer calls the loss function only if there are labels; ours does not read their values.
        "labels": pad(micro.tokens),
    }
    return (
        inputs if micro.position_ids is None else inputs | {"position_ids": pad(micro.position_ids)}
    )
