"""Small models in the forms of public repositories, in our own words, with the rows that must be red.

Each stands for a convention: what `forward` takes and gives, where the cache is, what is zero at the beginning, and
which fault was released with it.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 61
DIM = 32
HEADS = 2
LIMIT = 128


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions, computed in float32 as released code does, on x (b, t, h, d)."""
    half = x.shape[-1] // 2
    rates = 100.0 ** -(torch.arange(half, device=x.device).float() / half)
    angles = positions[:, None, None].float() * rates
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos().type_as(x), angles.sin().type_as(x)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class SelfAttention(nn.Module):
    """Attention of new tokens to `past` (keys, values) and to themselves; gives the mixture and all keys and values."""

    def __init__(self, *, zeros: bool = False, masked: bool = True) -> None:
        super().__init__()
        self.masked = masked
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.proj = nn.Linear(DIM, DIM)
        if zeros:
            nn.init.zeros_(self.proj.weight)
            nn.init.zeros_(self.proj.bias)

    def forward(self, x: Tensor, past: Any = None, start: int = 0) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        rows, length, _ = x.shape
        queries, keys, values = self.qkv(x).view(rows, length, 3 * HEADS, -1).chunk(3, dim=2)
        positions = torch.arange(start, start + length, device=x.device)
        queries = rotate(queries, positions)
        keys = rotate(keys, positions)
        if past is not None:
            keys = torch.cat([past[0], keys], dim=1)
            values = torch.cat([past[1], values], dim=1)
        allowed = torch.ones(length, keys.shape[1], dtype=torch.bool, device=x.device)
        if self.masked:
            allowed = allowed.tril(keys.shape[1] - length)
        heads = (part.transpose(1, 2) for part in (queries, keys, values))
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=allowed)
        return self.proj(mixed.transpose(1, 2).reshape(rows, length, DIM)), (keys, values)


class Core(nn.Module):
    """Embedding, two layers and a head, without a form of call of its own."""

    def __init__(self, *, vocab: int = VOCAB, zeros: bool = False, masked: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(vocab, DIM)
        self.layers = nn.ModuleList(SelfAttention(zeros=zeros, masked=masked) for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(DIM, vocab, bias=False)

    def run(self, tokens: Tensor, pasts: Sequence[Any] | None = None, start: int = 0) -> tuple[Tensor, list[Any]]:
        """Logits of the new tokens, and the keys and values of each layer."""
        x = self.drop(self.wte(tokens))
        new_pasts = []
        for index, layer in enumerate(self.layers):
            mixed, past = layer(self.norm(x), None if pasts is None else pasts[index], start)
            x = x + mixed
            new_pasts.append(past)
        return self.head(self.norm(x)), new_pasts


@dataclasses.dataclass
class GPTConfig:
    block_size: int = LIMIT
    vocab_size: int = VOCAB


class NanoGPT(Core):
    """Without targets it computes the last position alone; it has a `config` and a `generate`."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        self.config = GPTConfig()
        self.wpe = nn.Embedding(LIMIT, DIM)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        assert idx.shape[1] <= self.config.block_size
        x = self.wpe(torch.arange(idx.shape[1]))
        logits = self.run(idx)[0] + F.linear(x, self.head.weight)
        if targets is None:
            return logits[:, [-1]], None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    @torch.no_grad()
    def generate(self, idx: Tensor, count: int) -> Tensor:
        for _ in range(count):
            logits, _ = self(idx[:, -self.config.block_size :])
            idx = torch.cat([idx, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        return idx


class MinGPT(Core):
    """All positions with and without targets, attention in parts with a mask in a buffer."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        self.block_size = LIMIT
        self.register_buffer("bias", torch.tril(torch.ones(LIMIT, LIMIT))[None])

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        length = idx.shape[1]
        x = self.drop(self.wte(idx))
        for layer in self.layers:
            queries, keys, values = layer.qkv(self.norm(x)).chunk(3, dim=-1)
            scores = queries @ keys.mT / math.sqrt(DIM)
            scores = scores.masked_fill(self.bias[:, :length, :length] == 0, float("-inf"))
            x = x + layer.proj(self.drop(scores.softmax(-1)) @ values)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class KVCache:
    """An object of another file, changed in place: no trial can know how it is made."""

    def __init__(self) -> None:
        self.pasts: list[Any] = []
        self.position = 0


class Nanochat(Core):
    """Outputs of zeros, a vocabulary that is padded inside, logits or the loss, and a foreign cache."""

    def __init__(self) -> None:
        super().__init__(vocab=64, zeros=True)
        nn.init.zeros_(self.head.weight)
        self.gates = nn.Parameter(torch.zeros(2))

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, kv_cache: KVCache | None = None, loss_reduction: str = "mean"
    ) -> Tensor:
        pasts = None
        start = 0
        if kv_cache is not None:
            pasts = kv_cache.pasts or None
            start = kv_cache.position
        logits, new_pasts = self.run(idx, pasts, start)
        logits = 15 * torch.tanh((logits + self.gates[0] * self.head(self.wte(idx)))[..., :VOCAB].float() / 15)
        if kv_cache is not None:
            kv_cache.pasts = new_pasts
            kv_cache.position += idx.shape[1]
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction=loss_reduction)


