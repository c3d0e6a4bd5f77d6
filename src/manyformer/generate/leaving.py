"""The next token of a model that tokens may leave early: what nobody needs is not computed.

A layer that no row comes to is not called at all: what was copied to it waits, and becomes keys and values, all of it
in one product, when a row comes there again. In a layer that some rows come to, all rows get keys and values, and those
rows alone the rest.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyformer.attention import Attention, AttentionState
from manyformer.core import (
    Chain,
    Context,
    ContiguousLayout,
    Layer,
    MemorySequence,
    Pointwise,
    Residual,
    State,
    TokenPositions,
)
from manyformer.depth.early_exit_stack import EarlyExit, EarlyExitState, contiguous_positions
from manyformer.depth.exit_rules import ExitRuleInput
from manyformer.feedforward import FeedForward, GatedFeedForward
from manyformer.masks import AllKeys, Causal
from manyformer.models.exit_classifiers import ExitClassifiers
from manyformer.models.language_model import ModelState
from manyformer.models.token_positions import positions_of
from manyformer.sources import CrossAttentionSource, SelfSource
from manyformer.sources.cross_attention import ProjectedMemory
from manyformer.sources.self_attention import KVCache

Map = Callable[[Tensor], Tensor]
Next = Callable[[Tensor, State, MemorySequence | None], tuple[Tensor, State]]
Step = Callable[[Tensor, Context, State], tuple[Tensor, State]]


class Tools(NamedTuple):
    """How parts are looked up beforehand: a layer, a module of tokens by themselves, and whether attention is plain."""

    step: Callable[[Layer], Step]
    sure: Callable[[nn.Module], Map]
    simple: Callable[[Attention], bool]


class Call(NamedTuple):
    """What all layers share for one token: which rows go on (None: all), where they are, and what they may look at."""

    rows: Tensor | None
    positions: TokenPositions
    memory: MemorySequence | None
    shown: Tensor | None


def leaving(embed: nn.Module, body: EarlyExit, head: ExitClassifiers, tools: Tools) -> Next:
    """Logits and state after one token more a row, as the model itself gives them."""
    levels = [_level(layer, tools) for layer in body.layers]
    ready = [tools.step(layer) for layer in body.final_layers]
    fast = _Fast(embed, body, head, [level for level in levels if level is not None], ready)

    def following(tokens: Tensor, state: ModelState, memory: MemorySequence | None) -> tuple[Tensor, State]:
        place, tail = positions_of(tokens, None, state.tail)
        assert tail is not None
        if None not in levels and fast.serves(tokens, place, state.body):
            logits, after = fast(tokens, place, state.body, memory)
            return logits, ModelState(after, tail)
        y, kept, _ = body(embed(tokens, place), Context(place, memory), state.body)
        return head(y), ModelState(kept, tail)

    return following


def _level(layer: Layer, tools: Tools) -> "_Level | None":
    """The layer, where it is self-attention that keeps its keys, and then nothing through which later tokens meet."""
    watched = any(part._forward_hooks or part._forward_pre_hooks for part in layer.modules())
    branches = list(layer.children())
    if type(layer) is not Chain or watched or not all(type(branch) is Residual for branch in branches):
        return None
    own, *others = [branch.inner for branch in branches]
    if not isinstance(own, Attention) or type(own.source) is not SelfSource or not tools.simple(own):
        return None
    if own.kernel.cache_mask not in (Causal(), AllKeys()) or not all(_alone(other, tools) for other in others):
        return None
    return _Level(branches, tools)  # type: ignore[arg-type]


def _alone(inner: Any, tools: Tools) -> bool:
    """Whether it treats each token by itself, but for a source that it may look at."""
    if isinstance(inner, Attention):
        return (
            type(inner.source) is CrossAttentionSource and tools.simple(inner) and inner.kernel.cache_mask == AllKeys()
        )
    return isinstance(inner, FeedForward | GatedFeedForward | Pointwise)


@final
class _Fast:
    def __init__(
        self, embed: nn.Module, body: EarlyExit, head: ExitClassifiers, levels: "list[_Level]", others: list[Step]
    ) -> None:
        self.embed, self.body, self.head, self.levels, self.others = embed, body, head, levels, others

    def serves(self, tokens: Tensor, positions: TokenPositions, state: EarlyExitState) -> bool:
        """Whether this is one token more of rows that are one plain document each, and there is room for it."""
        layout, at = positions.layout, state.columns
        if (
            tokens.shape[1] != 1
            or not isinstance(layout, ContiguousLayout)
            or layout.start != at
            or torch.is_grad_enabled()
        ):
            return False
        caches: list[KVCache] = [branches[0].source for branches in state.layers]
        return all(cache.is_contiguous and (cache.capacity is None or at < cache.capacity) for cache in caches)

    def __call__(
        self, tokens: Tensor, positions: TokenPositions, state: EarlyExitState, memory: MemorySequence | None
    ) -> tuple[Tensor, EarlyExitState]:
        at, rule, total = state.columns, self.body.rule, tokens.shape[0]
        ctx = Context(positions, memory)
        x: Tensor = self.embed(tokens, positions)
        call = Call(None, positions, memory, None if memory is None else _shown(memory))
        plan = rule.init_plan(ctx, x)
        pos = positions.position_ids.expand(total, -1)
        layers, done, active = list(state.layers), list(state.filled), x
        copied: Any = state.pending
        said = _Said(self.head)
        for number, level in enumerate(self.levels, 1):
            begin = done[number - 1]
            missed = x if begin == at else torch.cat([copied[:, begin:at], x], 1)
            y, layers[number - 1] = level(missed, active, begin, call, layers[number - 1])
            done[number - 1] = at + 1
            x = y if call.rows is None else x.index_copy(0, call.rows, y)
            if number < len(self.levels) and not rule.applies_after(number):
                active = y
                continue
            ready = y
            for step in self.others:
                ready, _ = step(ready, ctx, None)
            if number == len(self.levels):
                said.add(call.rows, number, ready, None)
                break
            verdict = rule.forward(ExitRuleInput(number, y, active, ready, pos), plan)
            stays = (~verdict.exits[:, 0]).nonzero()[:, 0]
            active, plan = y, verdict.plan
            if len(stays) == len(y):
                continue
            gone = verdict.exits[:, 0].nonzero()[:, 0]
            said.add(
                _among(call.rows, gone), number, ready[gone], None if verdict.logits is None else verdict.logits[gone]
            )
            if not len(stays):
                break
            active, pos, plan = y[stays], pos[stays], None if plan is None else plan[stays]
            call = call._replace(rows=_among(call.rows, stays))
        return said.logits(), EarlyExitState(layers, at + 1, tuple(done), _copied(state, x))


def _among(rows: Tensor | None, chosen: Tensor) -> Tensor:
    return chosen if rows is None else rows[chosen]


def _shown(memory: MemorySequence) -> Tensor | None:
    """What of a source may be seen by a target that is one document; None where all of it."""
    return (
        None
        if isinstance(memory.positions.layout, ContiguousLayout)
        else (memory.positions.segment_ids == 0)[:, None, None, :]
    )


def _copied(state: EarlyExitState, x: Tensor) -> Tensor:
    """With what this token leaves to the layers above."""
    at, cache = state.columns, state.layers[0][0].source
    copied = state.pending
    if copied is None:
        copied = x.new_zeros(x.shape[0], at if cache.capacity is None else cache.capacity, x.shape[2])
    if cache.capacity is None:
        return torch.cat([copied, x], 1)
    copied.narrow(1, at, 1).copy_(x)
    return copied


@final
class _Said:
    """Collects what the rows say, from whichever layer; one product serves all that have the same classifier."""

    def __init__(self, head: ExitClassifiers) -> None:
        self.head = head
        self.parts: list[tuple[Tensor | None, Tensor, bool]] = []

    def add(self, rows: Tensor | None, number: int, ready: Tensor, logits: Tensor | None) -> None:
        """These rows leave after layer `number` with what classifiers read, or with the logits that are known."""
        if logits is None and len(self.head.per_layer):
            logits = self.head.logits_at(ready, number)
        self.parts.append((rows, ready if logits is None else logits, logits is not None))

    def logits(self) -> Tensor:
        """Those of all rows, in their order."""
        waiting = [part for _, part, known in self.parts if not known]
        product: Tensor | None = (
            self.head.shared(waiting[0] if len(waiting) == 1 else torch.cat(waiting)) if waiting else None
        )
        pieces = [] if product is None else list(torch.split(product, [len(part) for part in waiting]))
        found = [part if known else pieces.pop(0) for _, part, known in self.parts]
        if len(found) == 1:
            return found[0]
        rows = torch.cat([rows for rows, _, _ in self.parts if rows is not None])
        return torch.cat(found)[rows.argsort()]


@final
class _Level:
    """One layer: keys and values of all rows and of all that waits, everything else of the rows that come here."""

    def __init__(self, branches: list[Residual], tools: Tools) -> None:
        first, *rest = branches
        self.first, self.own = _Branch(first, tools), _Looks(first.inner, tools)  # type: ignore[arg-type]
        self.rest: list[tuple[_Branch, _Looks | None, Step]] = [
            (_Branch(branch, tools), _Looks(branch.inner, tools) if isinstance(branch.inner, Attention) else None,
             tools.step(branch.inner)) for branch in rest
        ]  # fmt: skip

    def __call__(self, missed: Tensor, active: Tensor, begin: int, call: Call, state: State) -> tuple[Tensor, State]:
        normed = self.first.before(missed)
        cache = _stored(state[0].source, *self.own.keys(normed, begin), begin)
        newest = normed[:, -1:]
        query = newest if call.rows is None else newest[call.rows]
        k, v = cache.k.narrow(2, 0, cache.length), cache.v.narrow(2, 0, cache.length)
        y = self.first.join(active, self.own(query, call.positions, *_of(call.rows, k, v), None))
        after = [AttentionState(cache, state[0].kernel)]
        for (branch, looks, step), kept in zip(self.rest, state[1:]):
            if looks is None:
                part, new = step(branch.before(y), Context(call.positions, call.memory), kept)
            else:
                assert call.memory is not None
                new = kept if kept.source.k is not None else AttentionState(looks.project(call.memory), kept.kernel)
                shown = call.shown if call.shown is None or call.rows is None else call.shown[call.rows]
                part = looks(branch.before(y), call.positions, *_of(call.rows, new.source.k, new.source.v), shown)
            y = branch.join(y, part)
            after.append(new)
        return y, after


def _of(rows: Tensor | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return (k, v) if rows is None else (k.index_select(0, rows), v.index_select(0, rows))


def _stored(cache: KVCache, k: Tensor, v: Tensor, begin: int) -> KVCache:
    """The cache with columns from `begin` on, where nothing is yet."""
    rows, _, count, _ = k.shape
    end = begin + count
    if cache.capacity is not None:
        cache.k.narrow(2, begin, count).copy_(k)
        cache.v.narrow(2, begin, count).copy_(v)
        return cache._replace(length=end)
    place = contiguous_positions(rows, begin, end, k.device)
    pos, seg = (
        torch.cat([cache.position_ids, place.position_ids], 1),
        torch.cat([cache.segment_ids, place.segment_ids], 1),
    )
    return KVCache(torch.cat([cache.k, k], 2), torch.cat([cache.v, v], 2), pos, seg, end)


@final
class _Branch:
    """What stands around a branch."""

    def __init__(self, residual: Residual, tools: Tools) -> None:
        parts = (residual.pre_norm, residual.inner_norm, residual.post_norm)
        self._before, self._within, self._after = (None if part is None else tools.sure(part) for part in parts)
        self._join = residual.join

    def before(self, x: Tensor) -> Tensor:
        return x if self._before is None else self._before(x)

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        branch = branch if self._within is None else self._within(branch)
        y = x + branch if self._join is None else self._join(x, branch)
        return y if self._after is None else self._after(y)


@final
class _Looks:
    """Attention of one query a row to keys that are there."""

    def __init__(self, layer: Attention, tools: Tools) -> None:
        assert layer.q_proj is not None
        self.heads, (self.groups, self.key, self.value) = layer.heads, layer.kv_shape
        self.to_q, self.to_kv, self.out = (
            tools.sure(layer.q_proj),
            tools.sure(layer.kv_proj),
            tools.sure(layer.out_proj),
        )
        self.turned = layer.position if layer.position.required_seams() - {"embed"} else None
        scale: float | None = layer.kernel.scale  # type: ignore[assignment]
        self.scale = 1 / math.sqrt(self.key) if scale is None else scale
        self.layer = layer

    def keys(self, normed: Tensor, begin: int) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens that are at positions from `begin` on."""
        rows, count = normed.shape[:2]
        kv, split = self.to_kv(normed), self.groups * self.key
        k = kv[..., :split].view(rows, count, self.groups, self.key).transpose(1, 2)
        v = kv[..., split:].view(rows, count, self.groups, self.value).transpose(1, 2)
        if self.turned is not None:
            k = self.turned.key(k, contiguous_positions(rows, begin, begin + count, k.device))
        return k, v

    def project(self, memory: MemorySequence) -> ProjectedMemory:
        return ProjectedMemory(*self.layer.project_kv(memory.y, memory.positions))

    def __call__(self, normed: Tensor, positions: TokenPositions, k: Tensor, v: Tensor, shown: Tensor | None) -> Tensor:
        rows = normed.shape[0]
        q = self.to_q(normed).view(rows, self.heads, 1, self.key)
        if self.turned is not None:
            # all rows are at the same position
            q = self.turned.query(
                q,
                TokenPositions(
                    positions.position_ids[:1].expand(rows, -1),
                    positions.segment_ids[:1].expand(rows, -1),
                    positions.layout,
                ),
            )
        many = self.heads != self.groups
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=shown, scale=self.scale, enable_gqa=many)
        return self.out(y.reshape(rows, 1, self.heads * self.value))
