"""The models of this library as subjects."""

from collections.abc import Mapping
from pathlib import Path
from typing import Self, final

import torch

from manyformer.api import load
from manyformer.check.contracts import CONTRACTS
from manyformer.check.contracts.loss_contract import images_of
from manyformer.check.subject import Subject, SubjectOutput
from manyformer.check.trees import grow
from manyformer.core import State
from manyformer.errors import UserError
from manyformer.models import (
    EncoderDecoder,
    ImageClassifier,
    LanguageModel,
    MaskedLM,
    Model,
    ModelSpec,
    Tagger,
    TextClassifier,
)
from manyformer.recipes import RecipeCard
from manyformer.recipes.registry import card_of
from manyformer.tasks import Inputs

CARD_PROMISES = ("causal", "incremental_decoding", "cross_attention", "padding_invariant")


def own_subject(model: Model, *, name: str | None = None) -> Subject:
    """The subject of a model of this library. Raises UserError for an unknown kind of model."""
    if isinstance(model, LanguageModel):
        return OwnLanguageModel(model, model.embed.vocab, name)
    if isinstance(model, EncoderDecoder):
        return OwnEncoderDecoder(model, model.embed_target.vocab, name)
    if isinstance(model, MaskedLM):
        return OwnEncoder(model, model.embed.vocab, name)
    if isinstance(model, TextClassifier):
        return OwnClassifier(model, model.embed.vocab, name)
    if isinstance(model, Tagger):
        return OwnTagger(model, model.embed.vocab, name)
    if isinstance(model, ImageClassifier):
        return OwnImageClassifier(model, BRIGHTNESS_LEVELS, name)
    raise UserError(f"contracts do not know the inputs and outputs of a {type(model).__name__}: wrap it in an Adapter")


class OwnSubject(Subject):
    """The common part of all subjects of this library: the recipe's card has the promises."""

    unavailable: Mapping[str, str] = {}
    """Promises that this kind of model cannot make, with the reasons."""

    def __init__(self, model: Model, token_ids: int, name: str | None) -> None:
        self.module = model
        # Apple's devices have no float64
        self.exact = model.device.type != "mps"
        spec: ModelSpec | None = getattr(model, "spec", None)
        card = None if spec is None else card_of(spec)
        self.name = name or (type(model).__name__ if spec is None else spec.recipe)
        self.max_length = model.max_length
        self.not_promised = {**self.unavailable, **_not_promised(card)}
        self.token_ids = torch.arange(token_ids, device=model.device)

    @property
    def model(self) -> Model:
        """The checked model."""
        assert isinstance(self.module, Model)
        return self.module

    def forward(self, inputs: Inputs, state: State = None) -> SubjectOutput:
        assert state is None
        logits, _, loss = self.model(inputs.tokens, inputs.segments)
        return SubjectOutput(logits, None, loss)

    def save_to(self, folder: str) -> None:
        self.model.save(Path(folder) / "model")

    def copy_from(self, folder: str) -> Self:
        loaded = own_subject(load(Path(folder) / "model").to(self.token_ids.device), name=self.name)
        assert isinstance(loaded, type(self))
        return loaded


@final
class OwnLanguageModel(OwnSubject):
    """A decoder-only model."""

    unavailable: Mapping[str, str] = {"cross_attention": "a language model reads one sequence only"}
    measured_anyway = frozenset({"causal", "causal-gradient"})

    def forward(self, inputs: Inputs, state: State = None) -> SubjectOutput:
        return SubjectOutput(*self.model(inputs.tokens, inputs.segments, state))

    def init_state(self, inputs: Inputs, *, capacity: int | None = None) -> State:
        assert isinstance(self.model, LanguageModel)
        return self.model.init_state(inputs.tokens.shape[0], capacity=capacity)


