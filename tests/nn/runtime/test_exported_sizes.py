"""Exported graphs are for any batch and length, whatever the example was, or refused in a sentence."""

from collections.abc import Iterator

import jaxtyping
import pytest
import torch
from torch import Tensor
from torch.export import Dim

from manyformer.analysis.own_models import build_tiny
from manyformer.base.errors import UserError
from manyformer.models import Model

QUICK = [("da-transformer", 20), ("sinkhorn-encoder", 13)]
RECIPES = [
    "da-transformer",
    "fox",
    "infini-attention",
    "mamba",
    "memorizing-transformer",
    "mixture-of-depths",
    "mlstm",
    "nsa",
    "reformer",
    "reformer-strict",
    "routing-transformer",
    "routing-transformer-strict",
    "sinkhorn-encoder",
    "sinkhorn-transformer",
    "universal-transformer",
]
LENGTHS = [20, 13]
"""Blocks and segments of the tiny models divide the one length and not the other."""
REFUSED = ["bahdanau", "gla", "lstm-lm"]


@pytest.fixture(autouse=True)
def without_shape_checks() -> Iterator[None]:
    """The checks of shapes, which tests alone have, cannot be recorded."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def tokens_of(model: Model, rows: int, length: int) -> tuple[Tensor, ...]:
    tokens = torch.randint(1, 20, (rows, length), generator=torch.Generator().manual_seed(length))
    return (tokens, tokens.flip(1)) if hasattr(model, "embed_target") else (tokens,)


def exported(model: Model, inputs: tuple[Tensor, ...]) -> torch.nn.Module:
    """The graph of a model for any rows and lengths."""
    shapes = tuple({0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for _ in inputs)
    return torch.export.export(model, inputs, dynamic_shapes=shapes).module()


@pytest.mark.parametrize(
    ("recipe", "length"),
    [
        pytest.param(recipe, length, marks=[] if (recipe, length) in QUICK else pytest.mark.slow)
        for recipe in RECIPES
        for length in LENGTHS
    ],
)
def test_an_exported_graph_is_for_any_batch_and_length(recipe: str, length: int) -> None:
    model = build_tiny(recipe, {}, 0).eval()
    graph = exported(model, tokens_of(model, 2, length))
    for rows, other_length in ((3, 40), (2, 33), (5, 12)):
        inputs = tokens_of(model, rows, other_length)
        torch.testing.assert_close(graph(*inputs).logits, model(*inputs).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recipe", REFUSED)
def test_a_loop_over_tokens_is_refused_where_an_exported_graph_is_for_any_length(recipe: str) -> None:
    model = build_tiny(recipe, {}, 0).eval()
    with pytest.raises(UserError, match="export it with a fixed length"):
        exported(model, tokens_of(model, 2, 12))


@pytest.mark.filterwarnings("ignore:TF32 acceleration", "ignore:The tensor attributes:UserWarning")
def test_an_lstm_of_a_fixed_length_is_exported_for_any_batch() -> None:
    model = build_tiny("lstm-lm", {}, 0).eval()
    graph = torch.export.export(model, tokens_of(model, 2, 6), dynamic_shapes=({0: Dim.DYNAMIC},)).module()
    inputs = tokens_of(model, 5, 6)
    torch.testing.assert_close(graph(*inputs).logits, model(*inputs).logits)
