"""Sound models that look odd: nothing in them reads the future, another row or another call, and none may be red."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from strange_models import FORMS, KINDS, Attention, Block, Config, Decoder, FeedForward, Output, Plain, Where
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class LearnedPrefix(Decoder):
    """Learned vectors before the tokens, whose outputs are cut off."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.prefix = nn.Parameter(torch.randn(5, config.n_embd))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.prefix.expand(x.shape[0], -1, -1), self.wte(x)], dim=1)
        where = Where(torch.arange(y.shape[1], device=x.device).expand(y.shape[:2]))
        for block in self.blocks:
            y, _ = block(y, where)
        return self.head(self.norm(y[:, 5:]))


class CausalDepths(nn.Module):
    """A network that only tokens with a positive score go through, whatever the others are."""

    def __init__(self, inner: nn.Module, config: Config) -> None:
        super().__init__()
        self.inner = inner
        self.router = nn.Linear(config.n_embd, 1)

    def forward(self, x: Tensor) -> Tensor:
        score = self.router(x)
        chosen = score[..., 0] > 0
        y = torch.zeros_like(x)
        y[chosen] = self.inner(x[chosen]) * torch.sigmoid(score[chosen])
        return y


class MixtureOfDepths(Plain):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        for block in self.blocks:
            block.mlp = CausalDepths(block.mlp, config)


class SortedBuckets(nn.Module):
    """Tokens sorted by hash read earlier tokens of their own bucket; the order of the sums alone follows the others."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.qv = nn.Linear(config.n_embd, 2 * config.n_embd)
        self.register_buffer("planes", torch.randn(config.n_embd, 4))

    def forward(self, x: Tensor, where: Where, past: Any = None) -> tuple[Tensor, Any]:
        q, v = self.qv(x).chunk(2, -1)
        buckets = (q @ self.planes.to(q.dtype)).argmax(-1)
        order = buckets.argsort(dim=1, stable=True)
        places = order[..., None].expand_as(q)
        q = q.gather(1, places)
        v = v.gather(1, places)
        buckets = buckets.gather(1, order)
        allowed = (order[:, None] <= order[..., None]) & (buckets[:, None] == buckets[..., None])
        scores = (q @ F.normalize(q, dim=-1).mT).masked_fill(~allowed, -1e9)
        y = torch.empty_like(v).scatter(1, places, scores.softmax(-1) @ v)
        return y, None


class PromptEncoder(Decoder):
    """A prompt beside the text is read in both directions; the text is read from left to right."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.encoder = nn.TransformerEncoderLayer(config.n_embd, 2, 32, dropout=0.0, batch_first=True)
        self.default_prompt = nn.Parameter(torch.randn(1, 4, config.n_embd))

    def forward(self, x: Tensor, *, prompt: Tensor | None = None) -> Tensor:
        encoded = self.encoder(self.default_prompt if prompt is None else self.wte(prompt))
        y = self.wte(x) + encoded.mean(1, keepdim=True)
        where = Where(torch.arange(x.shape[1], device=x.device).expand(x.shape))
        for block in self.blocks:
            y, _ = block(y, where)
        return self.head(self.norm(y))


class ChunkedAttention(nn.Module):
    """Attention to the token's own chunk and to the one before; the model pads to whole chunks itself."""

    size = 8

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)

    def forward(self, x: Tensor, where: Where, past: Any = None) -> tuple[Tensor, Any]:
        length = x.shape[1]
        padded = F.pad(x, (0, 0, 0, -length % self.size))
        q, k, v = (part.unflatten(1, (-1, self.size)) for part in self.qkv(padded).chunk(3, -1))
        # the chunk before the first is empty
        k = torch.cat([F.pad(k[:, :-1], (0, 0, 0, 0, 1, 0)), k], dim=2)
        v = torch.cat([F.pad(v[:, :-1], (0, 0, 0, 0, 1, 0)), v], dim=2)
        allowed = torch.ones(self.size, 2 * self.size, dtype=torch.bool).tril(self.size)
        scores = (q @ k.mT).masked_fill(~allowed, float("-inf"))
        return (scores.softmax(-1) @ v).flatten(1, 2)[:, :length], None


