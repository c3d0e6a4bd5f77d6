"""Gates on the outputs of attention heads, given or trained to be closed, and heads that are removed."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, final

import torch
from annotated_types import MaxLen
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.base.errors import UserError, suggest_names
from manyformer.base.files.json_records import FileRecord
from manyformer.nn.attention.attention import MultiHeadLayer
from manyformer.nn.runtime.module_places import separate_places
from manyformer.nn.runtime.training_hooks import AddsPenalty, OwnLearningRate, TracksProgress


@final
class ConstantGates(nn.Module):
    """Multiplies the outputs of heads by `gates`, after `inner` if there were gates before.

    `gates` has one number per head, or one per row and head; it gets gradients if it is a parameter."""

    def __init__(self, gates: Float[Tensor, "... h"], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.gates = gates
        self.inner = inner

    def forward(self, y: Float[Tensor, "b h l f"]) -> Float[Tensor, "b h l f"]:
        return (y if self.inner is None else self.inner(y)) * self.gates[..., None, None].to(y)


def attention_heads(model: nn.Module) -> dict[str, MultiHeadLayer]:
    """All layers of `model` with heads, in the order of its modules, by the names that attention maps have.

    A layer that is applied several times, as in a universal transformer, is listed once."""
    # `named_modules` names a module once, whatever the number of places it has
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MultiHeadLayer)}
    return {part_name(name): layer for name, layer in layers.items()}


@contextmanager
def gated_heads(model: nn.Module, gates: Mapping[str, Float[Tensor, "... h"]]) -> Iterator[None]:
    """Multiply the outputs of heads inside the block, also in decoding that begins there; 0 switches a head off.

    Michel et al. (2019, arXiv:1905.10650), equation 3. `gates` has for each layer, by its name in `attention_heads`,
    one number per head, or (b, h) for a batch of b rows; layers that are not named stay as they are. For gradients by
    `backward`, gates must be `nn.Parameter`s, which reversible layers need. Raises ValueError for unknown names, wrong
    sizes and other gates that require gradients."""
    layers = attention_heads(model)
    for name, values in gates.items():
        if name not in layers:
            raise ValueError(f"no layer with heads is named '{name}'; there are {', '.join(layers) or 'none'}")
        if values.ndim not in (1, 2) or values.shape[-1] != layers[name].heads:
            shape = tuple(values.shape)
            raise ValueError(f"{name} has {layers[name].heads} heads, but its gates have the shape {shape}")
        if values.requires_grad and not isinstance(values, nn.Parameter):
            raise ValueError(f"the gates of {name} require gradients, so they must be an nn.Parameter")
    # blocks may be nested: the gates of an outer one go on acting
    previous = {name: layers[name].head_gates for name in gates}
    try:
        for name, values in gates.items():
            layers[name].head_gates = ConstantGates(values, previous[name])
        yield
    finally:
        for name, module in previous.items():
            layers[name].head_gates = module


def part_name(name: str) -> str:
    """A module's name without the segments of wrappers (`inner`, `kernel`)."""
    return ".".join(segment for segment in name.split(".") if segment not in ("inner", "kernel"))


RemovedHeads = Mapping[str, Sequence[int]]
"""The numbers of removed heads, from 0, for each layer by its name in `attention_heads`."""


def remove_heads(model: nn.Module, removed: RemovedHeads) -> None:
    """Remove heads with all their weights from `model`, in place; its outputs are those with their gates at 0.

    A layer without any head left becomes the bias of its output projection. What layers share, such as a table of
    biases by distance, is copied for a layer that loses heads. Raises UserError for heads that do not exist or cannot
    be removed."""
    layers = attention_heads(model)
    if removed and not layers:
        raise UserError("no layer of this model has heads that an output projection joins, so none can be removed")
    for name, heads in removed.items():
        if name not in layers:
            raise UserError(f"there is no layer '{name}' with heads; {suggest_names(name, layers)}")
        if unknown := sorted(head for head in heads if not 0 <= head < layers[name].heads):
            raise UserError(f"{name} has no head {unknown[0]}: its {layers[name].heads} heads are numbered from 0")
    # what two layers share must not lose heads in both
    separate_places(model)
    for name, heads in removed.items():
        remaining = [head for head in range(layers[name].heads) if head not in heads]
        if len(remaining) == layers[name].heads:
            continue
        try:
            if remaining:
                layers[name].keep_heads(remaining)
            else:
                _replace(model, layers[name])
        except ValueError as error:
            raise UserError(f"heads {', '.join(map(str, heads))} of {name} cannot be removed: {error}") from error


