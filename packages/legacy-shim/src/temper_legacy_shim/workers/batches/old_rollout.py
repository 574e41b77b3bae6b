"""``generate_sequences``: prompts of an old batch completed by Temper's sampler."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import BatchError
from temper_engine_api.specs import ModelSpec
from temper_legacy_shim.data_proto import DataProto
from temper_legacy_shim.workers.batches.settings import block
from temper_trainer.config.rollout import RolloutConfig, SamplingConfig
from temper_trainer.rollout.hf_sampler import HfSampler
from temper_trainer.types import SamplingRequest


class OldRollout:
    """A sampler behind the old method: one response for each row."""

    def __init__(self, config: dict[str, object], *, model: ModelSpec, compute: str) -> None:
        self._config = config
        assert model.path is not None
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model.path, trust_remote_code=model.trust_remote_code
        )
        rollout = RolloutConfig(dtype="bf16" if compute == "bf16" else "fp32")
        self._sampler = HfSampler(model=model, tokenizer=self.tokenizer, config=rollout)
        self._draws = torch.Generator().manual_seed(int(str(config.get("seed") or 0)))

    def take_weights(self, engine: BaseEngine) -> None:
        """Use the engine's weights from now on. Collective."""
        with engine.export_weights() as stream:
            self._sampler.load_weights(stream, version=self._sampler.weight_version + 1)

    def generate(self, prompts: DataProto) -> DataProto:
        """Return the responses of prompts that are padded on the left.

        Args:
            prompts: input_ids, attention_mask, position_ids [B, P]; meta_info may hold do_sample,
                validate, eos and pad token ids.

        Returns:
            prompts [B, P], responses [B, W], rollout_log_probs [B, W], and input_ids,
            attention_mask, position_ids [B, P + W].
        """
        if prompts.batch is None or "input_ids" not in prompts.batch:
            raise BatchError(
                "generate_sequences() needs input_ids, attention_mask and position_ids [B, P]."
            )
        begin = time.perf_counter()
        tensors = prompts.batch
        ids, mask = tensors.column("input_ids"), tensors.column("attention_mask").bool()
        completions = self._sampler.sample(self._requests(prompts, ids=ids, mask=mask))
        width = self._width()
        pad = prompts.meta_info.get("pad_token_id", self.tokenizer.pad_token_id)
        responses = _padded(
            [c.tokens for c in completions],
            width=width,
            fill=int(str(pad)) if pad is not None else 0,
            dtype=ids.dtype,
        )
        filled = torch.arange(width) < torch.tensor([len(c.tokens) for c in completions])[:, None]
        positions = tensors.column("position_ids")
        # Prompts are padded on the left, so the last column is a prompt's last token.
        after = positions[:, -1:] + torch.arange(1, width + 1)
        logprobs = _padded(
            [c.rollout_logprobs for c in completions], width=width, fill=0.0, dtype=torch.float32
        )
        return DataProto.from_dict(
            tensors={
                "prompts": ids,
                "responses": responses,
                "rollout_log_probs": logprobs,
                "input_ids": torch.cat([ids, responses], dim=1),
                "attention_mask": torch.cat([mask, filled], dim=1).to(
                    tensors.column("attention_mask").dtype
                ),
                "position_ids": torch.cat([positions, after], dim=1),
            },
            non_tensors=dict(prompts.non_tensor_batch),
            meta_info={"timing": {"generate_sequences": time.perf_counter() - begin}},
        )

    def _requests(
        self, prompts: DataProto, *, ids: Tensor, mask: Tensor
    ) -> Sequence[SamplingRequest]:
        sampling = self._sampling(
            validates=bool(prompts.meta_info.get("validate", False)), meta=prompts.meta_info
        )
        seeds: list[int] = torch.randint(2**31, (len(ids),), generator=self._draws).tolist()
        return [
            SamplingRequest(
                request_id=row,
                prompt_tokens=tuple(ids[row][mask[row]].tolist()),
                sampling=sampling,
                seed=seeds[row],
            )
            for row in range(len(ids))
        ]

    def _sampling(self, *, validates: bool, meta: dict[str, object]) -> SamplingConfig:
        values = {**self._config, **(block(self._config, "val_kwargs") if validates else {})}
        samples = bool(meta.get("do_sample", values.get("do_sample", True)))
        top_k = int(str(values.get("top_k", -1)))
        return SamplingConfig(
            temperature=float(str(values.get("temperature", 1.0))) if samples else 0.0,
            top_p=float(str(values.get("top_p", 1.0))),
            top_k=max(top_k, 0),
            max_tokens=self._width(),
        )

    def _width(self) -> int:
        return int(str(self._config.get("response_length", 512)))


def _padded(
    rows: Sequence[Sequence[float]], *, width: int, fill: float, dtype: torch.dtype
) -> Tensor:
    out = torch.full((len(rows), width), fill, dtype=dtype)
    for row, values in enumerate(rows):
        out[row, : len(values)] = torch.tensor(values, dtype=dtype)
    return out
