"""Models of this library under the contracts: recipes by name, saved models and runs, and models in memory.

Recipes are built with tiny sizes, which use all mechanisms and run within milliseconds."""

import statistics
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from manyformer.analysis.contracts.check import CONTRACTS
from manyformer.analysis.contracts.check import check as check_subject
from manyformer.analysis.contracts.check import find_subject as find_any_subject
from manyformer.analysis.contracts.check_report import CheckReport, ContractRow
from manyformer.analysis.contracts.subject import Adapter, Subject, SubjectOutput, TargetScore, ToyTraining
from manyformer.analysis.contracts.trial import Backend
from manyformer.base.errors import UserError, suggest_names
from manyformer.base.system import temporary_folder
from manyformer.conversion import load
from manyformer.models import Model, ModelSpec
from manyformer.models.generative_model import NextTokenFn
from manyformer.models.model import model_name
from manyformer.models.model_files import refuse_changed_modules
from manyformer.models.tasks import Inputs, ToyDraw
from manyformer.models.tasks.masked_language_modelling import CLASSES, HEAD
from manyformer.models.tasks.toy import PERIOD
from manyformer.nn.core import State
from manyformer.nn.runtime.devices import device_kind
from manyformer.nn.runtime.training_hooks import run_post_step_updates
from manyformer.recipes import RecipeCard, build, get_recipe, recipe_names
from manyformer.recipes.parts.cards import FACTS, PROMISES
from manyformer.recipes.parts.registry import card_of, task_of

TINY_KEYWORDS: dict[str, Any] = {
    "vocab": 29,
    "classes": 3,
    "dim": 16,
    "depth": 2,
    "heads": 2,
    "ff_dim": 24,
    "max_length": 128,
    "dropout": 0.0,
}
"""Common keywords; those that only one recipe has are in the `tiny_keywords` of its card."""


PERTURBATION = 0.1

TOY_STEPS = 200
LEARNING_RATE = 6e-3

PERIODS = 6
"""The number of periods in a row of repeated symbols."""


def tiny_keywords(name: str) -> dict[str, Any]:
    """Tiny sizes for the recipe `name`, including those of its card. Raises UserError."""
    recipe = get_recipe(name)
    sizes = {keyword: value for keyword, value in TINY_KEYWORDS.items() if keyword in recipe.signature.parameters}
    if HEAD in recipe.signature.parameters:
        del sizes[CLASSES]  # the head that it has by default has no labels
    return sizes | recipe.card.tiny_keywords


def build_tiny(name: str, keywords: Mapping[str, Any], seed: int) -> Model:
    """Build the recipe `name` with `tiny_keywords`, overridden by `keywords`. Raises UserError.

    All parameters are perturbed: zero biases, unit gains and closed gates would hide defects.
    """
    keywords = tiny_keywords(name) | dict(keywords)
    # the generator of the process goes on as if nothing had been drawn
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = build(name, **keywords)
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=PERTURBATION)
    return model


def check(
    model: nn.Module | Adapter | Subject | str | Path,
    *,
    length: int | None = None,
    seed: int = 0,
    only: Collection[str] | None = None,
    skip: Collection[str] = (),
    compiler: Backend = "aot_eager",
    keywords: Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
    vocabulary: int | None = None,
    max_length: int | None = None,
    causal: bool = True,
    on_row: Callable[[ContractRow], None] | None = None,
) -> CheckReport:
    """Run the contracts of a model: causality, recurrent decoding, padding, packing, gradients, precision and more.

    `model` is a recipe's name (built with tiny sizes, perturbed parameters and `keywords`), the folder of a run or a
    saved model, a model, a Hugging Face model, an `Adapter`, or any other module, whose form of call is found by trial:
    `vocabulary` and `max_length` are not looked for if they are given, and `causal=False` is an encoder. `length` is
    the length of all sequences, by default 64 tokens for such modules, else 48 in contracts of many steps, and up to
    512 in causality contracts, for such modules as far as they are fast: each of these tokens is exchanged once, and a
    few in up to 2048. `only` and `skip` name contracts; "compile" takes seconds, and "learns" runs only if it is named.
    `device` is for a name or a folder. `on_row` is called with each finished row. The model is left unchanged. Raises
    UserError for a model that cannot be checked.
    """
    subject = find_own_subject(model, keywords or {}, seed, device)
    return check_subject(
        subject,
        length=length,
        seed=seed,
        only=only,
        skip=skip,
        compiler=compiler,
        vocabulary=vocabulary,
        max_length=max_length,
        causal=causal,
        on_row=on_row,
    )


def find_subject(
    model: nn.Module | Adapter | Subject | str | Path, options: Mapping[str, Any] = MappingProxyType({})
) -> Subject:
    """The subject for any `model` that `check` accepts, for several checks of it; `options` are keywords of `check`.

    Raises UserError for others."""
    return find_any_subject(find_own_subject(model, {}), options)


