"""What is done with each recipe on the pretended device and on the CPU: training, packed and padded rows, decoding."""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import manyformer as mf
from manyformer.analysis.own_models import build_tiny
from manyformer.base.errors import UserError
from manyformer.config import AdamWConfig
from manyformer.inference.generate import SourceBatch, answer_sources, decoding_from_options
from manyformer.models import GenerativeModel, Model, PolicyModel
from manyformer.models.tasks import Inputs, Task
from manyformer.nn.batches import IGNORE_INDEX, to_device
from manyformer.nn.core import PADDING_SEGMENT
from manyformer.recipes import get_recipe
from manyformer.recipes.parts.registry import task_of
from manyformer.training.engine import TrainingEngine
from manyformer.training.process_group import DDPStrategy
from pretended_device.cuda_functions import pretended_device
from pretended_device.tensor import PretendedTensor, numbers_of
from pretended_device.waits import Wait, Waits

ROWS = 2
LENGTH = 48
"""Longer than a block, a chunk or a window of any tiny model."""

LEARNING_RATE = 1e-3

SHORT_DECODING = 2
LONG_DECODING = 18
"""New tokens of two decodings: their difference is what a token costs, without the prompt and the first steps."""

PROMPTS = [[1 + i % 5 for i in range(9)], [2 + i % 7 for i in range(13)]]
"""Of unequal length, so that one of them is padded on the left."""

WIDTH = 32
"""Channels of two heads: FlexAttention, which CUDA takes, needs 16 channels in each."""


class TinyRecipe(NamedTuple):
    """A recipe's tiny model with inputs and targets, all on the CPU, and the device where the model is to go."""

    model: Model
    task: Task[Any]
    inputs: Inputs
    targets: Tensor
    device: torch.device


class JobResult(NamedTuple):
    """Numbers that must be the same on both devices, and how often the host waited for them."""

    numbers: list[Tensor]
    waits: dict[Wait, float]


class NotApplicableError(Exception):
    """The recipe has no such job."""


def tiny_recipe(name: str, device: torch.device) -> TinyRecipe:
    has_heads = {"dim", "heads"} <= get_recipe(name).signature.parameters.keys()
    model = build_tiny(name, {"dim": WIDTH} if has_heads else {}, 0)
    task = task_of(model)
    length = task.fixed_length(model) or min(LENGTH, model.max_length or LENGTH)
    generator = torch.Generator().manual_seed(0)
    inputs = task.example(model, torch.randint(task.token_ids(model), (ROWS, length), generator=generator))
    targets = task.random_targets(model, inputs, generator)
    return TinyRecipe(model, task, inputs, targets, device)


def train(recipe: TinyRecipe, waits: Waits, autocast: torch.dtype | None = None) -> JobResult:
    """Steps of the trainer's own engine; the last one is counted. Numbers are losses and norms of gradients."""
    model = recipe.model
    if autocast is not None and not model.allows_autocast:
        raise NotApplicableError(f"{model.spec.recipe} has float32 only")
    other = _other_tokens(recipe, recipe.inputs)
    batches = [recipe.task.batch(model, inputs, recipe.targets) for inputs in (recipe.inputs, other)]
    engine = TrainingEngine(model.to(recipe.device), AdamWConfig(), DDPStrategy(), autocast=autocast)
    figures = []
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        # what the first step puts into caches is there at the last one
        waits.clear()
        figures.append(engine.step([batch], LEARNING_RATE).figures)
    return JobResult(figures, dict(waits.counts))


def _other_tokens(recipe: TinyRecipe, inputs: Inputs) -> Inputs:
    if inputs.tokens.is_floating_point():
        return inputs
    other = recipe.task.example(recipe.model, inputs.tokens.flip(0).contiguous())
    return other._replace(segments=inputs.segments)


def train_in_bfloat16(recipe: TinyRecipe, waits: Waits) -> JobResult:
    return train(recipe, waits, torch.bfloat16)


