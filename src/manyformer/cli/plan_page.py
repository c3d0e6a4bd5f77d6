"""The page that `manyformer plan` prints."""

from collections.abc import Iterator

from manyformer.cli.console import print_heading, print_result, print_table
from manyformer.costs import FLOP_CONVENTION
from manyformer.planning import PlannedTraining
from manyformer.system.device_memory import format_memory


def print_plan(plan: PlannedTraining) -> None:
    """Print a plan, and what to do if it does not fit."""
    keywords = " ".join(f"{name}={value}" for name, value in plan.keywords.items())
    print_result(f"{plan.recipe} {keywords}".rstrip(), f"on {plan.devices}")
    print_heading("Training")
    print_table(("", "", ""), _training(plan), right=(1,))
    print_heading("Memory of each device")
    print_table(("", "", ""), _memory(plan), right=(1,))
    print_heading("Files")
    print_table(("", "", ""), _files(plan), right=(1,))
    print_result("", f"Operations are {plan.method}: {FLOP_CONVENTION}.")
    if not plan.fits:
        remedies = "a smaller --batch, --checkpointing, --strategy fsdp on more devices"
        print_result(f"It does not fit: the peak is above the memory. What makes it smaller: {remedies}.")


def _training(plan: PlannedTraining) -> Iterator[tuple[str, str, str]]:
    yield "parameters", f"{plan.parameters:,}", ""
    yield "tokens", f"{plan.tokens:,}", f"{plan.tokens / plan.parameters:.1f} for each parameter"
    yield "steps", f"{plan.steps:,}", f"of {plan.batch_tokens:,} tokens: {plan.rows} rows of {plan.length} on a device"
    yield "operations", f"{plan.total_flops:.3g}", f"{plan.step_flops:.3g} a step, forward and backward"
    yield "speed", f"{plan.rate:.3g}/s", f"of a device: {plan.rate_source}"
    yield "step", format_duration(plan.step_seconds), ""
    yield "time", format_duration(plan.seconds), f"{plan.device_hours:,.1f} hours of a device in all"
    if plan.price is not None:
        yield "price", f"{plan.price:,.2f}", "at the given price of an hour"


def _memory(plan: PlannedTraining) -> Iterator[tuple[str, str, str]]:
    yield "weights", format_memory(plan.weights), "float32"
    yield "gradients", format_memory(plan.gradients), ""
    yield "moments", format_memory(plan.moments), "two running means of AdamW"
    yield "activations", format_memory(plan.activations), "kept for the backward pass"
    yield "logits", format_memory(plan.logits), "" if plan.logits else "the loss is computed in chunks of tokens"
    yield "peak", format_memory(plan.peak), "the most at one time; not all of the above exist together"
    yield "available", format_memory(plan.memory), "it fits" if plan.fits else "IT DOES NOT FIT"
    largest = f"{plan.largest_batch:,} tokens" if plan.largest_batch else "none"
    yield "largest batch", largest, "of a step on all devices"


def _files(plan: PlannedTraining) -> Iterator[tuple[str, str, str]]:
    yield "tokens", format_memory(plan.data_bytes), f"{plan.token_bytes} bytes each, read once"
    yield "checkpoint", format_memory(plan.checkpoint_bytes), "weights and moments"
    yield "checkpoints", format_memory(plan.kept_bytes), "those that a run keeps by default"
    yield "model", format_memory(plan.model_bytes), "the final weights"


def format_duration(seconds: float) -> str:
    """A duration in the largest unit of which it has at least two, or in milliseconds."""
    for unit, size in (("years", 31_557_600), ("days", 86_400), ("hours", 3600), ("minutes", 60), ("s", 1)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{1e3 * seconds:.3g} ms"
