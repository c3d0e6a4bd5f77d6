"""Transformer-XL's relative positions against the formula pair by pair, and against XLNet's attention."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyformer.models.embedding import positions_of
from manyformer.nn import Attention, SoftmaxKernel
from manyformer.nn.core import PADDING_SEGMENT, Context, TokenPositions
from manyformer.nn.masks import AllKeys, Causal, Mask
from manyformer.nn.positions import TransformerXLBiases, TransformerXLPosition, transformer_xl
from perturbing import perturb
from token_rows import range_positions

DIM, HEADS, WIDTH = 12, 3, 4


def shaken(module: Any, size: float = 0.5) -> Any:
    return perturb(module, size).double()


def wave(far: int, dim: int) -> Tensor:
    angles = [far / 10000 ** (2 * i / dim) for i in range(dim // 2)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles]).double()


def by_hand(
    xl: TransformerXLPosition, q: Tensor, k: Tensor, query_positions: TokenPositions, key_positions: TokenPositions
) -> Tensor:
    """((q + u) k + (q + v) W R_{i-j}) / sqrt(e), one pair at a time."""
    u, v = xl.biases.u, xl.biases.v
    weight = xl.r_proj.weight.unflatten(0, (HEADS, WIDTH))
    rows = []
    for b in range(q.shape[0]):
        for h in range(HEADS):
            for i in range(q.shape[2]):
                for j in range(k.shape[2]):
                    i_pos, j_pos = (
                        int(p.position_ids[min(b, len(p.position_ids) - 1), n])
                        for p, n in ((query_positions, i), (key_positions, j))
                    )
                    content = (q[b, h, i] + u[h]) @ k[b, h, j]
                    where = (q[b, h, i] + v[h]) @ (weight[h] @ wave(i_pos - j_pos, DIM))
                    rows.append((content + where) / math.sqrt(WIDTH))
    return torch.stack(rows).view(*q.shape[:3], k.shape[2])


def scores(
    xl: TransformerXLPosition, q: Tensor, k: Tensor, query_positions: TokenPositions, key_positions: TokenPositions
) -> Tensor:
    q = xl.query(q, query_positions)
    return xl.score(q @ k.mT / math.sqrt(WIDTH), q, xl.key(k, key_positions), query_positions, key_positions)


PLACES: dict[str, tuple[TokenPositions, TokenPositions]] = {
    "from the first token on": (range_positions(5), range_positions(5)),
    "after a memory": (range_positions(3, 6), range_positions(9)),
    "after a memory, not known to be plain": (range_positions(3, 6, plain=False), range_positions(9)),
    "before the keys": (range_positions(2), range_positions(3, 4)),
    "anywhere": (
        TokenPositions(torch.tensor([[7, 2], [0, 5]]), torch.zeros(2, 2).long()),
        TokenPositions(torch.tensor([[1, 9, 4], [2, 0, 30]]), torch.zeros(2, 3).long()),
    ),
}


@pytest.mark.parametrize("where", PLACES)
def test_it_is_the_formula_with_gradients(where: str) -> None:
    """Also for keys ahead of their query, where a shifted table would hold other rows' numbers."""
    at, of = PLACES[where]
    xl = shaken(TransformerXLPosition(DIM, HEADS))
    q = torch.randn(2, HEADS, at.position_ids.shape[1], WIDTH, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, HEADS, of.position_ids.shape[1], WIDTH, dtype=torch.float64, requires_grad=True)
    expected, actual = by_hand(xl, q, k, at, of), scores(xl, q, k, at, of)
    # R is float32: the loop takes it in float64
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)
    grad_output, leaves = torch.randn_like(expected), [q, k, *xl.parameters()]
    pairs = zip(
        torch.autograd.grad(actual, leaves, grad_output),
        torch.autograd.grad(expected, leaves, grad_output),
        strict=True,
    )
    for ours, reference in pairs:
        assert reference.abs().max() > 0.1
        torch.testing.assert_close(ours, reference, atol=1e-5, rtol=0)


@pytest.mark.parametrize("clamp", [None, 3])
def test_what_it_is_by_distance(clamp: int | None) -> None:
    xl = shaken(TransformerXLPosition(DIM, HEADS, clamp=clamp))
    q, k = (torch.randn(1, HEADS, n, WIDTH, dtype=torch.float64) for n in (4, 9))
    at, of = range_positions(4, 3), range_positions(9)
    table = xl.distance_terms(6, 5)
    assert table.query_bias is not None
    assert table.keys is not None
    asked = xl.query(q, at)
    each = (asked + table.query_bias[:, None]) @ table.keys.mT
    ahead = of.position_ids[0][None, :] - at.position_ids[0][:, None]
    actual = asked @ k.mT / math.sqrt(WIDTH) + each.gather(-1, (ahead + 6).expand(1, HEADS, 4, 9))
    torch.testing.assert_close(actual, scores(xl, q, k, at, of), atol=1e-12, rtol=0)


