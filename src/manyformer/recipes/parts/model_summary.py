"""The structure, parameter counts and forward cost of a model, also without allocating its weights."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from manyformer.models import Model
from manyformer.models.model import eval_mode
from manyformer.models.tasks import Inputs, Task
from manyformer.nn.core import State, state_bytes
from manyformer.nn.runtime.costs import count_flops
from manyformer.nn.runtime.shapes_alone import ShapesAlone
from manyformer.recipes import build, get_recipe
from manyformer.recipes.parts.registry import task_of


@dataclass(frozen=True)
class ModuleRow:
    """One module of a model: its name, nesting level, class with settings, and number of parameters.

    `times` counts equal siblings that share one row; `parameters` is the sum over all of them. A parameter that
    several modules share is counted at the first of them only; `note` says so for the others.
    """

    name: str
    level: int
    kind: str
    parameters: int
    times: int = 1
    note: str = ""


class ForwardCost(NamedTuple):
    """The cost of one forward pass over one sequence of `length` tokens: FLOPs (a multiply-add counts two) and state.

    `state_bytes` is the state's size in float32 after `length` tokens, and `bytes_per_token` what each token adds to
    it; both are None for a model without a state.
    """

    length: int
    flops: int
    state_bytes: int | None
    bytes_per_token: float | None


def count_parameters(model: nn.Module) -> int:
    """The number of parameters of `model`; shared ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def nearest_size(count: Callable[[int], int], target: int, largest: int, start: int = 1) -> int:
    """The number from 1 to `largest` whose `count` is nearest to `target`, searched from `start`; counts must increase.

    Counts that grow by equal steps take about four calls."""
    # a count builds a whole model, if only on the meta device
    count = functools.cache(count)
    low = min(start, largest)
    high = min(2 * low, largest)
    while high < largest and count(high) < target:
        low = high
        high = min(2 * high, largest)
    while low > 1 and count(low) >= target:
        high = low
        low = high // 2
    while high - low > 1:
        # where a straight line between the two counts meets the target
        share = (target - count(low)) / max(1, count(high) - count(low))
        middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        if count(middle) < target:
            low = middle
        else:
            high = middle
    return min((low, high), key=lambda number: abs(count(number) - target))


def is_content_based(module: nn.Module) -> bool:
    """Whether some part declares (`content_based`) that its operators depend on token values, not on shapes alone."""
    return any(getattr(part, "content_based", False) for part in module.modules())


def module_rows(model: nn.Module) -> list[ModuleRow]:
    """The modules of `model` in depth-first order, with one row for equal siblings."""
    owners = {id(parameter): name for name, parameter in model.named_parameters()}
    return list(_iterate_rows(model, "", 0, owners))


def _iterate_rows(module: nn.Module, prefix: str, level: int, owners: dict[int, str]) -> Iterator[ModuleRow]:
    path_by_id: dict[int, str] = {}
    for group in _group_equal_siblings(module):
        child = module.get_submodule(group[0])
        path = f"{prefix}{group[0]}"
        # a module registered twice has its parameters once
        if id(child) in path_by_id:
            yield ModuleRow(group[0], level, _module_text(child), 0, note=f"the same as {path_by_id[id(child)]}")
            continue
        path_by_id[id(child)] = path
        if len(group) == 1:
            label = group[0]
        else:
            label = f"{group[0]}..{group[-1]}"
        parameters = sum(_count_owned(module.get_submodule(name), f"{prefix}{name}.", owners) for name in group)
        note = _describe_sharing(child, f"{path}.", owners)
        yield ModuleRow(label, level, _module_text(child), parameters, len(group), note)
        # of equal siblings only the first is entered: the others would repeat its rows
        yield from _iterate_rows(child, f"{path}.", level + 1, owners)


def _group_equal_siblings(module: nn.Module) -> list[list[str]]:
    """The names of the children, with adjacent numbered children of equal structure in one group."""
    groups: list[list[str]] = []
    last_repr = ""
    # not named_children, which leaves out the second name of a module that is registered twice
    for name, child in module._modules.items():
        if child is None:
            continue
        if groups and name.isdigit() and groups[-1][-1].isdigit() and repr(child) == last_repr:
            groups[-1].append(name)
        else:
            groups.append([name])
            last_repr = repr(child)
    return groups