class LossOnly(Core):
    """Gives the mean loss alone."""

    def __init__(self) -> None:
        super().__init__(zeros=True)

    def forward(self, input_ids: Tensor, target_ids: Tensor) -> Tensor:
        logits = self.run(input_ids)[0].float()
        return F.cross_entropy(logits.reshape(-1, VOCAB), target_ids.reshape(-1))


class ReturnLoss(Core):
    """Splits its tokens into inputs and targets, and gives nothing but the loss."""

    def forward(self, x: Tensor, return_loss: bool = False) -> Tensor:
        assert return_loss
        logits = self.run(x[:, :-1])[0]
        return F.cross_entropy(logits.transpose(1, 2), x[:, 1:])


class GptFast(Core):
    """Buffers for exactly the rows that `setup_caches` is given, written at the positions of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.max_seq_length = -1

    def setup_caches(self, max_batch_size: int, max_seq_length: int) -> None:
        self.max_seq_length = max_seq_length
        for layer in self.layers:
            shape = (max_batch_size, max_seq_length, HEADS, DIM // HEADS)
            for name in ("keys", "values"):
                layer.register_buffer(name, torch.zeros(shape, dtype=self.head.weight.dtype), persistent=False)

    def forward(self, idx: Tensor, input_pos: Tensor) -> Tensor:
        assert self.max_seq_length > 0, "setup_caches comes first"
        x = self.wte(idx)
        allowed = torch.arange(self.max_seq_length) <= input_pos[:, None]
        for layer in self.layers:
            queries, keys, values = layer.qkv(self.norm(x)).view(*idx.shape, 3 * HEADS, -1).chunk(3, dim=2)
            layer.keys[:, input_pos] = rotate(keys, input_pos)
            layer.values[:, input_pos] = values
            heads = (part.transpose(1, 2) for part in (rotate(queries, input_pos), layer.keys, layer.values))
            mixed = F.scaled_dot_product_attention(*heads, attn_mask=allowed)
            x = x + layer.proj(mixed.transpose(1, 2).reshape(*idx.shape, DIM))
        return self.head(self.norm(x))


class MetaLlama(Core):
    """Plain tensors in the layers, for at most four rows, under inference mode, from a position on."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [torch.zeros(2, 4, LIMIT, HEADS, DIM // HEADS) for _ in self.layers]

    @torch.inference_mode()
    def forward(self, tokens: Tensor, start_pos: int) -> Tensor:
        rows, length = tokens.shape
        pasts = [(kept[0][:rows, :start_pos], kept[1][:rows, :start_pos]) for kept in self.kept]
        logits, new_pasts = self.run(tokens, pasts, start_pos)
        for kept, (keys, values) in zip(self.kept, new_pasts):
            kept[0][:rows, : start_pos + length] = keys
            kept[1][:rows, : start_pos + length] = values
        return logits.float()


class OneToken(MetaLlama):
    """As before, one token at a time."""

    def forward(self, tokens: Tensor, start_pos: int) -> Tensor:
        assert tokens.shape[1] == 1, "one token at a time"
        return super().forward(tokens, start_pos)


