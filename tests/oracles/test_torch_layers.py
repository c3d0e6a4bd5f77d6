"""Our attention and our layers against those of torch, and against loops where torch has none."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mapping import gradients_of, multihead, torch_layer, weights_of
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from manyformer.nn import Attention, KernelCall, SoftmaxKernel
from manyformer.nn.attention.kv_cache import CrossAttentionSource
from manyformer.nn.core import PADDING_SEGMENT, Chain, Context, ContiguousLayout, MemorySequence, TokenPositions
from manyformer.nn.feed_forward.feedforward import FeedForward
from manyformer.nn.masks import AllKeys, Causal, Mask, NoKeys, PerHead, SameDocument
from manyformer.nn.positions import NoPosition
from manyformer.recipes.parts.baselines import branch
from perturbing import perturb

pytestmark = pytest.mark.oracle

DIM, HEADS, HIDDEN = 24, 4, 40


def plain(batch: int, length: int) -> TokenPositions:
    return TokenPositions(
        torch.arange(length).expand(batch, -1), torch.zeros(batch, length, dtype=torch.long), ContiguousLayout()
    )


def padded(lengths: list[int]) -> TokenPositions:
    width = max(lengths)
    column = torch.arange(width).expand(len(lengths), -1)
    return TokenPositions(column, torch.where(column < torch.tensor(lengths)[:, None], 0, PADDING_SEGMENT))


def shaken(module: Any) -> Any:
    return perturb(module, 0.2).eval()


def block(order: str, *, cross: bool) -> Chain:
    """Self-attention, perhaps cross-attention, feed-forward, as torch's layers have them."""
    parts: dict[str, Any] = {"attention": Attention(DIM, HEADS, SoftmaxKernel(Causal() if cross else AllKeys()))}
    if cross:
        parts["cross"] = Attention(DIM, HEADS, SoftmaxKernel(), source=CrossAttentionSource())
    parts["ff"] = FeedForward(DIM, HIDDEN)
    return Chain(**{n: branch(p, order=order, norm=lambda: nn.LayerNorm(DIM)) for n, p in parts.items()}).eval()


@pytest.mark.parametrize("order", ["pre", "post"])
def test_encoder_layer(order: str) -> None:
    reference = shaken(nn.TransformerEncoderLayer(DIM, HEADS, HIDDEN, 0.0, batch_first=True, norm_first=order == "pre"))
    ours = block(order, cross=False)
    norm = "pre_norm" if order == "pre" else "post_norm"
    ours.load_state_dict(torch_layer(weights_of(reference), norm))
    place = padded([9, 5])
    real = place.segment_ids != PADDING_SEGMENT
    x, grad_output = torch.randn(2, 9, DIM), torch.randn(2, 9, DIM) * real[..., None]
    # under grad mode torch takes its written-out form, not the inference fast path
    expected = reference(x, src_key_padding_mask=~real)
    y = ours(x, Context(place)).y
    torch.testing.assert_close(y[real], expected[real], atol=1e-5, rtol=0)
    (expected * grad_output).sum().backward()
    (y * grad_output).sum().backward()
    for name, value in torch_layer(gradients_of(reference), norm).items():
        torch.testing.assert_close(ours.get_parameter(name).grad, value, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("order", ["pre", "post"])
def test_decoder_layer(order: str) -> None:
    reference = shaken(nn.TransformerDecoderLayer(DIM, HEADS, HIDDEN, 0.0, batch_first=True, norm_first=order == "pre"))
    ours = block(order, cross=True)
    ours.load_state_dict(torch_layer(weights_of(reference), "pre_norm" if order == "pre" else "post_norm"))
    source, place = torch.randn(2, 11, DIM), padded([11, 6])
    x, length = torch.randn(2, 7, DIM), 7
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    with torch.no_grad():
        expected = reference(x, source, tgt_mask=later, memory_key_padding_mask=place.segment_ids == PADDING_SEGMENT)
        y = ours(x, Context(plain(2, length), MemorySequence(source, place))).y
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=0)


MASKS: list[tuple[str, Mask]] = [
    ("everything", AllKeys()),
    ("causal", Causal()),
    ("per head", PerHead({0: Causal(), 2: ~Causal() | Causal()}, default=Causal())),
]


@pytest.mark.parametrize(("_", "mask"), MASKS, ids=[name for name, _ in MASKS])
@pytest.mark.parametrize("path", ["auto", "naive"])
def test_multihead_attention(_: str, mask: Mask, path: Any) -> None:
    reference = shaken(nn.MultiheadAttention(DIM, HEADS, batch_first=True))
    ours = Attention(DIM, HEADS, SoftmaxKernel(mask, path=path))
    ours.load_state_dict(multihead(weights_of(reference)))
    x, place = torch.randn(2, 8, DIM), plain(2, 8)
    hidden = ~mask.dense(place, place, HEADS).expand(2, HEADS, 8, 8).flatten(0, 1)
    expected, _weights = reference(x, x, x, attn_mask=hidden)
    y = ours(x, Context(place)).y
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=0)
    grad_output = torch.randn_like(y)
    (expected * grad_output).sum().backward()
    (y * grad_output).sum().backward()
    for name, value in multihead(gradients_of(reference)).items():
        torch.testing.assert_close(ours.get_parameter(name).grad, value, atol=1e-5, rtol=1e-4)


