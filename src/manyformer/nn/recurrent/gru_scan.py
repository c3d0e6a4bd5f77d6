"""The gated recurrent unit (Cho et al. 2014), optionally with attention in every step (Bahdanau et al. 2015).

With s the state before step i, x the token's input to both gates and the candidate, and c the attention's output,

    z, r = sigmoid(x_zr + c_zr + s U_zr),  s' = tanh(x_s + c_s + (r * s) U_s),  s_i = s + z * (s' - s),
    c = sum over j of w_j (C h_j),  w = softmax over j of v . tanh(U_a h_j + s W_a)

as in appendix A.1.1 and A.1.2 of the latter paper: the reset gate acts before the product, and z is the share of the
new state, both of which `torch.nn.GRU` does the other way. U_a h_j and C h_j do not depend on the step, so they are
passed in precomputed. Time comes before the batch; several units of one size (`g`) run in parallel.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.nn.runtime.handwritten_gradient import HandwrittenGradient, needs_plain_operations
from manyformer.nn.runtime.torch_internals import compiler_disabled


class StepAttention(NamedTuple):
    """Additive attention of each step's state: `query` W_a, `keys` U_a h, `values` C h, `energy` v, and a mask."""

    query: Float[Tensor, "n a"]
    keys: Float[Tensor, "b s a"]
    values: Float[Tensor, "b s i"]
    energy: Float[Tensor, " a"]
    visible: Bool[Tensor, "l b s"] | None = None


class StepMaps(NamedTuple):
    """The maps with weights of a step: gates and candidate from their inputs and the states (g, b, n), and, with
    attention, query from the state (b, n) and energies from the features of pairs (b, s, a)."""

    gates: Callable[[Tensor, Tensor], Tensor]
    candidate: Callable[[Tensor, Tensor], Tensor]
    query: Callable[[Tensor], Tensor] | None = None
    energy: Callable[[Tensor], Tensor] | None = None


class StepSource(NamedTuple):
    """What each step attends to: the keys, values and mask of `StepAttention`."""

    keys: Float[Tensor, "b s a"]
    values: Float[Tensor, "b s i"]
    visible: Bool[Tensor, "l b s"] | None


class StateResets(NamedTuple):
    """Steps at which the state is reset to `starts` (zeros if None), and those that are not `valid` and keep it."""

    reset: Bool[Tensor, "l b"]
    valid: Bool[Tensor, "l b"] | None = None
    starts: Float[Tensor, "g l b n"] | None = None


class ScanResult(NamedTuple):
    """The states before and after every step, and the attention weights of each step."""

    states_in: Float[Tensor, "g l b n"]
    states_out: Float[Tensor, "g l b n"]
    weights: Float[Tensor, "l b s"] | None


class _Step(NamedTuple):
    """Results of one step that its gradient needs."""

    states_in: Tensor
    gates: Tensor
    candidate: Tensor
    states_out: Tensor
    query: Tensor | None
    weights: Tensor | None


def gru_scan_reference(
    token_inputs: Float[Tensor, "g l b i"],
    gates: Float[Tensor, "g n zr"],
    candidate: Float[Tensor, "g n n"],
    state: Float[Tensor, "g b n"],
    attention: StepAttention | None = None,
    resets: StateResets | None = None,
) -> ScanResult:
    """The definition, a loop over steps; also used for decoding."""
    maps, source = _maps_of(gates, candidate, attention)
    return gru_scan_by_maps(token_inputs, maps, state, source, resets)


@compiler_disabled
def gru_scan_by_maps(
    token_inputs: Float[Tensor, "g l b i"],
    maps: StepMaps,
    state: Float[Tensor, "g b n"],
    source: StepSource | None = None,
    resets: StateResets | None = None,
) -> ScanResult:
    """The same loop for any maps in place of the products with matrices."""
    return _stack_steps(list(_steps(token_inputs, maps, state, source, resets)))


