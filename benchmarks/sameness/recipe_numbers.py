"""The numbers of a recipe at its test size: logits, losses of training steps, cached passes and generated tokens.

Weights, inputs and targets are drawn from seeds; each part begins with a new model, so that no part changes another's.
Besides the recipe with its defaults, every choice that a keyword offers by name is computed, with fewer steps.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import torch
from torch import Tensor

import manyformer as mf
from manyformer.analysis.own_models import build_tiny
from manyformer.config import AdamWConfig
from manyformer.inference.generate import SourceBatch, answer_sources, decoding_from_options
from manyformer.models import GenerativeModel, Model, PolicyModel
from manyformer.models.tasks import Inputs, Task
from manyformer.nn.batches import Batch
from manyformer.nn.core import PADDING_SEGMENT
from manyformer.recipes import get_recipe
from manyformer.recipes.parts.registry import task_of
from manyformer.training.engine import TrainingEngine
from manyformer.training.process_group import DDPStrategy
from sameness.fingerprints import fingerprint

ROWS = 2
LENGTH = 48
"""Longer than a block, a chunk or a window of any tiny model."""

STEPS = 20
STEPS_WITH_DROPOUT = 4
STEPS_OF_A_CHOICE = 5
LEARNING_RATE = 1e-3

PROMPTS = [[1 + i % 5 for i in range(9)], [2 + i % 7 for i in range(13)]]
"""Of unequal length, so that one of them is padded on the left."""

NEW_TOKENS = 18
PREFILL = 9
"""Tokens that a cached pass begins with; the rest follow one at a time."""


class NothingToWrite(Exception):
    """The recipe has no such numbers."""


class TinyRecipe(NamedTuple):
    """A recipe's tiny model with inputs and targets."""

    model: Model
    task: Task[Any]
    inputs: Inputs
    targets: Tensor

    def batches(self) -> list[Batch]:
        """Two batches, which training takes in turns."""
        inputs = [self.inputs]
        if not self.inputs.tokens.is_floating_point():
            inputs.append(self.task.example(self.model, self.inputs.tokens.flip(0).contiguous()))
        # some batches hold what a table of the model says about a token: a constant, as data are
        with torch.no_grad():
            return [self.task.batch(self.model, each, self.targets) for each in inputs]


class Variant(NamedTuple):
    """A recipe with keywords beside those of its test size."""

    recipe: str
    keywords: Mapping[str, Any] = {}

    def tiny(self, **keywords: Any) -> TinyRecipe:
        """A new model with its inputs, always the same; `keywords` replace its own."""
        model = build_tiny(self.recipe, {**self.keywords, **keywords}, 0)
        task = task_of(model)
        length = task.fixed_length(model) or min(LENGTH, model.max_length or LENGTH)
        generator = torch.Generator().manual_seed(0)
        inputs = task.example(model, torch.randint(task.token_ids(model), (ROWS, length), generator=generator))
        return TinyRecipe(model, task, inputs, task.random_targets(model, inputs, generator))

    def promises(self, contract: str) -> bool:
        """Whether the card of the recipe promises a contract."""
        return contract in get_recipe(self.recipe).card.promises


def choices() -> Iterator[tuple[str, Variant]]:
    """Each recipe with each choice of a keyword that is not the default, under a name such as `compose kernel=rfa`."""
    for name, recipe in sorted(mf.recipes().items()):
        for parameter in recipe.signature.parameters.values():
            for choice in _named_choices(parameter.annotation):
                if choice != parameter.default:
                    yield f"{name} {parameter.name}={choice}", Variant(name, {parameter.name: choice})