class FromScratch(Core):
    """A flag, a cache in buffers, and a method that empties it; the sizes are in a dictionary that is not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.current_pos = 0
        self.reset_kv_cache()

    def reset_kv_cache(self) -> None:
        self.current_pos = 0
        for layer in self.layers:
            for name in ("cache_k", "cache_v"):
                layer.register_buffer(name, None, persistent=False)

    def forward(self, in_idx: Tensor, use_cache: bool = False) -> Tensor:
        if not use_cache:
            return self.run(in_idx)[0]
        pasts = [None if layer.cache_k is None else (layer.cache_k, layer.cache_v) for layer in self.layers]
        logits, new_pasts = self.run(in_idx, pasts, self.current_pos)
        self.current_pos += in_idx.shape[1]
        for layer, (keys, values) in zip(self.layers, new_pasts):
            layer.cache_k = keys
            layer.cache_v = values
        return logits


class LitGPT(Core):
    """Positions are an option, and the cache is allocated by a method."""

    def __init__(self) -> None:
        super().__init__()
        self.max_seq_length = LIMIT
        self.kept: Tensor | None = None

    def set_kv_cache(self, batch_size: int) -> None:
        self.kept = torch.zeros(2, 2, batch_size, LIMIT, HEADS, DIM // HEADS, dtype=self.head.weight.dtype)

    def forward(self, idx: Tensor, input_pos: Tensor | None = None) -> Tensor:
        if input_pos is None:
            return self.run(idx)[0]
        assert self.kept is not None, "set_kv_cache comes first"
        start = int(input_pos[0])
        logits, new_pasts = self.run(idx, [(k[:, :start], v[:, :start]) for k, v in self.kept], start)
        for kept, pair in zip(self.kept, new_pasts):
            kept[:, :, : start + idx.shape[1]] = torch.stack(pair)
        return logits


class RotatedTwice(Core):
    """Takes the whole prefix and its cache, and computes the last token; the fault: kept keys are rotated again."""

    faulty = True

    def forward(self, x: Tensor, cache: Any = None, return_cache: bool = False) -> Any:
        start = 0
        if cache is not None:
            start = x.shape[1] - 1
            x = x[:, -1:]
        logits, pasts = self.run(x, cache, start)
        if cache is not None and self.faulty:
            pasts = [(rotate(keys, torch.ones(keys.shape[1])), values) for keys, values in pasts]
        return (logits, pasts) if return_cache else logits


class RotatedOnce(RotatedTwice):
    """The same without the fault."""

    faulty = False


class Recurrent(nn.Module):
    """Two layers of LSTM, which give their states beside the logits; rows are on the second axis of the states."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(VOCAB, DIM)
        self.rnn = nn.LSTM(DIM, DIM, 2, batch_first=True, dropout=0.1)
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, x: Tensor, hidden: Any = None) -> Any:
        y, hidden = self.rnn(self.emb(x), hidden)
        return self.out(y), hidden