def _maps_of(gates: Tensor, candidate: Tensor, attention: StepAttention | None) -> tuple[StepMaps, StepSource | None]:
    """The products with these matrices, and what is attended to."""
    maps = StepMaps(
        lambda x, state: torch.baddbmm(x, state, gates), lambda x, state: torch.baddbmm(x, state, candidate)
    )
    if attention is None:
        return maps, None
    query_weight, keys, values, energy, visible = attention
    maps = maps._replace(query=lambda state: state @ query_weight, energy=lambda pairs: pairs @ energy)
    return maps, StepSource(keys, values, visible)


# outside compiled code, which would unroll every step and recompile for every length
@compiler_disabled
def gru_scan(
    token_inputs: Float[Tensor, "g l b i"],
    gates: Float[Tensor, "g n zr"],
    candidate: Float[Tensor, "g n n"],
    state: Float[Tensor, "g b n"],
    attention: StepAttention | None = None,
    resets: StateResets | None = None,
) -> ScanResult:
    """`gru_scan_reference` with a handwritten gradient, in float32 at least.

    Whatever does not depend on the state is one product for all steps: the gradients of all weights and of the values.
    Saved memory grows with steps times source length; the channels of each pair are recomputed.
    """
    compute_dtype = torch.promote_types(token_inputs.dtype, torch.float32)
    token_inputs, gates, candidate, state = (x.to(compute_dtype) for x in (token_inputs, gates, candidate, state))
    if attention is not None:
        query, keys, values, energy = (x.to(compute_dtype) for x in attention[:4])
        attention = StepAttention(query, keys, values, energy, attention.visible)
    if resets is not None and resets.starts is not None:
        resets = resets._replace(starts=resets.starts.to(compute_dtype))
    if not torch.is_grad_enabled() or needs_plain_operations():
        return gru_scan_reference(token_inputs, gates, candidate, state, attention, resets)
    optional = (*(attention or (None,) * 5), *(resets or (None,) * 3))
    return ScanResult(*_GRUScan.call(token_inputs, gates, candidate, state, *optional))


def _steps(
    token_inputs: Tensor,
    maps: StepMaps,
    state: Tensor,
    source: StepSource | None,
    resets: StateResets | None,
    scratch: Tensor | None = None,
) -> Iterator[_Step]:
    """Yield the steps; `scratch` is a reused buffer for pair features, where autograd does not need them."""
    size = state.shape[-1]
    for i, x in enumerate(token_inputs.unbind(1)):
        if resets is not None:
            if resets.starts is None:
                start_state = state.new_zeros(())
            else:
                start_state = resets.starts[:, i]
            state = torch.where(resets.reset[i, :, None], start_state, state)
        query = None
        weights = None
        if source is not None:
            assert maps.query is not None
            assert maps.energy is not None
            query = maps.query(state[0])
            energies = maps.energy(_pair_features(source.keys, query, scratch))
            weights = _attention_weights(energies, None if source.visible is None else source.visible[i])
            x = x + (weights[:, None] @ source.values)[:, 0]
        gate_values = maps.gates(x[..., : 2 * size], state).sigmoid()
        new_state = maps.candidate(x[..., 2 * size :], gate_values[..., size:] * state).tanh()
        # h = (1 - z) h + z h~, in the convention in which an update gate of 1 takes the new state
        state_out = state.lerp(new_state, gate_values[..., :size])
        if resets is not None and resets.valid is not None:
            # padding passes the state on
            state_out = torch.where(resets.valid[i, :, None], state_out, state)
        yield _Step(state, gate_values, new_state, state_out, query, weights)
        state = state_out


def _attention_weights(energies: Float[Tensor, "b s"], visible: Bool[Tensor, "b s"] | None) -> Float[Tensor, "b s"]:
    """Softmax of the energies over visible positions; zeros where there are none."""
    if visible is None:
        return energies.softmax(-1)
    hidden = ~visible
    energies = energies.masked_fill(hidden, -torch.inf).masked_fill(hidden.all(-1, keepdim=True), 0.0)
    return energies.softmax(-1).masked_fill(hidden, 0.0)


def _pair_features(keys: Tensor, query: Tensor, scratch: Tensor | None) -> Float[Tensor, "b s a"]:
    return torch.add(keys, query[:, None], out=scratch).tanh_()


