"""Latent attention: both forms are equal, the cache is narrow, and with a latent that is the input it is attention."""

import pytest
import torch
from torch import Tensor, nn

from manyformer.nn import Attention, SoftmaxKernel
from manyformer.nn.attention.latent_attention import LatentAttention
from manyformer.nn.core import Context, contiguous_positions, state_bytes
from manyformer.nn.masks import Causal, Window
from manyformer.nn.positions import AlibiPosition, RotaryPosition

DIM, HEADS = 24, 4


def latent_attention(**options: object) -> LatentAttention:
    widths = {"latent_dim": 10, "query_latent_dim": 14, "head_dim": 6, "rotary_dim": 4, "value_dim": 5}
    return LatentAttention(DIM, HEADS, Causal(), **{"position": RotaryPosition(4), **widths, **options})  # type: ignore[arg-type]


def context(x: Tensor, start: int = 0) -> Context:
    return Context(contiguous_positions(len(x), start, start + x.shape[1], x.device))


@pytest.mark.parametrize("length", [1, 2, 17])
@pytest.mark.parametrize("query_latent_dim", [None, 14])
def test_both_forms_are_equal_with_gradients(length: int, query_latent_dim: int | None) -> None:
    layer = latent_attention(query_latent_dim=query_latent_dim).double()
    x = torch.randn(2, length, DIM, dtype=torch.double, requires_grad=True)
    direction = torch.randn(2, length, DIM, dtype=torch.double)
    results = []
    for path in ("expanded", "absorbed"):
        layer.path = path
        y = layer(x, context(x)).y
        results.append([y, *torch.autograd.grad((y * direction).sum(), [x, *layer.parameters()])])
    for absorbed, expanded in zip(*results, strict=True):
        torch.testing.assert_close(absorbed, expanded, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pieces", [[20], [17, 1, 1, 1], [1] * 20])
def test_the_cache_holds_the_latent_and_the_shared_key_alone(pieces: list[int]) -> None:
    layer = latent_attention().double()
    x = torch.randn(2, 20, DIM, dtype=torch.double)
    expected = layer(x, context(x)).y
    state, outputs, start = layer.init_state(2, device=x.device, dtype=x.dtype), [], 0
    for piece in torch.split(x, pieces, 1):
        y, state, _ = layer(piece, context(piece, start), state)
        outputs.append(y)
        start += piece.shape[1]
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=0, atol=1e-12)
    # beside two ids for each token
    assert state_bytes(state) == 2 * 20 * ((10 + 4) * 8 + 2 * 8)


def test_the_form_is_the_cheaper_one_and_is_told() -> None:
    # the widths of DeepSeek-V3: about 171 new tokens of a long text
    layer = LatentAttention(16, 2, latent_dim=512, query_latent_dim=None, head_dim=128, rotary_dim=64, value_dim=128)
    assert layer.form(1, 1000) == "absorbed"
    assert layer.form(170, 10**9) == "absorbed"
    assert layer.form(171, 10**9) == "expanded"
    assert layer.form(4096, 4096) == "expanded"
    assert layer.explain(1, 1000).startswith("absorbed: 1,155,072 products a head absorbed, ")
    layer.path = "expanded"
    assert layer.explain(1, 1000) == "expanded: forced"


def test_with_the_input_as_latent_it_is_attention() -> None:
    layer = LatentAttention(
        DIM,
        HEADS,
        Window(7),
        latent_dim=DIM,
        query_latent_dim=None,
        head_dim=6,
        rotary_dim=2,
        value_dim=6,
        scale=6**-0.5,
    )
    plain = Attention(DIM, HEADS, SoftmaxKernel(Window(7)), bias=False)
    with torch.no_grad():
        # the shared key is 0, and the latent the input, which has a root mean square of 1
        layer.kv_down_proj.weight.copy_(torch.eye(DIM + 2, DIM))
        queries, keys, values = plain.q_proj.weight, *plain.kv_proj.weight.split(DIM)  # type: ignore[union-attr]
        by_head = torch.cat([keys.view(HEADS, 6, DIM), values.view(HEADS, 6, DIM)], 1)
        layer.kv_proj.weight.copy_(by_head.flatten(0, 1))
        layer.q_proj.weight.zero_()
        layer.q_proj.weight.view(HEADS, 8, DIM)[:, :6] = queries.view(HEADS, 6, DIM)
        layer.out_proj.weight.copy_(plain.out_proj.weight)
    x = nn.functional.rms_norm(torch.randn(2, 19, DIM), (DIM,))
    for path in ("expanded", "absorbed"):
        layer.path = path
        torch.testing.assert_close(layer(x, context(x)).y, plain(x, context(x)).y, rtol=0, atol=1e-5)


def test_no_latent_an_unknown_path_and_biases_of_distance_are_refused() -> None:
    with pytest.raises(ValueError, match="latent_dim"):
        latent_attention(latent_dim=0)
    with pytest.raises(ValueError, match="must be auto, expanded or absorbed"):
        latent_attention(path="other")
    with pytest.raises(ValueError, match="does not support"):
        latent_attention(position=AlibiPosition(HEADS))