class MambaMinimal(nn.Module):
    """A scan in float32, with a vocabulary that is padded to a multiple of 8 and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, DIM)
        self.conv = nn.Conv1d(DIM, DIM, 4, groups=DIM, padding=3)
        self.A_log = nn.Parameter(torch.arange(1.0, DIM + 1).log())
        self.D = nn.Parameter(torch.ones(DIM))
        self.lm_head = nn.Linear(DIM, 64, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        u = F.silu(self.conv(x.mT)[..., : x.shape[1]].mT)
        decay = torch.exp(-torch.exp(self.A_log.float()) / DIM)
        state = torch.zeros(x.shape[0], DIM, dtype=u.dtype)
        states = []
        for step in range(x.shape[1]):
            state = decay * state + u[:, step]
            states.append(state)
        y = torch.stack(states, dim=1) + self.D * u
        return self.lm_head(x + y.to(x.dtype))


class LongConvolution(nn.Module):
    """A filter of the greatest length; the fault: it wraps around in a transform of twice the actual length."""

    faulty = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l_max = LIMIT
        self.max_seq_len = LIMIT
        self.wte = nn.Embedding(VOCAB, DIM)
        self.filter = nn.Parameter(torch.randn(DIM, LIMIT))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        size = 2 * length if self.faulty else length + LIMIT
        spectrum = torch.fft.rfft(self.wte(x).mT, n=size) * torch.fft.rfft(self._filter(length), n=size)
        return self.head(torch.tanh(torch.fft.irfft(spectrum, n=size)[..., :length].mT))

    def _filter(self, length: int) -> Tensor:
        if not self.faulty:
            return self.filter
        # what is longer than the transform is added to its beginning
        folded = F.pad(self.filter, (0, -LIMIT % (2 * length)))
        return folded.view(DIM, -1, 2 * length).sum(1)


class PaddedConvolution(LongConvolution):
    """The same without the fault."""

    faulty = False


class RandomBlocks(Core):
    """The fault: a new random pattern in every call, in evaluation too."""

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.rand(x.shape[1], x.shape[1]) < 0.5
        allowed = (kept | torch.eye(x.shape[1], dtype=torch.bool)).tril()
        y = self.wte(x)
        for layer in self.layers:
            queries, keys, values = layer.qkv(self.norm(y)).chunk(3, dim=-1)
            y = y + layer.proj(F.scaled_dot_product_attention(queries, keys, values, attn_mask=allowed))
        return self.head(y)


class ChannelsFirst(Core):
    """Logits as (rows, vocabulary, tokens), as the cross entropy wants them."""

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)[0].mT


class Flattened(Core):
    """Logits of all tokens of all rows, one after the other."""

    def forward(self, x: Tensor) -> Mapping[str, Any]:
        return {"loss": None, "logits": self.run(x)[0].flatten(0, 1)}


class LastAlone(Core):
    """Logits of the last token alone, as naive generation wants them."""

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)[0][:, -1]


class AutocastInside(Core):
    """Computes in bfloat16 by itself."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.run(x)[0].float()


class Norm(Core):
    """Batch normalization over rows and tokens: sound in evaluation, a leak in training."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(DIM)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.batch_norm(self.wte(x).flatten(0, 1)).view(*x.shape, DIM)
        return self.head(normed)


class Encoder(Core):
    """Attends to both sides, behind outputs of zeros."""

    def __init__(self) -> None:
        super().__init__(zeros=True, masked=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)[0]


class Chunked(Core):
    """Takes multiples of 16 tokens, at least 32."""

    max_seq_len = LIMIT

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] % 16 == 0
        assert x.shape[1] >= 32
        return self.run(x)[0]


TRAINING = ("causal-training", "batch-training")
BOTH_SIDES = ("causal", "causal-training", "causal-gradient", "causal-autocast", "length")

STRANGERS: dict[Callable[[], nn.Module], tuple[str, str | None, Sequence[str]]] = {
    NanoGPT: ("f(x, y)", None, ()),
    MinGPT: ("f(x)", None, ()),
    Nanochat: ("f(x)", None, ()),
    LossOnly: ("f(x, y) -> loss", None, ()),
    ReturnLoss: ("f(x, return_loss=True)", None, ()),
    GptFast: ("f(x, i)", "f(x, input_pos=positions)", ()),
    MetaLlama: ("f(x, 0)", "f(x, start_pos=i)", ()),
    OneToken: ("f(x[:, i], i)", "f(x, start_pos=i)", ()),
    FromScratch: ("f(x)", "f(x, use_cache=True) after reset_kv_cache()", ()),
    LitGPT: ("f(x)", "f(x, input_pos=positions)", ()),
    RotatedTwice: ("f(x)", "f(prefix, cache=cache, return_cache=True)", ("cached", "prefill", "beams")),
    RotatedOnce: ("f(x)", "f(prefix, cache=cache, return_cache=True)", ()),
    Recurrent: ("f(x)", "f(x, hidden=cache)", ()),
    MambaMinimal: ("f(x)", None, ()),
    LongConvolution: ("f(x)", None, BOTH_SIDES),
    PaddedConvolution: ("f(x)", None, ()),
    RandomBlocks: ("f(x)", None, ("seed",)),
    ChannelsFirst: ("f(x)", None, ()),
    Flattened: ("f(x)", None, ()),
    LastAlone: ("f(x[:, :i])", None, ()),
    AutocastInside: ("f(x)", None, ()),
    Norm: ("f(x)", None, TRAINING),
    Encoder: ("f(x)", None, BOTH_SIDES),
    Chunked: ("f(x)", None, ()),
}
"""Models by their classes: the form of call, the form of the cache, and the contracts that must fail."""
