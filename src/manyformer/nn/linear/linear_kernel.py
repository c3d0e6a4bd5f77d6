"""Linear attention: products of query and key features replace exp(q.k), so that keys can be summed first."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from manyformer.nn.core import (
    PADDING_SEGMENT,
    ContiguousLayout,
    LayerOutput,
    PackedLayout,
    State,
    StepLayout,
    TokenPositions,
    no_watch,
    tree_map,
)
from manyformer.nn.kernels.kernel import Kernel, KernelCall, TokenRing
from manyformer.nn.linear import FeatureMap, FeatureValues, document_sums, fla_recurrence
from manyformer.nn.linear.document_sums import DocumentSums
from manyformer.nn.linear.memory_rules import (
    DeltaRule,
    MemoryRule,
    RecurrenceForm,
    RecurrentMemory,
    SumRule,
    TokenFeatures,
)
from manyformer.nn.masks.local import Causal
from manyformer.nn.masks.mask import AllKeys, Mask
from manyformer.nn.ops.document_rows import NO_SEGMENT, segment_runs
from manyformer.nn.runtime.devices import compiles_attention
from manyformer.nn.runtime.torch_internals import autocast_disabled, compiler_disabled
from manyformer.nn.runtime.training_hooks import StatefulAcrossBatches

LinearPath = Literal["summed"] | RecurrenceForm


class LinearState(NamedTuple):
    """The memory of the current document of each row, and its segment id; empty before any token."""

    memory: RecurrentMemory = RecurrentMemory()
    segment_ids: Int[Tensor, " b"] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the state holds no token yet."""
        return self.memory.matrix is None


class LinearResult(NamedTuple):
    """Outputs, the next state, and the weights if the path formed all pairs."""

    y: Float[Tensor, "b h l f"]
    state: LinearState | DocumentSums
    weights: Float[Tensor, "b h l s"] | None = None


