"""Low-rank adapters on the linear layers of a trained model, which are trained in its place and merged afterwards."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.base.errors import UserError, suggest_names
from manyformer.config import LoraConfig
from manyformer.nn.runtime.training_hooks import AddsToModule, FusedRows


@final
class LoraLinear(nn.Module, AddsToModule):
    """y = W x + (alpha / rank) B A dropout(x) with W frozen (Hu et al. 2021, arXiv:2106.09685, section 4.1).

    A is drawn as torch draws a linear layer and B is 0, so that y is at first what `base` computes. `sizes` divide the
    outputs into blocks with an A and a B each: a matrix for both keys and values gets two adapters, as two matrices
    would. `lora_a` holds the A of all blocks one below the other, `lora_b` the B."""

    how_to_merge = "merge it first (`manyformer.conversion.surgery.lora.merge_lora(model)`)"

    def __init__(self, base: nn.Linear, rank: int, sizes: Sequence[int], *, alpha: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.base = base
        self.rank = rank
        self.scale = alpha / rank
        self.sizes = list(sizes)
        self.dropout = nn.Dropout(dropout)
        self.lora_a = nn.Parameter(base.weight.new_empty(len(self.sizes) * self.rank, base.in_features))
        self.lora_b = nn.Parameter(base.weight.new_zeros(base.out_features, self.rank))
        # as nn.Linear draws its matrix
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        base.requires_grad_(requires_grad=False)

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... e"]:
        # one product for the A of all blocks
        low_rank = torch.split(F.linear(self.dropout(x), self.lora_a), self.rank, dim=-1)
        blocks = zip(low_rank, torch.split(self.lora_b, self.sizes), strict=True)
        y: Tensor = self.base(x)
        return y + self.scale * torch.cat([F.linear(part, weight) for part, weight in blocks], dim=-1)

    @property
    def weight(self) -> Float[Tensor, "e d"]:
        """The merged matrix, for layers that read it themselves; dropout has no part in it."""
        blocks = zip(torch.split(self.lora_b, self.sizes), torch.split(self.lora_a, self.rank), strict=True)
        return self.base.weight + self.scale * torch.cat([b @ a for b, a in blocks])

    @property
    def bias(self) -> Float[Tensor, " e"] | None:
        """The bias of the frozen layer."""
        return self.base.bias

    @property
    def in_features(self) -> int:
        """The number of inputs."""
        return self.base.in_features

    @property
    def out_features(self) -> int:
        """The number of outputs."""
        return self.base.out_features

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The frozen layer, with the adapters added to its matrix."""
        self.base.weight.copy_(self.weight)
        return self.base

    def extra_repr(self) -> str:
        return f"rank {self.rank}, scale {self.scale:g}"


def attach_lora(model: nn.Module, config: LoraConfig) -> None:
    """Put adapters on the linear layers that `config.parts` name, in place; freeze all other weights but the head's.

    Layers whose weights are frozen get none, and a head tied to the embedding is frozen with it. Raises UserError for a
    part that names no linear layer, and without a rank."""
    if config.rank is None:
        raise UserError("lora.rank is null: adapters need a rank, such as 8")
    linears = _adaptable_layers(model)
    selected = {name: layer for part in config.parts for name, layer in _matching(part, linears).items()}
    # by identity: a head tied to the embedding is the same parameter
    head = {id(w) for name, part in model.named_children() if is_head(name) for w in part.parameters()}
    tied = {id(w) for name, part in model.named_children() if not is_head(name) for w in part.parameters()}
    for weight in model.parameters():
        weight.requires_grad_(weight.requires_grad and id(weight) in head - tied)
    for name, layer in selected.items():
        parent, _, leaf = name.rpartition(".")
        owner = model.get_submodule(parent)
        sizes = _block_sizes(owner, leaf, layer)
        adapter = LoraLinear(layer, config.rank, sizes, alpha=config.alpha, dropout=config.input_dropout)
        setattr(owner, leaf, adapter)


def merge_lora(model: nn.Module) -> None:
    """Add the adapters of a model to the matrices and remove them, in place: the outputs remain the same."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLinear):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, module.merged())


def is_head(name: str) -> bool:
    """Whether the child of a model with this name is its head, or one of them."""
    return name == "head" or name.endswith("_head")


def _adaptable_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers outside of the head whose weights are trained and in no other place of the model, by name."""
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    return {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear
        and layer.weight.requires_grad
        # an adapter on a shared matrix would change it in one place and not in the other
        and uses[id(layer.weight)] == 1
        and not is_head(name.partition(".")[0])
    }


def _matching(part: str, layers: Mapping[str, nn.Linear]) -> dict[str, nn.Linear]:
    """The layers with a name that is `part`, ends in it, or matches it as a pattern. Raises UserError for none."""
    matching = {
        name: layer
        for name, layer in layers.items()
        if name == part or name.endswith(f".{part}") or fnmatchcase(name, part)
    }
    if not matching:
        leaves = {name.rpartition(".")[2] for name in layers}
        raise UserError(
            f"lora.parts: no trained linear layer below the head is named '{part}'; {suggest_names(part, leaves)}"
        )
    return matching


def _block_sizes(owner: nn.Module, leaf: str, layer: nn.Linear) -> list[int]:
    """The outputs of a layer that belong together: those of keys and of values, for a layer that projects both."""
    if not leaf.endswith("kv_proj"):
        return [layer.out_features]
    parts = owner.row_parts() if isinstance(owner, FusedRows) else {}
    if f"{leaf}.weight" in parts:
        return list(parts[f"{leaf}.weight"])
    return [layer.out_features // 2] * 2
