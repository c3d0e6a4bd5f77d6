"""The library's own models as subjects."""

from collections.abc import Mapping
from pathlib import Path
from typing import Self, final

import torch

from manyformer.api import load
from manyformer.check.contracts import CONTRACTS
from manyformer.check.contracts.loss_contract import images_of
from manyformer.check.subject import Inputs, Subject, SubjectOutput
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

PROMISES = ("causal", "incremental_decoding", "cross_attention", "padding_invariant")


def own(model: Model, *, name: str | None = None) -> Subject:
    """The subject for one of our models. Raises UserError for a kind of model that no contract knows."""
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
        return OwnImageClassifier(model, BRIGHTNESS, name)
    raise UserError(f"no contract knows what a {type(model).__name__} takes and gives: wrap it in an Adapter")


class OwnSubject(Subject):
    """What our models have in common: their card says what they promise."""

    silent: Mapping[str, str] = {}
    """What a kind of model cannot promise, whatever its card says."""

    def __init__(self, model: Model, token_ids: int, name: str | None) -> None:
        self.module = model
        # Apple's devices know no float64
        self.exact = model.device.type != "mps"
        spec: ModelSpec | None = getattr(model, "spec", None)
        card = None if spec is None else card_of(spec)
        self.name = name or (type(model).__name__ if spec is None else spec.recipe)
        self.max_length = model.max_length
        self.not_promised = {**self.silent, **_denied(card)}
        self.token_ids = torch.arange(token_ids, device=model.device)

    @property
    def model(self) -> Model:
        """The model."""
        assert isinstance(self.module, Model)
        return self.module

    def forward(self, inputs: Inputs, state: State = None) -> SubjectOutput:
        assert state is None
        logits, _, loss = self.model(inputs.tokens, inputs.segments)
        return SubjectOutput(logits, None, loss)

    def save_to(self, folder: str) -> None:
        self.model.save(Path(folder) / "model")

    def copy_from(self, folder: str) -> Self:
        again = own(load(Path(folder) / "model").to(self.token_ids.device), name=self.name)
        assert isinstance(again, type(self))
        return again


@final
class OwnLanguageModel(OwnSubject):
    """A decoder-only model."""

    silent: Mapping[str, str] = {"cross_attention": "a language model reads one sequence only"}
    measured_anyway = frozenset({"causal", "causal-gradient"})

    def forward(self, inputs: Inputs, state: State = None) -> SubjectOutput:
        return SubjectOutput(*self.model(inputs.tokens, inputs.segments, state))

    def init_state(self, inputs: Inputs, *, capacity: int | None = None) -> State:
        assert isinstance(self.model, LanguageModel)
        return self.model.init_state(inputs.tokens.shape[0], capacity=capacity)


@final
class OwnEncoderDecoder(OwnSubject):
    """A decoder given a source; with a state, the source is encoded once and kept beside it."""

    takes_source = True

    def forward(self, inputs: Inputs, state: State = None) -> SubjectOutput:
        assert isinstance(self.model, EncoderDecoder)
        if state is None:
            assert inputs.source is not None
            return SubjectOutput(*self.model(inputs.source, inputs.tokens, inputs.source_segments, inputs.segments))
        memory, stream = state
        logits, stream, loss = self.model.decode(inputs.tokens, memory, inputs.segments, stream)
        return SubjectOutput(logits, (memory, stream), loss)

    def init_state(self, inputs: Inputs, *, capacity: int | None = None) -> State:
        assert isinstance(self.model, EncoderDecoder)
        assert inputs.source is not None
        memory = self.model.encode(inputs.source, inputs.source_segments)
        return memory, self.model.init_state(inputs.tokens.shape[0], capacity=capacity)


BOTH_SIDES: Mapping[str, str] = {
    "causal": "every token sees both sides",
    "incremental_decoding": "a later token changes all earlier outputs, so nothing can be kept",
    "cross_attention": "it reads one sequence only",
}
"""What a model cannot promise that reads a sequence as a whole."""


@final
class OwnEncoder(OwnSubject):
    """A masked language model."""

    silent = BOTH_SIDES


@final
class OwnTagger(OwnSubject):
    """A model that gives every word a label, told of trees that follow from the tokens."""

    silent = BOTH_SIDES

    def forward(self, inputs: Inputs, state: State = None) -> SubjectOutput:
        assert state is None
        trees = grow(inputs.tokens, inputs.segments)
        logits, _, loss = self.model(inputs.tokens, inputs.segments, trees)
        return SubjectOutput(logits, None, loss)


@final
class OwnClassifier(OwnSubject):
    """A model that gives a row one label."""

    per_token = False
    silent: Mapping[str, str] = {
        "causal": "a label may depend on the whole row",
        "incremental_decoding": "a later token may change the label, so nothing can be kept",
        "cross_attention": "it reads one sequence only",
        "packing": "a row has one label, so it holds one document",
        "per_token": "a row has one label, tokens have none",
    }


BRIGHTNESS = 256
"""A token of an image is the brightness of one channel of one pixel."""


@final
class OwnImageClassifier(OwnSubject):
    """A model that gives an image one label: its tokens are the values of its pixels, always as many."""

    per_token = False
    silent: Mapping[str, str] = {
        "causal": "a label may depend on the whole image",
        "incremental_decoding": "an image is there as a whole",
        "cross_attention": "it reads one image only",
        "padding_invariant": "all images are of one size, so that there is none",
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


def _denied(card: RecipeCard | None) -> dict[str, str]:
    """What the card does not promise; without a card everything is promised but what only a recipe can give."""
    if card is None:
        why = "no recipe made this model, so nothing says how to make it again"
        return {"saving": why, "spec": why}
    known = {*PROMISES, *CONTRACTS, *(need for contract in CONTRACTS.values() for need in contract.needs)}
    if unknown := sorted(card.reasons.keys() - known):
        raise UserError(f"the card of {card.name} excuses itself from '{unknown[0]}', which nothing promises")
    return {name: why for name, why in card.reasons.items() if name not in PROMISES or not getattr(card, name)}