def _count_owned(module: nn.Module, prefix: str, owners: dict[int, str]) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if owners[id(parameter)].startswith(prefix))


def _describe_sharing(module: nn.Module, prefix: str, owners: dict[int, str]) -> str:
    """The module's direct parameters that are shared with, and counted at, another module."""
    names = {name: owners[id(parameter)] for name, parameter in module.named_parameters(recurse=False)}
    return ", ".join(f"{name} is {owner}" for name, owner in names.items() if owner != f"{prefix}{name}")


def _module_text(module: nn.Module) -> str:
    name = type(module).__name__
    extra = module.extra_repr()
    if extra and "\n" not in extra:
        return f"{name}({extra})"
    return name


def forward_cost(model: Model, length: int) -> ForwardCost:
    """The cost of one forward pass over one sequence of `length` tokens; encoder-decoders take that many on both sides.

    The pass is one in evaluation mode after a warm-up; an image classifier is given one image, whatever `length` is.
    Raises ValueError if the model does not allow that length. `model` may come from `build_on_meta`; if the cost
    depends on the content of the tokens, a copy with real weights is then built with a fixed seed."""
    model, inputs = _example_inputs(model, length)
    card = get_recipe(model.spec.recipe).card
    task = task_of(model)
    length = task.fixed_length(model) or length
    arguments = task.arguments(model, inputs)
    with torch.no_grad(), eval_mode(model), _passes(model):
        # a warm-up fills the caches of later passes: plans of sparse attention, which would take ten times as long
        # under the counter, and values that are cached until the weights change
        model(*arguments)
        flops = count_flops(lambda: model(*arguments))
    half_length = max(1, length // 2)
    if "incremental_decoding" not in card.promises or half_length == length:
        return ForwardCost(length, flops, None, None)
    # from two lengths, because a state may have a part that does not grow
    with _passes(model):
        half_bytes, full_bytes = (_state_bytes(task, model, inputs, upto) for upto in (half_length, length))
    return ForwardCost(length, flops, full_bytes, (full_bytes - half_bytes) / (length - half_length))


def state_bytes_after(model: Model, length: int) -> int | None:
    """The bytes of the decoding state after `length` tokens; None for a model without one.

    Raises ValueError if the model does not allow that length. `model` may come from `build_on_meta`, as for
    `forward_cost`."""
    if "incremental_decoding" not in get_recipe(model.spec.recipe).card.promises:
        return None
    model, inputs = _example_inputs(model, length)
    with eval_mode(model), _passes(model):
        return _state_bytes(task_of(model), model, inputs, length)


def _passes(model: Model) -> AbstractContextManager[object]:
    """What passes of a model run in: on the meta device they are answered from shapes."""
    if model.device.type == "meta":
        return ShapesAlone()
    return nullcontext()


def _example_inputs(model: Model, length: int) -> tuple[Model, Inputs]:
    """The model, with real weights if its cost depends on the content of the tokens, and inputs of that length."""
    model.check_length(length)
    content_based = is_content_based(model)
    # hashes and routing need values, which a tensor on the meta device does not have
    if content_based and model.device.type == "meta":
        # the generator of the process goes on as if nothing had been built
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = build(model.spec.recipe, **model.spec.keywords).eval()
    task = task_of(model)
    tokens = torch.zeros(1, length, dtype=torch.long, device=model.device)
    if content_based:
        # different tokens, because equal ones would all be routed to the same place
        tokens = torch.arange(length, device=model.device)[None] % task.token_ids(model)
    return model, task.example(model, tokens)


def _state_bytes(task: Task, model: Model, inputs: Inputs, length: int) -> int:
    with torch.no_grad():
        state: State = task.call(model, inputs.columns(0, length), task.init_state(model, inputs)).state
    if task.takes_source:
        # the encoded source is computed once and does not grow
        _, state = state
    return state_bytes(state)
