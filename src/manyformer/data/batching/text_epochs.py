"""Epochs of text rows in shuffled order, as batches for causal or masked language modeling, or for a masked diffusion.

Masked tokens are chosen and replaced here, and sentences numbered that are the parts of a text. For a diffusion random
numbers are drawn, by which the model hides tokens."""

from abc import ABC, abstractmethod
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from manyformer.base.type_aliases import IntArray
from manyformer.data.batching.epochs import FIXED_SEED, Epoch, FixedEpochPlan, random_generator
from manyformer.data.batching.row_layouts import RowArrangement, RowLayout, TextRows
from manyformer.data.storage.neighbour_tables import NeighbourTable
from manyformer.data.tokenizers.tokenizer import Tokenizer
from manyformer.nn.batches import IGNORE_INDEX, CausalLMBatch, MaskedLMBatch, NoisedBatch
from manyformer.nn.batches.two_texts import SENTENCE_ENDS
from manyformer.nn.core import PADDING_SEGMENT

# Distinguishes the random stream of masking from that of the row order.
_MASKING_SEED = 80_10_10

# The same for the random numbers of a diffusion.
_NOISE_SEED = 2_406_07524

TextBatch = CausalLMBatch | MaskedLMBatch | NoisedBatch


class BatchMaker(ABC):
    """Converts rows of text to the batch type of a task."""

    name: str

    @abstractmethod
    def make_batch(self, rows: TextRows, seeds: tuple[int, ...]) -> TextBatch:
        """The batch of these rows; its randomness is determined by `seeds`."""


@final
class NextTokenBatches(BatchMaker):
    """Batches for causal language modeling."""

    name = "next"

    def make_batch(self, rows: TextRows, seeds: tuple[int, ...]) -> CausalLMBatch:
        return CausalLMBatch(torch.from_numpy(rows.tokens), torch.from_numpy(rows.targets), _segments(rows))


@final
class MaskedBatches(BatchMaker):
    """Batches for masked language modeling; the masked tokens are drawn again in every epoch.

    `sentence_ends`, for each token whether a sentence ends with it, makes sentences the parts of the documents."""

    def __init__(self, rate: float, tokenizer: Tokenizer, sentence_ends: NDArray[np.bool_] | None = None) -> None:
        self._rate = rate
        self._tokenizer = tokenizer
        self._sentence_ends = sentence_ends
        self.name = f"masked-{rate}" + ("" if sentence_ends is None else "-sentences")

    def make_batch(self, rows: TextRows, seeds: tuple[int, ...]) -> MaskedLMBatch:
        tokens, targets = mask_tokens(rows, self._rate, self._tokenizer, random_generator(*seeds, _MASKING_SEED))
        # losses that hide whole parts, whether these are sentences or of equal length, need the mask as well
        mask = torch.full((len(tokens),), self._tokenizer.mask)
        batch = MaskedLMBatch(torch.from_numpy(tokens), torch.from_numpy(targets), _segments(rows), mask=mask)
        if self._sentence_ends is None:
            return batch
        return batch._replace(parts=torch.from_numpy(number_sentences(rows.tokens, rows.segments, self._sentence_ends)))


@final
class NoisedBatches(BatchMaker):
    """Batches for a masked diffusion: clean tokens, with the random numbers by which a model hides some of them.

    All tokens are targets but the start of a document, which is given as it is to a causal model, and copies of tokens
    that another row has too."""

    name = "noised"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def make_batch(self, rows: TextRows, seeds: tuple[int, ...]) -> NoisedBatch:
        is_target = rows.is_first_copy & (rows.tokens != self._tokenizer.bos)
        if rows.segments is not None:
            is_target &= rows.segments != PADDING_SEGMENT
        noise = draw_noise(len(rows.tokens), rows.tokens.shape[1], random_generator(*seeds, _NOISE_SEED))
        return NoisedBatch(
            torch.from_numpy(rows.tokens),
            torch.from_numpy(np.where(is_target, rows.tokens, IGNORE_INDEX)),
            torch.from_numpy(noise),
            _segments(rows),
        )


def draw_noise(rows: int, length: int, random: np.random.Generator) -> NDArray[np.float32]:
    """The noise of a `NoisedBatch`: levels that are stratified over the rows in each column, and independent numbers.

    In each column every row has another one of as many equal parts of the range from 0 to 1, all at the same place in
    their part (Kingma et al. 2021, arXiv:2107.00630, section 4.1): a level is uniform, and the mean over the rows
    varies less than that of independent ones."""
    parts = random.permuted(np.tile(np.arange(rows)[:, None], length), axis=0)
    levels = (parts + random.random(length)) / rows
    return np.stack([levels, random.random((rows, length))], axis=-1).astype(np.float32)


def _segments(rows: TextRows) -> torch.Tensor | None:
    if rows.segments is None:
        return None
    return torch.from_numpy(rows.segments)


