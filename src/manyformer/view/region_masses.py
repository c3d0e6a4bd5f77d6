"""How much of its attention a model gives to what it remembers, and how much to what it reads."""

from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyformer.batches import CausalLMBatch
from manyformer.core import PADDING_SEGMENT
from manyformer.data import HeldOutBatches
from manyformer.errors import UserError
from manyformer.models import LanguageModel, Model
from manyformer.models.carried_state import CarriedState
from manyformer.ops.region_shares import shares
from manyformer.training_hooks import eval_mode

USUAL = ("memory", "segment")


class RegionMass(NamedTuple):
    """The mean share of attention that goes to each region, for one part of a model."""

    part: str
    shares: dict[str, float]


def region_masses(
    model: Model, held: HeldOutBatches, *, batches: int = 32, each: Callable[[float], None] = lambda share: None
) -> list[RegionMass]:
    """What each layer of `model` looks at, the mean over heads, tokens and the first `batches` batches of `held`.

    Parts that tell "mass" themselves do so by the names of their regions; others have the tokens from before a batch as
    their memory. The first batch, before which there is nothing, is read but not counted. Raises UserError for a model
    or data without a memory.
    """
    memory = CarriedState(model, goes_on=held.goes_on)
    if not memory.on or not isinstance(model, LanguageModel):
        raise UserError("there is no memory: regions are of a model with one, that learned from data in lanes")
    found = _Found(model)
    with torch.inference_mode(), eval_mode(model):
        for number, batch in enumerate(islice(held, batches)):
            assert isinstance(batch, CausalLMBatch)
            tokens, segments = (
                None if part is None else part.to(model.device) for part in (batch.tokens, batch.segments)
            )
            assert tokens is not None
            state = memory.before(batch)
            found.real = torch.ones_like(tokens, dtype=torch.bool) if segments is None else segments != PADDING_SEGMENT
            found.on = number > 0
            memory.state = model(tokens, segments, state, watch=found).state
            each((number + 1) / batches)
    return found.told()


class _Found:
    """A watcher that sums what each part tells."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._sums: dict[str, dict[str, list[float]]] = {}
        self._tell: set[str] = set()
        self.real: Tensor
        self.on = False

    def __call__(self, module: nn.Module, name: str, value: Tensor) -> None:
        own = self.real.shape[1]
        if not self.on or not bool(self.real.any()):
            return
        if name == "mass":
            self._tell.add(self._names[module])
            regions: Any = module.regions
            self._add(module, regions, value)
        elif name == "weights" and value.shape[-2] == own <= value.shape[-1]:
            self._add(module, USUAL, shares(value, [value.shape[-1] - own, own], self.real))

    def told(self) -> list[RegionMass]:
        """The means, in the order of the model; of parts in parts the outermost that tells itself."""
        known = {part: regions for part, regions in self._sums.items() if not self._inside(part)}
        order = {name: number for number, name in enumerate(self._names.values())}
        return [
            RegionMass(part, {name: sum(values) / len(values) for name, values in known[part].items()})
            for part in sorted(known, key=order.__getitem__)
        ]

    def _add(self, module: nn.Module, regions: tuple[str, ...], value: Tensor) -> None:
        sums = self._sums.setdefault(self._names[module], {region: [] for region in regions})
        for region, share in zip(regions, value.tolist(), strict=True):
            sums[region].append(share)

    def _inside(self, part: str) -> bool:
        return any(part.startswith(f"{outer}.") for outer in self._tell)
