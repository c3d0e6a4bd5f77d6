"""kNN-LM: a language model interpolated with the next tokens of its nearest contexts (Khandelwal et al. 2020)."""

from typing import ClassVar, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.datastore.context_keys import KeyExtraction, extract_keys
from manyformer.datastore.datastore import Datastore
from manyformer.datastore.exact_search import ExcludedRanges, Neighbours
from manyformer.datastore.facts import KNNSettings
from manyformer.errors import UserError
from manyformer.models import BatchLoss, LanguageModel, Model, OutputHead
from manyformer.models.head import count_targets
from manyformer.models.model import model_name, weights_fingerprint
from manyformer.torch_internals import compiler_disabled


def neighbour_weights(distances: Float[Tensor, "n k"], temperature: float) -> Float[Tensor, "n k"]:
    """The weight of each neighbour: softmax of -distance / temperature; all 0 if there is no neighbour."""
    return (-distances / temperature).softmax(-1).nan_to_num(0.0)


def interpolate(
    model_log_probs: Float[Tensor, "*n"], neighbour_probs: Float[Tensor, "*n"], weight: Float[Tensor, "*#n"]
) -> Float[Tensor, "*n"]:
    """log(weight p_neighbours + (1 - weight) p_model), given log p_model and p_neighbours."""
    return torch.logaddexp(model_log_probs + torch.log1p(-weight), neighbour_probs.log() + weight.log())


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
    fingerprint = weights_fingerprint(model), extraction.key_dim
    if fingerprint != (facts.model, facts.width) or facts.vocab > extraction.reader.vocab:
        raise UserError(
            f"{store.folder} was built with another model ({store.facts.recipe}), whose keys differ from those of this "
            f"one ({model_name(model)}); build a datastore with it"
        )
    return extraction
