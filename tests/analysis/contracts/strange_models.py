"""Small language models as strangers write them: plain PyTorch, five kinds of layers, many forms of call.

Every form works with every kind. Faults are put into them by `strange_faults`, one into each.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kind = Literal["dense", "window", "recurrent", "convolution", "experts"]
KINDS: tuple[Kind, ...] = ("dense", "window", "recurrent", "convolution", "experts")

KERNEL = 4
EXPERTS = 4


@dataclass
class Config:
    """The sizes of a model."""

    kind: Kind = "dense"
    vocab_size: int = 31
    n_embd: int = 16
    n_layer: int = 2
    n_head: int = 2
    block_size: int = 128
    window: int = 12
    dropout: float = 0.0
    long_filters: bool = False


@dataclass
class Where:
    """What a layer knows of its tokens: positions, which are no padding, and their documents (each (b, t))."""

    positions: Tensor
    valid: Tensor | None = None
    documents: Tensor | None = None


class Attention(nn.Module):
    """Causal attention, to all earlier tokens or to those of a window; positions are rotated within a window."""

    def __init__(self, config: Config, window: int | None) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.window = window
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.out = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, where: Where, past: Any = None) -> tuple[Tensor, Any]:
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.window is not None:
            q = rotate(q, where.positions)
            k = rotate(k, where.positions)
        if past is not None:
            past = self.recall(past, where)
            k = torch.cat([past[0], k], dim=2)
            v = torch.cat([past[1], v], dim=2)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~self.mask(x.shape[1], k.shape[2], where), torch.finfo(scores.dtype).min)
        y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2)), self.keep(k, v, where)

    def mask(self, new: int, seen: int, where: Where) -> Tensor:
        """Which keys each of the new queries may read (b or 1, heads or 1, new, seen)."""
        query = torch.arange(seen - new, seen, device=where.positions.device)[:, None]
        key = torch.arange(seen, device=where.positions.device)
        allowed = (key <= query)[None, None]
        if self.window is not None:
            allowed = allowed & (query - key < self.window)
        if where.valid is not None:
            allowed = allowed & where.valid[:, None, None]
        if where.documents is not None:
            allowed = allowed & (where.documents[:, None, :, None] == where.documents[:, None, None])
        return allowed

    def recall(self, past: Any, where: Where) -> Any:
        return past

    def keep(self, k: Tensor, v: Tensor, where: Where) -> Any:
        if self.window is None:
            return k, v
        # a query sees itself and window - 1 tokens before it
        return k[:, :, 1 - self.window :], v[:, :, 1 - self.window :]


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate pairs of numbers by angles that grow with the positions."""
    half = x.shape[-1] // 2
    rates = 100.0 ** (-torch.arange(half, device=x.device) / half)
    angles = (positions[:, None, :, None] * rates).to(x.dtype)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Recurrence(nn.Module):
    """A gated running mean, one token after another."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.value = nn.Linear(config.n_embd, config.n_embd)
        self.gate = nn.Linear(config.n_embd, config.n_embd)
        self.out = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, where: Where, past: Any = None) -> tuple[Tensor, Any]:
        value = self.value(x)
        forget = torch.sigmoid(self.gate(x))
        take = 1 - forget
        if where.valid is not None:
            forget = torch.where(where.valid[..., None], forget, 1.0)
            take = torch.where(where.valid[..., None], take, 0.0)
        forget = self.reset(forget, where)
        state = torch.zeros_like(value[:, 0]) if past is None else past
        states = []
        for step in range(x.shape[1]):
            state = forget[:, step] * state + take[:, step] * value[:, step]
            states.append(state)
        return self.out(torch.stack(states, dim=1)), self.keep(states, past, where)

    def reset(self, forget: Tensor, where: Where) -> Tensor:
        """Gates that forget everything where a new document begins."""
        if where.documents is None:
            return forget
        begins = F.pad(where.documents[:, 1:] != where.documents[:, :-1], (1, 0), value=True)
        return forget.masked_fill(begins[..., None], 0.0)

    def keep(self, states: list[Tensor], past: Any, where: Where) -> Any:
        return states[-1]


class ShortConvolution(nn.Module):
    """Each channel by itself, over the last few tokens."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.value = nn.Linear(config.n_embd, config.n_embd)
        self.filters = nn.Parameter(torch.randn(KERNEL, config.n_embd) / 2)
        self.out = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, where: Where, past: Any = None) -> tuple[Tensor, Any]:
        value = self.value(x)
        if where.valid is not None:
            value = value * where.valid[..., None]
        if past is None:
            past = value.new_zeros(x.shape[0], KERNEL - 1, x.shape[2])
        padded = torch.cat([past, value], dim=1)
        y = torch.zeros_like(value)
        for lag in range(KERNEL):
            shifted = self.shift(padded, lag, x.shape[1])
            if where.documents is not None:
                shifted = shifted * self.same_document(where.documents, lag)[..., None]
            y = y + shifted * self.filters[lag]
        return self.out(F.gelu(y)), self.keep(padded, x.shape[1], where)

    def shift(self, padded: Tensor, lag: int, length: int) -> Tensor:
        start = KERNEL - 1 - lag
        return padded[:, start : start + length]

    def same_document(self, documents: Tensor, lag: int) -> Tensor:
        earlier = F.pad(documents, (lag, 0), value=-7)[:, : documents.shape[1]]
        return earlier == documents

    def keep(self, padded: Tensor, new: int, where: Where) -> Any:
        return padded[:, 1 - KERNEL :]