def _stack_steps(steps: list[_Step]) -> ScanResult:
    states_in = torch.stack([step.states_in for step in steps], dim=1)
    states_out = torch.stack([step.states_out for step in steps], dim=1)
    weights = [step.weights for step in steps if step.weights is not None]
    return ScanResult(states_in, states_out, torch.stack(weights) if weights else None)


class _GRUScan(HandwrittenGradient):
    """Backpropagation through time: a loop for what is sequential, then products over all steps at once."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        token_inputs, gates, candidate, state = arguments[:4]
        attention = _attention_of(arguments)
        resets = _resets_of(arguments)
        scratch = None
        if attention is not None:
            scratch = torch.empty_like(attention.keys)
        maps, source = _maps_of(gates, candidate, attention)
        steps = list(_steps(token_inputs, maps, state, source, resets, scratch))
        gate_values, candidates = (torch.stack(x, 1) for x in zip(*((step.gates, step.candidate) for step in steps)))
        queries = None
        if attention is not None:
            queries = torch.stack([step.query for step in steps if step.query is not None])
        result = _stack_steps(steps)
        ctx.save_for_backward(*arguments, result.states_in, gate_values, candidates, queries, result.weights)
        ctx.set_materialize_grads(False)
        return result.states_in, result.states_out, result.weights

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        arguments = ctx.saved_tensors[:12]
        saved = ctx.saved_tensors[12:]
        attention = _attention_of(arguments)
        resets = _resets_of(arguments)
        token_inputs, gates, candidate, state = arguments[:4]
        states_in, gate_values, candidates, queries, weights = saved
        attention_gradient: _AttentionGradient | None = None
        attention_grads: tuple[Tensor | None, ...] = (None,) * 4
        if attention is not None:
            attention_gradient = _AttentionGradient(attention, queries, weights, output_grads[2])
        grad_inputs = torch.empty_like(token_inputs)
        if resets is None or resets.starts is None:
            grad_starts = None
        else:
            grad_starts = torch.zeros_like(resets.starts)
        grad_state = torch.zeros_like(state)
        for i in reversed(range(token_inputs.shape[1])):
            if output_grads[1] is not None:
                grad_state = grad_state + output_grads[1][:, i]
            state_in = states_in[:, i]
            skipped_grad = None
            if resets is not None and resets.valid is not None:
                # rows whose step was skipped pass the gradient around it, as they did the state
                skipped_grad = grad_state.masked_fill(resets.valid[i, :, None], 0.0)
                grad_state = grad_state - skipped_grad
            step = gate_values[:, i], candidates[:, i]
            grad_state = _backward_step(grad_state, state_in, *step, candidate, grad_inputs[:, i])
            grad_state = grad_state.baddbmm_(grad_inputs[:, i, :, : 2 * state_in.shape[-1]], gates.mT)
            if attention_gradient is not None:
                grad_state.add_(attention_gradient.state_gradient(i, grad_inputs[0, i]))
            if skipped_grad is not None:
                grad_state.add_(skipped_grad)
            if output_grads[0] is not None:
                grad_state.add_(output_grads[0][:, i])
            if resets is not None:
                is_reset = resets.reset[i, :, None]
                if grad_starts is not None:
                    grad_starts[:, i] = grad_state.masked_fill(~is_reset, 0.0)
                grad_state = grad_state.masked_fill(is_reset, 0.0)
        flat_states = states_in.flatten(1, 2)
        flat_grads = grad_inputs.flatten(1, 2)
        size = state.shape[-1]
        # one product over all steps and rows for each weight: the loop holds only what depends on the next step
        grad_gates = flat_states.mT @ flat_grads[..., : 2 * size]
        grad_candidate = (gate_values[..., size:] * states_in).flatten(1, 2).mT @ flat_grads[..., 2 * size :]
        if attention_gradient is not None:
            attention_grads = attention_gradient.shared_gradients(states_in[0], grad_inputs[0])
        return grad_inputs, grad_gates, grad_candidate, grad_state, *attention_grads, None, None, None, grad_starts


def _backward_step(
    grad_state: Tensor,
    state_in: Tensor,
    gate_values: Tensor,
    candidate_values: Tensor,
    candidate: Tensor,
    grad_inputs: Tensor,
) -> Tensor:
    """Gradient of a step's input state through interpolation and candidate; writes those of x to `grad_inputs`."""
    size = state_in.shape[-1]
    update = gate_values[..., :size]
    reset = gate_values[..., size:]
    # through h = (1 - z) h + z h~, with tanh' = 1 - h~^2
    grad_new = grad_state * update
    torch.addcmul(grad_new, grad_new * candidate_values, candidate_values, value=-1, out=grad_inputs[..., 2 * size :])
    grad_reset_state = grad_inputs[..., 2 * size :] @ candidate.mT
    # g - g^2, the derivative of a sigmoid
    gate_slopes = torch.addcmul(gate_values, gate_values, gate_values, value=-1)
    torch.mul(grad_state * (candidate_values - state_in), gate_slopes[..., :size], out=grad_inputs[..., :size])
    torch.mul(grad_reset_state * state_in, gate_slopes[..., size:], out=grad_inputs[..., size : 2 * size])
    return (grad_state - grad_new).addcmul_(grad_reset_state, reset)


