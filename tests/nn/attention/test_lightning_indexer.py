"""Sparse attention by a lightning indexer: its definition, loss and choice, and dense attention up to its count."""

import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.nn.attention.latent_attention import LatentAttention, LightningIndexer
from manyformer.nn.core import Context, TokenPositions, contiguous_positions, state_bytes
from manyformer.nn.masks import Causal
from manyformer.nn.ops import chosen_attention
from manyformer.nn.ops.chosen_attention import choose_highest_scores
from manyformer.nn.positions import RotaryPosition

DIM, HEADS, COUNT = 24, 4, 6


def sparse_attention(count: int = COUNT) -> LatentAttention:
    indexer = LightningIndexer(
        DIM, 14, heads=5, head_dim=8, count=count, position=RotaryPosition(8, rotated=4, pairs="halves")
    )
    layer = LatentAttention(
        DIM,
        HEADS,
        Causal(),
        latent_dim=10,
        query_latent_dim=14,
        head_dim=6,
        rotary_dim=4,
        value_dim=5,
        position=RotaryPosition(4),
        indexer=indexer,
    )
    return layer.double()


def context(x: Tensor, start: int = 0) -> Context:
    return Context(contiguous_positions(len(x), start, start + x.shape[1], x.device))


def by_definition(layer: LatentAttention, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Outputs and the indexer's loss of rows without padding, query by query and token by token."""
    indexer, (rows, length, _) = layer.indexer, x.shape
    assert indexer is not None
    positions = contiguous_positions(rows, 0, length, x.device)
    latent = layer._query_latent(x)
    q = layer.q_proj(latent).view(rows, length, HEADS, 10)
    q = torch.cat([q[..., :6], layer.position.query(q[..., 6:].transpose(1, 2), positions).transpose(1, 2)], -1)
    k, v = layer._expand(layer.project_latent(x, positions)[0])
    queries, keys = indexer.queries(x, latent, positions), indexer.keys(x, positions)[:, 0]
    outputs, divergences = torch.zeros(rows, length, HEADS, 5, dtype=x.dtype), []
    for row in range(rows):
        for i in range(length):
            products = torch.stack([(queries.q[row, :, i] @ keys[row, j]).relu() for j in range(i + 1)])
            scores = products @ queries.head_weights[row, i]
            tokens = sorted(range(i + 1), key=lambda j: (scores[j].item(), j))[-count:]
            weights = torch.stack([(k[row, h, tokens] @ q[row, i, h] / 10**0.5).softmax(0) for h in range(HEADS)])
            outputs[row, i] = torch.stack([weights[h] @ v[row, h, tokens] for h in range(HEADS)])
            p = weights.detach().sum(0) / HEADS
            divergences.append((p * (p.log() - scores[tokens].log_softmax(0))).sum())
    return layer.out_proj(outputs.flatten(2)), torch.stack(divergences).mean()


@pytest.mark.parametrize("length", [1, 6, 7, 19])
def test_the_definition_with_gradients(length: int) -> None:
    layer = sparse_attention()
    x = torch.randn(2, length, DIM, dtype=torch.double, requires_grad=True)
    y, _, loss = layer(x, context(x))
    expected, expected_loss = by_definition(layer, x, COUNT)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-12)
    direction, weights = torch.randn_like(y), [x, *layer.parameters()]
    ours = torch.autograd.grad((y * direction).sum() + loss, weights)
    reference = torch.autograd.grad((expected * direction).sum() + expected_loss, weights)
    for own, definition in zip(ours, reference, strict=True):
        torch.testing.assert_close(own, definition, rtol=0, atol=1e-11)


def test_the_loss_moves_the_indexer_alone() -> None:
    layer = sparse_attention()
    x = torch.randn(2, 12, DIM, dtype=torch.double, requires_grad=True)
    y, _, loss = layer(x, context(x))
    assert isinstance(loss, Tensor)
    loss.backward(retain_graph=True)
    assert x.grad is None
    moved = {name for name, weight in layer.named_parameters() if weight.grad is not None}
    assert moved == {name for name, _ in layer.named_parameters() if name.startswith("indexer.")}
    layer.zero_grad()
    y.sum().backward()
    assert all(weight.grad is None for name, weight in layer.named_parameters() if name.startswith("indexer."))


