"""Mixture-of-Depths: its sum token by token with gradients, the plain block, documents, steps, and what it leaks."""

import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.nn import Attention, SoftmaxKernel
from manyformer.nn.core import PADDING_SEGMENT, Chain, Context
from manyformer.nn.depth.mixture_of_depths import DepthRouting, MixtureOfDepths, top_of_documents
from manyformer.nn.feed_forward.feedforward import FeedForward
from manyformer.nn.masks import Causal
from manyformer.nn.positions import RotaryPosition
from manyformer.recipes.parts.baselines import branch
from token_rows import range_positions, segment_positions

DIM = 8


def block() -> Chain:
    attention = Attention(DIM, 2, SoftmaxKernel(Causal()), position=RotaryPosition(4))
    parts = {"attention": attention, "ff": FeedForward(DIM, 12)}
    norm = torch.nn.LayerNorm
    return Chain(**{n: branch(p, order="pre", norm=lambda: norm(DIM), dropout=0.0) for n, p in parts.items()})


def routed(share: float, routing: DepthRouting = "top-k") -> MixtureOfDepths:
    return MixtureOfDepths(block(), DIM, share=share, routing=routing).double()


def test_the_best_tokens_of_each_document_are_chosen() -> None:
    positions = segment_positions([[0] * 5 + [1] * 3 + [PADDING_SEGMENT] * 2, [PADDING_SEGMENT] * 3 + [4] * 7])
    scores = torch.tensor([[3, 1, 2, 5, 4, 0, 7, 7, 9, 9], [9, 9, 9, 1, 1, 1, 1, 1, 0, 2.0]])
    chosen = top_of_documents(scores, positions, 0.4)
    assert chosen[0].nonzero()[:, 0].tolist() == [3, 4, 6, 7]
    # of equal ones the earlier
    assert chosen[1].nonzero()[:, 0].tolist() == [3, 4, 9]
    assert top_of_documents(scores, positions, 1.0).equal(positions.segment_ids != PADDING_SEGMENT)


def test_the_sum_is_that_of_the_paper_with_gradients() -> None:
    layer, x = routed(0.4), torch.randn(1, 10, DIM, dtype=torch.float64, requires_grad=True)
    positions = range_positions(10)
    y = layer.eval()(x, Context(positions)).y
    scores = x[0] @ layer.router.weight[0]
    index = scores.argsort(descending=True)[:4].sort().values
    chosen = positions._replace(
        position_ids=positions.position_ids[:, index], segment_ids=positions.segment_ids[:, index], layout=None
    )
    block_y = layer.block(x[:, index], Context(chosen)).y[0]
    rows: list[Tensor] = list(x[0])
    for number, i in enumerate(index.tolist()):
        rows[i] = x[0, i] + scores[i] * (block_y[number] - x[0, i])
    leaves, upstream = [x, *layer.block.parameters(), layer.router.weight], torch.randn_like(y)
    results = [torch.autograd.grad(z, leaves, upstream, retain_graph=True) for z in (y, torch.stack(rows)[None])]
    torch.testing.assert_close(y[0], torch.stack(rows), atol=1e-12, rtol=0)
    torch.testing.assert_close(*results, atol=1e-12, rtol=0)
    assert results[0][-1].abs().max() > 1e-3


def test_all_tokens_with_weight_1_are_the_plain_block() -> None:
    layer, x = routed(1.0), torch.randn(2, 7, DIM, dtype=torch.float64)
    x[..., 0] = 1.0
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(1, DIM))
    positions = segment_positions([[0] * 7] * 2)
    torch.testing.assert_close(layer(x, Context(positions)).y, layer.block(x, Context(positions)).y)


@pytest.mark.parametrize("routing", ["top-k", "predictor"])
def test_packed_and_padded_documents_are_those_alone(routing: DepthRouting) -> None:
    layer, x = routed(0.4, routing).eval(), torch.randn(2, 11, DIM, dtype=torch.float64)
    pad = PADDING_SEGMENT
    positions = segment_positions([[0] * 4 + [1] * 7, [pad] * 2 + [0] * 5 + [pad] * 4])
    y = layer(x, Context(positions)).y
    for row, segment in ((0, 0), (0, 1), (1, 0)):
        columns = (positions.segment_ids[row] == segment).nonzero()[:, 0]
        alone = layer(x[row : row + 1, columns], Context(range_positions(len(columns)))).y[0]
        torch.testing.assert_close(y[row, columns], alone, atol=1e-12, rtol=0)


def test_steps_of_the_predictor_equal_one_call() -> None:
    layer, x = routed(0.4, "predictor").eval(), torch.randn(2, 12, DIM, dtype=torch.float64)
    positions, pieces = segment_positions([[0] * 12] * 2), []
    chosen: list[Tensor] = []
    full = layer(x, Context(positions, watch=lambda m, name, v: chosen.append(v) if name == "chosen" else None)).y
    assert 0 < chosen[0].double().mean() < 1
    state = layer.init_state(2, device=x.device, dtype=x.dtype)
    for start, stop in ((0, 4), *((n, n + 1) for n in range(4, 12))):
        y, state, _ = layer(x[:, start:stop], Context(positions.columns(start, stop)), state)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), full, atol=1e-12, rtol=0)


def test_the_predictor_learns_from_its_loss_alone() -> None:
    layer, x = routed(0.4, "predictor"), torch.randn(2, 12, DIM, dtype=torch.float64, requires_grad=True)
    output = layer(x, Context(segment_positions([[0] * 12] * 2)))
    assert isinstance(output.loss, Tensor)
    assert 0.5 < output.loss.item() / 0.01 < 1
    others = [x, layer.router.weight, *layer.block.parameters()]
    assert all(g is None for g in torch.autograd.grad(output.loss, others, retain_graph=True, allow_unused=True))
    for gradient in torch.autograd.grad(output.loss, list(layer.predictor.parameters())):
        assert gradient.abs().max() > 0


@pytest.mark.slow
def test_check_shows_what_the_choice_of_training_sees() -> None:
    only = ["causal", "causal-gradient"]
    leaking = mf.check("mixture-of-depths", keywords={"routing": "top-k"}, only=only)
    verdicts = {row.contract: row for row in leaking.rows}
    assert verdicts["causal"].verdict == "failed"
    assert "the future leaks" in verdicts["causal"].sentence
    sound = mf.check("mixture-of-depths", only=only)
    assert [row.verdict for row in sound.rows] == ["passed"] * 2


def test_a_share_above_one_and_a_choice_among_all_tokens_with_a_state_are_refused() -> None:
    with pytest.raises(ValueError, match=r"share \(1.5\) must be above 0 and at most 1"):
        routed(1.5)
    with pytest.raises(ValueError, match="needs all tokens of a document at once"):
        routed(0.5).init_state(1, device=torch.device("cpu"), dtype=torch.float64)
    layer, x = routed(0.5, "predictor"), torch.randn(1, 3, DIM, dtype=torch.float64)
    state = layer.init_state(1, device=x.device, dtype=x.dtype)
    with pytest.raises(ValueError, match="needs all tokens at once, without a state"):
        layer(x, Context(range_positions(3)), state)