@final
class TextPlan(FixedEpochPlan):
    """Epochs with batches of `rows` rows each; the last batch of an epoch may have fewer."""

    def __init__(
        self,
        layout: RowLayout,
        rows: int,
        batch_maker: BatchMaker,
        fingerprint: str,
        neighbours: NeighbourTable | None = None,
    ) -> None:
        self._layout = layout
        self.rows = rows
        self.batch_maker = batch_maker
        self.neighbours = neighbours
        self.fingerprint = f"{fingerprint}-{batch_maker.name}-{rows}" + (f"-{neighbours.origin}" if neighbours else "")

    def epoch(self, seed: int, number: int) -> "TextEpoch":
        random = random_generator(seed, number)
        return TextEpoch(self, self._layout.arrange(random, number), random, (seed, number))

    def fixed_epoch(self) -> "TextEpoch":
        """The fixed epoch of held-out text, shuffled so that its first batches represent all of them."""
        arrangement = self._layout.arrange(None)
        return TextEpoch(self, arrangement, random_generator(FIXED_SEED), (FIXED_SEED,), held_out=True)


class TextEpoch(Epoch):
    """An epoch of the rows of an arrangement, shuffled by `random` unless these have an order.

    Batches of `held_out` text know the positions of their tokens.
    """

    def __init__(
        self,
        plan: TextPlan,
        arrangement: RowArrangement,
        random: np.random.Generator,
        seeds: tuple[int, ...],
        *,
        held_out: bool = False,
    ) -> None:
        self._plan = plan
        self._arrangement = arrangement
        self._seeds = seeds
        self._held_out = held_out
        self.rows_continue = arrangement.rows_continue
        if arrangement.in_order:
            # rows that continue those of the previous batch must not be shuffled
            self._order = np.arange(arrangement.count)
        else:
            self._order = random.permutation(arrangement.count)

    def __len__(self) -> int:
        return -(-len(self._order) // self._plan.rows)

    def batch(self, number: int) -> TextBatch:
        row_numbers = self._order[number * self._plan.rows : (number + 1) * self._plan.rows]
        batch = self._plan.batch_maker.make_batch(self._arrangement.rows(row_numbers), (*self._seeds, number))
        table = self._plan.neighbours
        if not isinstance(batch, CausalLMBatch) or not (self._held_out or table):
            return batch
        positions = self._arrangement.token_indices(row_numbers)
        return batch._replace(
            neighbours=None if table is None else torch.from_numpy(table.lookup(positions)),
            text_positions=torch.from_numpy(positions) if self._held_out else None,
        )


def mask_tokens(
    rows: TextRows, rate: float, tokenizer: Tokenizer, random: np.random.Generator
) -> tuple[IntArray, IntArray]:
    """Corrupted tokens, and targets that are IGNORE_INDEX at unselected tokens (Devlin et al. 2019, section 3.1).

    Each ordinary token is selected with probability `rate`, at least one per row; of the selected tokens 80 % become
    mask, 10 % a random ordinary token, and 10 % are unchanged. Which tokens are ordinary and which is the mask says the
    tokenizer: its special tokens are never selected, and neither they nor placeholders without text are drawn.
    """
    ordinary = rows.is_first_copy & tokenizer.is_ordinary[rows.tokens]
    # One draw decides both: below `rate` it selects the token, and its value decides how the token is replaced.
    draw = random.random(rows.tokens.shape)
    chosen = ordinary & (draw < rate)
    for row in np.flatnonzero(ordinary.any(1) & ~chosen.any(1)):
        column = int(random.choice(np.flatnonzero(ordinary[row])))
        chosen[row, column] = True
        draw[row, column] = random.random() * rate
    tokens = rows.tokens.copy()
    tokens[chosen & (draw < 0.8 * rate)] = tokenizer.mask
    randomized = chosen & (draw >= 0.9 * rate)
    replacements = tokenizer.ordinary_ids
    tokens[randomized] = replacements[random.integers(0, len(replacements), int(randomized.sum()))]
    return tokens, np.where(chosen, rows.tokens, IGNORE_INDEX)


def tokens_that_end_sentences(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """For each token whether a sentence ends with it: it ends with . ! or ? and white space, or has a blank line."""
    texts = [tokenizer.token(token) for token in range(tokenizer.vocab)]
    return np.array(["\n\n" in text or text.rstrip()[-1:] in tuple(SENTENCE_ENDS) for text in texts])


def number_sentences(tokens: IntArray, segments: IntArray | None, ends: NDArray[np.bool_]) -> IntArray:
    """The number of each token's sentence, from 0 in each document; -1 for padding. `ends` is that of all tokens."""
    if segments is None:
        segments = np.zeros_like(tokens)
    ended = np.zeros_like(tokens)
    # a sentence begins after the token that ends the one before
    ended[:, 1:] = ends[tokens[:, :-1]]
    starts = np.ones(tokens.shape, dtype=bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    counts = np.cumsum(ended, axis=1)
    # counted from the start of each document
    numbers = counts - np.maximum.accumulate(np.where(starts, counts, 0), axis=1)
    return np.where(segments == PADDING_SEGMENT, -1, numbers)
