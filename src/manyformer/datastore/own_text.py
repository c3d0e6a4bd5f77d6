"""Scored text that is in the datastore itself: refused, or excluded from its own neighbours.

A datastore that holds the scored text answers with the scored tokens: the score says nothing about new text.
"""

from typing import NamedTuple, final

import numpy as np
import torch

from manyformer.batches import IGNORE_INDEX, CausalLMBatch, to_device
from manyformer.core import State
from manyformer.data.row_layouts import ragged_arange
from manyformer.data.text_overlap import TextOverlap, find_overlap
from manyformer.data.token_shards import TokenShard
from manyformer.data.tokenizer import Tokenizer
from manyformer.datastore.datastore import Datastore
from manyformer.datastore.exact_search import ExcludedRanges
from manyformer.datastore.knn_head import KNNHead
from manyformer.errors import UserError
from manyformer.models import LanguageModel, Model
from manyformer.models.head import BatchScore
from manyformer.type_aliases import IntArray


class OwnText(NamedTuple):
    """The documents of a text that overlap with a datastore, and the entries that are excluded for each document.

    The entries excluded for document i are `starts[i, j]` to `stops[i, j]` for every j.
    """

    offsets: IntArray
    starts: IntArray
    stops: IntArray
    overlap: TextOverlap

    @property
    def documents(self) -> int:
        """The number of documents that overlap with the datastore."""
        return len(self.overlap.overlapping)

    def excluded(self, text_positions: IntArray) -> ExcludedRanges | None:
        """The entries that are excluded for the tokens at these positions in the text; None for none at all."""
        if not self.documents:
            return None
        documents = np.searchsorted(self.offsets, text_positions, side="right") - 1
        return ExcludedRanges(torch.from_numpy(self.starts[documents]), torch.from_numpy(self.stops[documents]))


def find_own_text(text: TokenShard, store: Datastore, tokenizer: Tokenizer) -> OwnText:
    """The documents of `text` that overlap with documents of the datastore, whose entries are then excluded.

    `tokenizer` is that of both."""
    overlap = find_overlap(text, store.text, tokenizer)
    counts = np.bincount(overlap.documents, minlength=len(text.lengths))
    starts = np.zeros((len(counts), counts.max(initial=0)), np.int64)
    stops = np.zeros_like(starts)
    columns = ragged_arange(counts)
    starts[overlap.documents, columns] = store.document_entries[overlap.reference_documents]
    stops[overlap.documents, columns] = store.document_entries[overlap.reference_documents + 1]
    return OwnText(np.array(text.offsets), starts, stops, overlap)


def check_own_text(
    text: TokenShard, name: str, store: Datastore, tokenizer: Tokenizer, *, exclude_own: bool
) -> OwnText:
    """What `find_own_text` finds. Raises UserError if there is such a document, unless `exclude_own` excludes it."""
    own_text = find_own_text(text, store, tokenizer)
    if own_text.documents and not exclude_own:
        raise UserError(
            f"{name} overlaps with the text of {store.folder} in {own_text.documents:,} of {len(text.lengths):,} "
            f"document{'s' * (len(text.lengths) != 1)}, which would find their own tokens (the first is document "
            f"{own_text.overlap.overlapping[0] + 1:,}): --exclude-own leaves each out of its own neighbours, or take "
            "another text"
        )
    return own_text


@final
class OwnTextModel(Model[CausalLMBatch]):
    """A kNN-LM that scores held-out batches of a text without the neighbours that are the text itself."""

    def __init__(self, model: LanguageModel, own_text: OwnText) -> None:
        super().__init__()
        self.model = model
        self.own_text = own_text

    def init_state(self, batch: int, *, capacity: int | None = None) -> State:
        return self.model.init_state(batch, capacity=capacity)

    @property
    def carries_state(self) -> bool:
        return self.model.carries_state

    def score(self, batch: CausalLMBatch, *, state: State = None) -> BatchScore:
        head = self.model.head
        assert isinstance(head, KNNHead)
        assert batch.text_positions is not None
        (x, next_state, _), targets = self.model.head_inputs(to_device(batch, self.device), state)
        is_scored = targets != IGNORE_INDEX
        positions = batch.text_positions.to(targets.device)[is_scored]
        nll = torch.zeros((), dtype=torch.float64)
        correct = torch.zeros((), dtype=torch.long, device=x.device)
        parts = (torch.split(part, head.score_chunk) for part in (x[is_scored], targets[is_scored], positions))
        for chunk, chunk_targets, chunk_positions in zip(*parts):
            log_probs = head.log_probs(chunk, self.own_text.excluded(chunk_positions.cpu().numpy()))
            nll = nll - log_probs.gather(1, chunk_targets[:, None]).cpu().double().sum()
            correct = correct + (log_probs.argmax(-1) == chunk_targets).sum()
        return BatchScore(nll, is_scored.sum(), correct, next_state)
