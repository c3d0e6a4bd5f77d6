"""gMLP's layer: written out in a loop, causal for certain, the same step by step, padded and packed."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from manyformer.models.embedding import empty_tail, positions_of
from manyformer.nn import Attention, PairTable, SoftmaxKernel, SpatialGate, ToeplitzPairs
from manyformer.nn.core import PADDING_SEGMENT, Context, ContiguousLayout, tree_map
from manyformer.nn.masks import AllKeys, Causal, Mask
from perturbing import perturb

DIM, HIDDEN, LONGEST = 6, 10, 14
SEGMENTS = torch.tensor([[0] * 12, [3] * 4 + [5] * 8, [-1] * 3 + [1] * 6 + [-1] * 3, [-1] * 12])


def shaken(mask: Mask, *, shifts: bool = False, attention: bool = False) -> SpatialGate:
    torch.manual_seed(1)
    weights = (ToeplitzPairs if shifts else PairTable)(LONGEST, std=0.5)
    tiny = Attention(DIM, 1, SoftmaxKernel(mask), head_dim=3, value_dim=3, out_dim=HIDDEN // 2) if attention else None
    layer = SpatialGate(DIM, HIDDEN, weights, mask=mask, attention=tiny).double()
    return perturb(layer, 0.3)


def written_out(layer: SpatialGate, x: Tensor, *, causal: bool) -> Tensor:
    """One document (l, d), token by token."""
    z1, z2 = F.gelu(x @ layer.up.weight.T + layer.up.bias).chunk(2, dim=-1)
    z2 = F.layer_norm(z2, (HIDDEN // 2,), layer.norm.weight, layer.norm.bias)
    table = layer.weights.weight[0]
    rows = []
    for i in range(len(x)):
        gate = layer.bias[i].expand(HIDDEN // 2)
        for j in range(i + 1 if causal else len(x)):
            weight = table[i - j + LONGEST - 1] if table.ndim == 1 else table[i, j]
            gate = gate + weight * z2[j]
        rows.append(z1[i] * gate)
    return torch.stack(rows) @ layer.down.weight.T + layer.down.bias


@pytest.mark.parametrize("shifts", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_documents_are_those_of_the_paper(causal: bool, shifts: bool) -> None:
    layer = shaken(Causal() if causal else AllKeys(), shifts=shifts)
    x = torch.randn(*SEGMENTS.shape, DIM, dtype=torch.float64, requires_grad=True)
    place, _ = positions_of(SEGMENTS, SEGMENTS, None)
    leaves = [x, *layer.parameters()]
    for given in (place, place._replace(layout=None)):
        actual = layer(x, Context(given)).y
        total, expected = torch.zeros(()).double(), torch.zeros(()).double()
        for row in range(len(SEGMENTS)):
            for number in sorted(set(SEGMENTS[row].tolist()) - {PADDING_SEGMENT}):
                columns = SEGMENTS[row] == number
                alone = written_out(layer, x[row, columns], causal=causal)
                torch.testing.assert_close(actual[row, columns], alone, atol=1e-10, rtol=0)
                grad_output = torch.randn_like(alone)
                total, expected = (
                    total + (actual[row, columns] * grad_output).sum(),
                    expected + (alone * grad_output).sum(),
                )
        for ours, reference in zip(torch.autograd.grad(total, leaves), torch.autograd.grad(expected, leaves)):
            torch.testing.assert_close(ours, reference, atol=1e-10, rtol=0)


@pytest.mark.parametrize("attention", [False, True])
def test_it_begins_as_an_ordinary_feed_forward_layer(attention: bool) -> None:
    layer = SpatialGate(DIM, HIDDEN, PairTable(LONGEST, std=1e-3 / LONGEST))
    x = torch.randn(2, LONGEST, DIM)
    place, _ = positions_of(torch.zeros(2, LONGEST, dtype=torch.long), None, None)
    z1 = F.gelu(layer.up(x)).chunk(2, dim=-1)[0]
    torch.testing.assert_close(layer(x, Context(place)).y, layer.down(z1), atol=1e-3, rtol=0)


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("capacity", [None, 12])
@pytest.mark.parametrize("segments", [None, SEGMENTS[:3]])
def test_step_by_step_is_all_at_once(segments: Tensor | None, capacity: int | None, attention: bool) -> None:
    layer = shaken(Causal(), attention=attention)
    x = torch.randn(3, 12, DIM, dtype=torch.float64)
    tokens = torch.zeros(3, 12, dtype=torch.long)
    with torch.no_grad():
        full = layer(x, Context(positions_of(tokens, segments, None)[0])).y
        state, tail = layer.init_state(3, capacity=capacity, device=x.device, dtype=x.dtype), empty_tail(3, x.device)
        begin, actual = 0, []
        for size in (3, 1, 1, 4, 1, 2):
            part = slice(begin, begin + size)
            place, tail = positions_of(tokens[:, part], None if segments is None else segments[:, part], tail)
            out = layer(x[:, part], Context(place), state)
            state = tree_map(lambda t: t.clone(), out.state)
            actual.append(out.y)
            begin += size
    real = torch.ones(3, 12, dtype=torch.bool) if segments is None else segments != PADDING_SEGMENT
    torch.testing.assert_close(torch.cat(actual, dim=1)[real], full[real], atol=1e-10, rtol=0)


def test_the_future_has_no_weight() -> None:
    layer = shaken(Causal(), attention=True)
    x = torch.randn(1, 9, DIM, dtype=torch.float64, requires_grad=True)
    place, _ = positions_of(torch.zeros(1, 9, dtype=torch.long), None, None)
    for output in range(9):
        y = layer(x, Context(place)).y[0, output].sum()
        seen = torch.autograd.grad(y, x)[0][0].abs().sum(-1)
        assert not seen[output + 1 :].any()
        assert seen[: output + 1].all()


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ff_dim \(9\) must be even"):
        SpatialGate(DIM, 9, PairTable(LONGEST, std=0.1))
    with pytest.raises(ValueError, match="they must have 1 head, not 2"):
        SpatialGate(DIM, HIDDEN, PairTable(LONGEST, heads=2, std=0.1))
    layer = SpatialGate(DIM, HIDDEN, PairTable(4, std=0.1))
    place, _ = positions_of(torch.zeros(1, 5, dtype=torch.long), None, None)
    assert isinstance(place.layout, ContiguousLayout)
    with pytest.raises(ValueError, match="position 4 does not exist: the model was built for max_length=4"):
        layer(torch.randn(1, 5, DIM), Context(place))
