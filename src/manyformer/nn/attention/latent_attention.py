"""Multi-head latent attention: keys and values of all heads from one narrow vector of each token, which is cached.

The lightning indexer is a cheap score of every earlier token, by which a query chooses the tokens it attends to.
"""

from typing import Literal, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from manyformer.nn.attention.attention import AttentionState, MultiHeadLayer, default_source, split_heads
from manyformer.nn.attention.kv_cache.kv_source import CacheSpec, KVShape
from manyformer.nn.core import PADDING_SEGMENT, Context, LayerOutput, State, TokenPositions, no_watch
from manyformer.nn.feed_forward.feedforward import init_glorot
from manyformer.nn.kernels.kernel import KernelCall
from manyformer.nn.masks import Mask
from manyformer.nn.ops.chosen_attention import (
    choose_tokens,
    chosen_index_scores,
    token_choice_attention,
    token_choice_mask,
)
from manyformer.nn.positions.position import NoPosition, Position
from manyformer.nn.runtime.head_selection import HeadSelection, select_head_inputs, select_head_outputs
from manyformer.nn.runtime.length_norms import RMSNorm
from manyformer.nn.runtime.recompute import choose_once
from manyformer.nn.runtime.torch_internals import is_plain
from manyformer.nn.runtime.training_hooks import FusedRows, OptimizerHints
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel

KEY_NORM_EPS = 1e-6


class IndexQueries(NamedTuple):
    """The indexer's queries and the weights of its heads."""

    q: Float[Tensor, "b h l e"]
    head_weights: Float[Tensor, "b l h"]


@final
class LightningIndexer(nn.Module, OptimizerHints):
    """Chooses the `count` tokens with the largest scores for each query (DeepSeek-AI 2025, DeepSeek-V3.2-Exp, 2.1).

    The score of token s for query t is sum_h w_th ReLU(q_th k_s): `heads` queries from the latent of queries, one key
    of width `head_dim` for all heads, normalized, and head weights from the input, all in float32 at least. `position`
    acts on queries and keys. It is trained by `loss` alone, and what it reads has no gradient. Scores of all pairs are
    computed, so its time is quadratic in the length, with a small constant. Raises ValueError for a count, heads or a
    width below 1."""

    adamw_weights = ("weight_proj.weight",)

    def __init__(
        self, dim: int, query_latent_dim: int, *, heads: int, head_dim: int, count: int, position: Position
    ) -> None:
        super().__init__()
        for name, size in {"heads": heads, "head_dim": head_dim, "count": count}.items():
            if size < 1:
                raise ValueError(f"LightningIndexer: {name} ({size}) must be at least 1")
        self.heads = heads
        self.head_dim = head_dim
        self.count = count
        self.position = position
        self.scale = (head_dim * heads) ** -0.5
        self.q_proj = nn.Linear(query_latent_dim, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, head_dim, bias=False)
        self.k_norm = nn.LayerNorm(head_dim, KEY_NORM_EPS)
        self.weight_proj = nn.Linear(dim, heads, bias=False)
        init_glorot(self.q_proj, self.k_proj, self.weight_proj)

    def keys(self, x: Float[Tensor, "b s d"], positions: TokenPositions) -> Float[Tensor, "b 1 s e"]:
        """The keys of tokens, which a cache holds."""
        # one key for all heads, with an axis of heads of size 1, as caches hold keys
        k: Tensor = self.k_norm(self.k_proj(x.detach()))
        return self.position.key(k[:, None], positions)

    def queries(
        self, x: Float[Tensor, "b l d"], latent: Float[Tensor, "b l c"], positions: TokenPositions
    ) -> IndexQueries:
        """The queries of tokens, and the weights of heads with the scale of scores."""
        q = self.q_proj(latent.detach()).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
        head_weights = self.weight_proj(x.detach())
        dtype = torch.promote_types(q.dtype, torch.float32)
        return IndexQueries(self.position.query(q, positions).to(dtype), head_weights.to(dtype) * self.scale)

    def choose(
        self, queries: IndexQueries, keys: Float[Tensor, "b 1 s e"], visible: Bool[Tensor, "#b 1 l s"]
    ) -> Int[Tensor, "b l m"]:
        """The chosen ones among the visible tokens of each query, -1 for none."""

        @torch.no_grad()
        def choose() -> Tensor:
            return choose_tokens(*queries, keys[:, 0].to(queries.q.dtype), visible[:, 0], self.count)

        # a choice, which a recomputed pass must not make anew
        return choose_once(choose)

    def loss(
        self,
        queries: IndexQueries,
        keys: Float[Tensor, "b 1 s e"],
        chosen: Int[Tensor, "b l m"],
        shares: Float[Tensor, "b l m"],
        positions: TokenPositions,
    ) -> Float[Tensor, ""]:
        """The divergence KL(p | softmax of scores) over the chosen tokens, its mean over queries (2.1.1).

        p are the `shares` of tokens in the attention of all heads."""
        scores = chosen_index_scores(*queries, keys[:, 0].to(queries.q.dtype), chosen)
        is_scored = (chosen >= 0) & (positions.segment_ids != PADDING_SEGMENT)[..., None]
        # not infinity: rows without a token have no scores to normalize
        log_shares = scores.masked_fill(~is_scored, torch.finfo(scores.dtype).min).log_softmax(-1)
        divergence = torch.where(is_scored, torch.xlogy(shares, shares) - shares * log_shares, 0.0).sum()
        return divergence / is_scored.any(-1).sum().clamp(min=1)

    def extra_repr(self) -> str:
        return f"{self.count} tokens, {self.heads} heads"