def layers_of_part(model: nn.Module, part: str | None) -> dict[str, MultiHeadLayer]:
    """The layers with heads whose names begin with `part`, such as "encoder"; None means all.

    Raises UserError where there is none."""
    layers = attention_heads(model)
    selected = {name: layer for name, layer in layers.items() if part is None or f"{name}.".startswith(f"{part}.")}
    if not layers:
        raise UserError(
            "this model has no layer in which an output projection joins attention heads: none can be pruned"
        )
    if not selected:
        prefixes = sorted({name.partition(".")[0] for name in layers}) + list(layers)
        raise UserError(f"there is no part '{part}' with attention heads; {suggest_names(str(part), prefixes)}")
    return selected


def _replace(model: nn.Module, layer: MultiHeadLayer) -> None:
    """Replace a layer by what remains of it without heads, in all places that it has."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is layer:
                setattr(parent, name, layer.without_heads())


def format_heads(removed: RemovedHeads) -> str:
    """The text for `parse_heads`, such as `encoder.0.attention:1,3 encoder.2.attention:0`."""
    return " ".join(f"{name}:{','.join(map(str, sorted(heads)))}" for name, heads in removed.items() if heads)


def parse_heads(text: str) -> dict[str, tuple[int, ...]]:
    """The heads of each layer that `text` names. Raises UserError for a text that `format_heads` does not write."""
    removed: dict[str, tuple[int, ...]] = {}
    for entry in text.split():
        name, _, numbers = entry.partition(":")
        heads = numbers.split(",")
        if not name or name in removed or not all(head.isdecimal() and len(head) < 5 for head in heads):
            raise UserError(
                f"removed_heads ('{entry:.60}') must be layers with numbers of heads, such as "
                "'encoder.0.attention:1,3 encoder.2.attention:0', each layer once"
            )
        removed[name] = tuple(sorted(set(map(int, heads))))
    return removed


def add_heads(earlier: RemovedHeads, removed: RemovedHeads) -> dict[str, tuple[int, ...]]:
    """All heads that a model lacks that lacked `earlier` and lost `removed`, numbered as they were at first.

    The numbers of `removed` are those of the model without `earlier`."""
    total = {name: tuple(heads) for name, heads in earlier.items()}
    for name, heads in removed.items():
        gone = total.get(name, ())
        # entry n is the first number of the head that is number n by now
        remaining = [head for head in range(max(heads, default=0) + len(gone) + 1) if head not in gone]
        total[name] = tuple(sorted({*gone, *(remaining[head] for head in heads)}))
    return total


def subtract_heads(total: RemovedHeads, earlier: RemovedHeads) -> dict[str, tuple[int, ...]]:
    """What a model without `earlier` must lose to lack `total`: the inverse of `add_heads`.

    Raises UserError where it lacks other heads already."""
    for name, heads in earlier.items():
        if missing := sorted(set(heads) - set(total.get(name, ()))):
            raise UserError(f"{name} has no head {missing[0]} any more: it was removed earlier")
    removed = {name: sorted(set(heads) - set(earlier.get(name, ()))) for name, heads in total.items()}
    return {
        name: tuple(head - sum(gone < head for gone in earlier.get(name, ())) for head in heads)
        for name, heads in removed.items()
        if heads
    }


GATES_FILE = "gates.json"

TEMPERATURE = 0.33
STRETCH = 0.1
"""beta, and the width by which the distribution exceeds [0, 1] on either side (Voita et al. 2019, section 6.1)."""

INITIAL_LOG_ALPHA = 2.0
"""Gates that are closed with probability 0.06 and fully open with probability 0.77."""

NOISE_MARGIN = 1e-6


@final
class HardConcreteGates(nn.Module, TracksProgress, AddsPenalty, OwnLearningRate):
    """A gate for each group of `group` heads from the hard concrete distribution (Louizos et al. 2018, section 2.3).

    As Voita et al. (2019, arXiv:1905.09418, section 6.1) prune heads: in training g = clip(1.2 s - 0.1, 0, 1) with
    s = sigmoid((log u - log(1 - u) + log_alpha) / 0.33), u drawn once for each training step; in evaluation s is
    sigmoid(log_alpha). `weight` times the sum of the probabilities of open gates is added to the loss. `lr_scale` is
    the learning rate of log_alpha as a multiple of the model's, because a gate must go a long way in a short training.
    """

    def __init__(self, groups: int, *, group: int = 1, weight: float, lr_scale: float) -> None:
        super().__init__()
        self.group = group
        self.weight = weight
        self.lr_scale = lr_scale
        self.log_alpha = nn.Parameter(torch.full((groups,), INITIAL_LOG_ALPHA))
        self.register_buffer("noise", torch.full((groups,), 0.5), persistent=False)
        self.noise: Tensor

    def set_progress(self, fraction: float) -> None:
        """Draw the gates of the next training step."""
        self.noise.uniform_(NOISE_MARGIN, 1 - NOISE_MARGIN)

    def forward(self, y: Float[Tensor, "b h l f"]) -> Float[Tensor, "b h l f"]:
        return y * self.values()[:, None, None].to(y)

    def values(self) -> Float[Tensor, " h"]:
        """The gate of each head: those drawn for this step in training mode, else the fixed ones."""
        logits: Tensor = self.log_alpha
        if self.training:
            # log u - log(1 - u) + log_alpha, the logistic noise of the concrete distribution
            logits = (torch.logit(self.noise) + logits) / TEMPERATURE
        # stretched beyond 0 and 1 and clipped, so that a gate is exactly closed or open with some probability
        gates = ((1 + 2 * STRETCH) * logits.sigmoid() - STRETCH).clamp(0, 1)
        return gates.repeat_interleave(self.group)

    def open_probability(self) -> Float[Tensor, " g"]:
        """The probability that the gate of each group is not 0."""
        return (self.log_alpha - TEMPERATURE * math.log(STRETCH / (1 + STRETCH))).sigmoid()

    def penalty(self) -> Tensor:
        return self.weight * self.open_probability().sum()


class GatesRecord(FileRecord):
    """The content of gates.json: log alpha of each head's gate, by layer."""

    title = "the trained gates of heads"
    format_number = 1
    log_alpha: dict[str, Annotated[list[float], MaxLen(4096)]]