def test_the_indexer_learns_what_attention_looks_at() -> None:
    layer = sparse_attention(16).float()
    x = torch.randn(8, 16, DIM)
    assert layer.indexer is not None
    optimizer = torch.optim.Adam(layer.indexer.parameters(), 1e-2)
    losses = []
    for _ in range(60):
        loss = layer(x, context(x)).loss
        assert isinstance(loss, Tensor)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_dense_up_to_the_count() -> None:
    layer = sparse_attention(20)
    x = torch.randn(2, 20, DIM, dtype=torch.double)
    dense = sparse_attention()
    dense.indexer = None
    dense.load_state_dict({name: value for name, value in layer.state_dict().items() if "indexer" not in name})
    expected = dense(x, context(x)).y
    torch.testing.assert_close(layer(x, context(x)).y, expected, rtol=0, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, context(x)).y, expected, rtol=0, atol=1e-12)
    longer = torch.randn(2, 21, DIM, dtype=torch.double)
    assert not torch.allclose(layer(longer, context(longer)).y, dense(longer, context(longer)).y)


def test_gathered_is_masked_with_padding_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = sparse_attention()
    x = torch.randn(2, 23, DIM, dtype=torch.double)
    segments = torch.tensor([[0] * 9 + [1] * 14, [-1, 3, 3, -1] + [3] * 17 + [-1] * 2])
    position_ids = torch.tensor([[*range(9), *range(14)], [0, 0, 1, 0, *range(2, 19), 0, 0]])
    positions = TokenPositions(position_ids, segments)
    expected = layer(x, Context(positions, watch=lambda *_: None))
    monkeypatch.setattr(chosen_attention, "GATHERED_ELEMENTS", 700)
    y, _, loss = layer(x, Context(positions))
    is_token = segments >= 0
    torch.testing.assert_close(y[is_token], expected.y[is_token], rtol=0, atol=1e-12)
    torch.testing.assert_close(loss, expected.loss, rtol=0, atol=1e-12)


def test_a_token_costs_its_latent_its_key_and_a_key_of_the_indexer() -> None:
    layer = sparse_attention()
    x = torch.randn(2, 15, DIM, dtype=torch.double)
    state = layer(x, context(x), layer.init_state(2, device=x.device, dtype=x.dtype)).state
    assert state_bytes(state) == 2 * 15 * ((10 + 4 + 8) * 8 + 2 * 8)


def test_of_equal_scores_the_newer_token_is_chosen() -> None:
    scores = torch.tensor([[[0.0, -torch.inf, -torch.inf], [0.0, 0.0, -torch.inf], [0.0, 0.0, 0.0]]])
    chosen = choose_highest_scores(scores, 2)
    assert chosen.sort().values.tolist() == [[[-1, 0], [0, 1], [1, 2]]]
    assert chosen_attention.token_choice_mask(chosen, 3)[0, 0].int().tolist() == [
        [1, 0, 0],
        [1, 1, 0],
        [0, 1, 1],
    ]


@pytest.mark.oracle
def test_the_choice_of_transformers() -> None:
    from transformers import DeepseekV32Config
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

    config = DeepseekV32Config(
        hidden_size=DIM, q_lora_rank=14, qk_rope_head_dim=4, index_topk=COUNT, index_n_heads=16, index_head_dim=8
    )
    reference = DeepseekV32Indexer(config, 0).double()
    position = RotaryPosition(8, rotated=4, pairs="halves")
    ours = LightningIndexer(DIM, 14, heads=16, head_dim=8, count=COUNT, position=position).double()
    names = {"wq_b": "q_proj", "wk": "k_proj", "k_norm": "k_norm", "weights_proj": "weight_proj"}
    ours.load_state_dict({f"{names[n.split('.')[0]]}.{n.split('.')[1]}": w for n, w in reference.state_dict().items()})
    x, latent, length = torch.randn(3, 40, DIM, dtype=torch.double), torch.randn(3, 40, 14, dtype=torch.double), 40
    angles = torch.arange(length)[:, None] * 1e4 ** -(torch.arange(0, 4, 2) / 4).double()
    angles = torch.cat([angles, angles], -1)[None]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    expected = reference(x, latent, (angles.cos(), angles.sin()), causal[None].expand(3, -1, -1), torch.arange(length))
    positions = contiguous_positions(3, 0, length, x.device)
    chosen = ours.choose(ours.queries(x, latent, positions), ours.keys(x, positions), causal[None, None])
    # queries that see fewer keys than are chosen get masked ones there
    torch.testing.assert_close(chosen[:, COUNT:].sort().values, expected[:, COUNT:].long().sort().values)


def test_sizes_that_leave_nothing_to_choose_or_turn_are_refused() -> None:
    with pytest.raises(ValueError, match=r"count \(0\) must be at least 1"):
        sparse_attention(0)
    sizes = {"vocab": 9, "dim": 16, "depth": 1, "heads": 2, "indexed_tokens": 4}
    with pytest.raises(UserError, match=r"the indexer of indexed_tokens \(4\) needs query_latent_dim \(None\)"):
        mf.build("deepseek", **sizes, query_latent_dim=None)
    with pytest.raises(UserError, match=r"rotary_dim \(32\) of the indexer_dim \(8\) channels"):
        mf.build("deepseek", **sizes, indexer_dim=8)