LatentForm = Literal["expanded", "absorbed"]


class _TokenChoice(NamedTuple):
    """The tokens that each query attends to, -1 for none, and what they were chosen by.

    `is_dense` says that weights of all pairs are formed."""

    chosen: Int[Tensor, "b l m"]
    queries: IndexQueries
    index_keys: Float[Tensor, "b 1 s e"]
    is_dense: bool


@final
class LatentAttention(MultiHeadLayer, FusedRows):
    """Multi-head latent attention (DeepSeek-V2, 2024, arXiv:2405.04434, section 2.1; DeepSeek-V3, section 2.1.1).

    A token has one latent of `latent_dim` channels, normalized, from which the keys (`head_dim`) and values
    (`value_dim`) of all heads are projected, and one key of `rotary_dim` channels with `position`, which all heads
    share; queries have both parts and come from a latent of `query_latent_dim` channels, or from the input with None.
    The cache holds latent and shared key, `latent_dim` + `rotary_dim` numbers for each token.

    A call takes the cheaper of two forms, which compute the same (see `form`): "expanded" projects keys and values of
    all tokens, "absorbed" projects the queries into the latent space instead, where all heads share keys and values.
    `path` forces one. The scale of scores is 1 / sqrt(head_dim + rotary_dim) by default.

    With an `indexer`, a query attends only to the tokens that it chooses (DeepSeek Sparse Attention, DeepSeek-AI 2025,
    DeepSeek-V3.2-Exp, section 2.1); the cache then holds its keys too. Where tokens are left out, latents are gathered
    for the absorbed form. Raises ValueError for sizes below 1, for a position that does not act on queries and keys
    alone, and for an indexer without a latent of queries."""

    def __init__(
        self,
        dim: int,
        heads: int,
        mask: Mask | None = None,
        *,
        latent_dim: int,
        query_latent_dim: int | None,
        head_dim: int,
        rotary_dim: int,
        value_dim: int,
        position: Position | None = None,
        scale: float | None = None,
        norm_eps: float = 1e-6,
        bias: bool = False,
        indexer: LightningIndexer | None = None,
        path: Literal["auto"] | LatentForm = "auto",
    ) -> None:
        super().__init__()
        sizes = {"latent_dim": latent_dim, "head_dim": head_dim, "rotary_dim": rotary_dim, "value_dim": value_dim}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"LatentAttention: {name} ({size}) must be at least 1")
        if path not in ("auto", "expanded", "absorbed"):
            raise ValueError(f"LatentAttention: path ('{path}') must be auto, expanded or absorbed")
        self.position = NoPosition() if position is None else position
        if unsupported := self.position.required_seams() - {"query", "key"}:
            raise ValueError(f"LatentAttention does not support {sorted(unsupported)}, which {self.position} needs")
        if indexer is not None and query_latent_dim is None:
            raise ValueError("LatentAttention: an indexer reads the latent of queries, and query_latent_dim is None")
        self.indexer = indexer
        self.heads = heads
        self.latent_dim = latent_dim
        self.rotary_dim = rotary_dim
        self.path = path
        self.head_dim = head_dim
        self.value_dim = value_dim
        self.kernel = SoftmaxKernel(mask, scale=(head_dim + rotary_dim) ** -0.5 if scale is None else scale)
        self.source = default_source(self.kernel)
        self.q_down_proj: nn.Linear | None = None
        self.q_norm: RMSNorm | None = None
        if query_latent_dim is not None:
            self.q_down_proj = nn.Linear(dim, query_latent_dim, bias=bias)
            self.q_norm = RMSNorm(query_latent_dim, norm_eps)
        self.q_proj = nn.Linear(query_latent_dim or dim, heads * (head_dim + rotary_dim), bias=False)
        self.kv_down_proj = nn.Linear(dim, latent_dim + rotary_dim, bias=bias)
        self.kv_norm = RMSNorm(latent_dim, norm_eps)
        self.kv_proj = nn.Linear(latent_dim, heads * (head_dim + value_dim), bias=False)
        self.out_proj = nn.Linear(heads * value_dim, dim, bias=bias)
        projections = (self.q_down_proj, self.q_proj, self.kv_down_proj, self.kv_proj, self.out_proj)
        init_glorot(*(projection for projection in projections if projection is not None))

    def row_parts(self) -> dict[str, tuple[int, ...]]:
        # rows of `kv_proj` are keys and values of one head after another, which no cut divides
        return {"kv_down_proj.weight": (self.latent_dim, self.rotary_dim)}

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        # the cached keys hold the values too, and the place of values the keys of the indexer
        index_dim = 0 if self.indexer is None else self.indexer.head_dim
        shape = KVShape(1, self.latent_dim + self.rotary_dim, index_dim)
        source_state = self.source.init_state(CacheSpec(batch, shape, capacity, device, dtype))
        return AttentionState(source_state, self.kernel.init_state(batch, device=device, dtype=dtype))

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        source_state, kernel_state = (None, None) if state is None else state[:2]
        latent = self._query_latent(x)
        q = split_heads(self.q_proj(latent), self.heads)
        q, rotary = torch.split(q, [self.head_dim, self.rotary_dim], -1)
        rotary = self.position.query(rotary, ctx.positions)
        # in the place of values the cache holds the keys of the indexer
        cached, index_keys, key_positions, source_state, loss = self.source(x, ctx, self.project_latent, source_state)
        choice = self._choose(x, latent, index_keys, key_positions, ctx)
        is_gathered = choice is not None and not choice.is_dense
        is_absorbed = is_gathered or self.form(q.shape[2], cached.shape[2]) == "absorbed"
        if is_absorbed:
            to_keys, _ = self._matrices_by_head()
            # q (W c) = (q W) c: all heads then share the latents as keys, and as values
            q = torch.einsum("bhle,hec->bhlc", q, to_keys)
            k = cached
            # the values are the latents themselves, the shared key at their end has no part in them
            v = cached[..., : self.latent_dim]
        else:
            k, v = self._expand(cached)
        # after the latent part, as the shared key follows the latent in the cache
        q = torch.cat([q, rotary], -1)
        call = KernelCall(q, k, v, ctx.positions, key_positions, NoPosition(), kernel_state, ctx.watch)
        if choice is None:
            y, kernel_state, _ = self.kernel(call)
        else:
            y, index_loss = self._attend_to_chosen(call, choice)
            loss = loss + index_loss
        if is_absorbed:
            # what was left out of the values is made good for the sum of them
            _, to_values = self._matrices_by_head()
            y = torch.einsum("bhlc,hfc->bhlf", y, to_values)
        y = self.out_proj(self.merge_heads(y))
        return LayerOutput(y, None if state is None else AttentionState(source_state, kernel_state), loss)

    def _choose(
        self, x: Tensor, latent: Tensor, index_keys: Tensor, key_positions: TokenPositions, ctx: Context
    ) -> "_TokenChoice | None":
        """The chosen tokens; None without an indexer, and where all are, unless the indexer learns from them."""
        indexer = self.indexer
        keys = index_keys.shape[2]
        if indexer is None or (keys <= indexer.count and not torch.is_grad_enabled()):
            return None
        queries = indexer.queries(x, latent, ctx.positions)
        visible = self.kernel.mask.dense(ctx.positions, key_positions, 1)
        chosen = indexer.choose(queries, index_keys, visible)
        # watchers and dropout need the weights of all pairs, which the gathered form never makes
        forms_weights = ctx.watch is not no_watch or (self.training and self.kernel.dropout > 0)
        is_dense = forms_weights or keys <= indexer.count or not is_plain(self.kv_proj, nn.Linear)
        return _TokenChoice(chosen, queries, index_keys, is_dense=is_dense)

    def _attend_to_chosen(self, call: KernelCall, choice: "_TokenChoice") -> tuple[Tensor, Tensor | float]:
        """The outputs (b, h, l, f), and the loss of the indexer where gradients are computed."""
        chosen, queries, index_keys, is_dense = choice
        indexer = self.indexer
        scale = self.kernel.scale
        assert indexer is not None
        assert scale is not None
        if is_dense:
            mask = token_choice_mask(chosen, call.k.shape[2])
            dropout = self.kernel.dropout if self.training else 0.0
            y, weights = call.softmax_reference(mask, scale=scale, dropout=dropout)
            call.watch(self.kernel, "weights", weights)
            # -1 stands for no token, whose share the loss leaves out
            shares = weights.detach().mean(1).gather(-1, chosen.clamp(min=0))
        else:
            y, shares = token_choice_attention(call.q, call.k[:, 0], call.v[:, 0], chosen, scale=scale)
        if not torch.is_grad_enabled():
            return y, 0.0
        return y, indexer.loss(queries, index_keys, chosen, shares, call.query_positions)

    def form(self, queries: int, keys: int) -> LatentForm:
        """The form with fewer multiplications for a call; both forms have the same scores.

        Where `kv_proj` is more than its matrix, which another tool has seen to, it is called, on expanded latents."""
        if not is_plain(self.kv_proj, nn.Linear):
            return "expanded"
        if self.path != "auto":
            return self.path
        absorbed, expanded = self._products(queries, keys)
        if absorbed < expanded:
            return "absorbed"
        return "expanded"

    def explain(self, queries: int, keys: int) -> str:
        """One sentence: the form for a call with so many queries and keys, and the reason."""
        absorbed, expanded = self._products(queries, keys)
        reason = "forced"
        if not is_plain(self.kv_proj, nn.Linear):
            reason = "kv_proj is more than a matrix, and is called"
        elif self.path == "auto":
            reason = f"{absorbed:,} products a head absorbed, {expanded:,} expanded"
        return f"{self.form(queries, keys)}: {reason}"

    def project_latent(self, x: Float[Tensor, "b s d"], positions: TokenPositions) -> tuple[Tensor, Tensor]:
        """What is cached of tokens: normalized latent and shared key (b, 1, s, c + r), and the keys of an indexer."""
        latent, key = torch.split(self.kv_down_proj(x)[:, None], [self.latent_dim, self.rotary_dim], -1)
        cached = torch.cat([self.kv_norm(latent).to(key.dtype), self.position.key(key, positions)], -1)
        return cached, cached[..., :0] if self.indexer is None else self.indexer.keys(x, positions).to(cached.dtype)

    def _query_latent(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b l c"]:
        """What the queries are projected from."""
        if self.q_down_proj is None or self.q_norm is None:
            return x
        latent: Tensor = self.q_norm(self.q_down_proj(x))
        return latent

    def _products(self, queries: int, keys: int) -> tuple[int, int]:
        """The multiplications for each head of both forms, without those that they share."""
        narrow = self.head_dim + self.value_dim
        absorbed = queries * self.latent_dim * (narrow + 2 * keys)
        return absorbed, keys * self.latent_dim * narrow + queries * keys * narrow

    def _expand(self, cached: Float[Tensor, "b 1 s c"]) -> tuple[Float[Tensor, "b h s e"], Float[Tensor, "b h s f"]]:
        """The keys of all heads, with the shared one at their end, and the values."""
        latent, shared_key = torch.split(cached, [self.latent_dim, self.rotary_dim], -1)
        keys_values = split_heads(self.kv_proj(latent[:, 0]), self.heads)
        k, v = torch.split(keys_values, [self.head_dim, self.value_dim], -1)
        return torch.cat([k, shared_key.expand(-1, self.heads, -1, -1)], -1), v

    def _matrices_by_head(self) -> tuple[Float[Tensor, "h e c"], Float[Tensor, "h f c"]]:
        """The matrices of each head from the latent to keys and to values."""
        by_head = self.kv_proj.weight.view(self.heads, self.head_dim + self.value_dim, self.latent_dim)
        to_keys, to_values = torch.split(by_head, [self.head_dim, self.value_dim], 1)
        return to_keys, to_values

    def select_projections(self, selection: HeadSelection) -> None:
        select_head_outputs(self.q_proj, selection)
        select_head_outputs(self.kv_proj, selection)
        select_head_inputs(self.out_proj, selection)

    def extra_repr(self) -> str:
        return f"{self.heads} heads, latent={self.latent_dim}, path={self.path}"
