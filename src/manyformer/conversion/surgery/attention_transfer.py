"""Attention transfer: new kernels learn to imitate the attention that they replace, before all weights are trained."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.config.training_sections import TransferConfig
from manyformer.conversion.surgery.conversion import LayerTransfer, ModelPair
from manyformer.conversion.surgery.weight_transfer import is_of_new_kernel
from manyformer.models.model import Model, eval_mode
from manyformer.nn.attention.attention import Attention, named_attention
from manyformer.nn.batches import Batch, to_device
from manyformer.nn.core import PADDING_SEGMENT, Context, ValueRecorder
from manyformer.nn.linear import FeatureMap

SCORED_BATCHES = 2
"""The number of batches, the first ones, on which each layer is compared before and after."""

MATCH_LABELS = {
    "outputs": "squared error of its output, relative to the mean square",
    "weights": "divergence of its attention weights in nats",
}

TransferProgressFn = Callable[[int, float], None]
"""Receives the number of a step and its loss, the mean over layers."""


class AttentionPair(NamedTuple):
    """An attention of the trained model, the one with a new kernel in its place, and what is trained of that."""

    name: str
    teacher: Attention
    student: Attention
    weights: list[nn.Parameter]


class LayerCall(NamedTuple):
    """The inputs of an attention of the trained model and its output."""

    x: Tensor
    ctx: Context
    y: Tensor


def transfer_attention(
    pair: ModelPair, batches: Iterator[Batch], config: TransferConfig, on_progress: TransferProgressFn
) -> list[LayerTransfer]:
    """Train the tensors of new kernels in `pair.target` so that each attention imitates the one that it replaces.

    Each attention gets the input of the one in `pair.source`, a complete model, which does not change; all other
    weights of the target stay as they are. The loss of a layer is the mean square of the error of its output divided by
    the mean square of that output (Zhang et al. 2024, LoLCATs, arXiv:2410.10254, section 3.1, which compares heads
    before their projection), or the divergence of its attention weights from the trained ones, which has the gradient
    of their cross-entropy (Zhang et al. 2024, Hedgehog, arXiv:2402.04347, section 4.2). Tokens that are padding count
    in neither. Raises UserError where no new kernel has anything to learn, and for a loss that is not finite.
    """
    assert config.steps is not None
    teacher = pair.source
    pairs = attention_pairs(pair, config)
    assert isinstance(teacher, Model)
    # taken before the first step, so that both measurements are on the same text
    scored = list(islice(batches, SCORED_BATCHES))
    with torch.enable_grad(), eval_mode(teacher), eval_mode(pair.target), _trains_only(pair.target, pairs):
        before = _mean_losses(teacher, pairs, scored, config)
        weights = [weight for attention in pairs for weight in attention.weights]
        optimizer = torch.optim.Adam(weights, lr=config.lr)
        for step in range(config.steps):
            loss = torch.stack(_layer_losses(teacher, pairs, next(batches), config)).mean()
            if not loss.isfinite():
                raise UserError(f"attention transfer diverged at step {step + 1}: lower its learning rate, {config.lr}")
            # a straight line to 0, so that the kernels that are kept are not those of a noisy last step
            optimizer.param_groups[0]["lr"] = config.lr * (1 - step / config.steps)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            on_progress(step + 1, float(loss.detach()))
        after = _mean_losses(teacher, pairs, scored, config)
    return [LayerTransfer(attention.name, *losses) for attention, *losses in zip(pairs, before, after)]


def attention_pairs(pair: ModelPair, config: TransferConfig) -> list[AttentionPair]:
    """The attentions whose kernels are new and have weights.

    Raises UserError if there is none, for other depths, and for weights to match that may be negative."""
    if pair.layers:
        raise UserError("attention transfer compares equal depths: make the model deeper in a conversion of its own")
    pairs = []
    for name, student in named_attention(pair.target).items():
        teacher = pair.old_module(name)
        if not isinstance(teacher, Attention):
            continue
        if pair.shared_places(name):
            raise UserError(f"{name} is applied several times, and would have several attentions to imitate")
        parameters = student.kernel.named_parameters(f"{name}.kernel")
        if weights := [weight for path, weight in parameters if is_of_new_kernel(pair, path)]:
            signed = [part for part in student.kernel.modules() if isinstance(part, FeatureMap) and part.signed]
            if signed and config.match == "weights":
                raise UserError(f"attention weights of {type(signed[0]).__name__} may be negative: match outputs")
            pairs.append(AttentionPair(name, teacher, student, weights))
    if not pairs:
        raise UserError("attention transfer trains new kernels with weights, such as t2r and hedgehog: there is none")
    return pairs


def describe_transfer(layers: Sequence[LayerTransfer], config: TransferConfig) -> str:
    """A sentence on the first and the last layer's loss before and after."""
    losses = [f"{layer.name} {layer.before:.3g} -> {layer.after:.3g}" for layer in layers]
    if len(losses) < 5:
        shown = losses
    else:
        shown = [*losses[:2], "...", *losses[-2:]]
    return f"attention transfer, {config.steps} steps, {MATCH_LABELS[config.match]}: {', '.join(shown)}"


