"""The reversible encoder-decoder: three branches in turn on two streams, with gradients that need no activations."""

from typing import Any

import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.batches import Seq2SeqBatch
from manyformer.core import Chain, Context, ContiguousLayout, MemorySequence
from manyformer.depth import ReversibleStack
from manyformer.models import EncoderDecoder
from manyformer.ops.static_layout import materialize
from perturbing import perturb

SIZES = {"vocab": 11, "dim": 16, "depth": 3, "heads": 2, "ff_dim": 24, "dropout": 0.0}


def two_streams(stack: Chain, x: Tensor, ctx: Context) -> Tensor:
    """y1 = x1 + F(x2), x1 and x2 exchanged, for each branch in turn (Kitaev et al. 2020, section 3, with storage)."""
    first = second = x
    layers = stack.get_submodule("layers")
    assert isinstance(layers, ReversibleStack)
    for layer in layers.children():
        for branch in layer.children():
            module: Any = branch
            first, second = second, first + module.inner(module.pre_norm(second), ctx).y
    output: Tensor = stack.get_submodule("norm")((first + second) / 2, ctx).y
    return output


def by_hand(model: EncoderDecoder, source: Tensor, target: Tensor) -> Tensor:
    places = [materialize(ContiguousLayout(), x.shape[1]) for x in (source, target)]
    assert isinstance(model.encoder, Chain)
    assert isinstance(model.decoder, Chain)
    encoded = two_streams(model.encoder, model.embed_source(source, places[0]), Context(places[0]))
    ctx = Context(places[1], MemorySequence(encoded, places[0]))
    decoded = two_streams(model.decoder, model.embed_target(target, places[1]), ctx)
    logits: Tensor = model.head(decoded)
    return logits


@pytest.mark.parametrize("keywords", [{}, {"kernel": "lsh", "num_buckets": 2, "chunk_length": 4}, {"ff_chunk": 3}])
def test_outputs_and_gradients_are_those_of_two_stored_streams(keywords: dict[str, Any]) -> None:
    model = perturb(mf.build("reformer-seq2seq", **SIZES, **keywords), 0.1).double().eval()
    source, target = torch.randint(1, 11, (2, 9)), torch.randint(1, 11, (2, 7))
    weights = torch.randn(2, 7, 11, dtype=torch.float64)
    gradients = []
    for logits in (model(source, target).logits, by_hand(model, source, target)):
        parameters = list(model.parameters())
        gradients.append([logits, *torch.autograd.grad((logits * weights).sum(), parameters)])
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-9, rtol=1e-9)


def test_no_activations_of_branches_are_stored() -> None:
    def stored(streams: str, depth: int) -> int:
        model = mf.build("reformer-seq2seq", **SIZES | {"depth": depth}, residual_streams=streams)
        batch = Seq2SeqBatch(*(torch.randint(1, 11, (2, 30)) for _ in range(3)))
        sizes: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            sizes[x.data_ptr()] = x.numel()
            return x

        weights = {parameter.data_ptr() for parameter in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model.loss(batch)
        return sum(size for pointer, size in sizes.items() if pointer not in weights)

    assert stored("reversible", 6) == stored("reversible", 1)
    assert stored("plain", 6) > 4 * stored("plain", 1)
