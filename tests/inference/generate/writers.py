"""Tiny models with the interface of the real ones, whose every probability can be worked out by other means."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyformer.nn.core import MemorySequence, TokenPositions


class Written(NamedTuple):
    logits: Tensor
    state: Any = None


class Mind(NamedTuple):
    """A summary of all tokens so far, and how many there were (a plain number, as real states have)."""

    h: Tensor
    count: int


class Recurrent(nn.Module):
    """A language model that never forgets a token or its place: any mistake with states or rows changes its logits."""

    def __init__(self, vocab: int, *, seed: int = 0, sharp: float = 2.0, max_length: int | None = None) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.vocab, self.max_length = vocab, max_length
        self.embed = nn.Parameter(torch.randn(vocab, 8, generator=draw))
        self.mix = nn.Parameter(torch.randn(8, 8, generator=draw) * 0.4)
        self.out = nn.Parameter(torch.randn(8, vocab, generator=draw) * sharp)
        self.drop = nn.Dropout(0.5)
        self.read = 0

    def init_state(self, batch: int, *, capacity: int | None = None) -> Mind:
        return Mind(torch.zeros(batch, 8), 0)

    def forward(self, tokens: Tensor, segments: Tensor | None = None, state: Mind | None = None) -> Written:
        h = torch.zeros(tokens.shape[0], 8) if state is None else state.h
        self.read += tokens.numel()
        logits = []
        for column in range(tokens.shape[1]):
            new = torch.tanh(h @ self.mix + self.embed[tokens[:, column]])
            h = new if segments is None else torch.where(segments[:, column : column + 1] < 0, h, new)
            logits.append(self.drop(h) @ self.out)
        after = None if state is None else Mind(h, state.count + tokens.shape[1])
        return Written(torch.stack(logits, 1), after)


class Pair(nn.Module):
    """An encoder-decoder made of two of these: the decoder begins with what the encoder has read."""

    def __init__(self, vocab: int, *, seed: int = 0, sharp: float = 2.0, max_length: int | None = None) -> None:
        super().__init__()
        self.reader, self.writer = Recurrent(vocab, seed=seed), Recurrent(vocab, seed=seed + 1, sharp=sharp)
        self.vocab, self.max_length, self.encoded = vocab, max_length, 0

    def init_state(self, batch: int, *, capacity: int | None = None) -> Mind:
        return self.writer.init_state(batch)

    def encode(self, source: Tensor, source_segments: Tensor | None = None) -> MemorySequence:
        self.encoded += source.numel()
        state = self.reader(source, source_segments, self.reader.init_state(source.shape[0])).state
        place = torch.zeros(source.shape[0], 1, dtype=torch.long)
        return MemorySequence(state.h[:, None], TokenPositions(place, place))

    def decode(
        self, target: Tensor, memory: MemorySequence, target_segments: Tensor | None = None, state: Mind | None = None
    ) -> Written:
        begin = memory.y[:, 0]
        out = self.writer(target, target_segments, Mind(begin, 0) if state is None or not state.count else state)
        # without the memory at every step, a memory in the wrong order would go unnoticed
        return Written(out.logits + (memory.y @ self.writer.out), None if state is None else out.state)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_segments: Tensor | None = None,
        target_segments: Tensor | None = None,
        state: Mind | None = None,
    ) -> Written:
        return self.decode(target, self.encode(source, source_segments), target_segments, state)


class Table:
    """A language model without parameters: the logits of the next token follow from the last one by a table."""

    max_length = None

    def __init__(self, logits: Tensor) -> None:
        self.logits, self.vocab = logits, logits.shape[-1]

    def init_state(self, batch: int, *, capacity: int | None = None) -> None:
        return None

    def __call__(self, tokens: Tensor, segments: Tensor | None = None, state: None = None) -> Written:
        return Written(self.logits[tokens])
