"""Longformer and BigBird of `transformers`, with random weights and patterns fed in, are our attention."""

from typing import Any

import numpy as np
import pytest
import torch
from mapping import attention_projections, by_family, global_projections, gradients_of, weights_of
from pairs import shaken
from torch import Tensor

import manyformer as mf
from manyformer.models.embedding import positions_of
from manyformer.nn import Attention, SoftmaxKernel
from manyformer.nn import masks as m
from manyformer.nn.attention.global_local import GlobalLocalAttention
from manyformer.nn.batches import IGNORE_INDEX, MaskedLMBatch
from manyformer.nn.core import PADDING_SEGMENT, Context

pytestmark = pytest.mark.oracle

VOCAB, DIM, DEPTH, HEADS, HIDDEN, LONGEST, WINDOW, GLOBALS = 53, 32, 2, 4, 80, 64, 4, 2


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    from transformers import LongformerConfig, LongformerForMaskedLM

    torch.manual_seed(4)
    config = LongformerConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        intermediate_size=HIDDEN,
        max_position_embeddings=LONGEST + 2,
        attention_window=2 * WINDOW,
        type_vocab_size=1,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        layer_norm_eps=1e-12,
    )
    reference = shaken(LongformerForMaskedLM(config))
    sizes = {"vocab": VOCAB, "dim": DIM, "depth": DEPTH, "heads": HEADS, "ff_dim": HIDDEN, "max_length": LONGEST}
    ours = mf.build("longformer", **sizes, window=WINDOW, global_tokens=GLOBALS, dropout=0.0).eval()
    weights, embeddings = weights_of(reference), "longformer.embeddings"
    # the one type of all tokens is one more vector at every position
    types = weights[f"{embeddings}.token_type_embeddings.weight"]
    weights[f"{embeddings}.position_embeddings.weight"] = weights[f"{embeddings}.position_embeddings.weight"] + types[0]
    ours.load_state_dict(by_family("longformer", ours, weights))
    return ours, reference


def draw(rows: int, length: int) -> tuple[Tensor, dict[str, Tensor]]:
    tokens = torch.randint(3, VOCAB, (rows, length))
    first = (torch.arange(length) < GLOBALS).long().expand(rows, -1)
    return tokens, {"global_attention_mask": first}


@pytest.mark.parametrize("length", [2, 9, 31, LONGEST])
def test_longformer_logits(models: tuple[Any, Any], length: int) -> None:
    ours, reference = models
    tokens, words = draw(2, length)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, reference(tokens, **words).logits, atol=1e-5, rtol=1e-5)


def test_longformer_with_padding(models: tuple[Any, Any]) -> None:
    ours, reference = models
    tokens, words = draw(3, 33)
    lengths = torch.tensor([33, 20, 7])[:, None]
    real = torch.arange(33) < lengths
    tokens = torch.where(real, tokens, 1)
    with torch.no_grad():
        actual = ours(tokens, torch.where(real, 0, PADDING_SEGMENT)).logits
        expected = reference(tokens, attention_mask=real.long(), **words).logits
    torch.testing.assert_close(actual[real], expected[real], atol=1e-5, rtol=1e-5)


def test_longformer_gradients(models: tuple[Any, Any]) -> None:
    ours, reference = models
    tokens, words = draw(2, 40)
    targets = torch.where(torch.rand(2, 40) < 0.3, tokens, IGNORE_INDEX)
    loss = ours.loss(MaskedLMBatch(tokens, targets, None))
    (loss.total / loss.targets).backward()
    reference(tokens, labels=torch.where(targets == IGNORE_INDEX, -100, targets), **words).loss.backward()
    mapped = by_family("longformer", ours, gradients_of(reference))
    for name, value in ours.named_parameters():
        if name == "embed.position.weight":
            # theirs is the sum over two tables
            continue
        largest = mapped[name].abs().max().item()
        torch.testing.assert_close(value.grad, mapped[name], atol=1e-5 * largest + 1e-6, rtol=1e-4, msg=name)


