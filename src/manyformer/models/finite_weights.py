"""Weights that are not finite: found in one pass, and told wherever weights are read."""

import math
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from manyformer.errors import NonFiniteWeights
from manyformer.torch_internals import tensor_norms


def local_tensor(tensor: Tensor) -> Tensor:
    """The tensor itself, or the shard of it in this process."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def find_non_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of those tensors, or of their local shards, that hold a number that is not finite.

    The numbers are read from the device together."""
    return [name for name, magnitude in _magnitudes(tensors).items() if not math.isfinite(magnitude)]


def _magnitudes(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest magnitude in each tensor of floating point numbers; NaN if one of them is NaN."""
    local = {name: local_tensor(tensor.detach()) for name, tensor in tensors.items()}
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in local.items():
        if tensor.is_floating_point() and tensor.numel():
            by_device.setdefault(tensor.device, {})[name] = tensor
    magnitudes: dict[str, float] = {}
    for on_device in by_device.values():
        # needs no tensor of booleans as large as the weight
        norms = tensor_norms(list(on_device.values()), math.inf)
        magnitudes.update(zip(on_device, torch.stack([norm.float() for norm in norms]).tolist(), strict=True))
    return {name: magnitudes[name] for name in local if name in magnitudes}


def warn_non_finite(model: nn.Module, source: object) -> None:
    """Warn if weights of `model`, which were read from `source`, are not finite.

    A buffer may be infinite by design, as a mask of scores is, but not NaN."""
    parameters = dict(model.named_parameters())
    bad_names = find_non_finite(parameters)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in parameters}
    bad_names += [name for name, magnitude in _magnitudes(buffers).items() if math.isnan(magnitude)]
    if bad_names:
        _warn(bad_names, len(parameters) + len(buffers), source)


def warn_non_finite_tensors(tensors: Mapping[str, Tensor], source: object) -> None:
    """The same for tensors that are read for a model of another library."""
    if bad_names := [name for name, magnitude in _magnitudes(tensors).items() if math.isnan(magnitude)]:
        _warn(bad_names, len(tensors), source)


def _warn(bad_names: list[str], total: int, source: object) -> None:
    count = "a tensor" if len(bad_names) == 1 else f"{len(bad_names):,} of {total:,} tensors"
    verb, first = ("is", bad_names[0]) if len(bad_names) == 1 else ("are", f"the first is {bad_names[0]}")
    sentence = f"{source}: {count} of the weights {verb} not finite ({first}); what the model computes is no number"
    warnings.warn(sentence, NonFiniteWeights, stacklevel=4)