def attach_gates(model: nn.Module, *, penalty: float, part: str | None, lr_scale: float) -> None:
    """Put a gate on each head of the layers whose names begin with `part`; None means all.

    The penalty of all gates together is `penalty` times the mean number of open gates in a layer, as published values
    count. Raises UserError where the model has no such heads."""
    layers = layers_of_part(model, part)
    device = next(model.parameters()).device
    for layer in layers.values():
        group = layer.head_group
        weight = penalty * group / len(layers)
        gates = HardConcreteGates(layer.heads // group, group=group, weight=weight, lr_scale=lr_scale)
        layer.head_gates = gates.to(device).train(layer.training)


@torch.no_grad()
def fold_gates(model: nn.Module) -> GatesRecord:
    """Multiply the output projections by the gates and remove the gates, in place: the outputs remain the same."""
    log_alpha: dict[str, list[float]] = {}
    for name, layer in attention_heads(model).items():
        gates = layer.head_gates
        if isinstance(gates, HardConcreteGates):
            layer.head_gates = None
            gates.eval()
            for projection in layer.output_projections():
                # a gate of a head is a factor of the columns that read it
                projection.weight *= gates.values().repeat_interleave(projection.in_features // layer.heads)
            log_alpha[name] = gates.log_alpha.repeat_interleave(gates.group).tolist()
    return GatesRecord(log_alpha=log_alpha)


def read_gates(folder: Path) -> dict[str, Float[Tensor, " h"]]:
    """Log alpha of each head of the run in `folder`, by layer. Raises DamagedFile."""
    return {name: torch.tensor(values) for name, values in GatesRecord.read(folder / GATES_FILE).log_alpha.items()}