def learn_packed_rows(recipe: TinyRecipe, waits: Waits) -> JobResult:
    """Loss and gradients where rows hold several documents, and one of them padding at its end."""
    segments = torch.zeros(recipe.inputs.tokens.shape[:2], dtype=torch.long)
    length = segments.shape[1]
    segments[0, length // 3 :] = 1
    segments[0, length - 3 :] = PADDING_SEGMENT
    segments[1, length // 2 :] = 1
    return _learn(recipe, waits, segments)


def learn_left_padding(recipe: TinyRecipe, waits: Waits) -> JobResult:
    """Loss and gradients where a row begins with padding, as a short prompt does."""
    segments = torch.zeros(recipe.inputs.tokens.shape[:2], dtype=torch.long)
    segments[0, : segments.shape[1] // 4] = PADDING_SEGMENT
    return _learn(recipe, waits, segments)


def _learn(recipe: TinyRecipe, waits: Waits, segments: Tensor) -> JobResult:
    model, targets = recipe.model.train(), recipe.targets
    if targets.shape[:2] != segments.shape:
        raise NotApplicableError("targets are not those of tokens, so that rows are not cut into documents")
    targets = targets.masked_fill(segments == PADDING_SEGMENT, IGNORE_INDEX)
    inputs = recipe.inputs._replace(segments=segments)
    # what the first pass puts into caches is there at the second; some batches have a graph of their own
    batches = [recipe.task.batch(model, inputs, targets) for _ in range(2)]
    model.to(recipe.device)
    for batch in batches:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        waits.clear()
        loss = model.loss(to_device(batch, recipe.device))
        total = loss.total / max(1, batch.target_count()) + loss.extra
        total.backward()  # type: ignore[no-untyped-call]
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return JobResult([total.detach(), *gradients], dict(waits.counts))


def decode(recipe: TinyRecipe, waits: Waits, **options: Any) -> JobResult:
    """Tokens of prompts of unequal length, or answers to sources; waits are those of one more token."""
    model = recipe.model.eval()
    if not isinstance(model, GenerativeModel) or isinstance(model, PolicyModel):
        raise NotApplicableError(f"{model.spec.recipe} generates nothing")
    limit = min(LONG_DECODING, (model.max_length or LENGTH) - len(PROMPTS[1]))
    sources = None
    if recipe.task.takes_source:
        sources = SourceBatch(*recipe.task.source(model, recipe.inputs))  # type: ignore[attr-defined]
    model.to(recipe.device)
    counts = []
    results: list[Any] = []
    for new in (SHORT_DECODING, limit):
        torch.manual_seed(0)
        waits.clear()
        decoding = decoding_from_options(max_new=new, stop_ids=(), **options)
        if sources is not None:
            results.append(answer_sources(model, sources, decoding=decoding, batch=ROWS))  # type: ignore[arg-type]
        else:
            results.append(mf.generate(model, PROMPTS, decoding=decoding, batch=ROWS))
        counts.append(Counter(waits.counts))
    further = limit - SHORT_DECODING
    per_token = {wait: (counts[1][wait] - counts[0][wait]) / further for wait in counts[1]}
    return JobResult(
        [torch.tensor(row) for row in results[1].tokens], {wait: n for wait, n in per_token.items() if n > 0}
    )


def decode_eagerly(recipe: TinyRecipe, waits: Waits) -> JobResult:
    return decode(recipe, waits, step_path="eager")


def decode_beams(recipe: TinyRecipe, waits: Waits) -> JobResult:
    return decode(recipe, waits, step_path="eager", beam=2)


def decode_statically(recipe: TinyRecipe, waits: Waits) -> JobResult:
    return decode(recipe, waits, step_path="static")


JOBS: dict[str, Callable[[TinyRecipe, Waits], JobResult]] = {
    "training": train,
    "bfloat16": train_in_bfloat16,
    "packed rows": learn_packed_rows,
    "left padding": learn_left_padding,
    "decoding": decode_eagerly,
    "beams": decode_beams,
    "static steps": decode_statically,
}


def run_on_cpu(name: str, job: str) -> JobResult | str:
    """The job on the CPU, or why the recipe has no such job."""
    return _run(name, job, torch.device("cpu"), Waits())


def run_pretended(name: str, job: str) -> JobResult | str:
    """The job on the pretended device; raises WrongDeviceError where CUDA would fail."""
    with pretended_device() as waits:
        result = _run(name, job, torch.device("cuda", 0), waits)
    if isinstance(result, JobResult):
        on_cpu = [numbers_of(tensor) for tensor in result.numbers]
        is_moved = all(isinstance(tensor, PretendedTensor) for tensor in result.numbers)
        if not is_moved and job not in ("decoding", "beams", "static steps"):
            raise AssertionError("a loss, a weight or a gradient is on the CPU")
        return result._replace(numbers=on_cpu)
    return result


def _run(name: str, job: str, device: torch.device, waits: Waits) -> JobResult | str:
    torch.manual_seed(0)
    try:
        return JOBS[job](tiny_recipe(name, device), waits)
    except (NotApplicableError, UserError) as error:
        return f"{type(error).__name__}: {error}"
