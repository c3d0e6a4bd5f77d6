"""`manyformer plan`: what a training would compute, hold, take and cost, before it is started."""

from dataclasses import asdict
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from manyformer.cli.app import TRAIN, command
from manyformer.cli.console import print_json
from manyformer.cli.shared_options import JsonOption, KeywordsArgument
from manyformer.cli.shell_completion import complete_recipes
from manyformer.cli.split_arguments import suggest_options


@command(
    TRAIN,
    "manyformer plan transformer-lm --params 1.3B --tokens 26B --devices 8xh100",
    "manyformer plan longformer-lm vocab=32000 dim=1024 depth=24 heads=16 --length 8192 --devices a100 --price 2.5",
    "manyformer plan transformer-lm dim=256 depth=4 --calibrate --tokens 20M",
    accepts_settings=True,
)
def plan(
    context: typer.Context,
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
    as_json: JsonOption = False,
) -> None:
    """Plan a training: parameters, operations, memory by kind, time, data, checkpoints and price.

    Nothing is trained, and weights are not allocated, so that models of any size are planned; recipes whose operations
    depend on the content of tokens are run once, up to 100 million parameters.
    """
    from manyformer.cli.model_arguments import read_keywords
    from manyformer.cli.plan_page import print_plan
    from manyformer.errors import UserError
    from manyformer.planning import PlanRequest, keywords_of_size, parse_devices, parse_quantity, plan_training
    from manyformer.recipes import get_recipe

    if mfu is not None and calibrate:
        raise UserError("--mfu states what --calibrate measures; give one of them")
    recipe = get_recipe(name)
    arguments = keywords or []
    given = suggest_options(context, arguments, lambda: read_keywords(recipe, arguments))
    device_set, row = parse_devices(devices), parse_quantity(length, "--length")
    if params is not None:
        given = keywords_of_size(name, given, parse_quantity(params, "--params"))
    request = PlanRequest(
        devices=device_set,
        tokens=None if tokens is None else parse_quantity(tokens, "--tokens"),
        length=row,
        batch_tokens=8 * row * device_set.count if batch is None else parse_quantity(batch, "--batch"),
        strategy=strategy,
        bfloat16=precision == "bfloat16",
        checkpointing=checkpointing,
        utilization=mfu,
        calibrate=calibrate,
        price=price,
    )
    result = plan_training(name, given, request)
    if as_json:
        print_json({**asdict(result), "fits": result.fits})
    else:
        print_plan(result)
