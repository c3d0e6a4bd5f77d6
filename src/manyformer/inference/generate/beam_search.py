"""Beam search over whole sequences (Vaswani et al. 2017, section 6.1)."""

from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.inference.generate.decoding import BeamScores, BeamSettings
from manyformer.inference.generate.logits_processors import LogitsFn
from manyformer.inference.generate.protocol import TokenizerProtocol
from manyformer.inference.generate.result import Hypothesis, StreamPiece
from manyformer.inference.generate.sampling import COMPACTION_SHARE, DecodeBatch, nothing_to_choose, readback_interval

NEGATIVE_INFINITY = float("-inf")


class FinishedBeams(NamedTuple):
    """The best finished sequences of each prompt, best first; the score is minus infinity where there is none."""

    score: Float[Tensor, "b w"]
    tokens: Int[Tensor, "b w n"]
    length: Int[Tensor, "b w"]


class BeamCandidates(NamedTuple):
    """The best continuations of each prompt's beam, best first: the index of the parent sequence and the new token."""

    score: Float[Tensor, "b k"]
    parent: Int[Tensor, "b k"]
    token: Int[Tensor, "b k"]


@final
class BeamSearch:
    """Decodes one batch with a `BeamSettings`: call `advance` until `is_done`, under `torch.inference_mode()`.

    As in transformers and fairseq, a finished sequence counts only if it is among the `width` best candidates of its
    step. A score is the model's log-probability; logits processors act on log-probabilities, without renormalization.
    """

    def __init__(self, batch: DecodeBatch, settings: BeamSettings, tokenizer: TokenizerProtocol | None) -> None:
        self.batch = batch
        self.settings = settings
        self.tokenizer = tokenizer
        prompts, self.prompt_length = batch.tokens.shape
        device = batch.tokens.device
        max_new = max(batch.limits)
        self.stop_ids = torch.tensor(batch.stop_ids, device=device, dtype=torch.long)
        self.limits = torch.tensor(batch.limits, device=device)
        # the penalty of each length from 0 on, computed once, so that no step moves data to the device
        self.penalties = settings.penalty(torch.arange(max_new + 1.0)).to(device)
        self.prompt_indices = torch.arange(prompts, device=device)
        # rows of one prompt stand together: row = prompt * width + place in the beam
        self.tokens = batch.tokens.new_zeros(prompts * settings.width, self.prompt_length + max_new)
        self.tokens[:, : self.prompt_length] = batch.tokens.repeat_interleave(settings.width, 0)
        # at first all sequences of a beam are equal, so that only one of them has a finite score
        self.live_scores = torch.full((prompts, settings.width), NEGATIVE_INFINITY, device=device)
        self.live_scores[:, 0] = 0
        empty = batch.tokens.new_zeros(prompts, settings.width, max_new)
        self.finished = FinishedBeams(torch.full_like(self.live_scores, NEGATIVE_INFINITY), empty, empty[..., 0])
        self.is_open = torch.ones(prompts, dtype=torch.bool, device=device)
        self.readback_interval = readback_interval(device)
        self.logits_fns: list[LogitsFn] = []
        self.column = self.prompt_length
        self.is_done = False
        self.finished_by_prompt: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self.new_tokens = self.cache_bytes = 0

    def advance(self) -> list[StreamPiece]:
        """Extend every unfinished sequence by one token; returns no pieces, as hypotheses are final only at the end."""
        column = self.column
        length = self.column - self.prompt_length + 1
        if length == 1:
            logits, self.logits_fns = self.batch.read_prompts(self.settings.width)
            self.cache_bytes = self.batch.feed.cache_bytes
        else:
            logits = self.batch.feed(self.tokens, column)
        candidates = self._best_continuations(logits, self.tokens[:, :column])
        is_final = torch.isin(candidates.token, self.stop_ids) | (length >= self.limits)[:, None]
        self._add_finished(candidates, is_final, length)
        self.live_scores, chosen = candidates.score.masked_fill(is_final, NEGATIVE_INFINITY).topk(self.settings.width)
        parent = candidates.parent.gather(1, chosen) + self._beam_offsets()
        self.tokens = self.tokens.index_select(0, parent.flatten())
        self.tokens[:, column] = candidates.token.gather(1, chosen).flatten()
        self.column = column + 1
        self.is_open = self.is_open & (length < self.limits) & self._can_improve(length)
        self._reorder_state(parent.flatten())
        return []

    def results(self) -> list[tuple[Hypothesis, ...]]:
        """The `best` hypotheses of each prompt, best first."""
        answers = []
        for prompt in range(len(self.finished_by_prompt)):
            score, tokens, length = (tensor.tolist() for tensor in self.finished_by_prompt[prompt])
            if not score[0] > NEGATIVE_INFINITY:
                raise UserError(nothing_to_choose(f"prompt {prompt}"))
            # a search that ends early may have finished fewer than asked for
            ranks = [rank for rank in range(self.settings.best) if score[rank] > NEGATIVE_INFINITY]
            self.new_tokens += sum(length[rank] for rank in ranks)
            answers.append(tuple(self._hypothesis(tokens[rank][: length[rank]], score[rank]) for rank in ranks))
        return answers

    def _hypothesis(self, tokens: list[int], score: float) -> Hypothesis:
        has_stop_id = tokens[-1] in self.batch.stop_ids
        # the end token counts in the score, and is no part of the text
        tokens = tokens[:-1] if has_stop_id else tokens
        text = None
        if self.tokenizer is not None:
            text = self.tokenizer.decode(tokens)
        return Hypothesis(tokens, text, score, "end" if has_stop_id else "limit")

    def _best_continuations(self, logits: Float[Tensor, "r v"], history: Int[Tensor, "r t"]) -> BeamCandidates:
        """The best continuations, so many that `width` are unfinished even if all stop tokens are among them."""
        log_probs = logits.log_softmax(-1, dtype=torch.float32)
        for process in self.logits_fns:
            log_probs = process(log_probs, history)
        vocab = log_probs.shape[-1]
        width = self.settings.width
        if self.batch.forced is not None:
            step = history.shape[1] - self.prompt_length + 1
            log_probs = self.batch.forced(log_probs, step, self.limits.repeat_interleave(width))
        # over all continuations of all sequences of a prompt at once: an index is parent * vocab + token
        total = (self.live_scores.view(-1, 1) + log_probs).view(-1, width * vocab)
        score, index = total.topk(min(max(2, 1 + len(self.stop_ids)) * width, width * vocab))
        return BeamCandidates(score, index // vocab, index % vocab)

    def _add_finished(self, candidates: BeamCandidates, is_final: Bool[Tensor, "b k"], length: int) -> None:
        """Merge the sequences that end at this step with the best finished sequences."""
        width = self.settings.width
        # only the `width` best candidates may finish; those behind them are there to keep the beam full
        newly_finished = is_final[:, :width] & self.is_open[:, None]
        # merging nothing changes nothing, and costs less than a wait for an accelerator
        if self.readback_interval == 1 and not newly_finished.any():
            return
        score = candidates.score[:, :width].masked_fill(~newly_finished, NEGATIVE_INFINITY) / self.penalties[length]
        parent = candidates.parent[:, :width] + self._beam_offsets()
        # (b, w, n): the parents' tokens before this step, whose own token is in none of the buffers yet
        tokens = self.tokens[parent, self.prompt_length :]
        tokens[:, :, length - 1] = candidates.token[:, :width]
        # old and new together, so that a good finished sequence is never lost to later ones
        score, order = torch.cat([self.finished.score, score], 1).topk(width)
        lengths = torch.cat([self.finished.length, torch.full_like(parent, length)], 1)
        tokens = torch.cat([self.finished.tokens, tokens], 1)
        self.finished = FinishedBeams(score, tokens.take_along_dim(order[..., None], 1), lengths.gather(1, order))

    def _can_improve(self, length: int) -> Bool[Tensor, " b"]:
        penalty = self.penalties[length]
        # the most that a live sequence can gain by growing
        final_penalty = self.penalties[self.limits]
        scores = BeamScores(self.live_scores[:, 0], self.finished.score, self.settings.best, penalty, final_penalty)
        return self.settings.stopping.can_improve(scores)

    def _beam_offsets(self) -> Int[Tensor, "b 1"]:
        """The index of the first row of each prompt's beam."""
        return torch.arange(0, self.tokens.shape[0], self.settings.width, device=self.tokens.device)[:, None]

    def _reorder_state(self, parent: Int[Tensor, " r"]) -> None:
        """Reorder the model's state by parent; remove closed prompts once few enough are open (`COMPACTION_SHARE`)."""
        new_tokens = self.column - self.prompt_length
        # a prompt at its limit may have reached the model's max_length: it must not be fed again
        reached_limit = new_tokens in self.batch.limits
        if not reached_limit and new_tokens % self.readback_interval:
            # prompts that are closed go on until the host reads which ones are, and take no further sequences
            self.batch.feed.reorder(parent)
            return
        open_prompts = self.is_open.nonzero()[:, 0]
        if not reached_limit and len(open_prompts) > COMPACTION_SHARE * len(self.prompt_indices):
            self.batch.feed.reorder(parent)
            return
        self.cache_bytes = max(self.cache_bytes, self.batch.feed.cache_bytes)
        for index in (~self.is_open).nonzero()[:, 0].tolist():
            score, tokens, length = (tensor[index].clone() for tensor in self.finished)
            self.finished_by_prompt[int(self.prompt_indices[index])] = score, tokens, length
        self.is_done = len(open_prompts) == 0
        if self.is_done:
            return
        within_beam = torch.arange(self.settings.width, device=open_prompts.device)
        open_rows = (open_prompts[:, None] * self.settings.width + within_beam).flatten()
        self.batch.feed.select_rows(parent[open_rows])
        self.tokens = self.tokens.index_select(0, open_rows)
        self.live_scores = self.live_scores[open_prompts]
        self.prompt_indices = self.prompt_indices[open_prompts]
        self.limits = self.limits[open_prompts]
        self.is_open = self.is_open[open_prompts]
        self.finished = FinishedBeams(*(tensor[open_prompts] for tensor in self.finished))