@final
class LinearKernel(Kernel, StatefulAcrossBatches):
    """Attention by sums of features (Katharopoulos et al. 2020), causal or to the whole document.

    `features` replaces exp(q.k); there is no further scale. It maps queries, and keys where these have no map of their
    own, `key_features`. With `Causal()` pairs are formed within chunks of `chunk`
    tokens, and a memory of constant size, in float32 at least, holds the sum of all earlier tokens; `rule` is its
    update rule, and decoding needs this memory alone. With `AllKeys()` keys are summed once for all queries, in
    cross-attention also for those of later calls. Other masks are refused: single keys cannot be removed from a sum.
    Sums of weights closer to 0 than `floor` count as `floor`. With `carried` training on rows that continue carries the
    memory from batch to batch, without its gradient; features that are redrawn while training are refused, because
    the memory is a sum of earlier features. `path` forces a path: "quadratic" (all pairs, the
    definition, also used when weights are watched), "chunked", "recurrent" (token by token) or, for rules without a
    normalizer, "fla" (the kernels of the package fla-core, in half precision on a GPU, where "auto" takes them if they
    are installed) for `Causal()`, "summed" for `AllKeys()`. Raises ValueError for unsupported combinations.
    """

    supports = frozenset({"query", "key"})
    recurrent = True
    implies_weights = True

    def __init__(
        self,
        features: FeatureMap,
        mask: Mask | None = None,
        *,
        key_features: FeatureMap | None = None,
        rule: MemoryRule | None = None,
        chunk: int = 64,
        floor: float = 1e-6,
        carried: bool = False,
        path: Literal["auto"] | LinearPath = "auto",
    ) -> None:
        super().__init__()
        self.mask = AllKeys() if mask is None else mask
        self.features = features
        self.key_features = key_features
        self.rule = SumRule() if rule is None else rule
        self.chunk = chunk
        self.floor = floor
        self.path = path
        self.carries_across_batches = carried
        self.gate_dim, self._causal = self.rule.gate_dim, self.mask == Causal()
        if not self._causal and self.mask != AllKeys():
            raise ValueError(f"LinearKernel sums over keys, so mask {mask!r} must be Causal(), AllKeys() or None")
        if not self._causal and not isinstance(self.rule, SumRule):
            raise ValueError(f"{type(self.rule).__name__} updates its memory token by token: it needs mask Causal()")
        if key_features is None:
            maps = [features]
        else:
            maps = [features, key_features]
        signed = next((feature_map for feature_map in maps if feature_map.signed), None)
        if signed is not None and isinstance(self.rule, DeltaRule):
            raise ValueError(f"DeltaRule divides features by their sum, which may be 0 for {type(signed).__name__}")
        are_redrawn = any(getattr(feature_map, "redraw", None) is not None for feature_map in maps)
        if carried and (not self._causal or are_redrawn):
            raise ValueError("LinearKernel: a carried memory needs mask Causal() and features that are never redrawn")
        if chunk < 1:
            raise ValueError(f"LinearKernel: chunk ({chunk}) must be at least 1 token")
        if self._causal:
            self._paths: frozenset[LinearPath] = self.rule.forms
        else:
            self._paths = frozenset({"quadratic", "summed"})
        if path != "auto" and path not in self._paths:
            raise ValueError(
                f"LinearKernel: path '{path}' must be auto or one of {', '.join(sorted(self._paths))} here"
            )

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        if self._causal:
            return LinearState()
        return DocumentSums()

    def forward(self, call: KernelCall) -> LayerOutput:
        path, _ = self._select_path(call)
        compute_dtype = torch.promote_types(call.v.dtype, torch.float32)
        if self._causal:
            compute = self._compute_causal
        else:
            compute = self._compute_all_keys
        with autocast_disabled(call.q.device):
            query_features = self.features(call.q.to(compute_dtype), call.query_positions).y
            key_features = self._key_map(call.k.to(compute_dtype), call.key_positions)
            v = call.v.to(compute_dtype)
            y, state, weights = compute(call, v, query_features, key_features, path)
        if weights is not None:
            call.watch(self, "weights", weights)
        return LayerOutput(y.to(call.v.dtype), None if call.state is None else state)

    def column_obstacle(self) -> str | None:
        if self._causal:
            return None
        return "its linear attention is not causal"

    def share_columns(self, ring: TokenRing) -> None:
        attend = self.forward

        def forward(call: KernelCall) -> LayerOutput:
            first = self.init_state(len(call.q), device=call.q.device, dtype=call.q.dtype)
            q, k, v = (x[:, :, :1] for x in (call.q, call.k, call.v))
            token = call.query_positions.columns(0, 1)
            with torch.no_grad():
                # one token is enough to know the shapes of the state that the previous process will send
                like = attend(KernelCall(q, k, v, token, token, call.position, first)).state

            def recur(state: State) -> tuple[Tensor, State]:
                y, state, _ = attend(call._replace(state=state))
                return y, state

            return LayerOutput(with_passed_state(recur, first, like, ring))

        self.forward = forward  # type: ignore[method-assign]
        self.explain = lambda call: f"passed state: {ring.size} processes one after the other"  # type: ignore[method-assign]

    def explain(self, call: KernelCall) -> str:
        return ": ".join(self._select_path(call))

    @property
    def gate_projection(self) -> nn.Module | None:
        """The rule's own projection of its gates, if it has one."""
        return self.rule.gate_projection

    def extra_repr(self) -> str:
        return f"{self.mask!r}, chunk={self.chunk}, path={self.path}"

    @property
    def _key_map(self) -> FeatureMap:
        if self.key_features is None:
            return self.features
        return self.key_features

    def _select_path(self, call: KernelCall) -> tuple[LinearPath, str]:
        """The path of this call and the reason for it."""
        queries = call.q.shape[2]
        keys = call.k.shape[2]
        if self._causal and queries != keys:
            raise ValueError(
                f"LinearKernel with Causal() needs a key for each query, got {keys} keys, {queries} queries; "
                "build it without Causal() for the keys of another sequence"
            )
        # pairs with keys that are only part of a sum cannot be formed
        has_all_keys = call.state is None or call.state.is_empty
        if self.path == "quadratic" and not has_all_keys:
            raise ValueError("LinearKernel: path 'quadratic' needs all keys, but the state holds only their sum")
        if self.path == "fla" and (refusal := self._fla_refusal(call)) is not None:
            raise ValueError(f"LinearKernel: path 'fla' cannot serve this call: {refusal}")
        if self.path != "auto":
            return self.path, "forced"
        if call.watch is not no_watch and has_all_keys and "quadratic" in self._paths:
            return "quadratic", "the weights are watched, and only this path forms them"
        if not self._causal:
            return "summed", "every key is visible, so the keys are summed once"
        if queries == 1:
            return "recurrent", "a single token"
        chunks = f"causal, {self.chunk} tokens at a time"
        if "fla" not in self._paths or not compiles_attention(call.q.device):
            return "chunked", chunks
        refusal = self._fla_refusal(call)
        if refusal is None:
            return ("fla", "causal, by the kernels of fla-core")
        return ("chunked", f"{chunks}; {refusal}")

    def _fla_refusal(self, call: KernelCall) -> str | None:
        return fla_recurrence.fla_refusal(
            call.q.device, call.v.dtype, call.k.shape[-1], has_decay_per_head=self.rule.has_decay_per_head
        )

    def _compute_causal(
        self, call: KernelCall, v: Tensor, query_features: Tensor, key_feature_values: FeatureValues, path: LinearPath
    ) -> LinearResult:
        """Causal attention; the tokens of each row continue the memory of its current document."""
        assert path != "summed"
        state = call.state
        heads_per_group = query_features.shape[1] // v.shape[1]
        previous = LinearState() if state is None else state
        memory = previous.memory
        if heads_per_group > 1:
            # query heads that share a key head have memories of their own while they are computed; one of them is kept
            key_feature_values, v, memory = tree_map(
                lambda x: x.repeat_interleave(heads_per_group, 1), (key_feature_values, v, memory)
            )
        key_features, log_scale = key_feature_values
        gate = None
        if self.gate_dim:
            v, gate = v.split_with_sizes([v.shape[-1] - self.gate_dim, self.gate_dim], -1)
        # without a run and a mask the tokens are one document, which the fast forms need not separate
        run, valid, last_segment = _track_segments(call.key_positions, previous, keep_state=state is not None)
        tokens = TokenFeatures(query_features, key_features, v, log_scale, gate, valid, run, call.v.dtype)
        y, memory, weights = self.rule(tokens, memory, form=path, chunk=self.chunk, floor=self.floor)
        if heads_per_group > 1:
            memory = tree_map(lambda x: x[:, ::heads_per_group], memory)
        return LinearResult(y, LinearState(memory, last_segment), weights)

    def _compute_all_keys(
        self, call: KernelCall, v: Tensor, query_features: Tensor, key_feature_values: FeatureValues, path: LinearPath
    ) -> LinearResult:
        """Attention to all keys of a query's document, including those already summed in the state."""
        query_positions = call.query_positions
        state = DocumentSums() if call.state is None else call.state
        sums = document_sums.sum_keys(*key_feature_values, v, call.key_positions, state)
        if path == "quadratic":
            y, weights = document_sums.document_sums_reference(
                query_features, *key_feature_values, v, query_positions, call.key_positions, self.floor
            )
            return LinearResult(y, sums, weights)
        y = document_sums.read_sums(query_features, query_positions, sums, v.shape[-1], self.floor)
        return LinearResult(y, sums)


