"""The gated recurrent unit (Cho et al. 2014), which may look at another sequence in every step (Bahdanau et al. 2015).

With s the state before step i, x what the token says to both gates and the candidate, and c what is looked at,

    z, r = sigmoid(x_zr + c_zr + s U_zr),  s' = tanh(x_s + c_s + (r * s) U_s),  s_i = s + z * (s' - s),
    c = sum over j of w_j (C h_j),  w = softmax over j of v . tanh(U_a h_j + s W_a)

as in appendix A.1.1 and A.1.2 of the latter paper: the reset gate acts before the product, and z is the share of the
new, both of which `torch.nn.GRU` has the other way. U_a h_j and C h_j do not depend on the step, so they are handed in
ready. Time stands before the batch, several units of one size (`g`) run side by side.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable


class StepAttention(NamedTuple):
    """Where the state of a step looks: `query` W_a, `keys` U_a h, `values` C h, `energy` v; all is seen unless told."""

    query: Float[Tensor, "n a"]
    keys: Float[Tensor, "b s a"]
    values: Float[Tensor, "b s i"]
    energy: Float[Tensor, " a"]
    visible: Bool[Tensor, "l b s"] | None = None


class StateResets(NamedTuple):
    """Where the state is exchanged for one of `starts` (zeros unless given), and where it is kept as it is."""

    reset: Bool[Tensor, "l b"]
    real: Bool[Tensor, "l b"] | None = None
    starts: Float[Tensor, "g l b n"] | None = None


class ScanResult(NamedTuple):
    """The states before and after every step, and what share of its look each place got."""

    states_in: Float[Tensor, "g l b n"]
    states_out: Float[Tensor, "g l b n"]
    weights: Float[Tensor, "l b s"] | None


class _Step(NamedTuple):
    """What a step makes and its gradient needs."""

    states_in: Tensor
    gates: Tensor
    candidate: Tensor
    states_out: Tensor
    query: Tensor | None
    weights: Tensor | None


def naive(
    into: Float[Tensor, "g l b i"],
    gates: Float[Tensor, "g n zr"],
    candidate: Float[Tensor, "g n n"],
    state: Float[Tensor, "g b n"],
    look: StepAttention | None = None,
    breaks: StateResets | None = None,
) -> ScanResult:
    """Step by step: the definition, and what decoding does."""
    return _stacked(list(_steps(into, gates, candidate, state, look, breaks)))


# outside compiled code, which would write every step out, and again for every length
@torch.compiler.disable  # type: ignore[untyped-decorator]
def scan(
    into: Float[Tensor, "g l b i"],
    gates: Float[Tensor, "g n zr"],
    candidate: Float[Tensor, "g n n"],
    state: Float[Tensor, "g b n"],
    look: StepAttention | None = None,
    breaks: StateResets | None = None,
) -> ScanResult:
    """The same with a gradient written by hand, in float32 at least.

    Whatever does not need the state is one product for all steps: the gradients of all weights and of the values. What
    is kept grows with steps times places, not with the channels of each pair, which are made again.
    """
    wide = torch.promote_types(into.dtype, torch.float32)
    into, gates, candidate, state = (x.to(wide) for x in (into, gates, candidate, state))
    if look is not None:
        query, keys, values, energy = (x.to(wide) for x in look[:4])
        look = StepAttention(query, keys, values, energy, look.visible)
    if breaks is not None and breaks.starts is not None:
        breaks = breaks._replace(starts=breaks.starts.to(wide))
    if not torch.is_grad_enabled():
        return naive(into, gates, candidate, state, look, breaks)
    absent: tuple[None, ...] = (None,) * 5
    return ScanResult(
        *_Scan.apply(  # type: ignore[no-untyped-call]
            into, gates, candidate, state, *(absent if look is None else look), *(breaks or absent[:3])
        )
    )


def _steps(
    into: Tensor,
    gates: Tensor,
    candidate: Tensor,
    state: Tensor,
    look: StepAttention | None,
    breaks: StateResets | None,
    room: Tensor | None = None,
) -> Iterator[_Step]:
    """The steps; `room` is where pairs are formed, one step after the other, when no gradient will ask for them."""
    size = state.shape[-1]
    for i, x in enumerate(into.unbind(1)):
        if breaks is not None:
            fresh = state.new_zeros(()) if breaks.starts is None else breaks.starts[:, i]
            state = torch.where(breaks.reset[i, :, None], fresh, state)
        query, weights = None, None
        if look is not None:
            query = state[0] @ look.query
            weights = _shares(look, query, i, room)
            x = x + (weights[:, None] @ look.values)[:, 0]
        both = torch.baddbmm(x[..., : 2 * size], state, gates).sigmoid()
        new = torch.baddbmm(x[..., 2 * size :], both[..., size:] * state, candidate).tanh()
        after = state.lerp(new, both[..., :size])
        if breaks is not None and breaks.real is not None:
            after = torch.where(breaks.real[i, :, None], after, state)
        yield _Step(state, both, new, after, query, weights)
        state = after


def _shares(look: StepAttention, query: Tensor, i: int, room: Tensor | None) -> Float[Tensor, "b s"]:
    """Softmax of the energies over what is seen; zeros where that is nothing."""
    energies = _pairs(look, query, room) @ look.energy
    if look.visible is None:
        return energies.softmax(-1)
    hidden = ~look.visible[i]
    energies = energies.masked_fill(hidden, -torch.inf).masked_fill(hidden.all(-1, keepdim=True), 0.0)
    return energies.softmax(-1).masked_fill(hidden, 0.0)


def _pairs(look: StepAttention, query: Tensor, room: Tensor | None) -> Float[Tensor, "b s a"]:
    return torch.add(look.keys, query[:, None], out=room).tanh_()


def _stacked(steps: list[_Step]) -> ScanResult:
    before, after = (
        torch.stack([getattr(step, name) for step in steps], dim=1) for name in ("states_in", "states_out")
    )
    weights = [step.weights for step in steps if step.weights is not None]
    return ScanResult(before, after, torch.stack(weights) if weights else None)


class _Scan(torch.autograd.Function):
    """Backpropagation through time: one loop for what must go step by step, then products of all steps at once."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        into, gates, candidate, state = given[:4]
        look, breaks = _look_of(given), _breaks_of(given)
        room = None if look is None else torch.empty_like(look.keys)
        steps = list(_steps(into, gates, candidate, state, look, breaks, room))
        both, new = (torch.stack([getattr(step, name) for step in steps], 1) for name in ("gates", "candidate"))
        queries = None if look is None else torch.stack([step.query for step in steps if step.query is not None])
        found = _stacked(steps)
        ctx.save_for_backward(*given, found.states_in, both, new, queries, found.weights)
        ctx.set_materialize_grads(False)
        return found.states_in, found.states_out, found.weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *up: Tensor | None) -> tuple[Tensor | None, ...]:
        given, made = ctx.saved_tensors[:12], ctx.saved_tensors[12:]
        look, breaks = _look_of(given), _breaks_of(given)
        into, gates, candidate, state = given[:4]
        before, both, new, queries, weights = made
        looking = None if look is None else _Looking(look, queries, weights, up[2])
        down, starts = torch.empty_like(into), None if breaks is None else _starts_of(breaks)
        flow = torch.zeros_like(state)
        for i in reversed(range(into.shape[1])):
            flow = flow if up[1] is None else flow + up[1][:, i]
            past, held = before[:, i], None
            if breaks is not None and breaks.real is not None:
                held = flow.masked_fill(breaks.real[i, :, None], 0.0)
                flow = flow - held
            flow = _through(flow, past, both[:, i], new[:, i], candidate, down[:, i])
            flow = flow.baddbmm_(down[:, i, :, : 2 * past.shape[-1]], gates.mT)
            flow = flow if looking is None else flow.add_(looking.back(i, down[0, i]))
            flow = flow if held is None else flow.add_(held)
            flow = flow if up[0] is None else flow.add_(up[0][:, i])
            if breaks is not None:
                fresh = breaks.reset[i, :, None]
                if starts is not None:
                    starts[:, i] = flow.masked_fill(~fresh, 0.0)
                flow = flow.masked_fill(fresh, 0.0)
        tokens, steps = before.flatten(1, 2), down.flatten(1, 2)
        size = state.shape[-1]
        to_gates = tokens.mT @ steps[..., : 2 * size]
        to_candidate = (both[..., size:] * before).flatten(1, 2).mT @ steps[..., 2 * size :]
        looked = (None,) * 4 if looking is None else looking.ended(before[0], down[0])
        return down, to_gates, to_candidate, flow, *looked, None, None, None, starts


