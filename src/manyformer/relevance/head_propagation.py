"""The relevance of each head for the predictions of a model, by layer-wise propagation (Voita et al. 2019, sec. 4)."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.attention.attention import MultiHeadLayer
from manyformer.attention.head_gates import attention_heads
from manyformer.errors import UserError
from manyformer.models import Model
from manyformer.models.embedding import SourceEmbedding
from manyformer.models.model import model_name
from manyformer.recipes.registry import task_of
from manyformer.relevance.kernel_rule import recorded_kernels, recorded_rotations
from manyformer.relevance.relevance_tape import RelevanceTape
from manyformer.tasks import Inputs
from manyformer.training_hooks import eval_mode

TARGETS_PER_PASS = 16
"""Predictions that are explained at a time, which bounds the memory for long texts."""


def head_relevance(model: Model, inputs: Inputs) -> dict[str, Float[Tensor, "t h"]]:
    """The relevance of each head for the largest logit of each prediction of one sequence.

    The sum of the absolute relevance of the head's outputs before the output projection, where that of the logit is 1,
    by the names of `attention_heads`; Voita et al. (2019, section 4), whose head relevance is that divided by the
    largest one of the layer, averaged over the predictions: `layer_relevance`. Relevance stops at the embeddings.
    Raises UserError for a model with operations that have no rule, such as attention that chooses keys by hashing."""
    layers = attention_heads(model)
    if not layers:
        raise UserError(f"{model_name(model)} has no attention heads")
    with torch.no_grad(), eval_mode(model):
        tape = RelevanceTape()
        with ExitStack() as stack:
            merged = stack.enter_context(_recorded_heads(layers))
            for record in (_tracked_embeddings, recorded_kernels, recorded_rotations):
                stack.enter_context(record(model, tape))
            stack.enter_context(tape)
            logits = task_of(model).call(model, inputs).logits
        rows = logits.reshape(-1, logits.shape[-1])
        best = rows.argmax(-1)
        parts: dict[str, list[Tensor]] = {name: [] for name in merged}
        for targets in torch.split(torch.arange(len(rows), device=logits.device), TARGETS_PER_PASS):
            relevance = logits.new_zeros(len(targets), *rows.shape)
            relevance[torch.arange(len(targets)), targets, best[targets]] = 1
            relevances = tape.propagate(logits, relevance.view(len(targets), *logits.shape))
            for name, tensors in merged.items():
                parts[name].append(_sum_by_head(relevances, tensors, layers[name].heads, len(targets)))
    return {name: torch.cat(chunks) for name, chunks in parts.items()}


def layer_relevance(relevance: Float[Tensor, "t h"]) -> Float[Tensor, " h"]:
    """The relevance of the heads of a layer, divided by the largest one, averaged over the predictions."""
    largest = relevance.amax(-1, keepdim=True)
    return (relevance / largest.clamp(min=torch.finfo(relevance.dtype).tiny)).mean(0)


def _sum_by_head(relevances: dict[int, Tensor], merged: list[Tensor], heads: int, targets: int) -> Tensor:
    """The absolute relevance of each head's slice of the merged outputs (b, l, h f), over all calls of the layer."""
    total = merged[0].new_zeros(targets, heads)
    for y in merged:
        if id(y) in relevances:
            total += torch.unflatten(relevances[id(y)], -1, (heads, -1)).abs().sum((1, 2, 4))
    return total


@contextmanager
def _recorded_heads(layers: dict[str, MultiHeadLayer]) -> Iterator[dict[str, list[Tensor]]]:
    """The inputs of the output projection of each layer, in all calls inside the block."""
    merged: dict[str, list[Tensor]] = {name: [] for name in layers}
    with ExitStack() as hooks:
        for name, layer in layers.items():
            projection = getattr(layer, "out_proj", None)
            if not isinstance(projection, nn.Linear):
                raise UserError(f"relevance needs an output projection after the heads, which {name} does not have")

            def record(module: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
                merged[name].append(args[0])

            hooks.enter_context(projection.register_forward_pre_hook(record))
        yield merged


@contextmanager
def _tracked_embeddings(model: nn.Module, tape: RelevanceTape) -> Iterator[None]:
    """Track the outputs of all embeddings inside the block. Raises UserError after it if there was none."""
    is_tracked = False

    def track(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        nonlocal is_tracked
        is_tracked = True
        tape.track(output)

    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, SourceEmbedding):
                hooks.enter_context(module.register_forward_hook(track))
        yield
    if not is_tracked:
        raise UserError(
            f"relevance begins at embeddings of tokens, patches or frames, which {model_name(model)} does not have"
        )
