"""A training engine with a transformers model and torch's AdamW on one CPU.

Sequences run one at a time, so this code needs neither padding nor packed attention.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from my_engine.config import MyConfig
from my_engine.head_outputs import compute_outputs
from temper_engine_api.batch import PackedBatch, SequenceBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.determinism import use_deterministic_algorithms
from temper_engine_api.engine import BaseEngine, ObjectT
from temper_engine_api.errors import ConfigError
from temper_engine_api.objective import HeadOutput, HeadOutputs, MicroBatchLoss
from temper_engine_api.specs import EngineConfig, ModelSpec
from temper_engine_api.topology import Topology
from temper_engine_api.weights import (
    NamedWeight,
    TrainingState,
    WeightEntry,
    check_saved_entries,
    check_weight_entries,
)

STATE_FILE = "state.pt"


class MyEngine(BaseEngine):
    """Implements the abstract methods of `BaseEngine`.

    The base class checks arguments, plans mini-batches, normalizes the loss and writes checkpoints.
    Its docstrings in `temper_engine_api.engine` specify the methods below.
    """

    config_class: ClassVar[type[EngineConfig]] = MyConfig
    # The base class refuses features that are not listed here, and the kit skips their tests.
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.LANGUAGE_MODEL, Capability.LOGPROB_AT, Capability.PORTABLE_STATE}
    )

    def _build(self) -> Topology:
        """Build the model and the optimizer; return the parallel layout of this rank."""
        self._model = _load_model(self.config.model)
        spec = self.config.optimizer
        self._optimizer = None
        if spec is not None:
            decayed = [p for p in self._model.parameters() if p.ndim >= 2 or spec.decays_vectors]
            others = [p for p in self._model.parameters() if p.ndim < 2 and not spec.decays_vectors]
            # Two groups, because norms and biases have no weight decay unless `decays_vectors`.
            groups: list[dict[str, Any]] = [
                {"params": decayed},
                {"params": others, "weight_decay": 0.0},
            ]
            self._optimizer = torch.optim.AdamW(
                groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay
            )
        return Topology()

    def _run_micro_batches(
        self,
        batch: PackedBatch,
        *,
        requested_outputs: frozenset[HeadOutput],
        micro_batch_loss: MicroBatchLoss | None,
        forward_only: bool,
        reduce_gradients: bool,
    ) -> list[HeadOutputs] | None:
        """Run the micro-batches in the given order and accumulate gradients without averaging them.

        The value of `micro_batch_loss` is already normalized over the mini-batch. A single rank has
        no gradients to reduce, so `reduce_gradients` has no effect here.
        """
        results = []
        is_training = micro_batch_loss is not None and not forward_only
        with torch.set_grad_enabled(not forward_only), self._determinism():
            for micro in batch.iterate_micro_batches():
                head_outputs = self._compute_outputs(
                    micro, requested_outputs=requested_outputs, only_trained=is_training
                )
                if micro_batch_loss is not None:
                    loss = micro_batch_loss(head_outputs, micro)
                    if is_training:
                        loss.backward()
                results.append(head_outputs.detach())
        return results

    def _determinism(self) -> AbstractContextManager[None]:
        """Allow only deterministic kernels if the setting `deterministic` asks for it."""
        return use_deterministic_algorithms() if self.config.deterministic else nullcontext()

    def _compute_outputs(
        self, micro: SequenceBatch, *, requested_outputs: frozenset[HeadOutput], only_trained: bool
    ) -> HeadOutputs:
        """Compute the head's outputs of a micro-batch and join them in the order of its tokens."""
        parts = []
        # Parameters stay in float32 as master weights; autocast computes matrix products in bf16.
        with torch.autocast(
            "cpu", dtype=torch.bfloat16, enabled=self.config.precision.compute == "bf16"
        ):
            for number in range(micro.num_sequences):
                sequence = micro.select([number])
                logits = self._model(
                    input_ids=sequence.tokens[None],
                    position_ids=sequence.get_position_ids()[None],
                    attention_mask=torch.ones_like(sequence.tokens)[None],
                    use_cache=False,
                ).logits[0]
                parts.append(compute_outputs(logits, sequence, requested_outputs=requested_outputs))
        columns = {
            head_output: torch.cat([part[head_output] for part in parts])
            for head_output in requested_outputs
        }
        if only_trained:
            # `where` blocks the gradient of untrained positions. A product with the mask would not:
            # zero times an infinite gradient is NaN.
            for head_output, column in columns.items():
                mask = micro.loss_mask if column.ndim == 1 else micro.loss_mask[:, None]
                columns[head_output] = torch.where(mask, column, 0.0)
        return HeadOutputs(columns=columns)

    def _reduce_pending_gradients(self) -> None:
        """Do nothing: with one data-parallel rank no gradient is left to reduce."""

    def _apply_gradients(self, *, lr: float) -> float:
        """Clip gradients and update the parameters; return the gradient norm before clipping.

        A norm that is not finite changes no parameter; the base class counts the skipped update.
        """
        assert self.config.optimizer is not None
        assert self._optimizer is not None
        # AdamW skips parameters without a gradient. Zeros keep the update counts and the weight
        # decay of all parameters equal.
        for parameter in self._model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        limit = self.config.optimizer.clip_grad_norm
        # Squares are summed in float64, because those of large gradients overflow float32.
        norms = [p.grad.double().norm() for p in self._model.parameters() if p.grad is not None]
        norm = float(torch.stack(norms).norm())
        if limit is None and norm**2 > torch.finfo(torch.float32).max:
            # Without clipping, second moments would be infinite, and stay so.
            return math.inf
        if math.isfinite(norm):
            if limit is not None:
                nn.utils.clip_grads_with_norm_(self._model.parameters(), limit, torch.tensor(norm))
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        return norm

    def _zero_gradients(self) -> None:
        self._model.zero_grad(set_to_none=True)

    @contextmanager
    def _loaded(self, mode: Literal["train", "eval", "update"]) -> Iterator[None]:
        """Switch between training and evaluation mode, and restore the mode also after an error.

        An engine with offloading loads here what the mode needs, and offloads it on exit.
        """
        was_training = self._model.training
        if mode != "update":
            self._model.train(mode == "train")
        try:
            yield
        finally:
            self._model.train(was_training)

    def _iterate_weights(self) -> Iterator[NamedWeight]:
        """Yield full tensors by Hugging Face name; a tied head appears once."""
        for name, tensor in self._weights().items():
            # A copy, because the caller may keep the tensor while training changes the parameter.
            yield NamedWeight(name=name, tensor=tensor.detach().clone())

    def _load_weights(self, stream: Iterable[NamedWeight]) -> None:
        """Load full tensors by Hugging Face name."""
        # Read the complete stream first: all names and shapes are checked before a weight changes.
        arrived, weights = list(stream), self._weights()
        check_weight_entries(
            [_entry(name, tensor) for name, tensor in weights.items()],
            [_entry(name, tensor) for name, tensor in arrived],
        )
        with torch.no_grad():
            for name, tensor in arrived:
                weights[name].copy_(tensor)

    def _weights(self) -> dict[str, Tensor]:
        """Return the tensors of the model's files: parameters and persistent buffers."""
        return {**dict(self._model.named_parameters()), **self._buffers()}

    def _buffers(self) -> dict[str, Tensor]:
        """Return the persistent buffers, which are also part of the model's files."""
        saved = self._model.state_dict().keys()
        return {name: b for name, b in self._model.named_buffers() if name in saved}

    def _iterate_state(self) -> Iterator[TrainingState]:
        """Yield master weights and AdamW moments by Hugging Face name."""
        for name, parameter in self._model.named_parameters():
            moments = self._moments(parameter)
            yield TrainingState(
                name=name,
                master=parameter.detach().clone(),
                first_moment=moments["exp_avg"].clone(),
                second_moment=moments["exp_avg_sq"].clone(),
                update_count=int(moments["step"]),
            )

    def _load_state(self, stream: Iterable[TrainingState]) -> None:
        arrived = list(stream)
        check_weight_entries(
            self._entries(), [_entry(state.name, state.master) for state in arrived]
        )
        for state in arrived:
            self._restore(
                state.name,
                state.master,
                state.first_moment,
                state.second_moment,
                state.update_count,
            )

    def _write_state(self, directory: str) -> list[str]:
        """Write this rank's files and return their names.

        The base class makes the checkpoint appear only when it is complete.
        """
        # The RNG state is saved too, so that dropout continues as in an uninterrupted run.
        state = {
            state.name: (state.master, state.first_moment, state.second_moment, state.update_count)
            for state in self._iterate_state()
        }
        saved = {"state": state, "buffers": self._buffers(), "random": torch.get_rng_state()}
        torch.save(saved, Path(directory) / STATE_FILE)
        return [STATE_FILE]

    def _read_state(self, directory: str) -> None:
        """Load the files of `_write_state`, after a check of all names and shapes."""
        saved = torch.load(Path(directory) / STATE_FILE, weights_only=True)
        tensors = {name: master for name, (master, *_) in saved["state"].items()}
        buffers = saved.get("buffers", {})
        tensors |= buffers
        # Check everything first: a CheckpointError must leave the engine unchanged.
        check_saved_entries(
            [_entry(name, tensor) for name, tensor in self._weights().items()],
            [_entry(name, tensor) for name, tensor in tensors.items()],
            directory=directory,
        )
        for name, (master, first, second, count) in saved["state"].items():
            self._restore(name, master, first, second, count)
        for name, buffer in self._buffers().items():
            buffer.copy_(buffers[name])
        torch.set_rng_state(saved["random"])

    def _moments(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        """Return AdamW's state of a parameter, or zeros before its first update."""
        known: Mapping[str, Tensor] = (
            {} if self._optimizer is None else self._optimizer.state.get(parameter, {})
        )
        zeros = torch.zeros_like(parameter)
        return known or {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros}

    def _restore(
        self, name: str, master: Tensor, first: Tensor, second: Tensor, count: int
    ) -> None:
        parameter = self._model.get_parameter(name)
        with torch.no_grad():
            parameter.copy_(master)
        if self._optimizer is not None:
            self._optimizer.state[parameter] = {
                "step": torch.tensor(float(count)),
                "exp_avg": first.clone(),
                "exp_avg_sq": second.clone(),
            }

    def _entries(self) -> list[WeightEntry]:
        return [_entry(name, parameter) for name, parameter in self._model.named_parameters()]

    def _sum_over_data_parallel(self, value: Tensor) -> Tensor:
        """Return the value, which is the sum over a single rank."""
        return value

    def _gather_objects(self, item: ObjectT) -> list[ObjectT]:
        """Return the objects of all ranks; here there is only one."""
        return [item]

    def to(
        self, device: Literal["cpu", "device"], *, model: bool = True, optimizer: bool = True
    ) -> None:
        """Check the arguments only: the engine always runs on the CPU."""
        self._check_can_move(device)

    def close(self) -> None:
        """Free memory so that another engine can be built; does nothing the second time."""
        if hasattr(self, "_model"):
            del self._model
        self._optimizer = None


def _load_model(spec: ModelSpec) -> nn.Module:
    """Build the model in float32 from its directory, or with seeded random weights."""
    if spec.trust_remote_code:
        raise ConfigError(
            "model.trust_remote_code is True, but this engine runs no remote code: set it to False."
        )
    torch.manual_seed(spec.seed)
    model: nn.Module
    if spec.path is not None:
        model = AutoModelForCausalLM.from_pretrained(
            spec.path, dtype=torch.float32, local_files_only=True
        )
    else:
        settings = dict(spec.architecture)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(settings.pop("model_type"), **settings), dtype=torch.float32
        )
    return model.eval()


def _entry(name: str, tensor: Tensor) -> WeightEntry:
    return WeightEntry(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)