def find_own_subject(
    model: nn.Module | Adapter | Subject | str | Path,
    keywords: Mapping[str, Any],
    seed: int = 0,
    device: str | torch.device | None = None,
) -> nn.Module | Adapter | Subject:
    """The subject of a recipe's name, a folder or a model of this library; any other `model` itself.

    Raises UserError for names of neither, and for `keywords` or a `device` of what is built already."""
    # a name comes before a folder of the same name: `check bert` never depends on the working directory
    if isinstance(model, str) and model in recipe_names():
        return OwnSubject(build_tiny(model, keywords, seed).to(device))
    if keywords:
        raise UserError(f"keywords ({', '.join(keywords)}) are for a recipe's name; this model is built already")
    if isinstance(model, str | Path):
        if not Path(model).is_dir():
            raise UserError(
                f"'{model}' is neither a recipe nor a folder with a model; {suggest_names(str(model), recipe_names())}"
            )
        return OwnSubject(load(model).to(device), name=str(model))
    if device is not None:
        raise UserError(f"device ({device}) is for a name or a folder; this model has a device already")
    # a model of peft holds ours, with its adapters inside
    inner: Any = model
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    if isinstance(inner, Model):
        return OwnSubject(inner)
    return model


@final
class OwnSubject(Subject):
    """A model of this library: its task knows the inputs and outputs, and the recipe's card has the promises.

    Raises UserError for a model class without a task.
    """

    def __init__(self, model: Model, *, name: str | None = None) -> None:
        self.module = model
        self.model = model
        self.task = task_of(model)
        self.exact = device_kind(model.device).has_float64
        self.spec: ModelSpec | None = getattr(model, "spec", None)
        card = None if self.spec is None else card_of(self.spec)
        self.name = name or model_name(model)
        self.max_length = model.max_length
        self.length_multiple = self.task.fixed_length(model) or 1
        self.takes_source = self.task.takes_source
        self.per_token = self.task.per_token
        self.measured_anyway = self.task.measured_anyway
        reasons = {"targets": "its forward takes no targets"}
        if self.length_multiple > 1:
            reasons["length"] = f"its inputs have {self.length_multiple} tokens each"
        try:
            refuse_changed_modules(model, "saved")
        except UserError as error:
            # of either the recipe knows nothing
            reasons |= dict.fromkeys(("saving", "spec"), str(error))
        self.not_promised = reasons | {**self.task.reasons, **self.task.model_reasons(model), **_not_promised(card)}
        self.token_ids = torch.arange(self.task.token_ids(model), device=model.device)

    def forward(self, inputs: Inputs, state: State = None) -> SubjectOutput:
        return SubjectOutput(*self.task.call(self.model, inputs, state))

    def init_state(self, inputs: Inputs, *, capacity: int | None = None) -> State:
        return self.task.init_state(self.model, inputs, capacity=capacity)

    def saved_copy(self) -> Self:
        with temporary_folder() as folder:
            self.model.save(folder / "model")
            # on the device of the original, because results of two devices may differ in their bits
            return type(self)(load(folder / "model").to(self.token_ids.device), name=self.name)

    def rebuild(self, keywords: Mapping[str, Any]) -> "OwnSubject":
        return OwnSubject(build(self.model.spec.recipe, **keywords))

    def one_token_step(self) -> Callable[[], NextTokenFn] | None:
        return self.task.one_token_step(self.model)

    def training_loss(self, inputs: Inputs, targets: Tensor, *, smoothing: float = 0.0) -> Tensor:
        return self.model.loss(self.task.batch(self.model, inputs, targets), label_smoothing=smoothing).total

    def auxiliary_loss(self, inputs: Inputs, targets: Tensor) -> Tensor | float:
        return self.model.loss(self.task.batch(self.model, inputs, targets)).extra

    def score(self, inputs: Inputs, targets: Tensor) -> TargetScore:
        score = self.model.score(self.task.batch(self.model, inputs, targets))
        return TargetScore(score.nll, score.targets, score.correct)

    def train_on_toy_task(self, generator: torch.Generator, *, share: float, smoothing_steps: int) -> ToyTraining:
        # a new model: the weights of the checked one are perturbed or trained, and stay as they are
        model = build(self.model.spec.recipe, **self.model.spec.keywords).to(self.model.device)
        length = max(round(PERIODS * PERIOD / self.length_multiple), 1) * self.length_multiple
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98))
        losses = list[float]()
        guessing_loss = 0.0
        for step in range(TOY_STEPS):
            draw = ToyDraw.make(generator, self.token_ids.device, length)
            batch, guessing_loss = self.task.toy(model, draw)
            with torch.enable_grad():
                loss = model.loss(batch)
                total = (loss.total / loss.targets) + loss.extra
            optimizer.zero_grad()
            total.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20) * min(1.0, 2 * (1 - step / TOY_STEPS))
            optimizer.step()
            # codebooks and running means are updated here, as in a real training
            run_post_step_updates(model, step + 1)
            losses.append(float(loss.total.detach() / loss.targets))
            if step >= smoothing_steps and statistics.fmean(losses[-smoothing_steps:]) <= share * guessing_loss:
                break
        return ToyTraining(losses, guessing_loss)


def _not_promised(card: RecipeCard | None) -> dict[str, str]:
    """The promises that the card excludes, with the reasons; without a card, those that need a recipe."""
    if card is None:
        reason = "this model was not built from a recipe, so it cannot be built again"
        return {"saving": reason, "spec": reason}
    # a misspelled reason would excuse nothing, and the contract would fail without saying why
    valid_names = {*PROMISES, *FACTS, *CONTRACTS, *(need for contract in CONTRACTS.values() for need in contract.needs)}
    if unknown_names := sorted(card.reasons.keys() - valid_names):
        raise UserError(
            f"the card of {card.name} has a reason for '{unknown_names[0]}', which is no promise, fact or contract"
        )
    return card.reasons
