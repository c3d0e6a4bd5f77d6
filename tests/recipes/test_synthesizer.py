"""Synthesizers: each kind of score written out, mixtures, attention as a special case, steps, padding, packing."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from manyformer.models.embedding import empty_tail, positions_of
from manyformer.nn import (
    Attention,
    DenseScores,
    DotProductScores,
    FactorizedDenseScores,
    FactorizedPairs,
    FixedScores,
    PairTable,
    SoftmaxKernel,
    SynthesizerAttention,
    SynthesizerScores,
)
from manyformer.nn.core import PADDING_SEGMENT, Context, tree_map
from manyformer.nn.masks import AllKeys, Causal, Mask
from perturbing import perturb

DIM, HEADS, LONGEST, WIDTH = 8, 2, 13, 4
SEGMENTS = torch.tensor([[0] * 11, [3] * 4 + [5] * 7, [-1] * 3 + [1] * 5 + [-1] * 3, [-1] * 11])

KINDS: dict[str, Callable[[], list[SynthesizerScores]]] = {
    "random": lambda: [FixedScores(PairTable(LONGEST, heads=HEADS, std=1.0))],
    "factorized-random": lambda: [FixedScores(FactorizedPairs(LONGEST, 3, heads=HEADS, std=1.0))],
    "dense": lambda: [DenseScores(DIM, HEADS, LONGEST)],
    "factorized-dense": lambda: [FactorizedDenseScores(DIM, HEADS, LONGEST)],
    "dot": lambda: [DotProductScores(DIM, HEADS)],
    "factorized-random+dot": lambda: [*KINDS["factorized-random"](), *KINDS["dot"]()],
    "factorized-dense+dot": lambda: [*KINDS["factorized-dense"](), *KINDS["dot"]()],
    "random+dense+dot": lambda: [*KINDS["random"](), *KINDS["dense"](), *KINDS["dot"]()],
}


def shaken(kind: str, mask: Mask) -> SynthesizerAttention:
    torch.manual_seed(2)
    layer = SynthesizerAttention(DIM, KINDS[kind](), mask=mask).double()
    return perturb(layer, 0.4)


def score(part: SynthesizerScores, head: int, x: Tensor, i: int, j: int) -> Tensor:
    """The score of key j for query i, both in one document, by the formulas of the paper."""
    ours = slice(head * WIDTH, (head + 1) * WIDTH)
    if isinstance(part, FixedScores):
        pairs = part.pairs
        if isinstance(pairs, PairTable):
            return pairs.weight[head, i, j]
        assert isinstance(pairs, FactorizedPairs)
        return pairs.row[head, i] @ pairs.column[head, j]
    if isinstance(part, DotProductScores):
        return part.q_proj(x[i])[ours] @ part.k_proj(x[j])[ours] / WIDTH**0.5
    assert isinstance(part, DenseScores | FactorizedDenseScores)
    numbers = part.up(x[i])[ours].relu() @ part.weight[head] + part.bias[head, 0]
    if isinstance(part, DenseScores):
        return numbers[j]
    a, b = numbers[: part.remainders], numbers[part.remainders :]
    # a is repeated as a whole, each number of b by itself
    return (a.repeat(part.quotients) * b.repeat_interleave(part.remainders))[j]


def written_out(layer: SynthesizerAttention, x: Tensor, *, causal: bool) -> Tensor:
    """One document (l, d), score by score."""
    shares = (
        [torch.ones(())]
        if layer.mixing_logits is None
        else list(layer.mixing_logits.exp() / layer.mixing_logits.exp().sum())
    )
    rows = []
    for i in range(len(x)):
        keys, heads = range(i + 1 if causal else len(x)), []
        for head in range(HEADS):
            scores = [sum(s * score(p, head, x, i, j) for s, p in zip(shares, layer.scores)) for j in keys]  # type: ignore[arg-type]
            weights = torch.stack(scores).exp()  # type: ignore[arg-type]
            values = layer.v_proj(x[: len(keys)])[:, head * WIDTH : (head + 1) * WIDTH]
            heads.append(weights / weights.sum() @ values)
        rows.append(torch.cat(heads))
    return layer.out_proj(torch.stack(rows))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_those_of_the_paper(kind: str, causal: bool) -> None:
    layer = shaken(kind, Causal() if causal else AllKeys())
    x = torch.randn(*SEGMENTS.shape, DIM, dtype=torch.float64, requires_grad=True)
    place, _ = positions_of(SEGMENTS, SEGMENTS, None)
    actual = layer(x, Context(place)).y
    leaves = [x, *layer.parameters()]
    total, expected = torch.zeros(()).double(), torch.zeros(()).double()
    for row, number in ((0, 0), (1, 3), (1, 5), (2, 1)):
        columns = SEGMENTS[row] == number
        alone = written_out(layer, x[row, columns], causal=causal)
        torch.testing.assert_close(actual[row, columns], alone, atol=1e-10, rtol=0)
        grad_output = torch.randn_like(alone)
        total, expected = total + (actual[row, columns] * grad_output).sum(), expected + (alone * grad_output).sum()
    for ours, reference in zip(torch.autograd.grad(total, leaves), torch.autograd.grad(expected, leaves)):
        torch.testing.assert_close(ours, reference, atol=1e-10, rtol=0)
    # one plain document takes other ways, in which rows share their weights
    plain, _ = positions_of(SEGMENTS, None, None)
    torch.testing.assert_close(layer(x, Context(plain)).y[0], actual[0], atol=1e-10, rtol=0)


@pytest.mark.parametrize("capacity", [None, 11])
@pytest.mark.parametrize("segments", [None, SEGMENTS[:3]])
@pytest.mark.parametrize("kind", KINDS)
def test_step_by_step_is_all_at_once(kind: str, segments: Tensor | None, capacity: int | None) -> None:
    layer = shaken(kind, Causal())
    x, tokens = torch.randn(3, 11, DIM, dtype=torch.float64), torch.zeros(3, 11, dtype=torch.long)
    with torch.no_grad():
        full = layer(x, Context(positions_of(tokens, segments, None)[0])).y
        state, tail = layer.init_state(3, capacity=capacity, device=x.device, dtype=x.dtype), empty_tail(3, x.device)
        begin, actual = 0, []
        for size in (2, 1, 5, 1, 2):
            part = slice(begin, begin + size)
            place, tail = positions_of(tokens[:, part], None if segments is None else segments[:, part], tail)
            out = layer(x[:, part], Context(place), state)
            state = tree_map(lambda t: t.clone(), out.state)
            actual.append(out.y)
            begin += size
    real = torch.ones(3, 11, dtype=torch.bool) if segments is None else segments != PADDING_SEGMENT
    torch.testing.assert_close(torch.cat(actual, dim=1)[real], full[real], atol=1e-10, rtol=0)


def test_products_of_queries_and_keys_alone_are_attention() -> None:
    layer, attention = shaken("dot", Causal()), Attention(DIM, HEADS, SoftmaxKernel(Causal())).double()
    dot = layer.scores[0]
    assert isinstance(dot, DotProductScores)
    for kind in ("weight", "bias"):
        getattr(attention.q_proj, kind).data.copy_(getattr(dot.q_proj, kind))
        keys, values = getattr(dot.k_proj, kind), getattr(layer.v_proj, kind)
        getattr(attention.kv_proj, kind).data.copy_(torch.cat([keys, values]))
        getattr(attention.out_proj, kind).data.copy_(getattr(layer.out_proj, kind))
    x = torch.randn(*SEGMENTS.shape, DIM, dtype=torch.float64)
    ctx = Context(positions_of(SEGMENTS, SEGMENTS, None)[0])
    real = SEGMENTS != PADDING_SEGMENT
    torch.testing.assert_close(layer(x, ctx).y[real], attention(x, ctx).y[real], atol=1e-10, rtol=0)


def test_a_mixture_with_all_of_its_share_on_one_part_is_that_part() -> None:
    mixed, alone = shaken("random+dense+dot", AllKeys()), shaken("dot", AllKeys())
    assert mixed.mixing_logits is not None
    mixed.mixing_logits.data = torch.tensor([-800.0, -800.0, 0.0]).double()
    mixed.scores[2].load_state_dict(alone.scores[0].state_dict())
    for name in ("v_proj", "out_proj"):
        getattr(mixed, name).load_state_dict(getattr(alone, name).state_dict())
    x, place = torch.randn(2, 7, DIM).double(), positions_of(torch.zeros(2, 7, dtype=torch.long), None, None)[0]
    torch.testing.assert_close(mixed(x, Context(place)).y, alone(x, Context(place)).y, atol=1e-12, rtol=0)


def test_weights_that_see_no_token_do_not_change_with_tokens() -> None:
    seen: list[Tensor] = []
    for kind, changes in (("random", False), ("dense", True)):
        layer = shaken(kind, Causal())
        place, _ = positions_of(torch.zeros(2, 6, dtype=torch.long), None, None)
        seen.clear()
        for _ in range(2):
            layer(torch.randn(2, 6, DIM).double(), Context(place, watch=lambda module, name, value: seen.append(value)))
        assert torch.equal(seen[0], seen[1]) != changes
        torch.testing.assert_close(seen[0].sum(-1), torch.ones_like(seen[0][..., 0]))
    assert not [p for p in SynthesizerAttention(DIM, KINDS["random"]()).parameters() if p.shape[0] == 0]


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"all scores must have the same number of heads, not \[2, 1\]"):
        SynthesizerAttention(DIM, [DotProductScores(DIM, 2), FixedScores(PairTable(4, std=1.0))])
    for kind in ("random", "dense", "factorized-dense"):
        place, _ = positions_of(torch.zeros(1, LONGEST + 4, dtype=torch.long), None, None)
        with pytest.raises(ValueError, match="does not exist: the model was built for max_length=13"):
            shaken(kind, Causal())(torch.randn(1, LONGEST + 4, DIM).double(), Context(place))
