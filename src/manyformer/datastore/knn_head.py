"""A language model and its nearest neighbours: what followed like contexts is likelier (Khandelwal et al. 2020)."""

from typing import ClassVar, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.batches import IGNORE_INDEX
from manyformer.datastore.context_keys import fingerprint, keyed, name_of
from manyformer.datastore.datastore import Datastore, KNNSettings
from manyformer.datastore.exact_search import Neighbours
from manyformer.errors import UserError
from manyformer.models import BatchLoss, LanguageModel, Model, OutputHead
from manyformer.models.model import count_targets


def neighbour_weights(distances: Float[Tensor, "n k"], temperature: float) -> Float[Tensor, "n k"]:
    """How much each neighbour counts: softmax of -d / temperature; all 0 where there is none."""
    return (-distances / temperature).softmax(-1).nan_to_num(0.0)


def interpolate(
    model: Float[Tensor, "*n"], neighbours: Float[Tensor, "*n"], weight: Float[Tensor, "*#n"]
) -> Float[Tensor, "*n"]:
    """log(weight p_neighbours + (1 - weight) p_model) of log p_model and p_neighbours."""
    return torch.logaddexp(model + torch.log1p(-weight), neighbours.log() + weight.log())


@final
class KNNHead(OutputHead):
    """The head of a language model, mixed with what followed the nearest contexts of a datastore.

    It is given the head's stream in the first `stream` channels and the key in the last ones. Nothing is learned of the
    neighbours: gradients go to the model alone.
    """

    score_chunk: ClassVar[int] = 512

    def __init__(self, head: OutputHead, store: Datastore, mix: KNNSettings, stream: int) -> None:
        super().__init__()
        self.head, self.store, self.mix, self.stream = head, store, mix, stream
        self.classes = head.classes

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        logits: Tensor = self.head(x[..., : self.stream])
        model = logits.log_softmax(-1, dtype=logits.dtype if logits.dtype == torch.float64 else torch.float32)
        if not self.mix.weight:
            return model
        neighbours = self._neighbours(self.key(x)).to(model.dtype).view_as(model)
        # an approximate index may find nobody at all, which leaves the model alone
        found = (neighbours.sum(-1, keepdim=True) > 0).to(model.dtype)
        return interpolate(model, neighbours, found * self.mix.weight)

    def loss(self, x: Float[Tensor, "*b d"], targets: Int[Tensor, "*b"], *, smoothing: float) -> BatchLoss:
        x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
        total = F.cross_entropy(self(x), targets, ignore_index=IGNORE_INDEX, label_smoothing=smoothing, reduction="sum")
        return BatchLoss(total, count_targets(targets))

    def key(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "n e"]:
        """The keys of all tokens."""
        return x[..., -self.store.facts.width :].detach().reshape(-1, self.store.facts.width)

    # files are read for it
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _neighbours(self, keys: Float[Tensor, "n e"]) -> Float[Tensor, "n v"]:
        found = self.store.search(keys, self.mix.neighbours)
        return neighbour_distribution(found, self.store.following(found.entries), self.classes, self.mix.temperature)

    def extra_repr(self) -> str:
        return f"{self.store.folder}, {len(self.store):,} entries, {self.mix}"


def neighbour_distribution(
    found: Neighbours, tokens: Int[Tensor, "n k"], classes: int, temperature: float
) -> Float[Tensor, "n v"]:
    """The probability of each class: what the neighbours that it followed count together."""
    each = neighbour_weights(found.distances, temperature)
    return each.new_zeros(len(each), classes).scatter_add_(1, tokens, each)


def knn_lm(
    model: Model,
    store: Datastore,
    *,
    neighbours: int | None = None,
    weight: float | None = None,
    temperature: float | None = None,
) -> LanguageModel:
    """`model` with the neighbours of a datastore: an ordinary language model with the same parts, for evaluation.

    What is not given is what tuning found to be best, or 1024 neighbours, a weight (lambda) of 0.25 and a temperature
    of 1 as in the paper, where the temperature is not named. Both models are put into evaluation mode. Raises UserError
    where the datastore was built with another model.
    """
    mix = store.mix().changed(neighbours, weight, temperature)
    if mix.neighbours > len(store):
        raise UserError(f"neighbours ({mix.neighbours}) must be at most {len(store):,}, the entries of {store.folder}")
    check_fits(model, store)
    assert isinstance(model, LanguageModel)
    own = keyed(model, store.facts.keys)
    both = LanguageModel(model.embed, own.body, KNNHead(model.head, store, mix, own.stream))
    both.max_length, both.tokenizer = model.max_length, model.tokenizer
    return both.eval()


def check_fits(model: Model, store: Datastore) -> None:
    """Raise UserError where the datastore was built with another model."""
    keyed(model, store.facts.keys)
    if fingerprint(model) != store.facts.model:
        raise UserError(
            f"{store.folder} was built with another model ({store.facts.recipe}), whose keys mean nothing to this one "
            f"({name_of(model)}); build a datastore with it"
        )
