"""Whether a training step compiles as one graph, and is not compiled again for the same shapes."""

import warnings
from functools import partial
from typing import Any

import torch
from torch._dynamo.utils import counters

import manyformer as mf
from gpu_parts.correctness import inputs_on, prepared
from gpu_parts.outcome import TINY_RECIPES, Item, Outcome, Setting, judged
from manyformer.models import Model
from manyformer.nn.core import tree_map
from manyformer.recipes.parts.model_summary import is_content_based
from manyformer.recipes.parts.registry import task_of

SECOND_SHAPE_GRAPHS = 1
"""Graphs that a second length may add: torch then compiles one for all lengths."""


def items(setting: Setting) -> dict[str, Item]:
    """Each recipe."""
    names = TINY_RECIPES[:1] if setting.tiny else sorted(mf.recipes())
    return {name: partial(check, setting, name) for name in names}


def check(setting: Setting, recipe: str) -> Outcome:
    """The loss of two batches of one length and of one of another, compiled without code generation."""
    model, data = prepared(recipe)
    model.to(setting.device)
    shorter = {"tokens": data["tokens"][:, :-1], "targets": data["targets"]}
    has_lengths = task_of(model).fixed_length(model) is None and task_of(model).per_token
    # a card says why the graph may break; so may that of a model whose operators depend on the content of tokens
    stated = mf.recipes()[recipe].card.reasons.get("one_graph")
    if stated is None and is_content_based(model):
        stated = "its operators depend on token values"
    torch.compiler.reset()
    counters.clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return judge(setting, model, data, shorter if has_lengths else None, stated)
    finally:
        torch.compiler.reset()


def judge(setting: Setting, model: Model, data: Any, shorter: Any, stated: str | None) -> Outcome:
    """Count graphs and breaks."""

    def loss(batch: Any) -> torch.Tensor:
        with setting.autocast():
            found = model.loss(batch)
        return found.total + found.extra

    compiled = torch.compile(loss, backend="aot_eager")
    graphs = [_graphs_after(compiled, model, data) for _ in range(2)]
    breaks = {reason.partition("\n")[0]: count for reason, count in counters["graph_break"].items()}
    numbers = {"graphs": float(graphs[0]), "breaks": float(sum(breaks.values()))}
    misses = [] if graphs[1] == graphs[0] else [f"compiled again for the same shapes: {graphs[1]} graphs"]
    if not graphs[0]:
        misses.append("nothing was compiled: it ran eagerly")
    if breaks and stated is None:
        misses.append(f"the graph breaks: {', '.join(breaks)}")
    if shorter is not None and stated is None and not misses:
        shorter["targets"] = _columns(model, data)
        added = _graphs_after(compiled, model, shorter) - graphs[1]
        numbers["graphs for a second length"] = float(added)
        if added > SECOND_SHAPE_GRAPHS:
            misses.append(f"a second length adds {added} graphs, {SECOND_SHAPE_GRAPHS} stated")
    sentence = f"{graphs[0]} graph{'s' * (graphs[0] != 1)}, {sum(breaks.values())} breaks"
    return judged(f"{sentence}, as stated: {stated}" if breaks and stated else sentence, misses, numbers)


def _columns(model: Model, data: Any) -> Any:
    """Targets for the inputs without their last column."""
    generator = torch.Generator().manual_seed(0)
    task = task_of(model)
    return task.random_targets(model, task.example(model, data["tokens"][:, :-1].to(model.device)), generator)


def _graphs_after(compiled: Any, model: Model, data: Any) -> int:
    """The number of graphs so far, after another call."""
    task, targets = task_of(model), tree_map(lambda tensor: tensor.to(model.device), data["targets"])
    compiled(task.batch(model, inputs_on(model, data), targets)).backward()
    return counters["stats"]["unique_graphs"]
