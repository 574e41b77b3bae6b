"""The head over a split vocabulary equals log-softmax over the whole one, in chunks and with its gradient."""

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


def numbers(*, rows=7, words=13, padding=3):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 8, generator=draw, requires_grad=True)
    # What pads the vocabulary would be the likeliest word if it were one.
    weight = torch.cat(
        [torch.randn(words, 8, generator=draw), torch.full((padding, 8), 9.0)]
    ).requires_grad_()
    labels = torch.randint(words, (rows,), generator=draw)
    ids = torch.randint(words, (rows, 2), generator=draw)
    heat = torch.rand(rows, generator=draw) + 0.5
    return hidden, weight, labels, ids, heat


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_answers_and_gradients_equal_log_softmax(group, chunk):
    hidden, weight, labels, ids, heat = numbers()
    share = VocabShard(group=group, first=0, size=13, chunk=chunk, wants_entropy=True)
    columns = vocab_parallel_logprobs(
        hidden, weight, labels, temperature=heat, ids=ids, share=share
    )
    logs = torch.log_softmax(hidden @ weight[:13].t() / heat[:, None], dim=-1)
    expected = {
        "logprob": logs.gather(1, labels[:, None])[:, 0],
        "logsumexp": torch.logsumexp(hidden @ weight[:13].t() / heat[:, None], dim=-1),
        "entropy": -(logs.exp() * logs).sum(-1),
        "logprob_at": logs.gather(1, ids),
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
    for have, want in zip(*grads, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


def test_no_position_at_all_is_answered(group):
    hidden, weight, labels, _, heat = numbers()
    share = VocabShard(group=group, first=0, size=13, chunk=4, wants_entropy=False)
    columns = vocab_parallel_logprobs(
        hidden[:0], weight, labels[:0], temperature=heat[:0], ids=None, share=share
    )
    columns.logprob.sum().backward()
    assert (columns.logprob.shape, columns.logprob_at.shape) == ((0,), (0, 0))
    assert not bool(weight.grad.any())


def test_columns_are_added_up_in_one_order_on_every_rank(group):
    # A set's order differs between processes; ranks that followed it would add log-probs to another's entropies.
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
        projection=weight,
        bias=None,
        scalar=None,
        vocabulary=13,
        chunk=4,
        is_compiled=False,
        fills_chunks=False,
        tp=group,
        cp=group,
    )
    head_outputs = head.compute_outputs(
        torch.randn(7, 8), local, requested_outputs=LANGUAGE_OUTPUTS, trained_only=False
    )
    assert list(head_outputs.columns) == sorted(LANGUAGE_OUTPUTS)


@pytest.mark.bitwise
def test_a_log_prob_does_not_depend_on_how_many_others_are_asked(group):
    hidden, weight, labels, _, heat = numbers(rows=24)
    share = VocabShard(group=group, first=0, size=13, chunk=100, wants_entropy=True)
    whole = vocab_parallel_logprobs(hidden, weight, labels, temperature=heat, ids=None, share=share)
    for size in (1, 2, 3, 5, 23):
        few = vocab_parallel_logprobs(
            hidden[:size], weight, labels[:size], temperature=heat[:size], ids=None, share=share
        )
        assert torch.equal(few.logprob, whole.logprob[:size])
        assert torch.equal(few.entropy, whole.entropy[:size])


def test_whole_chunks_change_no_answer_and_no_gradient(group):
    hidden, weight, labels, ids, heat = numbers(rows=24)
    found = []
    for fills_chunks in (False, True):
        share = VocabShard(
            group=group, first=0, size=13, chunk=16, wants_entropy=True, fills_chunks=fills_chunks
        )
        columns = vocab_parallel_logprobs(
            hidden, weight, labels, temperature=heat, ids=ids, share=share
        )
        total = (columns.logprob + columns.entropy + columns.logprob_at.sum(1)).sum()
        found.append(
            (columns.logprob, columns.entropy, *torch.autograd.grad(total, [hidden, weight]))
        )
    for have, want in zip(*found, strict=True):
        torch.testing.assert_close(have, want)
