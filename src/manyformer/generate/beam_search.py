"""Beam search: the best sequences rather than the best tokens (Vaswani et al. 2017, section 6.1)."""

from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.errors import UserError
from manyformer.generate.logits_processors import LogitsFn
from manyformer.generate.protocol import TokenizerProtocol
from manyformer.generate.result import Hypothesis, StreamPiece
from manyformer.generate.sampling import CROWDED, DecodeBatch
from manyformer.generate.token_choice import BeamSettings

NEVER = float("-inf")


class FinishedBeams(NamedTuple):
    """The best finished sequences of each prompt, best first; minus infinity where there is none."""

    score: Float[Tensor, "b w"]
    tokens: Int[Tensor, "b w n"]
    length: Int[Tensor, "b w"]


class BeamCandidates(NamedTuple):
    """The best continuations of each prompt's beam, best first: which sequence, and with which token."""

    score: Float[Tensor, "b k"]
    parent: Int[Tensor, "b k"]
    token: Int[Tensor, "b k"]


@final
class BeamSearch:
    """Decodes one batch with a `BeamSettings`: call `advance` until `over`, under `torch.inference_mode()`.

    As in transformers and fairseq, a finished sequence counts only if it is among the `width` best candidates of its
    step. A score is the model's own log-probability; what shapes it acts on log-probabilities without renormalising.
    """

    def __init__(self, job: DecodeBatch, beam: BeamSettings, words: TokenizerProtocol | None) -> None:
        self.job, self.beam, self.words = job, beam, words
        prompts, self.begin = job.tokens.shape
        device, room = job.tokens.device, max(job.limits)
        self.ends = torch.tensor(job.ends, device=device, dtype=torch.long)
        self.limits = torch.tensor(job.limits, device=device)
        # by length, from 0, once and for all: nothing need be moved to a device at each step
        self.penalties = beam.penalty(torch.arange(room + 1.0)).to(device)
        self.rows = torch.arange(prompts, device=device)
        self.tokens = job.tokens.new_zeros(prompts * beam.width, self.begin + room)
        self.tokens[:, : self.begin] = job.tokens.repeat_interleave(beam.width, 0)
        # at first all sequences of a beam are the same, so that only one of them counts
        self.alive = torch.full((prompts, beam.width), NEVER, device=device)
        self.alive[:, 0] = 0
        empty = job.tokens.new_zeros(prompts, beam.width, room)
        self.finished = FinishedBeams(torch.full_like(self.alive, NEVER), empty, empty[..., 0])
        self.open = torch.ones(prompts, dtype=torch.bool, device=device)
        self.shape: list[LogitsFn] = []
        self.at, self.over = self.begin, False
        self.found: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self.new_tokens = self.kept = 0

    def advance(self) -> list[StreamPiece]:
        """One more token for every sequence that grows; nothing is certain before the end."""
        at, length = self.at, self.at - self.begin + 1
        logits = self._first() if length == 1 else self.job.feed(self.tokens, at)
        candidates = self._candidates(logits, self.tokens[:, :at])
        ends = torch.isin(candidates.token, self.ends) | (length >= self.limits)[:, None]
        self._finish(candidates, ends, length)
        self.alive, chosen = candidates.score.masked_fill(ends, NEVER).topk(self.beam.width)
        parent = candidates.parent.gather(1, chosen) + self._offsets()
        self.tokens = self.tokens.index_select(0, parent.flatten())
        self.tokens[:, at] = candidates.token.gather(1, chosen).flatten()
        self.at = at + 1
        self.open = self.open & (length < self.limits) & self._improvable(length)
        self._drop(parent.flatten())
        return []

    def results(self) -> list[tuple[Hypothesis, ...]]:
        """For each prompt the `best` sequences, best first."""
        answers = []
        for prompt in range(len(self.found)):
            score, tokens, length = (part.tolist() for part in self.found[prompt])
            if not score[0] > NEVER:
                raise UserError(
                    f"there is nothing to choose from for prompt {prompt}: the logits are not finite, "
                    "or every token is forbidden"
                )
            kept = [n for n in range(self.beam.best) if score[n] > NEVER]
            self.new_tokens += sum(length[n] for n in kept)
            answers.append(tuple(self._hypothesis(tokens[n][: length[n]], score[n]) for n in kept))
        return answers

    def _hypothesis(self, tokens: list[int], score: float) -> Hypothesis:
        ended = tokens[-1] in self.job.ends
        tokens = tokens[:-1] if ended else tokens
        text = None if self.words is None else self.words.decode(tokens)
        return Hypothesis(tokens, text, score, "end" if ended else "limit")

    def _first(self) -> Float[Tensor, "r v"]:
        """Read the prompts, each once, and only then make room for its whole beam."""
        logits = self.job.feed(self.job.tokens, self.begin)
        self.shape = [shaping.ready(logits.shape[-1], logits.device) for shaping in self.job.shape]
        rows = self.rows.repeat_interleave(self.beam.width)
        self.job.feed.take(rows)
        self.kept = self.job.feed.cache_bytes
        return logits.index_select(0, rows)

    def _candidates(self, logits: Float[Tensor, "r v"], history: Int[Tensor, "r t"]) -> BeamCandidates:
        """Enough of the best continuations that `width` of them go on even if all end tokens are among them."""
        gain = logits.log_softmax(-1, dtype=torch.float32)
        for shape in self.shape:
            gain = shape(gain, history)
        vocab, width = gain.shape[-1], self.beam.width
        total = (self.alive.view(-1, 1) + gain).view(-1, width * vocab)
        score, index = total.topk(min(max(2, 1 + len(self.ends)) * width, width * vocab))
        return BeamCandidates(score, index // vocab, index % vocab)

    def _finish(self, candidates: BeamCandidates, ends: Bool[Tensor, "b k"], length: int) -> None:
        """Let the sequences that end now compete with those that ended before."""
        width = self.beam.width
        new = ends[:, :width] & self.open[:, None]
        if not new.any():
            return
        score = candidates.score[:, :width].masked_fill(~new, NEVER) / self.penalties[length]
        parent = candidates.parent[:, :width] + self._offsets()
        tokens = self.tokens[parent, self.begin :]
        tokens[:, :, length - 1] = candidates.token[:, :width]
        score, order = torch.cat([self.finished.score, score], 1).topk(width)
        lengths = torch.cat([self.finished.length, torch.full_like(parent, length)], 1)
        tokens = torch.cat([self.finished.tokens, tokens], 1)
        self.finished = FinishedBeams(score, tokens.take_along_dim(order[..., None], 1), lengths.gather(1, order))

    def _improvable(self, length: int) -> Bool[Tensor, " b"]:
        now, last = self.penalties[length], self.penalties[self.limits]
        return self.beam.until.open(self.alive[:, 0], self.finished.score, self.beam.best, now, last)

    def _offsets(self) -> Int[Tensor, "b 1"]:
        """The row in which each prompt's beam begins."""
        return torch.arange(0, self.tokens.shape[0], self.beam.width, device=self.tokens.device)[:, None]

    def _drop(self, parent: Int[Tensor, " r"]) -> None:
        """Reorder the model's state, without prompts that are done once they are many."""
        growing = self.open.nonzero()[:, 0]
        # a prompt at its limit may be at the model's too: it must not be fed again
        full = self.at - self.begin in self.job.limits
        if not full and len(growing) > CROWDED * len(self.rows):
            self.job.feed.reorder(parent)
            return
        self.kept = max(self.kept, self.job.feed.cache_bytes)
        for number in (~self.open).nonzero()[:, 0].tolist():
            self.found[int(self.rows[number])] = tuple(part[number].clone() for part in self.finished)  # type: ignore[assignment]
        self.over = len(growing) == 0
        if self.over:
            return
        within = (growing[:, None] * self.beam.width + torch.arange(self.beam.width, device=growing.device)).flatten()
        self.job.feed.take(parent[within])
        self.tokens = self.tokens.index_select(0, within)
        self.alive, self.rows, self.limits = self.alive[growing], self.rows[growing], self.limits[growing]
        self.open = self.open[growing]
        self.finished = FinishedBeams(*(part[growing] for part in self.finished))
