"""Modules that no recipe builds, such as a user's own: a model around one, with the loss and score of what it returns.

The module is called with the batch. What it returns is a loss, logits, or both: a tensor, a tuple, a mapping, or an
object with `loss` and `logits`, as Hugging Face models return."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, final

import torch
import torch.nn.functional as F
from safetensors.torch import save_model
from torch import Generator, Tensor, nn

from manyformer.base.errors import UserError, suggest_names
from manyformer.base.files.atomic_files import atomic_path
from manyformer.base.keyword_checks import check_names
from manyformer.base.plugins import imported_file
from manyformer.models import BatchLoss, BatchScore, Model, ModelOutput
from manyformer.models.model_files import CONFIG_FILE, WEIGHTS_FILE, ModelRecord, ModelSpec
from manyformer.models.scores import ScoreKind
from manyformer.models.tasks.requests import EvaluationRequest, EvaluationResult
from manyformer.models.tasks.task import ScoreSums, Task, likelihood, token_scores
from manyformer.models.tasks.toy import Toy, ToyDraw
from manyformer.nn.batches import IGNORE_INDEX, Batch, TextUnits
from manyformer.nn.batches.given_batches import GivenBatch
from manyformer.nn.core import State
from manyformer.nn.model_inputs import Inputs
from manyformer.recipes.parts.cards import OWN_RECIPES, Recipe, RecipeCard

LossFn = Callable[..., Tensor]
"""The mean loss of the output of a module, given the output and the target, or the batch where it has no target."""

TARGET_NAMES = ("targets", "target", "y")
"""Names of the second parameter of a `forward` that takes the target, and returns the loss beside the logits."""

CLASSIFIED = "classified"
"""The number of targets whose class was predicted, among the sums of scores: none where a module gives a loss alone."""


class CallParts(NamedTuple):
    """What a module has returned: its mean loss, its logits or other output, and an auxiliary loss."""

    loss: Tensor | None
    logits: Any
    extra: Tensor | float = 0.0


def parts_of_output(output: Any) -> CallParts:
    """The loss and the logits in what a module has returned. Raises UserError where there is neither."""
    if isinstance(output, ModelOutput):
        return CallParts(None, output.logits, output.loss)
    if isinstance(output, Tensor):
        return CallParts(output, None) if output.ndim == 0 else CallParts(None, output)
    if isinstance(output, Mapping):
        return CallParts(output.get("loss"), output.get("logits"))
    if hasattr(output, "logits") or hasattr(output, "loss"):
        return CallParts(getattr(output, "loss", None), getattr(output, "logits", None))
    if isinstance(output, Sequence) and not isinstance(output, str):
        tensors = [item for item in output if isinstance(item, Tensor)]
        loss = next((tensor for tensor in tensors if tensor.ndim == 0 and tensor.is_floating_point()), None)
        logits = next((tensor for tensor in tensors if tensor.ndim > 0), None)
        if loss is not None or logits is not None:
            return CallParts(loss, logits)
    raise UserError(
        f"the module returned a {type(output).__name__}, in which there is neither a loss nor logits: return a tensor, "
        "(logits, loss), or an object with `loss` or `logits`"
    )


class ModuleLoss(NamedTuple):
    """The summed loss of a batch, the auxiliary loss, and how many targets were predicted, of how many."""

    total: Tensor
    extra: Tensor | float
    correct: Tensor | float
    classified: int


@final
class OwnModule(Model[Batch]):
    """A module of the user's own, called with batches; its weights keep their names in files.

    `loss_fn` computes the mean loss of its output, for outputs that are neither a loss nor logits of classes."""

    call_form = None

    def __init__(self, module: nn.Module, spec: ModelSpec, loss_fn: LossFn | None = None) -> None:
        super().__init__()
        if next(module.parameters(), None) is None:
            raise UserError(f"{spec.recipe} has no parameters, so there is nothing to train")
        self.module = module
        self.spec = spec
        self._loss_fn = loss_fn
        names = list(inspect.signature(module.forward).parameters)
        self._takes_target = loss_fn is None and len(names) > 1 and names[1] in TARGET_NAMES

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)

    def loss(self, batch: Batch, *, label_smoothing: float = 0.0, state: State = None) -> BatchLoss:
        call = as_call(batch)
        result = self._module_loss(call, label_smoothing)
        targets = torch.tensor(call.targets, device=result.total.device)
        return BatchLoss(result.total, targets, result.extra)

    def score(self, batch: Batch, *, state: State = None) -> BatchScore:
        call = as_call(batch)
        result = self._module_loss(call, 0.0)
        device = result.total.device
        return BatchScore(
            result.total,
            torch.tensor(call.targets, device=device),
            torch.as_tensor(result.correct, device=device),
            others={CLASSIFIED: torch.tensor(result.classified, device=device)},
        )

    def _module_loss(self, batch: GivenBatch, label_smoothing: float) -> ModuleLoss:
        arguments = batch.arguments
        if self._takes_target and batch.target is not None and not batch.is_shifted:
            arguments = (*arguments, batch.target)
        output = self.module(*arguments, **batch.keywords)
        if self._loss_fn is not None:
            aim = batch.keywords if batch.target is None else batch.target
            return self._of_mean(self._loss_fn(output, aim), batch, label_smoothing)
        parts = parts_of_output(output)
        if parts.loss is not None:
            return self._of_mean(parts.loss, batch, label_smoothing)
        if batch.target is None:
            self._refuse("gives no loss for such a batch: add what its forward takes as labels, or give loss=")
        logits, target = self._aligned(parts.logits, batch)
        total = F.cross_entropy(
            logits.float(), target, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=label_smoothing
        )
        correct = ((logits.argmax(-1) == target) & (target != IGNORE_INDEX)).sum()
        # a process without rows takes part with a loss of 0
        weight = float(batch.targets > 0)
        return ModuleLoss(total * weight, parts.extra, correct, batch.targets)

    def _of_mean(self, loss: Tensor, batch: GivenBatch, label_smoothing: float) -> ModuleLoss:
        if label_smoothing:
            self._refuse("computes its loss itself, so loss.label_smoothing has no effect; leave it out")
        if loss.ndim:
            self._refuse(f"gives a loss of shape {tuple(loss.shape)}; it must be one number, the mean over the batch")
        return ModuleLoss(loss.float() * batch.targets, 0.0, 0.0, 0)

    def _aligned(self, logits: Tensor, batch: GivenBatch) -> tuple[Tensor, Tensor]:
        """The logits (n, classes) and their targets (n,). Raises UserError for shapes that do not fit."""
        target = batch.target
        assert target is not None
        shapes = f"gives an output of shape {tuple(logits.shape)} for targets of shape {tuple(target.shape)}"
        if target.is_floating_point():
            self._refuse(f"{shapes} that are no classes; give the loss, such as loss=torch.nn.functional.mse_loss")
        if logits.shape[:-1] != target.shape:
            # torch's own place of the classes
            if logits.ndim == target.ndim + 1 and logits.shape[:1] + logits.shape[2:] == target.shape:
                logits = logits.movedim(1, -1)
            else:
                self._refuse(f"{shapes}: logits have the shape of the targets and the classes after it")
        if batch.is_shifted:
            if logits.ndim != 3:
                self._refuse(f"{shapes}, and a batch of tokens alone is for a model of the next token")
            logits = logits[:, :-1]
            target = target[:, 1:]
        return logits.flatten(0, -2), target.flatten()

    def _refuse(self, problem: str) -> NoReturn:
        raise UserError(f"{self.spec.recipe} {problem}")

    # files have the names of the module's own weights
    def state_dict(self, *args: Any, **options: Any) -> Any:
        return self.module.state_dict(*args, **options)

    def write_files(self, folder: Path) -> None:
        record = ModelRecord(recipe=self.spec.recipe, recipe_module=self.spec.module, keywords=self.spec.keywords)
        record.write(folder / CONFIG_FILE)
        with atomic_path(folder / WEIGHTS_FILE) as file:
            save_model(self.module, str(file))


def as_call(batch: Batch) -> GivenBatch:
    """A batch of the library's own data as the call of a module: its first field, and its second as the target.

    Raises UserError for batches with another form."""
    if isinstance(batch, GivenBatch):
        return batch
    fields = getattr(batch, "_fields", ())
    if fields[:2] not in (("tokens", "targets"), ("tokens", "labels"), ("pixels", "labels")):
        raise UserError(f"a module of your own learns from batches (input, target), not from {type(batch).__name__}")
    return GivenBatch((batch[0],), {}, batch[1], len(batch[0]), batch.target_count())


@final
class OwnTask(Task[OwnModule]):
    """What a module of the user's own is for: only its batches say."""

    name = "own-module"
    title = "a module of your own"
    model = OwnModule
    data_forms: Mapping[str, str] = {"text": "next-token", "synthetic": "next-token"}
    score_kinds: Mapping[str, ScoreKind] = {}
    reasons: Mapping[str, str] = {
        "causal": "the library did not build it",
        "incremental_decoding": "the library did not build it",
        "cross_attention": "the library did not build it",
        "padding_invariant": "the library did not build it",
    }

    def validation(self, sums: ScoreSums, units: TextUnits | None) -> dict[str, float]:
        loss = sums.nats / max(1, sums.targets)
        scores = {"loss": loss}
        # with no sums at all, the names of all scores that there may be
        if not sums.others or sums.others[CLASSIFIED]:
            scores["accuracy"] = sums.correct / max(1, sums.targets)
            scores["perplexity"] = math.exp(loss) if loss < 700 else math.inf
        if units is not None:
            scores["bits_per_byte"] = loss / math.log(2) / (units.bytes / units.targets)
        return scores

    def evaluate(self, request: EvaluationRequest[OwnModule]) -> EvaluationResult:
        sums = likelihood(request)
        return EvaluationResult(token_scores(sums), f"{sums.targets:,} targets in rows of {request.row_length}")

    def token_ids(self, model: OwnModule) -> int:
        self._unknown()

    def arguments(self, model: OwnModule, inputs: Inputs) -> tuple[Any, ...]:
        self._unknown()

    def batch(self, model: OwnModule, inputs: Inputs, targets: Tensor) -> Batch:
        self._unknown()

    def random_targets(self, model: OwnModule, inputs: Inputs, generator: Generator) -> Tensor:
        self._unknown()

    def toy(self, model: OwnModule, draw: ToyDraw) -> Toy:
        self._unknown()

    def _unknown(self) -> NoReturn:
        raise UserError("what a module of your own is called with is not known: give it to this function itself")