def test_distances_beyond_the_clamp_are_alike() -> None:
    xl = shaken(TransformerXLPosition(DIM, HEADS))
    free, xl.clamp = xl.distance_vectors(6, 6), 4
    held = xl.distance_vectors(6, 6)
    xl.clamp = 0
    torch.testing.assert_close(xl.distance_vectors(2, 2), free[:, 6:7].expand(-1, 5, -1))
    torch.testing.assert_close(held[:, 2:11], free[:, 2:11])
    torch.testing.assert_close(held[:, :2], free[:, 2:3].expand(-1, 2, -1))
    torch.testing.assert_close(held[:, 11:], free[:, 10:11].expand(-1, 2, -1))


def test_the_table_that_is_kept_grows_to_both_sides_and_further_ones_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    xl = TransformerXLPosition(DIM, HEADS)
    monkeypatch.setattr("manyformer.nn.positions.transformer_xl.MAX_TABLE_DISTANCE", 40)
    for back, ahead in ((0, 0), (3, -1), (-2, 9), (20, 30), (50, 0), (5, 5)):
        with torch.inference_mode(mode=back == 3):
            actual = xl.distance_vectors(back, ahead)
        expected = torch.stack([wave(far, DIM) for far in range(back, -ahead - 1, -1)]).float() @ xl.r_proj.weight.T
        torch.testing.assert_close(actual.transpose(0, 1).flatten(1), expected, atol=1e-6, rtol=0)
    xl.distance_vectors(2, 2).sum().backward()
    assert not [name for name in xl.state_dict() if "table" in name]


def test_dropout_acts_on_the_table_while_training() -> None:
    xl = shaken(TransformerXLPosition(DIM, HEADS, dropout=0.5))
    assert not torch.equal(xl.distance_vectors(4, 0), xl.distance_vectors(4, 0))
    xl.eval()
    assert torch.equal(xl.distance_vectors(4, 0), xl.distance_vectors(4, 0))


def test_layers_share_the_biases_or_have_their_own() -> None:
    shared = TransformerXLBiases(HEADS, WIDTH)
    tied = nn.ModuleList(TransformerXLPosition(DIM, HEADS, biases=shared) for _ in range(3))
    untied = nn.ModuleList(TransformerXLPosition(DIM, HEADS) for _ in range(3))
    table = HEADS * WIDTH * DIM
    assert sum(p.numel() for p in tied.parameters()) == 3 * table + 2 * DIM
    assert sum(p.numel() for p in untied.parameters()) == 3 * (table + 2 * DIM)


@pytest.mark.usefixtures("unchecked")
def test_widths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"TransformerXLPosition: dim \(12\) must be a multiple of heads \(5\)"):
        TransformerXLPosition(12, 5)
    with pytest.raises(ValueError, match=r"TransformerXLPosition: dim \(15\) must be even"):
        TransformerXLPosition(15, 3)
    with pytest.raises(
        ValueError, match=r"TransformerXLPosition: biases of shape \(3, 4\) do not fit 2 heads of width 6"
    ):
        TransformerXLPosition(12, 2, biases=TransformerXLBiases(3, 4))


def attention(mask: Mask, path: Any = "auto") -> Attention:
    return shaken(
        Attention(DIM, HEADS, SoftmaxKernel(mask, path=path), position=TransformerXLPosition(DIM, HEADS), bias=False),
        0.3,
    )


@pytest.mark.oracle
@pytest.mark.parametrize("memory", [0, 4])
@pytest.mark.parametrize("kind", ["uni", "bi"])
def test_xlnet_attends_alike(kind: str, memory: int) -> None:
    """With a memory its queries are the last tokens, and they alone are asked for."""
    from transformers import XLNetConfig, XLNetModel

    length, batch = 6, 2
    ours = attention(Causal() if kind == "uni" else AllKeys())
    sizes = {"d_model": DIM, "n_head": HEADS, "d_inner": 8, "n_layer": 1, "vocab_size": 7}
    model = XLNetModel(XLNetConfig(**sizes, attn_type=kind, dropout=0.0)).double()
    reference = shaken(model.layer[0].rel_attn)
    ahead = memory_of(ours, reference)
    x = torch.randn(batch, memory + length, DIM, dtype=torch.float64)
    table = model.relative_positional_encoding(length, memory + length, bsz=batch).double()
    seen = torch.ones(length, memory + length).tril(memory if kind == "uni" else memory + length)
    hidden = (1 - seen)[:, :, None, None].expand(-1, -1, batch, -1).double()
    with torch.no_grad():
        h = x[:, memory:].transpose(0, 1)
        mems = x[:, :memory].transpose(0, 1) if memory else None
        expected = reference(h, None, hidden, None, table, None, mems=mems)[0].transpose(0, 1)
        actual = reference.layer_norm(x[:, memory:] + ahead(x, memory))
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)
    assert expected.std() > 0.3


