"""LoLCATs attention: softmax within a window, sums of features beyond it, one normalizer for both."""

import math
from typing import Literal, NamedTuple, final, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from manyformer.nn.core import PADDING_SEGMENT, ContiguousLayout, LayerOutput, State, no_watch
from manyformer.nn.kernels.kernel import Kernel, KernelCall
from manyformer.nn.linear import HedgehogFeatures, linear_attention
from manyformer.nn.masks.local import Causal, Window
from manyformer.nn.runtime.head_selection import PerHeadTensors
from manyformer.nn.runtime.torch_internals import autocast_disabled

LolcatsPath = Literal["naive", "windows"]


class LolcatsState(NamedTuple):
    """The tokens of the window, on the right, and the sum of those of the same document before it; empty at first."""

    k: Float[Tensor, "b g w e"] | None = None
    v: Float[Tensor, "b g w f"] | None = None
    segment_ids: Int[Tensor, "b w"] | None = None
    matrix: Float[Tensor, "b h r fp1"] | None = None


class _Stream(NamedTuple):
    """The window before a call and the tokens of the call, of one row each: padding first, then all tokens in order.

    `documents` numbers the documents in it, with 0 for those that begin before the call. `places` are the columns of
    the call's tokens among the last l, where padding has any; None where these are the tokens as they are."""

    q: Float[Tensor, "b h l e"]
    k: Float[Tensor, "b g s e"]
    v: Float[Tensor, "b g s f"]
    segment_ids: Int[Tensor, "b s"]
    documents: Int[Tensor, "b s"]
    places: Int[Tensor, "b l"] | None


