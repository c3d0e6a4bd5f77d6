"""The Reformer against the released ones, weights and hashes mapped.

`transformers` has two things that the paper has not: it does not mask other buckets of the same chunks, and counts a
pair as often as it meets. Where chunks are buckets and no pair meets twice, both are the same; for the paper's form at
large there is `reformer_pytorch`, told to keep to it.
"""

from typing import Any

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.nn import Attention, LSHKernel, SoftmaxKernel
from manyformer.nn.clustered import chunk_gather_attention, lsh_hashing
from manyformer.nn.clustered.bucket_chunks import sort_into_chunks
from manyformer.nn.clustered.chunk_gather_attention import ChunkVisibility
from manyformer.nn.core import Context, ContiguousLayout, TokenPositions
from manyformer.nn.masks import Causal, LocalBlocks
from manyformer.nn.positions import ConcatenatedGridPosition
from manyformer.recipes.parts.baselines import axial_embedding

DIM, HEADS, LENGTH, CHUNK = 12, 2, 16, 4


def config(**more: Any) -> Any:
    reformer = pytest.importorskip("transformers", reason="needs transformers")
    usual = {"num_buckets": 4, "lsh_attention_probs_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0}
    return reformer.ReformerConfig(
        hidden_size=DIM,
        num_attention_heads=HEADS,
        attention_head_size=DIM // HEADS,
        attn_layers=["lsh"],
        axial_pos_embds=False,
        num_hashes=2,
        lsh_attn_chunk_length=CHUNK,
        local_attn_chunk_length=CHUNK,
        lsh_num_chunks_before=0,
        lsh_num_chunks_after=0,
        hash_seed=3,
        **{**usual, **more},
    )


def context() -> Context:
    pos = torch.arange(LENGTH).expand(2, -1)
    return Context(TokenPositions(pos, torch.zeros_like(pos), ContiguousLayout()))


def attention(kernel: LSHKernel | SoftmaxKernel, weights: list[Tensor]) -> Attention:
    """With these projections, heads side by side as the released layer gives them."""
    layer = Attention(DIM, HEADS, kernel, bias=False).double()
    with torch.no_grad():
        if layer.q_proj is not None:
            layer.q_proj.weight.copy_(weights.pop(0))
        layer.kv_proj.weight.copy_(torch.cat(weights))
        nn.init.eye_(layer.out_proj.weight)
    return layer


@pytest.mark.parametrize("factors", [(6,), (4, 6)])
def test_hashes_are_those_of_transformers(factors: tuple[int, ...]) -> None:
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    buckets: Any = list(factors) if len(factors) > 1 else factors[0]
    peer: Any = LSHSelfAttention(config(num_buckets=buckets))  # type: ignore[no-untyped-call]
    x, total = torch.randn(2, HEADS, LENGTH, DIM // HEADS), torch.tensor(factors).prod()
    expected = peer._hash_vectors(x, 3, None).view(2, HEADS, 3, LENGTH) - total * torch.arange(3)[:, None]
    torch.manual_seed(3)
    turns = torch.randn(HEADS, DIM // HEADS, 3, sum(factors) // 2)
    parts = torch.split(rearrange(turns, "h e r f -> r h e f"), [factor // 2 for factor in factors], dim=-1)
    actual = lsh_hashing.buckets(x, tuple(parts))
    assert actual is not None
    assert torch.equal(rearrange(actual, "r b h l -> b h r l"), expected)


@pytest.mark.parametrize("causal", [True, False])
def test_lsh_attention_of_transformers(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    peer = LSHSelfAttention(config(is_decoder=causal)).double().eval()  # type: ignore[no-untyped-call]
    # two ways to deal out 16 tokens to 4 buckets of 4 in which no two tokens meet twice, differently in each head
    token = torch.arange(LENGTH)
    ways = torch.stack([token // 4, token % 4, token % 4, (token // 4 + token) % 4]).view(HEADS, 2, LENGTH)
    hashes = ways.expand(2, -1, -1, -1)
    offset = hashes + 4 * torch.arange(2)[:, None]
    x = torch.randn(2, LENGTH, DIM, dtype=torch.float64)
    expected = peer(x, buckets=offset.flatten(2)).hidden_states
    kernel = LSHKernel(
        num_buckets=4,
        chunk_length=CHUNK,
        num_hashes=2,
        chunks_before=0,
        chunks_after=0 if causal else 1,
        variant="published",
    )
    monkeypatch.setattr(kernel, "_hash", lambda q: rearrange(hashes, "b h r l -> r b h l").int())
    actual = attention(kernel, [peer.query_key.weight, peer.value.weight])(x, context()).y
    assert (actual - expected).abs().max() < 1e-6


def test_local_attention_of_transformers() -> None:
    from transformers.models.reformer.modeling_reformer import LocalSelfAttention

    peer = LocalSelfAttention(config(is_decoder=True)).double().eval()  # type: ignore[no-untyped-call]
    x = torch.randn(2, LENGTH, DIM, dtype=torch.float64)
    layer = attention(
        SoftmaxKernel(Causal() & LocalBlocks(CHUNK, lookback=CHUNK)),
        [peer.query.weight, peer.key.weight, peer.value.weight],
    )
    assert (layer(x, context()).y - peer(x).hidden_states).abs().max() < 1e-12


@pytest.mark.parametrize("causal", [True, False])
def test_multi_round_attention_of_the_paper(causal: bool) -> None:
    """Several rounds, other buckets masked, pairs counted once: what `reformer_pytorch` does when told to."""
    peers = pytest.importorskip("reformer_pytorch.reformer_pytorch", reason="needs reformer-pytorch")
    rounds, size, width, length = 3, 4, 6, 24
    peer = peers.LSHAttention(
        bucket_size=size, n_hashes=rounds, causal=causal, allow_duplicate_attention=False, attend_across_buckets=False
    ).double()
    qk, v = (torch.randn(2, length, width, dtype=torch.float64, requires_grad=True) for _ in range(2))
    expected, _, buckets = peer.eval()(qk, v)
    hashes = buckets.view(2, rounds, length) - (length // size) * torch.arange(rounds)[:, None]
    seg = torch.zeros(2, length, dtype=torch.long)
    ways = tuple(sort_into_chunks(hashes[:, r], seg, size, unit="document", reach=1) for r in range(rounds))
    sight = ChunkVisibility(ways, 1, 0, causal=causal)
    q, k, values = (x.flatten(0, 1) for x in (qk, nn.functional.normalize(qk, dim=-1), v))
    actual = chunk_gather_attention.chunk_gather_attention(q, k, values, sight, scale=width**-0.5).view(
        2, length, width
    )
    assert (actual - expected).abs().max() < 1e-7
    grad_output = torch.randn_like(actual)
    for one, other in zip(
        torch.autograd.grad(actual, [qk, v], grad_output), torch.autograd.grad(expected, [qk, v], grad_output)
    ):
        assert (one - other).abs().max() < 1e-6


def test_axial_positions() -> None:
    """The released Reformer's positions, in the most square grid."""
    pytest.importorskip("transformers", reason="needs transformers")
    from transformers.models.reformer.modeling_reformer import AxialPositionEmbeddings

    settings = config()
    settings.axial_pos_shape, settings.axial_pos_embds_dim, settings.hidden_dropout_prob = (4, 6), (6, 6), 0.0
    reference = AxialPositionEmbeddings(settings).eval()
    ours = axial_embedding(7, DIM, 24, dropout=0.0).position
    assert isinstance(ours, ConcatenatedGridPosition)
    with torch.no_grad():
        for weight, axis in zip(reference.weights, ours.axes, strict=True):
            weight.copy_(axis.weight.view_as(weight))
        expected = reference(torch.arange(24)[None])[0]
    torch.testing.assert_close(ours.rows(torch.arange(24)), expected)
    with pytest.raises(UserError, match="axial positions are a grid"):
        axial_embedding(7, DIM, 23, dropout=0.0)
