"""kNN-LM: a language model interpolated with the next tokens of its nearest contexts (Khandelwal et al. 2020).

A datastore that holds the scored text itself answers with the scored tokens, and the score says nothing about new text:
`OwnText` is what both have in common, which is refused, or excluded from its own neighbours."""

from typing import ClassVar, NamedTuple, final

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.base.type_aliases import IntArray
from manyformer.data.batching.row_layouts import ragged_arange
from manyformer.data.storage.token_shards import TokenShard
from manyformer.data.text.text_overlap import TextOverlap, find_overlap
from manyformer.data.tokenizers.tokenizer import Tokenizer
from manyformer.inference.datastore.context_keys import KeyExtraction, extract_keys
from manyformer.inference.datastore.datastore import Datastore, KNNSettings
from manyformer.inference.datastore.nearest_keys import ExcludedRanges, Neighbours
from manyformer.models import BatchLoss, LanguageModel, Model, OutputHead
from manyformer.models.head import BatchScore, count_targets
from manyformer.models.model import model_name, weights_fingerprint
from manyformer.nn.batches import IGNORE_INDEX, CausalLMBatch, to_device
from manyformer.nn.core import State
from manyformer.nn.runtime.torch_internals import compiler_disabled


@final
class KNNHead(OutputHead):
    """Interpolates the distribution of a language model's head with that of the next tokens of the nearest contexts.

    The input has the head's input in the first `stream_dim` channels and the key in the last ones. Neighbours receive
    no gradients, only the model does.
    """

    score_chunk: ClassVar[int] = 512

    def __init__(self, head: OutputHead, store: Datastore, settings: KNNSettings, stream_dim: int) -> None:
        super().__init__()
        self.head = head
        self.store = store
        self.settings = settings
        self.stream_dim = stream_dim
        self.classes = head.classes

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        return self.log_probs(x, None)

    def log_probs(self, x: Float[Tensor, "*b d"], excluded: ExcludedRanges | None) -> Float[Tensor, "*b v"]:
        """The interpolated log-probabilities, without the neighbours that are `excluded` for each token."""
        # the channels behind `stream_dim` are the key, which the head was not trained on
        logits: Tensor = self.head(x[..., : self.stream_dim])
        model_log_probs = logits.log_softmax(-1, dtype=logits.dtype if logits.dtype == torch.float64 else torch.float32)
        if not self.settings.weight:
            return model_log_probs
        neighbour_probs = self._search(self.key(x), excluded).to(model_log_probs.dtype).view_as(model_log_probs)
        # an approximate index may find no neighbour at all, which leaves the model's distribution
        has_neighbours = (neighbour_probs.sum(-1, keepdim=True) > 0).to(model_log_probs.dtype)
        return interpolate(model_log_probs, neighbour_probs, has_neighbours * self.settings.weight)

    def loss(self, x: Float[Tensor, "*b d"], targets: Int[Tensor, "*b"], *, label_smoothing: float) -> BatchLoss:
        x = x.reshape(-1, x.shape[-1])
        targets = targets.reshape(-1)
        # targets of IGNORE_INDEX, torch's default, have no loss
        # log-probabilities are their own log-softmax, so that cross entropy takes them as logits
        total = F.cross_entropy(self(x), targets, label_smoothing=label_smoothing, reduction="sum")
        return BatchLoss(total, count_targets(targets))

    def key(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "n e"]:
        """The keys of all tokens."""
        return x[..., -self.store.facts.width :].detach().reshape(-1, self.store.facts.width)

    # the search reads files
    @compiler_disabled
    def _search(self, keys: Float[Tensor, "n e"], excluded: ExcludedRanges | None) -> Float[Tensor, "n v"]:
        return self.distribution(self.store.search(keys, self.settings.neighbours, excluded=excluded))

    def distribution(self, neighbours: Neighbours) -> Float[Tensor, "n v"]:
        """The probability of each class: the sum of the weights of the neighbours that it followed."""
        weights = neighbour_weights(neighbours.distances, self.settings.temperature)
        # a missing neighbour has no weight
        tokens = self.store.next_tokens(neighbours.entries).clamp(min=0)
        return weights.new_zeros(len(weights), self.classes).scatter_add_(1, tokens, weights)

    def extra_repr(self) -> str:
        return f"{self.store.folder}, {len(self.store):,} entries, {self.settings}"