@final
class LolcatsKernel(Kernel, PerHeadTensors):
    """Causal attention with a window of softmax and a memory of all tokens before it (Zhang et al. 2024, LoLCATs).

    arXiv:2410.10254, section 3.3.1: the weight of key j for query i is gamma exp(s_ij - max_j s_ij) with the scores
    s_ij = q_i k_j / sqrt(e) of the last `window` tokens, and phi_q(q_i) phi_k(k_j) for tokens before them; all of them
    are divided by their sum, at least `floor`. phi are `HedgehogFeatures` with a map for each of the `heads` and
    `kv_heads`, gamma is the sigmoid of a weight of each head, 1/2 at first. The state has the tokens of a window and a
    matrix a head. `path` forces the definition, which forms all pairs ("naive", also used when weights are watched), or
    blocks of windows and chunks of sums ("windows"). Raises ValueError for a window below 1, and for keys without
    queries."""

    supports = frozenset({"query", "key"})
    recurrent = True
    head_axes = (("window_factor", -1),)

    def __init__(
        self,
        head_dim: int,
        *,
        heads: int,
        kv_heads: int,
        window: int = 64,
        floor: float = 1e-6,
        path: Literal["auto"] | LolcatsPath = "auto",
    ) -> None:
        super().__init__()
        if window < 1:
            raise ValueError(f"LolcatsKernel: window ({window}) must be at least 1 token")
        if path != "auto" and path not in get_args(LolcatsPath):
            raise ValueError(f"LolcatsKernel: path '{path}' does not exist; choose from auto, naive, windows")
        self.window = window
        self.floor = floor
        self.path = path
        self._scale = 1 / math.sqrt(head_dim)
        self.features, self.key_features = (HedgehogFeatures(head_dim, heads=n) for n in (heads, kv_heads))
        self.window_factor = nn.Parameter(torch.zeros(heads))

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        return LolcatsState()

    def forward(self, call: KernelCall) -> LayerOutput:
        path = self._select_path(call)
        dtype = call.v.dtype
        compute_dtype = torch.promote_types(dtype, torch.float32)
        with autocast_disabled(call.q.device):
            call = call._replace(**{name: getattr(call, name).to(compute_dtype) for name in ("q", "k", "v")})
            y, state = self._attend(self._stream(call), call.state)
            if path == "naive":
                y, weights = self._attend_to_pairs(call)
                call.watch(self, "weights", weights.to(dtype))
        return LayerOutput(y.to(dtype), None if call.state is None else state)

    def explain(self, call: KernelCall) -> str:
        if self._select_path(call) == "windows":
            return f"windows: softmax of {self.window} tokens, sums of those before them"
        return "naive: " + (
            "forced" if self.path == "naive" else "the weights are watched, and only this path forms them"
        )

    def extra_repr(self) -> str:
        return f"window={self.window}, path={self.path}"

    def _select_path(self, call: KernelCall) -> LolcatsPath:
        if call.q.shape[2] != call.k.shape[2]:
            raise ValueError(
                f"LolcatsKernel needs a key for each query, got {call.k.shape[2]} keys, {call.q.shape[2]} queries"
            )
        # pairs with keys that are only part of a sum cannot be formed
        has_all_keys = call.state is None or call.state.k is None
        if self.path == "naive" and not has_all_keys:
            raise ValueError("LolcatsKernel: path 'naive' needs all keys, but the state holds only their sum")
        is_watched = call.watch is not no_watch and has_all_keys and self.path == "auto"
        if is_watched or self.path == "naive":
            return "naive"
        return "windows"

    def _attend_to_pairs(self, call: KernelCall) -> tuple[Float[Tensor, "b h l f"], Float[Tensor, "b h l s"]]:
        """The definition, and its weights."""
        groups = call.q.shape[1] // call.k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (call.k, call.v))
        positions = call.query_positions, call.key_positions
        in_window = (Causal() & Window(self.window)).dense(*positions, 1)
        beyond_window = Causal().dense(*positions, 1) & ~in_window
        far_weights = (self.features.map(call.q) @ self._key_features(call.k, groups).mT).masked_fill(
            ~beyond_window, 0.0
        )
        weights = self._window_weights(call.q @ k.mT, in_window) + far_weights
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=self.floor)
        return weights @ v, weights

    def _window_weights(self, scores: Float[Tensor, "b h *n l s"], in_window: Bool[Tensor, "..."]) -> Tensor:
        """gamma exp(s - max s) for products of queries and keys; 0 for keys that are not `in_window`."""
        # finite: a row without a key in its window has a maximum as well, and weights of 0
        scores = (scores * self._scale).masked_fill(~in_window, torch.finfo(scores.dtype).min)
        gamma = self.window_factor.to(scores.dtype).sigmoid().view(-1, *[1] * (scores.ndim - 2))
        return (gamma * (scores - scores.amax(-1, keepdim=True)).exp()).masked_fill(~in_window, 0.0)

    def _attend(self, stream: _Stream, state: LolcatsState | None) -> tuple[Float[Tensor, "b h l f"], LolcatsState]:
        """Outputs of the call's tokens, in windows of queries, and the state after them."""
        groups = stream.q.shape[1] // stream.k.shape[1]
        if state is None or state.matrix is None:
            matrix = None
        else:
            matrix = state.matrix.repeat_interleave(groups, 1)
        beyond, matrix = self._attend_beyond(stream, groups, matrix)
        total = self._attend_to_window(stream, groups) + beyond
        y = linear_attention.divide_by_normalizer(total, self.floor)
        if stream.places is not None:
            places = stream.places[:, None, :, None].expand(-1, y.shape[1], -1, y.shape[-1])
            y = y.gather(2, places.clamp(min=0)).masked_fill(places < 0, 0.0)
        # copies: views would keep all tokens of the call alive
        k, v = (x[:, :, -self.window :].clone() for x in (stream.k, stream.v))
        return y, LolcatsState(k, v, stream.segment_ids[:, -self.window :].clone(), matrix[:, ::groups])

    def _attend_to_window(self, stream: _Stream, groups: int) -> Float[Tensor, "b h l fp1"]:
        """Sums over the window of weights times values, and of the weights, which are the last channel."""
        window = self.window
        length = stream.q.shape[2]
        block = min(window, length)
        missing = -length % block
        q = F.pad(stream.q, (0, 0, 0, missing)).unfold(2, block, block).mT
        keys = [F.pad(x, (0, 0, 0, missing)).unfold(2, window + block, block) for x in (stream.k, stream.v)]
        # (b h n window + block e): the keys of a block of queries with those of the window before it
        k, v = (x.repeat_interleave(groups, 1).mT for x in keys)
        labels = F.pad(stream.documents, (0, missing), value=-1)
        is_token = F.pad(stream.segment_ids != PADDING_SEGMENT, (0, missing))
        distance = torch.arange(block, device=q.device)[:, None] + window
        distance = distance - torch.arange(window + block, device=q.device)
        key_labels, are_tokens = (x.unfold(1, window + block, block)[:, None, :, None] for x in (labels, is_token))
        query_labels = labels[:, window:].unfold(1, block, block)[:, None, :, :, None]
        in_window = (distance >= 0) & (distance < window) & (key_labels == query_labels) & are_tokens
        weights = self._window_weights(q @ k.mT, in_window)
        return (weights @ F.pad(v, (0, 1), value=1.0)).flatten(2, 3)[:, :, :length]

    def _attend_beyond(
        self, stream: _Stream, groups: int, matrix: Tensor | None
    ) -> tuple[Float[Tensor, "b h l fp1"], Float[Tensor, "b h r fp1"]]:
        """The same sums over the tokens before the window: each query adds the one that has just left it."""
        length = stream.q.shape[2]
        documents = stream.documents[:, :length]
        query_documents = stream.documents[:, self.window :]
        # the token that leaves the window enters the sum, but not that of another document
        counts = (documents == query_documents) & (stream.segment_ids[:, :length] != PADDING_SEGMENT)
        columns = F.pad(stream.v[:, :, :length], (0, 1), value=1.0) * counts[:, None, :, None]
        key_features = self._key_features(stream.k[:, :, :length], groups)
        columns = columns.repeat_interleave(groups, 1)
        runs = query_documents.clamp(min=0)
        return linear_attention.chunked(
            self.features.map(stream.q), key_features, columns, None, runs, matrix, chunk=min(64, length)
        )

    def _stream(self, call: KernelCall) -> _Stream:
        """The tokens of the window and of the call."""
        state = LolcatsState() if call.state is None else call.state
        segment_ids = call.key_positions.segment_ids.expand(len(call.k), -1)
        if state.k is None or state.v is None or state.segment_ids is None:
            k, v = (F.pad(x, (0, 0, self.window, 0)) for x in (call.k, call.v))
            segment_ids = F.pad(segment_ids, (self.window, 0), value=PADDING_SEGMENT)
        else:
            k = torch.cat([state.k, call.k], 2)
            v = torch.cat([state.v, call.v], 2)
            segment_ids = torch.cat([state.segment_ids, segment_ids], 1)
        q = call.q
        places = None
        # the last token before the call, whose document is number 0
        last = segment_ids.new_full((len(segment_ids), 1), self.window - 1)
        if not isinstance(call.key_positions.layout, ContiguousLayout):
            # padding first, so that the tokens of a row are adjacent and a window is a range of columns
            order = (segment_ids != PADDING_SEGMENT).byte().argsort(stable=True, dim=1)
            segment_ids = segment_ids.gather(1, order)
            k, v = (x.gather(2, order[:, None, :, None].expand_as(x)) for x in (k, v))
            # where each token of the call has gone among the last ones; below 0 for padding
            columns = order.argsort(1)
            places = columns[:, self.window :] - self.window
            last = columns[:, self.window - 1, None]
            new = (order[:, self.window :] - self.window).clamp(min=0)
            q = q.gather(2, new[:, None, :, None].expand_as(q))
        changes = F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0)).cumsum(1)
        return _Stream(q, k, v, segment_ids, changes - changes.gather(1, last), places)

    def _key_features(self, k: Float[Tensor, "b g l e"], groups: int) -> Float[Tensor, "b h l r"]:
        return self.key_features.map(k).repeat_interleave(groups, 1)