def test_watched_weights_are_those_of_torch() -> None:
    reference = shaken(nn.MultiheadAttention(DIM, HEADS, batch_first=True))
    ours = Attention(DIM, HEADS, SoftmaxKernel())
    ours.load_state_dict(multihead(weights_of(reference)))
    x, place = torch.randn(2, 8, DIM), padded([8, 3])
    _y, expected = reference(x, x, x, key_padding_mask=place.segment_ids == PADDING_SEGMENT, average_attn_weights=False)
    seen: list[tuple[str, Tensor]] = []
    ours(x, Context(place, watch=lambda module, name, value: seen.append((name, value))))
    assert [name for name, _ in seen] == ["weights"]
    real = place.segment_ids != PADDING_SEGMENT
    for row in range(2):
        torch.testing.assert_close(seen[0][1][row][:, real[row]], expected[row][:, real[row]], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads_are_repeated_heads(kv_heads: int) -> None:
    grouped = shaken(Attention(DIM, HEADS, SoftmaxKernel(Causal()), kv_heads=kv_heads))
    full = Attention(DIM, HEADS, SoftmaxKernel(Causal()))
    repeats, width = HEADS // kv_heads, DIM // HEADS
    with torch.no_grad():
        full.q_proj.load_state_dict(grouped.q_proj.state_dict())
        full.out_proj.load_state_dict(grouped.out_proj.state_dict())
        for old, new in ((grouped.kv_proj.weight, full.kv_proj.weight), (grouped.kv_proj.bias, full.kv_proj.bias)):
            # (k or v) x heads x width, every head as often as it has queries
            parts = old.view(2, kv_heads, width, -1).repeat_interleave(repeats, dim=1)
            new.copy_(parts.reshape(new.shape))
    x, ctx = torch.randn(2, 9, DIM), Context(plain(2, 9))
    torch.testing.assert_close(grouped(x, ctx).y, full(x, ctx).y, atol=1e-6, rtol=1e-5)


def test_key_and_value_widths_against_a_loop() -> None:
    heads, kv_heads, key, value, length = 4, 2, 5, 3, 6
    attention = shaken(Attention(DIM, heads, SoftmaxKernel(Causal()), kv_heads=kv_heads, head_dim=key, value_dim=value))
    x = torch.randn(2, length, DIM)
    y = attention(x, Context(plain(2, length))).y
    q = F.linear(x, attention.q_proj.weight, attention.q_proj.bias)
    kv = F.linear(x, attention.kv_proj.weight, attention.kv_proj.bias)
    for b in range(2):
        for i in range(length):
            joined = []
            for h in range(heads):
                g = h // (heads // kv_heads)
                ours = q[b, i, h * key : (h + 1) * key]
                scores = [ours @ kv[b, j, g * key : (g + 1) * key] / math.sqrt(key) for j in range(i + 1)]
                weights = torch.stack(scores).softmax(0)
                at = kv_heads * key + g * value
                joined.append(sum(weights[j] * kv[b, j, at : at + value] for j in range(i + 1)))
            expected = attention.out_proj(torch.cat(joined))
            torch.testing.assert_close(y[b, i], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("scale", [None, 0.7])
def test_naive_is_scaled_dot_product_attention(scale: float | None) -> None:
    q, k, v = (torch.randn(2, HEADS, n, 8) for n in (5, 7, 7))
    kernel = SoftmaxKernel(path="naive", scale=scale)
    y = kernel(KernelCall(q, k, v, plain(2, 5), plain(2, 7), NoPosition())).y
    torch.testing.assert_close(y, F.scaled_dot_product_attention(q, k, v, scale=scale), atol=1e-6, rtol=1e-5)


FLEX: list[tuple[str, Mask]] = [
    ("causal documents", Causal()),
    ("not causal", ~Causal()),
    ("or", PerHead({1: AllKeys()}, default=NoKeys()) | Causal() & SameDocument()),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("_", "mask"), FLEX, ids=[name for name, _ in FLEX])
def test_masks_are_those_of_flex_attention(_: str, mask: Mask) -> None:
    """A mask asked with the scalar places of one query and one key, as FlexAttention asks its `mask_mod`."""
    place = TokenPositions(
        torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0]]), torch.tensor([[0, 0, 0, 1, 1, 2, PADDING_SEGMENT, PADDING_SEGMENT]])
    )
    q, k, v = (torch.randn(1, HEADS, 8, 16) for _ in range(3))

    def scored(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        at, of = (TokenPositions(place.position_ids[b, n], place.segment_ids[b, n]) for n in (i, j))
        return torch.where(
            mask(h, at, of) & (at.segment_ids == of.segment_ids) & (of.segment_ids != PADDING_SEGMENT),
            score,
            -torch.inf,
        )

    with torch.no_grad():
        expected = flex_attention(q, k, v, score_mod=scored)
    y = SoftmaxKernel(mask)(KernelCall(q, k, v, place, place, NoPosition())).y
    seen = mask.dense(place, place, HEADS).expand(1, HEADS, 8, 8).any(-1)
    torch.testing.assert_close(y[seen], expected[seen], atol=1e-5, rtol=0)
    assert (y[~seen] == 0).all()