class _AttentionGradient:
    """Gradient of the attention: `state_gradient` for each step in reverse, then `shared_gradients` over all steps."""

    def __init__(self, attention: StepAttention, queries: Tensor, weights: Tensor, weight_grads: Tensor | None) -> None:
        self.attention = attention
        self.queries = queries
        self.weights = weights
        self.weight_grads = weight_grads
        self.grad_queries = torch.empty_like(queries)
        self.grad_energy = torch.zeros_like(attention.energy)
        self.grad_scores = torch.zeros_like(attention.keys[..., 0])
        self.grad_times_squares = torch.zeros_like(attention.keys)
        self.scratch = torch.empty_like(attention.keys)

    def state_gradient(self, i: int, grad_inputs: Float[Tensor, "b i"]) -> Float[Tensor, "b n"]:
        """Gradient of the state before step i, where `grad_inputs` is that of the attention's output."""
        attention = self.attention
        weights = self.weights[i]
        grad_score = (attention.values @ grad_inputs[:, :, None])[..., 0]
        if self.weight_grads is not None:
            grad_score = grad_score + self.weight_grads[i]
        # softmax backward
        grad_score = weights * (grad_score - (weights * grad_score).sum(-1, keepdim=True))
        pairs = _pair_features(attention.keys, self.queries[i], self.scratch)
        self.grad_energy += pairs.flatten(0, 1).mT @ grad_score.flatten()
        # tanh' = 1 - tanh^2, and gradients of softmax scores sum to 0, so that the 1 contributes nothing to the query
        pairs.square_()
        self.grad_scores += grad_score
        self.grad_times_squares.addcmul_(pairs, grad_score[:, :, None])
        grad_query = torch.mul((grad_score[:, None] @ pairs)[:, 0], -attention.energy, out=self.grad_queries[i])
        return grad_query @ attention.query.mT

    def shared_gradients(
        self, states_in: Float[Tensor, "l b n"], grad_inputs: Float[Tensor, "l b i"]
    ) -> tuple[Tensor, ...]:
        """Gradients of query, keys, values and energy."""
        grad_query = states_in.flatten(0, 1).mT @ self.grad_queries.flatten(0, 1)
        grad_keys = (self.grad_scores[..., None] - self.grad_times_squares) * self.attention.energy
        grad_values = torch.einsum("lbs,lbi->bsi", self.weights, grad_inputs)
        return grad_query, grad_keys, grad_values, self.grad_energy


def _attention_of(arguments: tuple[Any, ...]) -> StepAttention | None:
    if arguments[4] is None:
        return None
    return StepAttention(*arguments[4:9])


def _resets_of(arguments: tuple[Any, ...]) -> StateResets | None:
    if arguments[9] is None:
        return None
    return StateResets(*arguments[9:12])