def _track_segments(
    positions: TokenPositions, previous: LinearState, *, keep_state: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Runs (see `segment_runs`) and valid tokens where they matter, and each row's last segment id if there is a state.

    `previous` is the state that the tokens continue.
    """
    segment_ids = positions.segment_ids
    # the token of a step continues the document of its row
    if isinstance(positions.layout, ContiguousLayout):
        return None, None, segment_ids[:, -1] if keep_state else None
    if isinstance(positions.layout, StepLayout):
        # copied, because a static step overwrites its segment ids with those of the next token
        return None, None, segment_ids[:, -1].clone() if keep_state else None
    if not keep_state and isinstance(positions.layout, PackedLayout) and _has_one_document_per_row(positions.layout):
        # padding on the right comes after all valid tokens
        return None, None if positions.layout.right_padded else segment_ids != PADDING_SEGMENT, None
    last_ids = previous.segment_ids
    if last_ids is None:
        last_ids = segment_ids.new_full(segment_ids.shape[:1], NO_SEGMENT)
    run, valid, last_segment = segment_runs(segment_ids, last_ids)
    return run, valid, last_segment.clone()


def _has_one_document_per_row(layout: PackedLayout) -> bool:
    rows = [row for row, _, _ in layout.documents]
    return len(set(rows)) == len(rows)


@compiler_disabled
def with_passed_state(
    recur: Callable[[State], tuple[Tensor, State]], first: State, like: State, ring: TokenRing
) -> Tensor:
    """The outputs of `recur`, which maps the state before this process's tokens to outputs and the state after them.

    `first` is the state before all tokens, `like` one of the shapes that states have after some. Every process takes
    the gradient if one does.
    """
    # gradients of states are sent in any case, so that no process waits in vain
    anchor = torch.zeros((), requires_grad=torch.is_grad_enabled())
    state = first
    if ring.rank > 0:
        tensors = iter(_ReceiveState.apply(anchor, ring, *_tensors(like)))  # type: ignore[no-untyped-call]
        state = tree_map(lambda _: next(tensors), like)
    y, state = recur(state)
    if ring.rank + 1 == ring.size:
        return y
    sent: Tensor = _SendState.apply(y, ring, *_tensors(state))  # type: ignore[no-untyped-call]
    return sent


class _ReceiveState(torch.autograd.Function):
    """Tensors of the previous process; their gradients go back to it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ring: TokenRing, *like: Tensor) -> tuple[Tensor, ...]:
        tensors = ring.receive(like, ring.rank - 1)
        ctx.ring = ring
        ctx.is_float = [tensor.is_floating_point() for tensor in tensors]
        ctx.mark_non_differentiable(*(tensor for tensor in tensors if not tensor.is_floating_point()))
        return tuple(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        floats = [grad.contiguous() for grad, is_float in zip(grads, ctx.is_float, strict=True) if is_float]
        ctx.ring.send(floats, ctx.ring.rank - 1)
        return (None, None, *(None for _ in grads))


class _SendState(torch.autograd.Function):
    """`y` as it is; the other tensors are sent to the next process, which returns their gradients."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, ring: TokenRing, *tensors: Tensor) -> Tensor:
        ring.send([tensor.contiguous() for tensor in tensors], ring.rank + 1)
        ctx.ring = ring
        ctx.like = [torch.empty_like(tensor) if tensor.is_floating_point() else None for tensor in tensors]
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        grads = iter(ctx.ring.receive([like for like in ctx.like if like is not None], ctx.ring.rank + 1))
        return (grad_y, None, *(None if like is None else next(grads) for like in ctx.like))


def _tensors(state: State) -> list[Tensor]:
    """All tensors of a state, in the order of `tree_map`."""
    tensors: list[Tensor] = []

    def add(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    tree_map(add, state)
    return tensors
