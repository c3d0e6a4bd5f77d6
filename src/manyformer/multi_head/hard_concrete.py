"""Gates on attention heads that are trained to be closed: hard concrete distributions with a penalty on open gates."""

import math
from pathlib import Path
from typing import Annotated, final

import torch
from annotated_types import MaxLen
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.files.json_records import FileRecord
from manyformer.multi_head.head_gates import attention_heads, layers_of_part
from manyformer.training_hooks import AddsPenalty, OwnLearningRate, TracksProgress

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
            logits = (torch.logit(self.noise) + logits) / TEMPERATURE
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
                projection.weight *= gates.values().repeat_interleave(projection.in_features // layer.heads)
            log_alpha[name] = gates.log_alpha.repeat_interleave(gates.group).tolist()
    return GatesRecord(log_alpha=log_alpha)


def read_gates(folder: Path) -> dict[str, Float[Tensor, " h"]]:
    """Log alpha of each head of the run in `folder`, by layer. Raises DamagedFile."""
    return {name: torch.tensor(values) for name, values in GatesRecord.read(folder / GATES_FILE).log_alpha.items()}