def _through(flow: Tensor, past: Tensor, both: Tensor, new: Tensor, candidate: Tensor, down: Tensor) -> Tensor:
    """The gradient of the state before a step by way of the mixture and the candidate; `down` gets those of x."""
    size = past.shape[-1]
    update, keep = both[..., :size], both[..., size:]
    to_new = flow * update
    torch.addcmul(to_new, to_new * new, new, value=-1, out=down[..., 2 * size :])
    back = down[..., 2 * size :] @ candidate.mT
    slopes = torch.addcmul(both, both, both, value=-1)
    torch.mul(flow * (new - past), slopes[..., :size], out=down[..., :size])
    torch.mul(back * past, slopes[..., size:], out=down[..., size : 2 * size])
    return (flow - to_new).addcmul_(back, keep)


class _Looking:
    """The gradient of the look: `back` for each step from the last to the first, `ended` for what all steps share."""

    def __init__(self, look: StepAttention, queries: Tensor, weights: Tensor, up: Tensor | None) -> None:
        self.look, self.queries, self.weights, self.up = look, queries, weights, up
        self.to_queries = torch.empty_like(queries)
        self.to_energy = torch.zeros_like(look.energy)
        self.flat, self.bent = torch.zeros_like(look.keys[..., 0]), torch.zeros_like(look.keys)
        self.room = torch.empty_like(look.keys)

    def back(self, i: int, down: Float[Tensor, "b i"]) -> Float[Tensor, "b n"]:
        """What the state before step i gets, when what it saw gets `down`."""
        look, weights = self.look, self.weights[i]
        slope = (look.values @ down[:, :, None])[..., 0]
        slope = slope if self.up is None else slope + self.up[i]
        slope = weights * (slope - (weights * slope).sum(-1, keepdim=True))
        pairs = _pairs(look, self.queries[i], self.room)
        self.to_energy += pairs.flatten(0, 1).mT @ slope.flatten()
        # tanh' = 1 - tanh^2, and the slopes of a softmax sum to 0, so that the query gets nothing from the 1
        pairs.square_()
        self.flat += slope
        self.bent.addcmul_(pairs, slope[:, :, None])
        to_query = torch.mul((slope[:, None] @ pairs)[:, 0], -look.energy, out=self.to_queries[i])
        return to_query @ look.query.mT

    def ended(self, before: Float[Tensor, "l b n"], down: Float[Tensor, "l b i"]) -> tuple[Tensor, ...]:
        """The gradients of query, keys, values and energy."""
        to_query = before.flatten(0, 1).mT @ self.to_queries.flatten(0, 1)
        to_keys = (self.flat[..., None] - self.bent) * self.look.energy
        to_values = torch.einsum("lbs,lbi->bsi", self.weights, down)
        return to_query, to_keys, to_values, self.to_energy


def _look_of(given: tuple[Any, ...]) -> StepAttention | None:
    return None if given[4] is None else StepAttention(*given[4:9])


def _breaks_of(given: tuple[Any, ...]) -> StateResets | None:
    return None if given[9] is None else StateResets(*given[9:12])


def _starts_of(breaks: StateResets) -> Tensor | None:
    return None if breaks.starts is None else torch.zeros_like(breaks.starts)
