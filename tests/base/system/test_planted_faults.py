"""A fault that somebody writes into the package, at ten places, is found by training or decoding a tiny model."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from pretended_device import WrongDeviceError, stated_reads
from pretended_device.recipe_jobs import JobResult, run_pretended

STATED = stated_reads.read()


class Place(NamedTuple):
    """A function of the package, and a recipe and a job in which it is called."""

    module: str
    name: str
    recipe: str
    job: str = "training"


PLACES = [
    Place("manyformer.models.embedding", "TokenEmbedding.forward", "alibi"),
    Place("manyformer.nn.softmax.softmax_kernel", "SoftmaxKernel.forward", "transformer-lm"),
    Place("manyformer.nn.feed_forward.feedforward", "GatedFeedForward.forward", "llama"),
    Place("manyformer.nn.runtime.length_norms", "RMSNorm.forward", "llama"),
    Place("manyformer.nn.feed_forward.routers", "SoftmaxRouter.forward", "mixtral"),
    Place("manyformer.nn.token_mixing", "FourierMixer.forward", "fnet"),
    Place("manyformer.nn.linear.linear_attention", "_ChunkedLinearAttention.backward", "linear-transformer"),
    Place("manyformer.nn.graphs", "GraphConvolution.forward", "gcn"),
    Place("manyformer.models.head", "ClassHead.loss", "transformer"),
    Place("manyformer.inference.generate.sampling", "choose_tokens", "retnet", "static steps"),
]


def tensors_of(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    parts = result if isinstance(result, tuple | list) else []
    return [tensor for part in parts for tensor in tensors_of(part)]


def with_tensor_of_cpu(result: Any) -> Any:
    """The result, with a tensor that was made without saying where added to its first part."""
    if isinstance(result, Tensor):
        return result + torch.zeros(result.shape, dtype=result.dtype) if result.ndim else result * torch.ones(1)
    first, *others = result
    changed = [with_tensor_of_cpu(first), *others]
    return type(result)(*changed) if hasattr(result, "_fields") else type(result)(changed)


def after_reading(result: Any) -> Any:
    """The result, one number of which was looked at."""
    assert tensors_of(result)[0].sum().item() is not None
    return result


def plant(monkeypatch: pytest.MonkeyPatch, place: Place, fault: Callable[[Any], Any]) -> None:
    owner: Any = importlib.import_module(place.module)
    *path, name = place.name.split(".")
    for part in path:
        owner = getattr(owner, part)
    function = getattr(owner, name)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        return fault(function(*args, **kwargs))

    is_static = isinstance(vars(owner).get(name), staticmethod)
    monkeypatch.setattr(owner, name, staticmethod(faulty) if is_static else faulty)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_a_tensor_made_on_the_cpu_is_found(monkeypatch: pytest.MonkeyPatch, place: Place) -> None:
    plant(monkeypatch, place, with_tensor_of_cpu)
    with pytest.raises(WrongDeviceError, match=r"on cuda:0 of shape .* and one on the CPU"):
        run_pretended(place.recipe, place.job)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_a_number_that_is_read_is_found_and_told_with_what_read_it(
    monkeypatch: pytest.MonkeyPatch, place: Place
) -> None:
    plant(monkeypatch, place, after_reading)
    result = run_pretended(place.recipe, place.job)
    assert isinstance(result, JobResult)
    sentence = stated_reads.difference(place.recipe, place.job, result.waits, STATED)
    assert ".py" in sentence
    assert "item (0 ->" in sentence