def _named_choices(annotation: Any) -> list[Any]:
    """The values that a type lists, also inside `| None` and Annotated."""
    if annotation is bool:
        return [False, True]
    origin = get_origin(annotation)
    if origin is Literal:
        return list(get_args(annotation))
    if origin is Annotated:
        return _named_choices(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [choice for inner in get_args(annotation) if inner is not bool for choice in _named_choices(inner)]
    return []


def numbers_of_recipe(name: str) -> dict[str, Any]:
    """All parts of a recipe; what it does not have, or refuses, is the sentence that says so."""
    return _numbers_of(Variant(name), PARTS)


def numbers_of_choice(variant: Variant) -> dict[str, Any]:
    """The parts that show another mechanism."""
    return _numbers_of(variant, PARTS_OF_A_CHOICE)


def _numbers_of(variant: Variant, parts: Mapping[str, Callable[[Variant], Any]]) -> dict[str, Any]:
    start = time.process_time()
    record = {part: _attempt(work, variant) for part, work in parts.items()}
    return record | {"seconds": round(time.process_time() - start, 2)}


def _attempt(work: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    torch.manual_seed(0)
    try:
        return work(*arguments, **keywords)
    except Exception as error:
        # an error that only a defect can cause is a difference from the commit that has none
        return f"{type(error).__name__}: {error}"


def weights(variant: Variant) -> dict[str, Any]:
    """Names and shapes, which checkpoints hold, and the values."""
    model = variant.tiny().model
    values = torch.cat([weight.detach().reshape(-1).float() for weight in model.parameters()])
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    return {"shapes": shapes, "values": fingerprint(values)}


def logits(variant: Variant) -> dict[str, Any]:
    """The outputs in evaluation mode and in training mode."""
    tiny = variant.tiny()
    with torch.no_grad():
        evaluated = tiny.task.call(tiny.model.eval(), tiny.inputs).logits
    torch.manual_seed(0)
    trained = tiny.task.call(tiny.model.train(), tiny.inputs).logits
    return {"evaluation": fingerprint(evaluated), "training": fingerprint(trained)}


def packed_logits(variant: Variant) -> dict[str, Any]:
    """The outputs where rows hold two documents and padding at the end, and where a row begins with padding."""
    tiny = variant.tiny()
    if not variant.promises("padding_invariant"):
        raise NothingToWrite("it does not promise that padding changes nothing")
    length = tiny.inputs.tokens.shape[1]
    packed = torch.zeros(tiny.inputs.tokens.shape[:2], dtype=torch.long)
    packed[0, length // 3 :] = 1
    packed[0, length - 3 :] = PADDING_SEGMENT
    padded = torch.zeros_like(packed)
    padded[0, :5] = PADDING_SEGMENT
    tiny.model.eval()
    with torch.no_grad():
        return {
            name: fingerprint(tiny.task.call(tiny.model, tiny.inputs._replace(segments=segments)).logits)
            for name, segments in (("packed", packed), ("padded on the left", padded))
        }


def losses(variant: Variant, steps: int = STEPS) -> dict[str, list[float]]:
    """Losses, auxiliary losses and norms of gradients of steps with the default optimizer."""
    return _train(variant.tiny(), steps)


def losses_with_dropout(variant: Variant) -> dict[str, list[float]]:
    """The same with dropout, which shows in which order random numbers are drawn."""
    if "dropout" not in get_recipe(variant.recipe).signature.parameters:
        raise NothingToWrite("it has no dropout")
    return _train(variant.tiny(dropout=0.1), STEPS_WITH_DROPOUT)


def losses_in_double(variant: Variant) -> dict[str, list[float]]:
    """Losses and norms of gradients in float64, where another order of the same sums is no difference to speak of."""
    tiny = variant.tiny()
    model = tiny.model.double().train()
    rows = []
    for batch in tiny.batches():
        torch.manual_seed(0)
        loss = model.loss(batch)
        (loss.total / max(1, batch.target_count()) + loss.extra).backward()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        rows.append([float(loss.total.detach()), float(torch.nn.utils.get_total_norm(gradients))])
        model.zero_grad(set_to_none=True)
    total, norm = (list(column) for column in zip(*rows))
    return {"total": total, "gradient norm": norm}


def _train(tiny: TinyRecipe, steps: int) -> dict[str, list[float]]:
    engine = TrainingEngine(tiny.model, AdamWConfig(), DDPStrategy())
    batches = tiny.batches()
    rows = []
    for number in range(steps):
        torch.manual_seed(number)
        rows.append(engine.step([batches[number % len(batches)]], LEARNING_RATE).figures[:3].tolist())
    loss, auxiliary, norm = (list(column) for column in zip(*rows))
    return {"loss": loss, "auxiliary": auxiliary, "gradient norm": norm}


def cached_logits(variant: Variant) -> dict[str, Any]:
    """The outputs of a pass over the first tokens and of one token at a time after it, with the state between them."""
    tiny = variant.tiny()
    if not (tiny.task.generates or variant.promises("incremental_decoding")):
        raise NothingToWrite("it has no decoding state")
    model = tiny.model.eval()
    length = min(tiny.inputs.tokens.shape[1], 3 * PREFILL)
    bounds = [0, *range(PREFILL, length + 1)]
    outputs = []
    with torch.no_grad():
        state = tiny.task.init_state(model, tiny.inputs)
        for start, stop in pairwise(bounds):
            output = tiny.task.call(model, tiny.inputs.columns(start, stop), state)
            state = output.state
            outputs.append(output.logits)
    return fingerprint(torch.cat(outputs, 1))


def generated(variant: Variant) -> dict[str, Any]:
    """Tokens of greedy decoding by each kind of step, of sampling, and of a beam with its scores."""
    return {name: _attempt(_generate, variant, **options) for name, options in DECODINGS.items()}


def generated_by_choice(variant: Variant) -> dict[str, Any]:
    """The first of them."""
    return {"greedy": _attempt(_generate, variant, **DECODINGS["greedy"])}


def _generate(variant: Variant, **options: Any) -> list[list[Any]]:
    """The tokens and the score of each answer to each prompt."""
    tiny = variant.tiny()
    model = tiny.model.eval()
    if not isinstance(model, GenerativeModel) or isinstance(model, PolicyModel):
        raise NothingToWrite("it generates no tokens")
    longest = (model.max_length or LENGTH) - len(PROMPTS[1])
    torch.manual_seed(0)
    decoding = decoding_from_options(max_new=min(NEW_TOKENS, longest), stop_ids=(), **options)
    if tiny.task.takes_source:
        sources = SourceBatch(*tiny.task.source(model, tiny.inputs))  # type: ignore[attr-defined]
        result = answer_sources(model, sources, decoding=decoding, batch=ROWS)  # type: ignore[arg-type]
    else:
        result = mf.generate(model, PROMPTS, decoding=decoding, batch=ROWS)
    return [[list(answer.tokens), answer.score] for answers in result.rows for answer in answers]


DECODINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "static steps": {"temperature": 0.0, "step_path": "static"},
    "sampled": {"seed": 3, "temperature": 1.3, "top_k": 8},
    "beam": {"beam": 3},
}

PARTS: dict[str, Callable[[Variant], Any]] = {
    "weights": weights,
    "logits": logits,
    "packed logits": packed_logits,
    "losses": losses,
    "losses with dropout": losses_with_dropout,
    "losses in float64": losses_in_double,
    "cached logits": cached_logits,
    "generated": generated,
}

PARTS_OF_A_CHOICE: dict[str, Callable[[Variant], Any]] = {
    "weights": weights,
    "logits": logits,
    "packed logits": packed_logits,
    "losses": partial(losses, steps=STEPS_OF_A_CHOICE),
    "cached logits": cached_logits,
    "generated": generated_by_choice,
}