class LongConvolution(nn.Module):
    """Filters as long as the sequence, by Fourier transforms; padding keeps them from wrapping around."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.value = nn.Linear(config.n_embd, config.n_embd)
        self.filters = nn.Parameter(torch.randn(config.block_size, config.n_embd) / 4)
        self.out = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, where: Where, past: Any = None) -> tuple[Tensor, Any]:
        length = x.shape[1]
        value = self.value(x)
        size = self.transform_size(length)
        spectrum = torch.fft.rfft(value, n=size, dim=1) * torch.fft.rfft(self.filters[:length], n=size, dim=0)
        y = torch.fft.irfft(spectrum, n=size, dim=1)[:, :length]
        return self.out(F.gelu(y)), None

    def transform_size(self, length: int) -> int:
        return 2 * length


class FeedForward(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.n_embd, 2 * config.n_embd)
        self.down = nn.Linear(2 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """Each token goes to the feed-forward network that the router prefers."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.router = nn.Linear(config.n_embd, EXPERTS)
        self.experts = nn.ModuleList(FeedForward(config) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        weight, choice = weights.max(-1)
        admitted = self.admit(weight, choice)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            chosen = (choice == index) & admitted
            y[chosen] = (expert(x[chosen]) * weight[chosen][:, None]).to(y.dtype)
        return y

    def admit(self, weight: Tensor, choice: Tensor) -> Tensor:
        """The tokens that their expert has room for: all."""
        return torch.ones_like(choice, dtype=torch.bool)


class Block(nn.Module):
    def __init__(self, config: Config, index: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.n_embd)
        self.mixer = make_mixer(config, index)
        self.norm2 = nn.LayerNorm(config.n_embd)
        self.mlp = Experts(config) if config.kind == "experts" else FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, where: Where, past: Any = None) -> tuple[Tensor, Any]:
        y, kept = self.mixer(self.norm1(x), where, past)
        x = x + self.dropout(y)
        return x + self.dropout(self.mlp(self.norm2(x))), kept


def make_mixer(config: Config, index: int) -> nn.Module:
    if config.kind == "recurrent":
        return Recurrence(config)
    if config.kind == "convolution":
        if config.long_filters and index % 2:
            return LongConvolution(config)
        return ShortConvolution(config)
    return Attention(config, config.window if config.kind == "window" else None)


class Decoder(nn.Module):
    """Embeddings, blocks and a head; the classes below are called in their own ways."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        if config.kind in ("dense", "experts"):
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def run(
        self,
        tokens: Tensor,
        pasts: Any = None,
        start: int = 0,
        *,
        valid: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> tuple[Tensor, list[Any]]:
        """The logits, and what each layer keeps for later tokens."""
        if start + tokens.shape[1] > self.config.block_size:
            raise ValueError(f"at most {self.config.block_size} tokens")
        where = Where(self.positions(tokens, start, valid, documents), valid, documents)
        x = self.wte(tokens)
        if hasattr(self, "wpe"):
            x = x + self.wpe(where.positions)
        kept = []
        for index, block in enumerate(self.blocks):
            x, memory = block(x, where, None if pasts is None else pasts[index])
            kept.append(memory)
        return self.read(self.norm(x)), kept

    def positions(self, tokens: Tensor, start: int, valid: Tensor | None, documents: Tensor | None) -> Tensor:
        """The positions of tokens in their documents, padding not counted (b, t)."""
        columns = torch.arange(start, start + tokens.shape[1], device=tokens.device).expand(tokens.shape)
        if valid is not None:
            return (valid.cumsum(1) - 1).clamp(min=0)
        if documents is not None:
            begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
            return columns - torch.where(begins, columns, 0).cummax(1).values
        return columns

    def read(self, x: Tensor) -> Tensor:
        return self.head(x)

    def with_targets(self, logits: Tensor, targets: Tensor) -> Tensor:
        return logits


class Plain(Decoder):
    """f(x)"""

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)[0]


class OptionalTargets(Decoder):
    """f(x, y), which without targets gives the last logits alone."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.run(idx)[0]
        if targets is None:
            return logits[:, [-1]], None
        logits = self.with_targets(logits, targets)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class LossAlone(Decoder):
    """f(x, y), which gives the loss alone."""

    def forward(self, input_ids: Tensor, target_ids: Tensor) -> Tensor:
        logits = self.with_targets(self.run(input_ids)[0], target_ids)
        return F.cross_entropy(logits.flatten(0, 1).float(), target_ids.flatten())