def memory_of(ours: Attention, theirs: Any) -> Callable[[Tensor, int], Tensor]:
    """Our attention with XLNet's weights, for the tokens after a memory."""
    xl = ours.position
    assert isinstance(xl, TransformerXLPosition)
    with torch.no_grad():
        ours.q_proj.weight.copy_(theirs.q.flatten(1).T)
        ours.kv_proj.weight.copy_(torch.cat([theirs.k.flatten(1), theirs.v.flatten(1)], dim=1).T)
        ours.out_proj.weight.copy_(theirs.o.flatten(1))
        xl.r_proj.weight.copy_(theirs.r.flatten(1).T)
        xl.biases.u.copy_(theirs.r_w_bias)
        xl.biases.v.copy_(theirs.r_r_bias)
    return lambda x, memory: ours(x, Context(range_positions(x.shape[1]))).y[:, memory:]


@pytest.mark.parametrize("mask", [Causal(), AllKeys()], ids=repr)
def test_padding_packing_and_shifts_change_nothing(mask: Mask) -> None:
    layer = attention(mask)
    x = torch.randn(1, 7, DIM, dtype=torch.float64)
    full = layer(x, Context(range_positions(7))).y[0]
    shifted = layer(x, Context(range_positions(7, 100_000))).y[0]
    torch.testing.assert_close(shifted, full, atol=1e-10, rtol=0)
    segments = torch.tensor([[PADDING_SEGMENT] * 4 + [0] * 7, [0] * 3 + [1] * 7 + [PADDING_SEGMENT]])
    place, _ = positions_of(segments, segments, None)
    rows = torch.randn(2, 11, DIM, dtype=torch.float64)
    rows[0, 4:], rows[1, 3:10] = x[0], x[0]
    actual = layer(rows, Context(place)).y
    torch.testing.assert_close(actual[0, 4:], full, atol=1e-10, rtol=0)
    torch.testing.assert_close(actual[1, 3:10], full, atol=1e-10, rtol=0)


@pytest.mark.parametrize("sizes", [[1] * 7, [3, 1, 3], [7]])
@pytest.mark.parametrize("capacity", [None, 9])
def test_cached_is_parallel(sizes: list[int], capacity: int | None) -> None:
    layer, x = attention(Causal()), torch.randn(2, 7, DIM, dtype=torch.float64)
    full = layer(x, Context(range_positions(7))).y
    state = layer.init_state(2, capacity=capacity, device=x.device, dtype=x.dtype)
    begin = 0
    for size in sizes:
        with torch.no_grad():
            out = layer(x[:, begin : begin + size], Context(range_positions(size, begin)), state)
        torch.testing.assert_close(out.y, full[:, begin : begin + size], atol=1e-10, rtol=0)
        state, begin = out.state, begin + size


def test_distances_in_unknown_places_never_cost_more_than_the_rows_need() -> None:
    """Documents of a row lie at unlike positions; what cannot meet must not stretch the table."""
    pos = torch.tensor([[1_000_000_000, 1_000_000_001, 0, 1]])
    place = TokenPositions(pos, torch.tensor([[0, 0, 1, 1]]))
    layer, x = attention(Causal()), torch.randn(1, 4, DIM, dtype=torch.float64)
    y = layer(x, Context(place)).y
    torch.testing.assert_close(y[:, 2:], layer(x[:, 2:], Context(range_positions(2))).y, atol=1e-10, rtol=0)
    torch.testing.assert_close(y[:, :2], layer(x[:, :2], Context(range_positions(2))).y, atol=1e-10, rtol=0)


@pytest.mark.parametrize("mask", [Causal(), AllKeys()], ids=repr)
def test_training_on_a_device_knows_how_far_keys_are_apart_without_reading(
    mask: Mask, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = attention(mask).train()
    segments = torch.tensor([[PADDING_SEGMENT] * 4 + [0] * 7, [0] * 3 + [1] * 8])
    counted, _ = positions_of(segments, segments, None)
    place, x = TokenPositions(counted.position_ids, segments), torch.randn(2, 11, DIM, dtype=torch.float64)
    expected = layer(x, Context(place)).y
    monkeypatch.setattr(transformer_xl, "reads_are_free", lambda x: False)
    monkeypatch.setattr(torch, "aminmax", None)
    torch.testing.assert_close(layer(x, Context(place)).y, expected, atol=1e-10, rtol=0)
