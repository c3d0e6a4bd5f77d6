"""`manyformer plan`: what a training would compute, hold, take and cost, before it is started."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from manyformer.base.errors import UserError
from manyformer.cli.app import TRAIN, command
from manyformer.cli.console import Block, Heading, Output, PageTable
from manyformer.cli.model_arguments import read_keywords
from manyformer.cli.options import KeywordsArgument, complete_recipes

if TYPE_CHECKING:
    from manyformer.analysis.planning import PlannedTraining


@command(
    TRAIN,
    "manyformer plan transformer-lm --params 1.3B --tokens 26B --devices 8xh100",
    "manyformer plan longformer-lm vocab=32000 dim=1024 depth=24 heads=16 --length 8192 --devices a100 --price 2.5",
    "manyformer plan transformer-lm dim=256 depth=4 --calibrate --tokens 20M",
    accepts_settings=True,
)
def plan(
    name: Annotated[str, Argument(help="A recipe.", autocompletion=complete_recipes)],
    keywords: KeywordsArgument = None,
    *,
    params: Annotated[str | None, Option(help="Choose dim, depth and heads for about so many, such as 1.3B.")] = None,
    tokens: Annotated[str | None, Option(help="Tokens to train on, such as 26B; 20 a parameter unless given.")] = None,
    devices: Annotated[str, Option(help="Such as 8xh100, a100 or cpu; an unknown name lists all.")] = "cpu",
    length: Annotated[str, Option(help="Tokens of a row.")] = "1024",
    batch: Annotated[str | None, Option(help="Tokens of a step on all devices; 8 rows a device unless given.")] = None,
    strategy: Annotated[Literal["ddp", "fsdp"], Option(help="How several devices share the work.")] = "ddp",
    precision: Annotated[
        Literal["bfloat16", "float32"], Option(help="Of products on accelerators; on a CPU float32.")
    ] = "bfloat16",
    checkpointing: Annotated[bool, Option("--checkpointing", help="Compute activations again to save memory.")] = False,
    mfu: Annotated[float | None, Option(min=0.001, max=1.0, help="Share of the peak that is reached.")] = None,
    calibrate: Annotated[bool, Option("--calibrate", help="Time ten steps here; needs such a device at hand.")] = False,
    price: Annotated[float | None, Option(min=0.0, help="Price of one device for an hour.")] = None,
) -> Output:
    """Plan a training: parameters, operations, memory by kind, time, data, checkpoints and price.

    Nothing is trained, and weights are not allocated, so that models of any size are planned; recipes whose operations
    depend on the content of tokens are run once, up to 100 million parameters.
    """
    from manyformer.analysis.planning import PlanRequest, keywords_of_size, parse_devices, parse_quantity, plan_training
    from manyformer.recipes import get_recipe

    if mfu is not None and calibrate:
        raise UserError("--mfu states what --calibrate measures; give one of them")
    recipe = get_recipe(name)
    settings = read_keywords(recipe, keywords)
    device_set = parse_devices(devices)
    row = parse_quantity(length, "--length")
    if params is not None:
        settings = keywords_of_size(name, settings, parse_quantity(params, "--params"))
    request = PlanRequest(
        devices=device_set,
        tokens=None if tokens is None else parse_quantity(tokens, "--tokens"),
        length=row,
        batch_tokens=None if batch is None else parse_quantity(batch, "--batch"),
        strategy=strategy,
        bfloat16=precision == "bfloat16",
        checkpointing=checkpointing,
        utilization=mfu,
        calibrate=calibrate,
        price=price,
    )
    result = plan_training(name, settings, request)
    return Output({**vars(result), "fits": result.fits}, _page(result))


def _page(plan: "PlannedTraining") -> Iterator[Block]:
    """A plan, and what to do if it does not fit."""
    from manyformer.nn.runtime.costs import FLOP_CONVENTION

    keywords = " ".join(f"{name}={value}" for name, value in plan.keywords.items())
    yield f"{plan.recipe} {keywords}".rstrip()
    yield f"on {plan.devices}"
    sections = {"Training": _training, "Memory of each device": _memory, "Files": _files}
    for title, rows in sections.items():
        yield Heading(title)
        yield PageTable(("", "", ""), rows(plan), right=(1,))
    yield f"\nOperations are {plan.method}: {FLOP_CONVENTION}."
    if not plan.fits:
        remedies = "a smaller --batch, --checkpointing, --strategy fsdp on more devices"
        yield f"It does not fit: the peak is above the memory. What makes it smaller: {remedies}."


def _training(plan: "PlannedTraining") -> Iterator[tuple[str, str, str]]:
    yield "parameters", f"{plan.parameters:,}", ""
    yield "tokens", f"{plan.tokens:,}", f"{plan.tokens / plan.parameters:.1f} for each parameter"
    yield "steps", f"{plan.steps:,}", f"of {plan.batch_tokens:,} tokens: {plan.rows} rows of {plan.length} on a device"
    yield "operations", f"{plan.total_flops:.3g}", f"{plan.step_flops:.3g} a step, forward and backward"
    yield "speed", f"{plan.rate:.3g}/s", f"of a device: {plan.rate_source}"
    yield "step", _duration(plan.step_seconds), ""
    yield "time", _duration(plan.seconds), f"{plan.device_hours:,.1f} hours of a device in all"
    if plan.price is not None:
        yield "price", f"{plan.price:,.2f}", "at the given price of an hour"


def _memory(plan: "PlannedTraining") -> Iterator[tuple[str, str, str]]:
    from manyformer.nn.runtime.devices import format_memory

    yield "weights", format_memory(plan.weights), "float32"
    yield "gradients", format_memory(plan.gradients), ""
    yield "moments", format_memory(plan.moments), "two running means of AdamW"
    yield "activations", format_memory(plan.activations), "kept for the backward pass"
    yield "logits", format_memory(plan.logits), "" if plan.logits else "the loss is computed in chunks of tokens"
    yield "peak", format_memory(plan.peak), "the most at one time; not all of the above exist together"
    yield "available", format_memory(plan.memory), "it fits" if plan.fits else "IT DOES NOT FIT"
    largest = "none"
    if plan.largest_batch:
        largest = f"{plan.largest_batch:,} tokens"
    yield "largest batch", largest, "of a step on all devices"


def _files(plan: "PlannedTraining") -> Iterator[tuple[str, str, str]]:
    from manyformer.nn.runtime.devices import format_memory

    yield "tokens", format_memory(plan.data_bytes), f"{plan.token_bytes} bytes each, read once"
    yield "checkpoint", format_memory(plan.checkpoint_bytes), "weights and moments"
    yield "checkpoints", format_memory(plan.kept_bytes), "those that a run keeps by default"
    yield "model", format_memory(plan.model_bytes), "the final weights"


def _duration(seconds: float) -> str:
    """A duration in the largest unit of which it has at least two, or in milliseconds."""
    for unit, size in (("years", 31_557_600), ("days", 86_400), ("hours", 3600), ("minutes", 60), ("s", 1)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{1e3 * seconds:.3g} ms"