class ReturnLoss(Decoder):
    """f(x, return_loss=True)"""

    def forward(self, x: Tensor, return_loss: bool = False) -> Tensor:
        if not return_loss:
            return self.run(x)[0]
        logits = self.run(x[:, :-1])[0]
        return F.cross_entropy(logits.transpose(1, 2), x[:, 1:])


class FromPosition(Decoder):
    """f(x, start_pos), with the caches kept in the model."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.caches: Any = None

    def forward(self, tokens: Tensor, start_pos: int) -> Tensor:
        logits, self.caches = self.run(tokens, self.caches if start_pos else None, start_pos)
        return logits


class InputPositions(Decoder):
    """f(x, input_pos), after the caches were set up for a number of rows."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.caches: Any = None
        self.ready_for = 0

    def setup_caches(self, max_batch_size: int, max_seq_length: int) -> None:
        self.ready_for = max_batch_size
        self.caches = None

    def forward(self, idx: Tensor, input_pos: Tensor) -> Tensor:
        assert self.ready_for == idx.shape[0], "caches must be set up first"
        start = int(input_pos[0])
        logits, self.caches = self.run(idx, self.caches if start else None, start)
        return logits


class UseCache(Decoder):
    """f(x, use_cache=True), with a method that empties the caches."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.cache: Any = None
        self.current_pos = 0

    def reset_kv_cache(self) -> None:
        self.cache = None
        self.current_pos = 0

    def forward(self, in_idx: Tensor, use_cache: bool = False) -> Tensor:
        if not use_cache:
            return self.run(in_idx)[0]
        logits, self.cache = self.run(in_idx, self.cache, self.current_pos)
        self.current_pos += in_idx.shape[1]
        return logits


class ReturnedCache(Decoder):
    """f(x, cache, return_cache=True), which gives the cache behind the logits."""

    def forward(self, x: Tensor, cache: Any = None, return_cache: bool = False) -> Any:
        start, pasts = (0, None) if cache is None else cache
        logits, kept = self.run(x, pasts, start)
        if return_cache:
            return logits, (start + x.shape[1], kept)
        return logits


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None
    past_key_values: Any = None


class RecordedCache(Decoder):
    """f(x, past_key_values, use_cache=True), which gives a record with the cache."""

    def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = False) -> Output:
        start, pasts = (0, None) if past_key_values is None else past_key_values
        logits, kept = self.run(input_ids, pasts, start)
        return Output(logits, past_key_values=(start + input_ids.shape[1], kept) if use_cache else None)


class CacheAndPosition(Decoder):
    """f(x, kv_cache, start_pos), which always gives the cache behind the logits."""

    def forward(self, tokens: Tensor, kv_cache: Any = None, start_pos: int = 0) -> tuple[Tensor, Any]:
        return self.run(tokens, kv_cache, start_pos)


class StepMethod(Decoder):
    """f(x) for sequences, and a method for one token of each row with the state before it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)[0]

    def init_state(self, batch_size: int) -> Any:
        return 0, None

    def step(self, token: Tensor, state: Any) -> tuple[Tensor, Any]:
        start, pasts = state
        logits, kept = self.run(token[:, None], pasts, start)
        return logits[:, 0], (start + 1, kept)


class Masked(Decoder):
    """f(x, attention_mask), which gives a record."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Output:
        valid = None if attention_mask is None else attention_mask.bool()
        return Output(self.run(input_ids, valid=valid)[0])


class Packed(Decoder):
    """f(x, segment_ids), several documents in a row."""

    def forward(self, tokens: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        return self.run(tokens, documents=segment_ids)[0]


FORMS: dict[str, type[Decoder]] = {
    form.__name__: form
    for form in (
        Plain,
        OptionalTargets,
        LossAlone,
        ReturnLoss,
        FromPosition,
        InputPositions,
        UseCache,
        ReturnedCache,
        RecordedCache,
        CacheAndPosition,
        StepMethod,
        Masked,
        Packed,
    )
}