def knn_lm(
    model: Model,
    store: Datastore,
    *,
    neighbours: int | None = None,
    weight: float | None = None,
    temperature: float | None = None,
) -> LanguageModel:
    """A kNN-LM of `model` and a datastore: a language model that shares the modules of `model`, for evaluation.

    Arguments that are None are taken from the settings saved by tuning, else they are 1024 neighbours, a weight
    (lambda) of 0.25 and a temperature of 1 as in the paper, which does not mention the temperature. Both models are put
    into evaluation mode. Raises UserError if the datastore was built with another model.
    """
    settings = store.load_settings().with_overrides(neighbours, weight, temperature)
    if settings.neighbours > len(store):
        raise UserError(
            f"neighbours ({settings.neighbours}) must be at most {len(store):,}, the entries of {store.folder}"
        )
    reader, stream_dim, _ = check_fits(model, store)
    combined = reader.with_decoder(reader.body, KNNHead(model.head, store, settings, stream_dim), None)
    combined.max_length = model.max_length
    combined.tokenizer = model.tokenizer
    return combined.eval()


def check_fits(model: Model, store: Datastore) -> KeyExtraction:
    """The model with the keys of a datastore. Raises UserError if that was built with another model."""
    facts = store.facts
    extraction = extract_keys(model, facts.keys)
    # keys of other weights have the same shape, and distances to them mean nothing
    fingerprint = weights_fingerprint(model), extraction.key_dim
    if fingerprint != (facts.model, facts.width) or facts.vocab > extraction.reader.vocab:
        raise UserError(
            f"{store.folder} was built with another model ({store.facts.recipe}), whose keys differ from those of this "
            f"one ({model_name(model)}); build a datastore with it"
        )
    return extraction


def neighbour_weights(distances: Float[Tensor, "n k"], temperature: float) -> Float[Tensor, "n k"]:
    """The weight of each neighbour: softmax of -distance / temperature; all 0 if there is no neighbour."""
    return (-distances / temperature).softmax(-1).nan_to_num(0.0)


def interpolate(
    model_log_probs: Float[Tensor, "*n"], neighbour_probs: Float[Tensor, "*n"], weight: Float[Tensor, "*#n"]
) -> Float[Tensor, "*n"]:
    """log(weight p_neighbours + (1 - weight) p_model), given log p_model and p_neighbours."""
    # in the log domain, because either probability may be 0
    return torch.logaddexp(model_log_probs + torch.log1p(-weight), neighbour_probs.log() + weight.log())


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
        # all tokens of a document share its exclusions, wherever in it they overlap
        documents = np.searchsorted(self.offsets, text_positions, side="right") - 1
        return ExcludedRanges(torch.from_numpy(self.starts[documents]), torch.from_numpy(self.stops[documents]))


def find_own_text(text: TokenShard, store: Datastore, tokenizer: Tokenizer) -> OwnText:
    """The documents of `text` that overlap with documents of the datastore, whose entries are then excluded.

    `tokenizer` is that of both."""
    overlap = find_overlap(text, store.text, tokenizer)
    # documents overlap with different numbers of others: the missing ranges of a row are empty, from 0 to 0
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
        # in chunks: neighbours and probabilities of all tokens of a batch would not fit into memory
        parts = (torch.split(part, head.score_chunk) for part in (x[is_scored], targets[is_scored], positions))
        for chunk, chunk_targets, chunk_positions in zip(*parts):
            log_probs = head.log_probs(chunk, self.own_text.excluded(chunk_positions.cpu().numpy()))
            nll = nll - log_probs.gather(1, chunk_targets[:, None]).cpu().double().sum()
            correct = correct + (log_probs.argmax(-1) == chunk_targets).sum()
        return BatchScore(nll, is_scored.sum(), correct, next_state)
