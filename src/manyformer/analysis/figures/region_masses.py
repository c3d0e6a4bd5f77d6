"""The shares of attention that go to a model's memory and to the current segment."""

from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.data import HeldOutBatches
from manyformer.models import Model
from manyformer.models.model import CarriedState, eval_mode
from manyformer.nn.batches import CausalLMBatch, to_device
from manyformer.nn.core import PADDING_SEGMENT, WeightAxes
from manyformer.nn.kernels.kernel import WeightReports
from manyformer.nn.ops.softmax_attention import region_shares

DEFAULT_REGIONS = ("memory", "segment")


class RegionMass(NamedTuple):
    """The mean share of attention for each region of keys, for one part of a model."""

    part: str
    shares: dict[str, float]


def region_masses(
    model: Model,
    held_out: HeldOutBatches,
    *,
    batches: int = 32,
    on_progress: Callable[[float], None] = lambda share: None,
) -> list[RegionMass]:
    """The attention mass per region for each layer, the mean over heads, tokens and the first `batches` batches.

    Parts that report "mass" to `watch` define their own regions; for others the memory is the tokens of earlier
    batches. The first batch is read but not counted, because its memory is empty. Raises UserError for a model or data
    without a memory.
    """
    carried = CarriedState(model, rows_continue=held_out.rows_continue)
    if not carried.enabled:
        raise UserError(
            "there is no memory: regions need a model with one, and data whose rows continue across batches"
        )
    recorder = _MassRecorder(model)
    with torch.inference_mode(), eval_mode(model):
        for index, batch in enumerate(islice(held_out, batches)):
            assert isinstance(batch, CausalLMBatch)
            batch = to_device(batch, model.device)
            everything = torch.ones_like(batch.tokens, dtype=torch.bool)
            if batch.segments is None:
                recorder.valid = everything
            else:
                recorder.valid = batch.segments != PADDING_SEGMENT
            # the first batch fills the memory that later ones read
            recorder.is_recording = index > 0
            carried.state = model(batch.tokens, batch.segments, carried.state_for(batch), watch=recorder).state
            on_progress((index + 1) / batches)
    return recorder.means()


class _MassRecorder:
    """A `watch` callback that collects the shares of attention of each part."""

    def __init__(self, model: nn.Module) -> None:
        self._reports = WeightReports(model)
        self._sums: dict[str, dict[str, list[float]]] = {}
        self._reporting_parts: set[str] = set()
        self.valid: Tensor
        self.is_recording = False

    def __call__(self, module: nn.Module, name: str, value: Tensor) -> None:
        length = self.valid.shape[1]
        if not self.is_recording or not bool(self.valid.any()):
            return
        part = self._reports.names[module]
        regions: Any = DEFAULT_REGIONS
        if name == "mass":
            self._reporting_parts.add(part)
            regions = module.regions
        else:
            reported = self._reports.read(module, name, value)
            # weights of slots or blocks are no attention to tokens of either region
            if reported is None or reported.axes != WeightAxes():
                return
            value = region_shares(value, [reported.remembered, length], self.valid)
        sums = self._sums.setdefault(part, {region: [] for region in regions})
        for region, share in zip(regions, value.tolist(), strict=True):
            sums[region].append(share)

    def means(self) -> list[RegionMass]:
        """The means, in the order of the model; of nested parts only the outermost that reports "mass"."""
        # a part that sums over its own attention layers has counted them already
        nested_prefixes = tuple(f"{outer}." for outer in self._reporting_parts)
        return [
            RegionMass(part, {name: sum(values) / len(values) for name, values in self._sums[part].items()})
            for part in self._reports.names.values()
            if part in self._sums and not part.startswith(nested_prefixes)
        ]
