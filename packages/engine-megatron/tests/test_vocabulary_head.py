"""Test that the split head equals log-softmax over the full vocabulary, with gradients."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from temper_engine_api.batch import from_sequences
from temper_engine_megatron.model.micro_batch_layout import (
    MicroBatchLayout,
    build_local_micro_batch,
)
from temper_engine_megatron.model.output_head import LANGUAGE_OUTPUTS, OutputHead
from temper_engine_megatron.model.vocab_parallel_logprobs import VocabShard, vocab_parallel_logprobs


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def draw_inputs(*, rows=7, vocab_size=13, padding=3):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 8, generator=draw, requires_grad=True)
    # The padding rows would be the most likely tokens if they were counted as tokens.
    weight = torch.cat(
        [torch.randn(vocab_size, 8, generator=draw), torch.full((padding, 8), 9.0)]
    ).requires_grad_()
    labels = torch.randint(vocab_size, (rows,), generator=draw)
    ids = torch.randint(vocab_size, (rows, 2), generator=draw)
    temperature = torch.rand(rows, generator=draw) + 0.5
    return hidden, weight, labels, ids, temperature


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_outputs_and_gradients_equal_log_softmax(group, chunk):
    hidden, weight, labels, ids, temperature = draw_inputs()
    shard = VocabShard(group=group, first_id=0, num_tokens=13, chunk_size=chunk, needs_entropy=True)
    columns = vocab_parallel_logprobs(
        hidden, weight, labels, temperature=temperature, extra_ids=ids, shard=shard
    )
    logs = torch.log_softmax(hidden @ weight[:13].t() / temperature[:, None], dim=-1)
    expected = {
        "logprob": logs.gather(1, labels[:, None])[:, 0],
        "logsumexp": torch.logsumexp(hidden @ weight[:13].t() / temperature[:, None], dim=-1),
        "entropy": -(logs.exp() * logs).sum(-1),
        "extra_logprobs": logs.gather(1, ids),
    }
    draw = torch.Generator().manual_seed(1)
    factors = {name: torch.randn(column.shape, generator=draw) for name, column in expected.items()}
    for name, column in expected.items():
        torch.testing.assert_close(getattr(columns, name), column)
    grads = [
        torch.autograd.grad(
            sum((source[name] * factors[name]).sum() for name in expected), [hidden, weight]
        )
        for source in ({name: getattr(columns, name) for name in expected}, expected)
    ]
    for actual, expected_grad in zip(*grads, strict=True):
        torch.testing.assert_close(actual, expected_grad, rtol=1e-5, atol=1e-5)


def test_empty_batch_has_empty_outputs_and_zero_gradients(group):
    hidden, weight, labels, _, temperature = draw_inputs()
    shard = VocabShard(group=group, first_id=0, num_tokens=13, chunk_size=4, needs_entropy=False)
    columns = vocab_parallel_logprobs(
        hidden[:0], weight, labels[:0], temperature=temperature[:0], extra_ids=None, shard=shard
    )
    columns.logprob.sum().backward()
    assert (columns.logprob.shape, columns.extra_logprobs.shape) == ((0,), (0, 0))
    assert not bool(weight.grad.any())


def test_columns_are_summed_in_the_same_order_on_every_rank(group):
    # The order of a set differs between processes; ranks would sum different columns.
    tokens = [torch.arange(4), torch.arange(3)]
    columns = {"logprob_at_ids": [torch.zeros(len(t), 1, dtype=torch.int64) for t in tokens]}
    micro = from_sequences(
        tokens, loss_masks=[torch.zeros(len(t)) for t in tokens], columns=columns
    )
    local = build_local_micro_batch(
        micro,
        MicroBatchLayout(
            cp_size=1, cp_rank=0, token_multiple=1, is_packed=True, device=torch.device("cpu")
        ),
        trained_tokens=5,
    )
    weight = torch.nn.Parameter(torch.randn(13, 8))
    head = OutputHead(
        weight=weight,
        bias=None,
        scalar_output=None,
        vocab_size=13,
        chunk_size=4,
        uses_compile=False,
        pads_chunks=False,
        tp=group,
        cp=group,
    )
    head_outputs = head.compute_outputs(
        torch.randn(7, 8), local, requested_outputs=LANGUAGE_OUTPUTS, trained_only=False
    )
    assert list(head_outputs.columns) == sorted(LANGUAGE_OUTPUTS)


@pytest.mark.bitwise
def test_logprob_does_not_depend_on_the_number_of_positions(group):
    hidden, weight, labels, _, temperature = draw_inputs(rows=24)
    shard = VocabShard(group=group, first_id=0, num_tokens=13, chunk_size=100, needs_entropy=True)
    full = vocab_parallel_logprobs(
        hidden, weight, labels, temperature=temperature, extra_ids=None, shard=shard
    )
    for size in (1, 2, 3, 5, 23):
        few = vocab_parallel_logprobs(
            hidden[:size],
            weight,
            labels[:size],
            temperature=temperature[:size],
            extra_ids=None,
            shard=shard,
        )
        assert torch.equal(few.logprob, full.logprob[:size])
        assert torch.equal(few.entropy, full.entropy[:size])


def test_padded_chunks_change_neither_outputs_nor_gradients(group):
    hidden, weight, labels, ids, temperature = draw_inputs(rows=24)
    results = []
    for pads_chunks in (False, True):
        shard = VocabShard(
            group=group,
            first_id=0,
            num_tokens=13,
            chunk_size=16,
            needs_entropy=True,
            pads_chunks=pads_chunks,
        )
        columns = vocab_parallel_logprobs(
            hidden, weight, labels, temperature=temperature, extra_ids=ids, shard=shard
        )
        total = (columns.logprob + columns.entropy + columns.extra_logprobs.sum(1)).sum()
        results.append(
            (columns.logprob, columns.entropy, *torch.autograd.grad(total, [hidden, weight]))
        )
    for unpadded, padded in zip(*results, strict=True):
        torch.testing.assert_close(padded, unpadded)
