"""The plan of a training: what it computes, holds, reads, writes, takes and costs."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from manyformer.analysis.planning.hardware import CPU_SHARE, DeviceSet, calibrate, matmul_rate
from manyformer.analysis.planning.rehearsed_step import RehearsedCost, step_cost
from manyformer.base.errors import UserError
from manyformer.config.training_sections import SaveConfig
from manyformer.recipes import get_recipe
from manyformer.recipes.parts.model_summary import count_parameters, nearest_size
from manyformer.recipes.parts.registry import build_on_meta

TOKENS_PER_PARAMETER = 20
"""Hoffmann et al. 2022, arXiv:2203.15556: about this many for each parameter, where compute is the limit."""
UTILIZATION = 0.35
"""Of an accelerator's published peak: torchtitan reports 33 to 39 per cent for 8 billion parameters on H100s."""

WEIGHT_BYTES = 4
GRADIENT_BYTES = 4
MOMENT_BYTES = 8
"""For each parameter: training holds weights in float32 and the two running means of AdamW."""

HEAD_WIDTH = 64
WIDTHS = [*range(64, 1024, 64), *range(1024, 1 << 15, 128)]
"""The widths that are tried for a given number of parameters."""

ROWS_PER_DEVICE = 8

Strategy = Literal["ddp", "fsdp"]


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The training that is planned: rows of `length` tokens, `batch_tokens` in a step on all devices together.

    `batch_tokens` is None for 8 rows on each device, `tokens` is None for 20 for each parameter; `price` is that of one
    device for an hour. `utilization` is the share of the peak of a device, None to calibrate with ten steps if
    `calibrate`, else a default.
    """

    devices: DeviceSet
    tokens: int | None = None
    length: int = 1024
    batch_tokens: int | None = None
    strategy: Strategy = "ddp"
    bfloat16: bool = True
    checkpointing: bool = False
    utilization: float | None = None
    calibrate: bool = False
    price: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlannedTraining:
    """All numbers of a plan; sizes in bytes for each device, times in seconds.

    `peak` is the largest sum of all that is held at one time, less than the sum of the kinds. `largest_batch` are the
    tokens of a step on all devices together that fit; 0 if not even one row does.
    """

    recipe: str
    keywords: dict[str, Any]
    devices: str
    parameters: int
    tokens: int
    steps: int
    length: int
    rows: int
    batch_tokens: int
    step_flops: int
    total_flops: float
    rate: float
    rate_source: str
    step_seconds: float
    seconds: float
    weights: int
    gradients: int
    moments: int
    activations: int
    logits: int
    peak: int
    memory: int
    largest_batch: int
    token_bytes: int
    data_bytes: int
    checkpoint_bytes: int
    kept_bytes: int
    model_bytes: int
    device_hours: float
    price: float | None
    method: str

    @property
    def fits(self) -> bool:
        """Whether the peak is within the memory of a device."""
        return self.peak <= self.memory


def plan_training(recipe: str, keywords: dict[str, Any], request: PlanRequest) -> PlannedTraining:
    """Plan a training. Raises UserError where it is impossible."""
    devices = request.devices
    if request.batch_tokens is None:
        rows = ROWS_PER_DEVICE
    else:
        rows = request.batch_tokens // (request.length * devices.count)
    if not rows:
        raise UserError(
            f"a batch of {request.batch_tokens:,} tokens has no row of {request.length:,} for each of {devices.count} "
            f"devices; --batch {request.length * devices.count} is the smallest"
        )
    bfloat16 = request.bfloat16 and devices.accelerator is not None
    keywords = _with_length(recipe, keywords, request.length)
    cost = step_cost(
        recipe, keywords, rows=rows, length=request.length, bfloat16=bfloat16, checkpointing=request.checkpointing
    )
    tokens = request.tokens or TOKENS_PER_PARAMETER * cost.parameters
    batch_tokens = rows * cost.length * devices.count
    steps = math.ceil(tokens / batch_tokens)
    rate, source = _rate(recipe, keywords, request, cost, bfloat16=bfloat16)
    seconds = steps * cost.flops / rate
    hours = seconds * devices.count / 3600
    save = SaveConfig()
    token_bytes = _token_bytes(recipe, keywords)
    # gradients are not saved
    checkpoint = (WEIGHT_BYTES + MOMENT_BYTES) * cost.parameters
    return PlannedTraining(
        recipe=recipe,
        keywords=keywords,
        devices=devices.name,
        parameters=cost.parameters,
        tokens=tokens,
        steps=steps,
        length=cost.length,
        rows=rows,
        batch_tokens=batch_tokens,
        step_flops=cost.flops * devices.count,
        total_flops=float(cost.flops) * devices.count * steps,
        rate=rate,
        rate_source=source,
        step_seconds=cost.flops / rate,
        seconds=seconds,
        **_memory(cost, request),
        token_bytes=token_bytes,
        data_bytes=tokens * token_bytes,
        checkpoint_bytes=checkpoint,
        kept_bytes=checkpoint * (save.keep_last + save.keep_best),
        model_bytes=WEIGHT_BYTES * cost.parameters,
        device_hours=hours,
        price=None if request.price is None else hours * request.price,
        method=cost.method,
    )


def keywords_of_size(recipe: str, keywords: dict[str, Any], parameters: int) -> dict[str, Any]:
    """`keywords` with the width, depth and heads for which the number of parameters is nearest to `parameters`.

    Raises UserError for a recipe without these keywords, and where one of them is given already.
    """
    names = get_recipe(recipe).signature.parameters
    if missing := {"dim", "depth"} - names.keys():
        raise UserError(f"{recipe} has no {' and no '.join(sorted(missing))} to be chosen; give its keywords instead")
    if fixed := sorted({"dim", "depth", "heads"} & keywords.keys()):
        raise UserError(f"--params chooses {', '.join(fixed)} itself; give either --params or these keywords")

    def sized(number: int) -> dict[str, Any]:
        dim = WIDTHS[number - 1]
        if "heads" in names:
            heads = {"heads": dim // HEAD_WIDTH}
        else:
            heads = {}
        return {**keywords, "dim": dim, "depth": depth_of(dim), **heads}

    def count(number: int) -> int:
        return count_parameters(build_on_meta(recipe, sized(number)))

    return sized(nearest_size(count, parameters, len(WIDTHS)))


def depth_of(dim: int) -> int:
    """Layers for a width, near those of GPT-3 (Brown et al. 2020, arXiv:2005.14165, table 2.1).

    The width is 64 times the depth at 768 and 128 times at 4096 and beyond.
    """
    # wider models are also deeper, but less than in proportion
    ratio: float = min(128.0, max(32.0, 64 * (dim / 768) ** 0.4))
    return max(1, round(dim / ratio))


def _with_length(recipe: str, keywords: dict[str, Any], length: int) -> dict[str, Any]:
    """The keywords with the length of the rows as `max_length`, where the recipe has one that is not given."""
    has_limit = "max_length" in get_recipe(recipe).signature.parameters and "max_length" not in keywords
    if has_limit:
        return {**keywords, "max_length": length}
    return keywords


def _token_bytes(recipe: str, keywords: dict[str, Any]) -> int:
    """Bytes of a stored token."""
    parameter = get_recipe(recipe).signature.parameters.get("vocab")
    vocab = keywords.get("vocab", 1 << 8 if parameter is None else parameter.default)
    if vocab <= 1 << 8:
        return 1
    if vocab <= 1 << 16:
        return 2
    return 4


def _rate(
    recipe: str, keywords: dict[str, Any], request: PlanRequest, cost: RehearsedCost, *, bfloat16: bool
) -> tuple[float, str]:
    """Operations a second of one device, and where the number comes from."""
    devices = request.devices
    if request.calibrate:
        rate = calibrate(recipe, keywords, devices, rows=cost.rows, length=request.length, bfloat16=bfloat16)
        return rate, "ten steps of this model on this machine"
    if devices.accelerator is not None:
        if request.utilization is None:
            share = UTILIZATION
        else:
            share = request.utilization
        return share * devices.accelerator.flops, f"{share:.0%} of the published peak; --mfu changes it"
    if request.utilization is None:
        share = CPU_SHARE
    else:
        share = request.utilization
    return share * matmul_rate(), f"{share:.0%} of this machine's products of matrices; --calibrate measures it"


def _memory(cost: RehearsedCost, request: PlanRequest) -> dict[str, int]:
    """The memory of a device by kind, its peak, and the largest batch that fits.

    FSDP divides weights, gradients and moments among the devices; the gathered weights of one layer are not counted.
    """
    devices = request.devices
    shares = devices.count if request.strategy == "fsdp" else 1
    weights, gradients, moments = (
        size * cost.parameters // shares for size in (WEIGHT_BYTES, GRADIENT_BYTES, MOMENT_BYTES)
    )
    # the peak of the pass contains whole gradients
    peak = weights + moments + cost.peak - (GRADIENT_BYTES * cost.parameters - gradients)
    fixed = peak - cost.rows * cost.row_peak
    memory = int(devices.memory)
    # a row that adds nothing to the peak would fit without end
    rows = max(0, int((memory - fixed) // max(1, cost.row_peak)))
    return {
        "weights": weights,
        "gradients": gradients,
        "moments": moments,
        "activations": cost.activations,
        "logits": cost.logits,
        "peak": peak,
        "memory": memory,
        "largest_batch": rows * cost.length * devices.count,
    }