class ReversibleBlock(nn.Module):
    """Two streams, each changed by a function of the other."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.mixer = Attention(config, None)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, where: Where, past: Any = None) -> tuple[Tensor, Any]:
        first, second = (x, x) if not isinstance(past, tuple) else past
        first = first + self.mixer(second, where)[0]
        second = second + self.mlp(first)
        return (first + second) / 2, (first, second)


class Reversible(Decoder):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(ReversibleBlock(config) for _ in range(config.n_layer))

    def forward(self, x: Tensor) -> Tensor:
        where = Where(torch.arange(x.shape[1]).expand(x.shape))
        y = self.wte(x)
        streams: Any = None
        for block in self.blocks:
            y, streams = block(y, where, streams)
        return self.head(self.norm(y))


class ZeroOutputs(Plain):
    """Output projections begin at zero, as in many recipes of training."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        for block in self.blocks:
            nn.init.zeros_(block.mixer.out.weight)
            nn.init.zeros_(block.mixer.out.bias)
            if hasattr(block.mlp, "down"):
                nn.init.zeros_(block.mlp.down.weight)
        nn.init.zeros_(self.head.weight)


class TiedWeights(Plain):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.head.weight = self.wte.weight


class Float32Islands(Plain):
    """Weights in bfloat16, with norms and the head in float32."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.to(torch.bfloat16)
        self.norm.float()
        self.head.float()

    def read(self, x: Tensor) -> Tensor:
        return self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        y = self.wte(x)
        where = Where(torch.arange(x.shape[1]).expand(x.shape))
        for block in self.blocks:
            y, _ = block(y, where)
        return self.head(self.norm(y.float()))


class RunningScale(nn.Module):
    """Divides by a running scale that training updates for later calls and evaluation leaves alone."""

    def __init__(self, inner: nn.Module, config: Config) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("scale", torch.ones(config.n_embd))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x / self.scale)
        if self.training:
            with torch.no_grad():
                self.scale = self.scale.lerp(x.detach().abs().mean((0, 1)).to(self.scale.dtype) + 0.1, 0.1)
        return y


class FrozenStatistics(Plain):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        for block in self.blocks:
            block.mlp = RunningScale(block.mlp, config)


class SinkAttention(Attention):
    """A window, and the first four tokens always."""

    def mask(self, new: int, seen: int, where: Where) -> Tensor:
        query = torch.arange(seen - new, seen)[:, None]
        key = torch.arange(seen)
        near = query - key < 8
        return ((key <= query) & (near | (key < 4)))[None, None]


class AlibiAttention(Attention):
    """Scores fall with the distance."""

    def forward(self, x: Tensor, where: Where, past: Any = None) -> tuple[Tensor, Any]:
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        places = torch.arange(x.shape[1])
        distance = places[:, None] - places
        slopes = 2.0 ** -(1 + torch.arange(self.n_head))
        bias = -slopes[:, None, None] * distance.clamp(min=0) + torch.where(distance < 0, -1e9, 0.0)
        y = (q @ k.mT + bias.to(q.dtype)).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2)), None


class MultiQueryAttention(nn.Module):
    """Several heads of queries for one of keys, by torch's own attention."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.q = nn.Linear(config.n_embd, config.n_embd)
        self.kv = nn.Linear(config.n_embd, 2 * config.n_embd // config.n_head)
        self.n_head = config.n_head

    def forward(self, x: Tensor, where: Where, past: Any = None) -> tuple[Tensor, Any]:
        q = self.q(x).unflatten(-1, (self.n_head, -1)).transpose(1, 2)
        k, v = (part[:, None].expand_as(q) for part in self.kv(x).chunk(2, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).flatten(2), None


class TokenShift(nn.Module):
    """Half of each token's channels come from the token before."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        here, before = x.chunk(2, -1)
        return self.inner(torch.cat([here, F.pad(before[:, :-1], (0, 0, 1, 0))], dim=-1))


class Shifted(Plain):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        for block in self.blocks:
            block.mlp = TokenShift(block.mlp)


class Scaled(Plain):
    """Very small or very large logits."""

    factor = 1.0

    def read(self, x: Tensor) -> Tensor:
        return self.factor * self.head(x)


class SmallLogits(Scaled):
    factor = 1e-7


class LargeLogits(Scaled):
    factor = 1e5


class OneLinear(nn.Module):
    """A linear layer of one-hot tokens."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        self.linear = nn.Linear(config.vocab_size, config.vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear(F.one_hot(tokens, self.vocab_size).to(self.linear.weight.dtype))


class EmbeddingAlone(nn.Module):
    """A table of bigrams."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.vocab_size)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        logits = self.table(idx)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class GivesDict(Decoder):
    def forward(self, input_ids: Tensor) -> dict[str, Any]:
        logits, kept = self.run(input_ids)
        return {"logits": logits, "past": kept, "aux_loss": logits.new_zeros(())}


class GivesRecord(Decoder):
    def forward(self, input_ids: Tensor) -> Output:
        return Output(self.run(input_ids)[0])


class GivesTuple(Decoder):
    def forward(self, input_ids: Tensor) -> tuple[Tensor, Any, None]:
        logits, kept = self.run(input_ids)
        return logits, kept, None


class PaddedVocabulary(Decoder):
    """A table that is padded to 64 rows, and logits that are cut back."""

    def __init__(self, config: Config) -> None:
        config.vocab_size = 64
        super().__init__(config)

    def forward(self, idx: Tensor) -> Tensor:
        return self.run(idx)[0][..., :53]


class WholeChunks(Plain):
    """Lengths in multiples of 16 alone."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] % 16:
            raise ValueError(f"{x.shape[1]} tokens are no multiple of 16")
        return super().forward(x)


class ShortLimit(Plain):
    """A limit of 40 tokens, which nothing but an error tells."""

    def __init__(self, config: Config) -> None:
        config.block_size = 40
        super().__init__(config)
        self.config = None
        self.longest = 40

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] <= self.longest, "too long"
        self.config = Config(block_size=self.longest)
        try:
            return super().forward(x)
        finally:
            self.config = None


class PositionsBeside(Decoder):
    """f(x, positions) with positions of one axis, as a call of its own may give any."""

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        y = self.wte(x)
        where = Where(position.expand(x.shape))
        if hasattr(self, "wpe"):
            y = y + self.wpe(where.positions)
        for block in self.blocks:
            y, _ = block(y, where)
        return self.head(self.norm(y))


class SmallIntegers(Plain):
    """Ids of 32 bits alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.int32))


class LastLogitsAlone(Decoder):
    """For generation: the logits of the last token, and of no other."""

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)[0][:, -1]


class Checkpointed(Plain):
    """Computes its blocks again in the backward pass of training."""

    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.wte(x)
        where = Where(torch.arange(x.shape[1]).expand(x.shape))
        for block in self.blocks:
            if self.training:
                y, _ = checkpoint(block, y, where, use_reentrant=self.use_reentrant)
            else:
                y, _ = block(y, where)
        return self.head(self.norm(y))


class CheckpointedReentrant(Checkpointed):
    use_reentrant = True


class NumpyInside(Plain):
    """Counts earlier equal tokens in NumPy."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.counts = nn.Embedding(8, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        ids = x.cpu().numpy()
        equal = ids[:, :, None] == ids[:, None]
        counts = np.minimum((equal & np.tri(ids.shape[1], dtype=bool)).sum(-1) - 1, 7)
        y = self.wte(x) + self.counts(torch.from_numpy(counts))
        where = Where(torch.arange(x.shape[1]).expand(x.shape))
        for block in self.blocks:
            y, _ = block(y, where)
        return self.head(self.norm(y))


def with_mixers(mixer: Callable[[Config], nn.Module]) -> Callable[[Config], nn.Module]:
    """A function that builds a model whose blocks have these mixers."""

    def build(config: Config) -> nn.Module:
        model = Plain(config)
        for block in model.blocks:
            assert isinstance(block, Block)
            block.mixer = mixer(config)
        return model

    return build


def compiled(config: Config) -> nn.Module:
    module: nn.Module = torch.compile(Plain(config), backend="eager")  # type: ignore[assignment]
    return module


def with_dropout(config: Config) -> nn.Module:
    config.dropout = 0.2
    return Plain(config)


def with_long_filters(config: Config) -> nn.Module:
    config.kind = "convolution"
    config.long_filters = True
    config.n_layer = 2
    return Plain(config)


def with_long_filters_and_loss(config: Config) -> nn.Module:
    config.kind = "convolution"
    config.long_filters = True
    config.n_layer = 2
    return FORMS["LossAlone"](config)


def in_half_precision(config: Config) -> nn.Module:
    return Plain(config).to(torch.bfloat16)


SOUND: dict[str, Callable[[Config], nn.Module]] = {
    "learned prefix": LearnedPrefix,
    "mixture of depths": MixtureOfDepths,
    "sorted buckets": with_mixers(SortedBuckets),
    "encoder of a prompt": PromptEncoder,
    "chunked attention": with_mixers(ChunkedAttention),
    "long filters": with_long_filters,
    "long filters, loss alone": with_long_filters_and_loss,
    "reversible": Reversible,
    "zero outputs": ZeroOutputs,
    "tied weights": TiedWeights,
    "dropout": with_dropout,
    "cache to empty": FORMS["UseCache"],
    "cache from a position": FORMS["FromPosition"],
    "cache to set up": FORMS["InputPositions"],
    "returned cache": FORMS["ReturnedCache"],
    "cache in a record": FORMS["RecordedCache"],
    "cache and position": FORMS["CacheAndPosition"],
    "method for steps": FORMS["StepMethod"],
    "float32 islands": Float32Islands,
    "frozen statistics": FrozenStatistics,
    "sinks": with_mixers(lambda config: SinkAttention(config, None)),
    "token shift": Shifted,
    "alibi": with_mixers(lambda config: AlibiAttention(config, None)),
    "multi-query": with_mixers(MultiQueryAttention),
    "small logits": SmallLogits,
    "large logits": LargeLogits,
    "one linear layer": OneLinear,
    "embedding alone": EmbeddingAlone,
    "gives a record": GivesRecord,
    "gives a dict": GivesDict,
    "gives a tuple": GivesTuple,
    "padded vocabulary": PaddedVocabulary,
    "whole chunks": WholeChunks,
    "short limit": ShortLimit,
    "positions beside": PositionsBeside,
    "small integers": SmallIntegers,
    "last logits alone": LastLogitsAlone,
    "checkpointed": Checkpointed,
    "checkpointed, reentrant": CheckpointedReentrant,
    "compiled": compiled,
    "half precision": in_half_precision,
    "numpy inside": NumpyInside,
    "padding": FORMS["Masked"],
    "documents": FORMS["Packed"],
    "loss alone": FORMS["LossAlone"],
}

ATTENTION_ALONE = {
    "learned prefix", "encoder of a prompt", "reversible", "sorted buckets", "chunked attention", "sinks", "alibi",
    "multi-query",
}  # fmt: skip
"""Models whose layers are of their own kind, so that no other is drawn for them."""


@dataclass(frozen=True)
class SoundModel:
    name: str
    kind: str
    build: Callable[[], nn.Module]


def draw_sound(seed: int) -> list[SoundModel]:
    """All sound models, with kinds, sizes and weights of this seed."""
    draw = random.Random(1000 + seed)
    models = []
    for name, make in SOUND.items():
        kind = "window" if name in ATTENTION_ALONE else draw.choice(KINDS)
        config = Config(kind=kind, n_layer=draw.choice((1, 2)), window=draw.choice((8, 12, 17)))
        models.append(SoundModel(name, kind, _builder(make, config, draw.randrange(1 << 30))))
    return models


def _builder(make: Callable[[Config], nn.Module], config: Config, weights: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(weights)
            return make(Config(**vars(config))).eval()

    return build
