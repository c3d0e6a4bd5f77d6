"""Losses of tokens after the next one: what they are in packed and padded rows, and what they leave as it was."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.models.ahead import ParallelAhead, SequentialAhead
from manyformer.models.embedding import positions_of
from manyformer.nn.batches import IGNORE_INDEX, CausalLMBatch
from manyformer.nn.core import PADDING_SEGMENT, Context, contiguous_positions
from manyformer.recipes.parts.attention_kernels import KERNELS

SMALL: dict[str, Any] = {"vocab": 13, "dim": 16, "depth": 2, "heads": 2}
RECIPES: dict[str, dict[str, Any]] = {
    "compose": {"max_length": 16, "position": "learned"},
    "transformer-lm": {"max_length": 16},
    "llama": {"window": 3},
    "deepseek": {
        **{"head_dim": 8, "rotary_dim": 4, "value_dim": 8, "latent_dim": 8, "query_latent_dim": 8},
        **{"expert_dim": 8, "num_experts": 4, "experts_per_token": 4, "balance_weight": 0.0},
    },
}
DOCUMENTS = [[3, 1, 4, 1, 5, 9], [2, 6], [5, 3, 5, 8, 9]]


def build(recipe: str, **keywords: Any) -> Any:
    torch.manual_seed(2)
    model = mf.build(recipe, **SMALL, **RECIPES[recipe], **keywords).double()
    with torch.no_grad():
        for weight in model.parameters():
            # no norm is the identity, and layers differ visibly
            weight.add_(torch.randn_like(weight), alpha=0.2)
    return model


def packed() -> CausalLMBatch:
    """The documents in one row, which begins and ends with padding, and the first of them alone in another."""
    rows = [[None, *DOCUMENTS[0], *DOCUMENTS[1], *DOCUMENTS[2], None], [*DOCUMENTS[0], *[None] * 9]]
    numbers = [[-1, *[0] * 6, *[1] * 2, *[2] * 5, -1], [*[0] * 6, *[-1] * 9]]
    tokens = torch.tensor([[token or 0 for token in row] for row in rows])
    segments = torch.tensor(numbers)
    follows = segments[:, 1:] == segments[:, :-1]
    targets = torch.full_like(tokens, IGNORE_INDEX)
    targets[:, :-1] = torch.where(follows & (segments[:, 1:] != PADDING_SEGMENT), tokens[:, 1:], IGNORE_INDEX)
    return CausalLMBatch(tokens, targets, segments)


def state_of(model: Any, depth: int, hidden: Tensor, tokens: Tensor) -> Tensor:
    """The states of depth k by the equation of the paper: row i is that of token i, with the token i + k."""
    if depth == 0:
        return hidden
    before = state_of(model, depth - 1, hidden, tokens)[:-1]
    layer = model.auxiliary.in_order()[depth - 1]
    places = contiguous_positions(1, depth, tokens.shape[0], tokens.device)
    ahead = model.embed(tokens[None, depth:], places)
    both = torch.cat([layer.token_norm(ahead), layer.hidden_norm(before[None])], -1)
    return layer.norm(layer.block(both @ layer.merge.weight.T, Context(places)).y)[0]


def expected_loss(model: Any, kind: str, count: int) -> Tensor:
    """The mean loss at each distance, over the documents one by one, without any row that is shared."""
    total = torch.zeros((), dtype=torch.float64)
    for depth in range(1, count + 1):
        losses: list[Tensor] = []
        for document in [*DOCUMENTS, DOCUMENTS[0]]:
            tokens = torch.tensor(document)
            if len(tokens) <= depth + 1:
                continue
            hidden = model.hidden(tokens[None]).y[0]
            states = hidden
            if kind == "parallel":
                head = model.auxiliary.in_order()[depth - 1]
                places = contiguous_positions(1, 0, len(tokens), tokens.device)
                states = head.norm(head.block(hidden[None], Context(places)).y)[0]
            if kind == "sequential":
                states = state_of(model, depth, hidden, tokens)
            # token i predicts token i + depth + 1
            predicting = states[: len(tokens) - depth - 1]
            losses.append(F.cross_entropy(model.head(predicting), tokens[depth + 1 :], reduction="none"))
        total = total + torch.cat(losses).mean() / count
    return total


@pytest.mark.parametrize("kind", ["sequential", "parallel", "shared"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_of_packed_and_padded_rows_are_those_of_the_documents(recipe: str, kind: str) -> None:
    model = build(recipe, ahead=kind, ahead_tokens=3, ahead_weight=0.5)
    extra = model.loss(packed()).extra
    expected = 0.5 * expected_loss(model, kind, 3)
    torch.testing.assert_close(extra, expected, rtol=1e-10, atol=0)
    weights = list(model.parameters())
    gradients = torch.autograd.grad(extra, weights, allow_unused=True)
    expected_gradients = torch.autograd.grad(expected, weights, allow_unused=True)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        assert (gradient is None) == (wanted is None)
        if gradient is not None:
            torch.testing.assert_close(gradient, wanted, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("kind", ["sequential", "parallel"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_weight_zero_trains_the_model_without_it(recipe: str, kind: str) -> None:
    """Also with dropout, and with what else begins at random."""
    parts = {} if recipe == "deepseek" else {"value_residual": True, "smear": True}
    models = []
    for keywords in ({}, {"ahead": kind, "ahead_tokens": 2, "ahead_weight": 0}):
        torch.manual_seed(0)
        model: Any = mf.build(recipe, **SMALL, **RECIPES[recipe], dropout=0.1, **parts, **keywords)
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            loss = model.loss(packed())
            optimizer.zero_grad()
            (loss.total / loss.targets + loss.extra).backward()
            optimizer.step()
        models.append(model)
    without, silent = models
    for name, weight in without.named_parameters():
        assert torch.equal(weight, silent.get_parameter(name)), name
    for name, weight in silent.named_parameters():
        # several processes would wait for a gradient otherwise
        assert weight.grad is not None, name


def test_the_layers_ahead_change_no_prediction_of_the_next_token() -> None:
    model = build("llama", ahead="sequential").eval()
    tokens = packed().tokens
    before = model(tokens).logits
    with torch.no_grad():
        for weight in model.auxiliary.parameters():
            weight.zero_()
    assert torch.equal(model(tokens).logits, before)


def test_depth_k_sees_k_tokens_more_and_not_the_one_it_predicts() -> None:
    """Each token is exchanged in turn: states in the columns before it stay, and its own column changes."""
    model = build("llama", ahead="sequential", ahead_tokens=3).eval()
    tokens = torch.randint(0, 13, (1, 9))

    def chain(tokens: Tensor) -> list[Tensor]:
        positions = positions_of(tokens, None, None)[0]
        hidden = model.hidden(tokens).y
        states = model.auxiliary.chain(hidden, model.embed(tokens, positions), positions)
        # the column of token j, which the state of token j - depth reads
        return [F.pad(state.hidden, (0, 0, depth, 0)) for depth, state in enumerate(states, 1)]

    with torch.no_grad():
        before = chain(tokens)
        for column in range(9):
            other = tokens.clone()
            other[0, column] = (tokens[0, column] + 5) % 13
            for depth, (old, new) in enumerate(zip(before, chain(other), strict=True), 1):
                changed = (old - new).abs().amax(-1)[0] > 1e-9
                assert not changed[: max(column, depth)].any()
                assert column < depth or changed[column]


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_take_rows_that_do_not_begin_at_position_0(kernel: str) -> None:
    """The chain's rows do, by a layout that lets kernels choose their fastest path, and without it."""
    torch.manual_seed(4)
    keywords = {**SMALL, "max_length": 16, "position": "rope" if kernel == "softmax" else "none"}
    model: Any = mf.build("compose", **keywords, kernel=kernel, ahead="sequential", ahead_tokens=2).double().eval()
    tokens = torch.randint(0, 13, (2, 9))
    positions = positions_of(tokens, None, None)[0]
    with torch.no_grad():
        hidden = model.hidden(tokens).y
        fast, plain = (
            [states.hidden for states in model.auxiliary.chain(hidden, model.embed(tokens, positions), known)]
            for known in (positions, positions._replace(layout=None))
        )
    for with_layout, without in zip(fast, plain, strict=True):
        torch.testing.assert_close(with_layout, without, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("kind", ["sequential", "parallel", "shared"])
def test_rows_that_are_too_short_for_a_loss_have_gradients_of_zero(kind: str, length: int) -> None:
    model = build("compose", ahead=kind, ahead_tokens=4)
    tokens = torch.randint(0, 13, (2, length))
    targets = torch.full_like(tokens, IGNORE_INDEX)
    targets[:, :-1] = tokens[:, 1:]
    loss = model.loss(CausalLMBatch(tokens, targets))
    (loss.total + loss.extra).backward()
    assert all(weight.grad is not None and bool(weight.grad.isfinite().all()) for weight in model.parameters())
    assert loss.extra.isfinite()


def test_layers_ahead_follow_those_of_the_model() -> None:
    """A pattern goes on, and DeepSeek's have experts: what the next layer of the model would be."""
    hybrid: Any = mf.build("compose", **SMALL, pattern="KKD", position="rope", ahead="parallel", ahead_tokens=2)
    assert isinstance(hybrid.auxiliary, ParallelAhead)
    third = mf.build("compose", **{**SMALL, "depth": 4}, pattern="KKD", position="rope")
    for number, head in enumerate(hybrid.auxiliary.in_order(), 2):
        shapes = [weight.shape for weight in head.block.parameters()]
        assert shapes == [weight.shape for weight in third.get_submodule(f"body.{number}").parameters()]
    experts = build("deepseek", ahead="sequential")
    assert isinstance(experts.auxiliary, SequentialAhead)
    assert "auxiliary.layers.0.block.ff.inner.router.proj.weight" in experts.state_dict()


@pytest.mark.parametrize(("name", "value"), [("ahead_tokens", 2), ("ahead_weight", 0.1)])
def test_settings_of_tokens_that_nothing_predicts_are_refused(name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"{name} \\({value}\\) is that of tokens after the next one: set ahead"):
        mf.build("compose", **SMALL, **{name: value})


@pytest.mark.parametrize("keywords", [{"pattern": "WWYY"}, {"pattern": "KD", "shared_layers": "D"}])
def test_layers_that_share_keys_or_weights_have_none_that_follow_them(keywords: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="ahead \\(sequential\\) adds layers with weights and keys of their own"):
        mf.build("compose", **SMALL, position="rope", ahead="sequential", **keywords)
    assert mf.build("compose", **SMALL, position="rope", ahead="shared", **keywords)
