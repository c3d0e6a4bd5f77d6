"""The models of this library as subjects."""

from pathlib import Path
from typing import Self, final

import torch

from manyformer.api import load
from manyformer.check.contracts import CONTRACTS
from manyformer.check.subject import Subject, SubjectOutput
from manyformer.core import State
from manyformer.errors import UserError
from manyformer.models import Model, ModelSpec
from manyformer.models.model import model_name
from manyformer.recipes import RecipeCard
from manyformer.recipes.registry import FACTS, PROMISES, card_of, task_of
from manyformer.system.devices import device_kind
from manyformer.tasks import Inputs


@final
class OwnSubject(Subject):
    """A model of this library: its task knows the inputs and outputs, and the recipe's card has the promises.

    Raises UserError for a model class without a task.
    """

    def __init__(self, model: Model, *, name: str | None = None) -> None:
        self.module = model
        self._model = model
        self.task = task_of(model)
        self.exact = device_kind(model.device).has_float64
        spec: ModelSpec | None = getattr(model, "spec", None)
        card = None if spec is None else card_of(spec)
        self.name = name or model_name(model)
        self.max_length = model.max_length
        self.length_multiple = self.task.fixed_length(model) or 1
        self.takes_source, self.per_token = self.task.takes_source, self.task.per_token
        self.measured_anyway = self.task.measured_anyway
        self.not_promised = {**self.task.reasons, **self.task.model_reasons(model), **_not_promised(card)}
        self.token_ids = torch.arange(self.task.token_ids(model), device=model.device)

    @property
    def model(self) -> Model:
        return self._model

    def forward(self, inputs: Inputs, state: State = None) -> SubjectOutput:
        return SubjectOutput(*self.task.call(self.model, inputs, state))

    def init_state(self, inputs: Inputs, *, capacity: int | None = None) -> State:
        return self.task.init_state(self.model, inputs, capacity=capacity)

    def save_to(self, folder: str) -> None:
        self.model.save(Path(folder) / "model")

    def copy_from(self, folder: str) -> Self:
        return type(self)(load(Path(folder) / "model").to(self.token_ids.device), name=self.name)


def _not_promised(card: RecipeCard | None) -> dict[str, str]:
    """The promises that the card excludes, with the reasons; without a card, those that need a recipe."""
    if card is None:
        reason = "this model was not built from a recipe, so it cannot be built again"
        return {"saving": reason, "spec": reason}
    valid_names = {*PROMISES, *FACTS, *CONTRACTS, *(need for contract in CONTRACTS.values() for need in contract.needs)}
    if unknown_names := sorted(card.reasons.keys() - valid_names):
        raise UserError(
            f"the card of {card.name} has a reason for '{unknown_names[0]}', which is no promise, fact or contract"
        )
    return card.reasons
