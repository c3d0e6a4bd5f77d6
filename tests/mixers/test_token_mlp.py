"""The layer along the patches: a feed-forward of the transposed image, for one number of tokens alone."""

import pytest
import torch

from manyformer.core import Context
from manyformer.mixers import TokenMLP
from manyformer.models.embedding import positions_of


def test_every_channel_goes_through_the_same_layer() -> None:
    layer, x = TokenMLP(7, 5), torch.randn(3, 7, 4)
    place, _ = positions_of(torch.zeros(3, 7, dtype=torch.long), None, None)
    y = layer(x, Context(place)).y
    for channel in range(4):
        alone = layer.down(torch.nn.functional.gelu(layer.up(x[..., channel])))
        torch.testing.assert_close(y[..., channel], alone)


def test_what_is_refused() -> None:
    layer, tokens = TokenMLP(7, 5), torch.zeros(1, 6, dtype=torch.long)
    with pytest.raises(ValueError, match="mixes exactly 7 tokens, not 6"):
        layer(torch.randn(1, 6, 4), Context(positions_of(tokens, None, None)[0]))
    tokens = torch.zeros(1, 7, dtype=torch.long)
    padded, _ = positions_of(tokens, torch.tensor([[0] * 5 + [-1] * 2]), None)
    with pytest.raises(ValueError, match="it allows neither padding nor packing"):
        layer(torch.randn(1, 7, 4), Context(padded))
    with pytest.raises(ValueError, match="cannot continue from a state"):
        layer.init_state(1, device=torch.device("cpu"), dtype=torch.float32)