@final
class OwnEncoderDecoder(OwnSubject):
    """An encoder-decoder; its state is the encoded source and the decoder's state."""

    takes_source = True

    def forward(self, inputs: Inputs, state: State = None) -> SubjectOutput:
        assert isinstance(self.model, EncoderDecoder)
        if state is None:
            assert inputs.source is not None
            return SubjectOutput(*self.model(inputs.source, inputs.tokens, inputs.source_segments, inputs.segments))
        memory, decoder_state = state
        logits, decoder_state, loss = self.model.decode(inputs.tokens, memory, inputs.segments, decoder_state)
        return SubjectOutput(logits, (memory, decoder_state), loss)

    def init_state(self, inputs: Inputs, *, capacity: int | None = None) -> State:
        assert isinstance(self.model, EncoderDecoder)
        assert inputs.source is not None
        memory = self.model.encode(inputs.source, inputs.source_segments)
        return memory, self.model.init_state(inputs.tokens.shape[0], capacity=capacity)


BOTH_SIDES: Mapping[str, str] = {
    "causal": "every token attends to both sides",
    "incremental_decoding": "a later token changes all earlier outputs, so none can be cached",
    "cross_attention": "it reads one sequence only",
}
"""Promises that a bidirectional model cannot make, with the reasons."""


@final
class OwnEncoder(OwnSubject):
    """A masked language model."""

    unavailable = BOTH_SIDES


@final
class OwnTagger(OwnSubject):
    """A tagger, with dependency trees that are derived from the tokens."""

    unavailable = BOTH_SIDES

    def forward(self, inputs: Inputs, state: State = None) -> SubjectOutput:
        assert state is None
        trees = grow(inputs.tokens, inputs.segments)
        logits, _, loss = self.model(inputs.tokens, inputs.segments, trees)
        return SubjectOutput(logits, None, loss)


@final
class OwnClassifier(OwnSubject):
    """A classifier of texts: one label per row."""

    per_token = False
    unavailable: Mapping[str, str] = {
        "causal": "a label may depend on the whole row",
        "incremental_decoding": "a later token may change the label, so nothing can be cached",
        "cross_attention": "it reads one sequence only",
        "packing": "a row has one label, so it holds one document",
        "per_token": "a row has one label, tokens have none",
    }


BRIGHTNESS_LEVELS = 256
"""The number of values of a pixel's channel, which is a token of an image."""


@final
class OwnImageClassifier(OwnSubject):
    """A classifier of images: one label per image, whose tokens are a fixed number of pixel values."""

    per_token = False
    unavailable: Mapping[str, str] = {
        "causal": "a label may depend on the whole image",
        "incremental_decoding": "an image is processed as a whole",
        "cross_attention": "it reads one image only",
        "padding_invariant": "all images have one size, so there is no padding",
        "packing": "an image is not part of a row",
        "per_token": "an image has one label, its patches have none",
    }

    def __init__(self, model: Model, token_ids: int, name: str | None) -> None:
        super().__init__(model, token_ids, name)
        assert model.max_length is not None
        self.length_multiple = model.max_length

    def forward(self, inputs: Inputs, state: State = None) -> SubjectOutput:
        assert state is None
        assert isinstance(self.model, ImageClassifier)
        logits, _, loss = self.model(images_of(self.model, inputs.tokens))
        return SubjectOutput(logits, None, loss)


def _not_promised(card: RecipeCard | None) -> dict[str, str]:
    """The promises that the card excludes, with the reasons; without a card, those that need a recipe."""
    if card is None:
        reason = "this model was not built from a recipe, so it cannot be built again"
        return {"saving": reason, "spec": reason}
    valid_names = {*CARD_PROMISES, *CONTRACTS, *(need for contract in CONTRACTS.values() for need in contract.needs)}
    if unknown_names := sorted(card.reasons.keys() - valid_names):
        raise UserError(
            f"the card of {card.name} has a reason for '{unknown_names[0]}', which is no promise and no contract"
        )
    return {
        name: reason for name, reason in card.reasons.items() if name not in CARD_PROMISES or not getattr(card, name)
    }