def _mean_losses(
    teacher: Model, pairs: list[AttentionPair], batches: Sequence[Batch], config: TransferConfig
) -> list[float]:
    with torch.no_grad():
        losses = [torch.stack(_layer_losses(teacher, pairs, batch, config)) for batch in batches]
    means: list[float] = torch.stack(losses).mean(0).tolist()
    return means


def _layer_losses(teacher: Model, pairs: list[AttentionPair], batch: Batch, config: TransferConfig) -> list[Tensor]:
    calls = _teacher_calls(teacher, pairs, batch)
    if config.match == "outputs":
        match = _match_outputs
    else:
        match = _match_weights
    return [match(attention, calls[attention.name]) for attention in pairs]


@torch.no_grad()
def _teacher_calls(teacher: Model, pairs: list[AttentionPair], batch: Batch) -> dict[str, LayerCall]:
    """The calls of the attentions in one pass of the trained model."""
    calls: dict[str, LayerCall] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            calls[name] = LayerCall(arguments[0], arguments[1], output.y)

        return hook

    with ExitStack() as hooks:
        for attention in pairs:
            hooks.callback(attention.teacher.register_forward_hook(record(attention.name)).remove)
        # one pass of the teacher gives every layer its true input: errors of lower students do not reach upper ones
        teacher.score(to_device(batch, teacher.device))
    return calls


def _match_outputs(pair: AttentionPair, call: LayerCall) -> Tensor:
    valid = call.ctx.positions.segment_ids.expand(call.x.shape[:2]) != PADDING_SEGMENT
    error = (pair.student(call.x, call.ctx).y - call.y)[valid]
    # relative, so that layers with large outputs do not decide the mean over layers
    return error.square().mean() / call.y[valid].square().mean()


def _match_weights(pair: AttentionPair, call: LayerCall) -> Tensor:
    valid = call.ctx.positions.segment_ids.expand(call.x.shape[:2]) != PADDING_SEGMENT
    with torch.no_grad():
        trained = _attention_weights(pair.name, pair.teacher, call)
    weights = _attention_weights(pair.name, pair.student, call)
    # masked weights are 0, whose logarithm is not finite
    smallest = torch.finfo(weights.dtype).tiny
    logarithms = trained.clamp_min(smallest).log() - weights.clamp_min(smallest).log()
    # (b, h, l): the sums over keys
    divergences = (trained * logarithms).sum(-1)
    return divergences.transpose(1, 2)[valid].mean()


def _attention_weights(name: str, layer: Attention, call: LayerCall) -> Tensor:
    """The weights (b, h, l, s) of an attention. Raises UserError for a kernel that forms none."""
    weights = ValueRecorder(layer.kernel, "weights")
    layer(call.x, replace(call.ctx, watch=weights))
    if not weights.values:
        raise UserError(f"{type(layer.kernel).__name__} of {name} forms no attention weights: match outputs instead")
    return weights.values[0]


@contextmanager
def _trains_only(model: Model, pairs: Sequence[AttentionPair]) -> Iterator[None]:
    """Gradients for the weights of the pairs alone."""
    trained = {weight for attention in pairs for weight in attention.weights}
    flags = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        for parameter in flags:
            parameter.requires_grad_(parameter in trained)
        yield
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
            parameter.grad = None