OWN_TASK = OwnTask()


def recipe_in_imported_file(name: str) -> Recipe:
    """The recipe of FILE.py:NAME, a module's class or a function that gives a module.

    The file is a program, which must be imported already. Raises UserError."""
    file, _, attribute = name.rpartition(":")
    module = imported_file(file)
    if module is None:
        raise UserError(f"the recipe {name} is in a file, which is a program: --import {file} runs and imports it")
    factory = getattr(module, attribute, None)
    if not callable(factory):
        names = [key for key, value in vars(module).items() if callable(value) and value.__module__ == module.__name__]
        raise UserError(f"{file} has no class or function '{attribute}'; {suggest_names(attribute, names)}")
    return register_own(name, factory)


DEFAULT_VOCABULARY = 256
"""The number of token ids where neither the data nor a class has said one, as while a run is planned."""

VOCABULARY_NAMES = ("vocab", "vocab_size", "vocabulary", "n_vocab", "num_tokens", "n_tokens", "ntoken")
"""How the parameter of a module's class is called that is the number of token ids."""


def register_own(name: str, factory: Callable[..., nn.Module], loss_fn: LossFn | None = None) -> Recipe:
    """The recipe of a module of the user's own, which `factory` builds; this process alone knows it.

    Its keywords are those of the factory, of which `vocab` stands for the number of token ids, whatever its name."""
    parameters = inspect.signature(factory).parameters
    own_names = {
        "vocab" if parameter.name in VOCABULARY_NAMES else parameter.name: parameter.name
        for parameter in parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    shown_parameters = {
        shown: parameters[parameter_name].replace(name=shown, kind=inspect.Parameter.KEYWORD_ONLY)
        for shown, parameter_name in own_names.items()
    }
    if "vocab" in shown_parameters and shown_parameters["vocab"].default is inspect.Parameter.empty:
        shown_parameters["vocab"] = shown_parameters["vocab"].replace(default=DEFAULT_VOCABULARY)
    signature = inspect.Signature(list(shown_parameters.values()))

    def build(**keywords: Any) -> OwnModule:
        check_names(name, keywords, own_names)
        missing = [
            shown
            for shown, parameter in signature.parameters.items()
            if parameter.default is parameter.empty and shown not in keywords
        ]
        if missing:
            raise UserError(f"{name} needs model.{missing[0]}, for which its {factory.__name__} has no default")
        keywords = {
            shown: keywords.get(shown, parameter.default)
            for shown, parameter in signature.parameters.items()
            # its factory knows other defaults best
            if shown in keywords or shown == "vocab"
        }
        module = factory(**{own_names[shown]: value for shown, value in keywords.items()})
        if not isinstance(module, nn.Module):
            raise UserError(f"{name} must give an nn.Module, and it gave a {type(module).__name__}")
        return OwnModule(module, ModelSpec(name, keywords, type(module).__module__), loss_fn)

    build.__signature__ = signature  # type: ignore[attr-defined]
    build.__module__ = getattr(factory, "__module__", "")
    card = RecipeCard(
        name=name,
        title=name,
        paper="A module of the user's own",
        summary="The library trains it as it is.",
        task=OWN_TASK,
        cost="unknown",
        reasons=dict(OWN_TASK.reasons),
    )
    OWN_RECIPES[name] = Recipe(card, build)
    return OWN_RECIPES[name]
