"""Stacks of layers: numbers, patterns, complete layers and branches that are taken as they are."""

from functools import partial

import pytest
from torch import nn

from manyformer.nn.core import Chain, Layer, Pointwise
from manyformer.nn.residual import Residual
from manyformer.recipes.parts.baselines import NormOrder, stack

norm = partial(nn.LayerNorm, 4)


def linear(number: int) -> dict[str, Layer]:
    return {"ff": Pointwise(nn.Linear(4, number + 1))}


def identity(number: int) -> dict[str, Layer]:
    return {"ff": Pointwise(nn.Identity())}


def kinds(body: Chain) -> list[str]:
    return [type(body.get_submodule(f"{number}.ff.inner.inner")).__name__ for number in range(len(body._modules) - 1)]


def test_the_maker_gets_the_number_of_the_layer() -> None:
    body = stack(3, linear, order="pre", norm=norm, dropout=0.0)
    assert list(body._modules) == ["0", "1", "2", "norm"]
    widths = [body.get_submodule(f"{number}.ff.inner.inner").out_features for number in range(3)]
    assert widths == [1, 2, 3]


def test_several_makers_take_turns() -> None:
    body = stack(5, [identity, identity, linear], order="pre", norm=norm, dropout=0.0)
    assert kinds(body) == ["Identity", "Identity", "Linear", "Identity", "Identity"]


@pytest.mark.parametrize("order", ["post", "pre", "sandwich"])
def test_complete_layers_and_branches_are_taken_as_they_are(order: NormOrder) -> None:
    layer = Pointwise(nn.Identity())
    residual = Residual(Pointwise(nn.Identity()))
    body = stack(1, lambda number: layer, order=order, norm=norm, dropout=0.1)
    assert body.get_submodule("0") is layer
    body = stack(1, lambda number: {"a": residual, "b": layer}, order=order, norm=norm, dropout=0.1)
    assert body.get_submodule("0.a") is residual
    branch = body.get_submodule("0.b")
    assert isinstance(branch, Residual)
    assert branch.inner is layer
    assert (branch.pre_norm is None) == (order == "post")
    assert ("norm" in body._modules) == (order != "post")


def test_reversible_streams_need_chains() -> None:
    with pytest.raises(ValueError, match=r"layer 0 \(Pointwise\) must be a Chain"):
        stack(1, lambda number: Pointwise(nn.Identity()), order="pre", norm=norm, dropout=0.0, streams="reversible")