def test_any_token_can_be_global() -> None:
    """Other tokens in each row, given by their role; theirs marks them by large numbers."""
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    config = LongformerConfig(hidden_size=DIM, num_attention_heads=HEADS, attention_window=[8])
    config.attention_probs_dropout_prob = 0.0
    reference: Any = shaken(LongformerSelfAttention(config, 0))
    ours = GlobalLocalAttention(DIM, HEADS, m.symmetric_window(4), m.WithRole(1))
    weights = weights_of(reference)
    packed = {}
    for kind in ("weight", "bias"):
        q, k, v = (weights[f"{name}.{kind}"] for name in ("query", "key", "value"))
        packed |= {f"q_proj.{kind}": q, f"kv_proj.{kind}": torch.cat([k, v])}
    packed |= {"out_proj.weight": torch.eye(DIM), "out_proj.bias": torch.zeros(DIM)}
    ours.load_state_dict(packed | global_projections(weights, "", ""))
    x, role = torch.randn(2, 24, DIM), torch.zeros(2, 24, dtype=torch.long)
    role[0, [3, 11]] = role[1, 20] = 1
    segments = torch.tensor([[0] * 24, [0] * 21 + [PADDING_SEGMENT] * 3])
    marks = torch.where(segments == PADDING_SEGMENT, -10000.0, 10000.0 * role)
    with torch.no_grad():
        place = positions_of(role, segments, None)[0]._replace(roles=role)
        actual = ours(x, Context(place)).y
        expected = reference(x, marks, marks < 0, marks > 0, bool((marks > 0).any()))[0]
    real = segments != PADDING_SEGMENT
    torch.testing.assert_close(actual[real], expected[real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("padding", [0, 11])
def test_bigbird_with_our_random_blocks(padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    size, blocks, count = 4, 16, 2
    config = BigBirdConfig(
        hidden_size=DIM, num_attention_heads=HEADS, block_size=size, num_random_blocks=count, max_position_embeddings=64
    )
    # evaluation would look at block 0 instead of random ones
    reference: Any = shaken(BigBirdBlockSparseAttention(config, seed=0)).train()
    chance = m.RandomBlocks(size, count, blocks, seed=3, skip_first=1, skip_last=1)
    lists: list[Any] = [chance.for_head(head) for head in range(HEADS)]
    rows = [np.array(one.rows[1:-1]) for one in lists]
    assert {row.shape for row in rows} == {(blocks - 2, count)}
    monkeypatch.setattr(reference, "_bigbird_block_rand_mask_with_head", lambda **words: rows)
    ends = m.AtPositions(*range(size), *range(size * (blocks - 1), size * blocks))
    mask = m.LocalBlocks(size, lookback=size, lookahead=size) | m.GlobalTokens(ends) | chance
    ours = Attention(DIM, HEADS, SoftmaxKernel(mask, path="sparse"))
    names = ("query", "key", "value", "query")
    weights = {f"x.{name}": value for name, value in weights_of(reference).items()}
    mapped = {name.removeprefix("y."): value for name, value in attention_projections(weights, "x", "y", names).items()}
    ours.load_state_dict(mapped)
    with torch.no_grad():
        ours.out_proj.weight.copy_(torch.eye(DIM))
        ours.out_proj.bias.zero_()
    length = size * blocks
    x = torch.randn(2, length, DIM)
    keep = torch.ones(2, length)
    keep[1, length - padding :] = 0 if padding else 1
    blocked, band, before, after = BigBirdModel.create_masks_for_block_sparse_attn(keep, size)
    actual = ours(x, Context(positions_of(keep.long(), torch.where(keep > 0, 0, PADDING_SEGMENT), None)[0])).y
    expected = reference(x, band, before, after, blocked, blocked)[0]
    real = keep > 0
    torch.testing.assert_close(actual[real], expected[real], atol=1e-5, rtol=1e-5)
