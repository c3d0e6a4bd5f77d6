"""One layer again and again: fixed steps share their weights, halted tokens cost nothing, groups lose no token."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyformer as mf
from manyformer.models.embedding import positions_of
from manyformer.nn.core import Context, MemorySequence, TokenPositions, no_watch
from manyformer.nn.depth import (
    AdaptiveComputation,
    FixedSteps,
    GravesHalting,
    HaltingUnit,
    ReleasedHalting,
    UniversalBlock,
)
from manyformer.nn.depth.adaptive import HaltingRule
from manyformer.nn.depth.token_subset import AllTokens, TokenSubset
from manyformer.nn.masks import Causal
from manyformer.nn.positions import LearnedStepSignal, PositionStepSignal, SinusoidalPosition, SinusoidalStepSignal
from manyformer.nn.runtime.costs import count_flops
from manyformer.recipes.universal_transformer import UniversalConfig
from perturbing import perturb

DIM, STEPS = 8, 4
SEGMENTS = torch.tensor([[0, 0, 0, 0, 0, 0], [-1, -1, 3, 3, 3, 4], [0, 0, 0, -1, -1, -1]])


def made(*, causal: bool = False, cross: bool = False, **chosen: Any) -> Any:
    options: Any = {"norm_order": "post", "halting": "act", "transition": "feedforward", "step_signal": "sinusoid"}
    options |= {"ponder_cost": 0.1, "halting_bias": 1.0, **chosen}
    config = UniversalConfig(DIM, STEPS, 2, 12, 0.0, options)
    body = config.body(Causal() if causal else None, cross=cross).double()
    return perturb(body, 0.3)


def tokens(segments: Tensor | None = SEGMENTS, rows: int = 3, length: int = 6) -> tuple[Tensor, TokenPositions]:
    x = torch.randn(rows, length, DIM, dtype=torch.float64)
    return x, positions_of(torch.zeros(rows, length, dtype=torch.long), segments, None)[0]


def all_at_once(layer: AdaptiveComputation, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
    """The definition: every token at every step, and then what has halted is put back. Output, loss and steps."""
    real, h = (ctx.positions.segment_ids != -1).expand(x.shape[:2]), x
    spent = steps = rest = torch.zeros(x.shape[:2], dtype=x.dtype)
    running, y = real, torch.zeros_like(x)
    freezes, most = isinstance(layer.halting.rule, GravesHalting), layer.halting.max_steps
    for step in range(most):
        inside = layer.timing(h, ctx.positions, step)
        p = torch.sigmoid(inside @ layer.halting.weight + layer.halting.bias)
        a = layer.block.attention(inside, ctx).y
        a = a if layer.block.cross is None else layer.block.cross(a, ctx).y
        # what neighbours see of a token that has halted is its state
        a = torch.where(running[..., None], a, h) if freezes else a
        new = layer.block.transition(a, ctx).y
        h = torch.where(running[..., None], new, h) if freezes else new
        full = spent + p > 1 - layer.halting.slack
        full = full | (freezes and step == most - 1)
        halts = running & full
        u = torch.where(running, torch.where(full, 1 - spent, p), 0.0)
        y = (y if freezes else (1 - u[..., None]) * y) + u[..., None] * h
        spent, steps = spent + u, steps + running
        rest, running = rest + torch.where(halts, u, 0.0), running & ~full
    return y, layer.halting.ponder_cost * (steps + rest)[real].mean(), steps


VARIANTS: dict[str, dict[str, Any]] = {
    "post": {},
    "causal": {"causal": True, "step_signal": "learned"},
    "pre": {"norm_order": "pre"},
    "cross": {"causal": True, "cross": True},
    "convolution": {"transition": "convolution"},
    "released": {"halting": "act-released"},
    "window": {"causal": True, "step_signal": "none", "halting_bias": -1.0, "window": 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_halted_tokens_are_left_out_without_a_trace(variant: str) -> None:
    body = made(**VARIANTS[variant])
    layer = body.steps if variant == "pre" else body
    x, place = tokens()
    memory = MemorySequence(torch.randn(3, 5, DIM, dtype=torch.float64), tokens(None, 3, 5)[1])
    if variant == "cross":
        memory = memory._replace(
            positions=memory.positions._replace(segment_ids=torch.tensor([[0] * 5, [3, 3, 4, 4, -1], [0] * 5]))
        )
    ctx = Context(place, memory)
    x.requires_grad_()
    expected_output, cost, steps = all_at_once(layer, x, ctx)
    real = (place.segment_ids != -1)[..., None]
    assert steps[real[..., 0]].unique().numel() > 1, "some halt before others"
    weight = torch.randn_like(x) * real
    expected = torch.autograd.grad((expected_output * weight).sum() + cost, [x, *layer.parameters()])
    for watch in (no_watch, lambda *_: None):
        out = layer(x, Context(place, memory, watch))
        torch.testing.assert_close(out.y * real, expected_output * real, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(out.loss, cost)
        actual = torch.autograd.grad((out.y * weight).sum() + out.loss, [x, *layer.parameters()])
        for one, two in zip(actual, expected):
            torch.testing.assert_close(one, two, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_fixed_steps_are_a_stack_that_shares_its_weights(norm: str) -> None:
    body = made(causal=True, cross=True, halting="fixed", norm_order=norm)
    layer = body if norm == "post" else body.steps
    x, place = tokens()
    ctx, expected = Context(place, MemorySequence(*tokens())), x
    for step in range(STEPS):
        expected = layer.block(layer.timing(expected, place, step), ctx).y
    torch.testing.assert_close(layer(x, ctx).y, expected, atol=1e-12, rtol=1e-12)
    tied, rows = (
        mf.build("transformer-lm", vocab=5, dim=DIM, depth=STEPS, heads=2, norm_order="post"),
        torch.arange(5)[None],
    )
    own = mf.build("universal-transformer-lm", vocab=5, dim=DIM, depth=STEPS, heads=2, halting="fixed")
    for one in tied.body.children():
        one.load_state_dict({name.replace("transition", "ff"): w for name, w in own.body.block.state_dict().items()})
        one.ff.inner.activation = nn.ReLU()
    own.body.timing.forward = own.body.timing.add_signals = lambda x, *_: x
    tied.embed, tied.head = own.embed, own.head
    torch.testing.assert_close(own(rows).logits, tied(rows).logits)


@pytest.mark.parametrize("rule", [GravesHalting(), ReleasedHalting()], ids=["graves", "released"])
def test_weights_and_cost_of_three_steps_by_hand(rule: HaltingRule) -> None:
    halting = HaltingUnit(1, 3, rule=rule, ponder_cost=1.0)
    one, real = torch.ones(1, 1, 1), torch.ones(1, 1, dtype=torch.bool)
    p = torch.tensor([0.3, 0.4, 0.9], requires_grad=True)
    tally, mixed = halting.init_state(real, one), torch.zeros(1, 1, 3)
    for step in range(3):
        weights, tally = halting.weigh(tally, p[step].view(1, 1), step)
        mixed = rule.mix(mixed, torch.eye(3)[step].view(1, 1, 3), weights)
    shares = [0.3, 0.4, 0.3] if isinstance(rule, GravesHalting) else [0.126, 0.28, 0.3]
    torch.testing.assert_close(mixed[0, 0], torch.tensor(shares))
    assert not tally.running.any()
    cost = halting.loss(tally, real)
    assert cost.item() == pytest.approx(3 + 0.3)
    # through the remainder alone, and not through the step that halted
    assert torch.autograd.grad(cost, p)[0].tolist() == [-1.0, -1.0, 0.0]


def test_who_does_not_halt_before_the_last_step() -> None:
    one, real = torch.ones(1, 1, 1), torch.ones(1, 1, dtype=torch.bool)
    for rule, left in ((GravesHalting(), 0.8), (ReleasedHalting(), 0.0)):
        halting = HaltingUnit(1, 2, rule=rule)
        tally = halting.init_state(real, one)
        for step, chance in enumerate((0.2, 0.3)):
            _, tally = halting.weigh(tally, torch.full((1, 1), chance), step)
        assert (float(tally.steps), float(tally.remainder)) == pytest.approx((2.0, left))


@pytest.mark.parametrize("bias", [50.0, -50.0], ids=["at once", "never"])
def test_extreme_probabilities_are_one_step_and_all_steps(bias: float) -> None:
    layer = made(causal=True)
    with torch.no_grad():
        layer.halting.bias.fill_(bias)
    x, place = tokens(None)
    steps = 1 if bias > 0 else STEPS
    fixed = FixedSteps(layer.block, layer.timing, steps)
    torch.testing.assert_close(layer(x, Context(place)).y, fixed(x, Context(place)).y)
    assert layer(x, Context(place)).loss.item() == pytest.approx(0.1 * (steps + 1))


def test_a_token_that_halts_costs_nothing_more() -> None:
    """Two rows of which one halts at once, against the one that goes on alone."""
    layer = made(causal=True).float()
    layer.halting.bias.data.fill_(-50.0)
    layer.halting.weight.data.zero_()
    x, place = (part.float() if isinstance(part, Tensor) else part for part in tokens(None, 4, 6))
    all_of_them = count_flops(lambda: layer(x, Context(place)))
    # the first row alone goes on: the others halt at the first step
    layer.halting.forward = lambda x: x[..., 0] * 0 + (torch.arange(len(x)) > 0)[:, None] * 0.999
    few = count_flops(lambda: layer(x, Context(place)))
    once = all_of_them / STEPS
    # keys of the three that halted are projected once more for all steps
    assert few < once + (STEPS - 1) * once / 4 + 3 * 6 * 2 * DIM * 2 * DIM + STEPS * 2 * 2 * DIM * 2 * DIM
    state = layer.init_state(4, device=x.device, dtype=x.dtype)
    assert count_flops(lambda: layer(x, Context(place), state)) == few


def test_what_is_watched() -> None:
    layer, seen = made(), {}
    x, place = tokens()
    layer(x, Context(place, None, lambda module, name, value: seen.setdefault(name, value)))
    steps, chances = seen["steps"], seen["halting"]
    assert (steps[place.segment_ids == -1] == 0).all()
    spent = chances.cumsum(-1)
    for row, column in (place.segment_ids != -1).nonzero().tolist():
        full = (spent[row, column] > 0.99).nonzero()
        assert steps[row, column] == (full[0, 0] + 1 if len(full) else STEPS)


@pytest.mark.parametrize(
    "chosen",
    [
        {"transition": "convolution"},
        {"halting": "act-released", "step_signal": "learned"},
        {"halting": "fixed", "norm_order": "pre"},
        {"step_signal": "none", "window": 3, "halting_bias": -2.0},
    ],
    ids=lambda chosen: "-".join(str(value) for value in chosen.values()),
)
def test_variants_keep_their_promises(chosen: dict[str, Any]) -> None:
    only = {"causal", "cached", "padding-ragged", "packing-state", "gradients"}
    report = mf.check("universal-transformer-lm", only=only, keywords=chosen, length=12)
    assert {row.verdict for row in report.rows if row.contract in only} == {"passed"}, str(report)


def test_mistakes_are_refused() -> None:
    block, timing = made(halting="fixed").block, PositionStepSignal(SinusoidalPosition(DIM), SinusoidalStepSignal(DIM))
    with pytest.raises(ValueError, match=r"source=HaltedTokenSource\(\)"):
        AdaptiveComputation(block, timing, HaltingUnit(DIM, 3))
    with pytest.raises(ValueError, match=r"steps \(0\)"):
        FixedSteps(block, timing, 0)
    with pytest.raises(ValueError, match=r"max_steps \(0\)"):
        HaltingUnit(DIM, 0)
    with pytest.raises(ValueError, match="cost"):
        HaltingUnit(DIM, 1, ponder_cost=-1.0)
    with pytest.raises(ValueError, match="must be an Attention, not a FeedForward"):
        UniversalBlock(block.transition, block.transition)
    with pytest.raises(ValueError, match="step 2 does not exist"):
        AdaptiveComputation(
            made().block, PositionStepSignal(SinusoidalPosition(DIM), LearnedStepSignal(DIM, 2)), HaltingUnit(DIM, 3)
        )


POSITIONS = TokenPositions(torch.arange(4).expand(3, -1), torch.zeros(3, 4, dtype=torch.long))
STATE: Any = {"k": torch.arange(6.0).view(3, 2), "length": 7, "pair": (torch.ones(3), None)}
CHOSEN = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 1]]).bool()


def test_rows_without_chosen_tokens_are_left_out() -> None:
    state = TokenSubset(POSITIONS, CHOSEN).select_rows(STATE)
    assert state["k"].tolist() == [[0, 1], [4, 5]]
    assert (state["length"], len(state["pair"][0]), state["pair"][1]) == (7, 2, None)


def test_a_group_with_tokens_in_every_row_has_the_entire_state() -> None:
    for group in (AllTokens(POSITIONS), TokenSubset(POSITIONS, torch.ones(3, 4, dtype=torch.bool))):
        assert group.select_rows(STATE) is STATE


def test_only_the_tokens_of_the_group_change() -> None:
    x = torch.arange(12.0).view(3, 4, 1)
    for group in (AllTokens(POSITIONS, CHOSEN), TokenSubset(POSITIONS, CHOSEN)):
        torch.testing.assert_close(group.scatter(x, group.gather(x) + 10), x + 10 * CHOSEN[..., None])
