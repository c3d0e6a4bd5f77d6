"""The Image Transformer: who sees which pixels, what stands where, both outputs, and what a cache holds."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import manyformer as mf
from manyformer.models import LogisticMixture
from manyformer.models.embedding import positions_of
from manyformer.models.scores import bits_per_dimension
from manyformer.nn.attention.kv_cache.window_cache import RingCache
from manyformer.nn.batches import IGNORE_INDEX, CausalLMBatch
from manyformer.nn.structures import pixel_order

SMALL: dict[str, Any] = {"vocab": 21, "dim": 16, "depth": 1, "heads": 2, "ff_dim": 8, "dropout": 0.0}


def built(recipe: str, seed: int = 0, **keywords: Any) -> Any:
    torch.manual_seed(seed)
    return mf.build(recipe, **{**SMALL, **keywords}).eval()


def test_the_order_of_blocks() -> None:
    assert pixel_order((2, 3, 2), (1, 3)).tolist() == list(range(12))
    # blocks of two rows and two columns, written out
    expected = [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    assert pixel_order((4, 4, 1), (2, 2)).tolist() == expected
    assert pixel_order((4, 2, 3), (2, 1)).tolist()[:12] == [0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11]
    for block in ((3, 2), (2, 3), (0, 2)):
        with pytest.raises(ValueError, match=f"4 x 4 cannot be cut into blocks of {block[0]} x {block[1]}"):
            pixel_order((4, 4, 1), block)


def influence(model: Any, cells: int) -> Tensor:
    """Which inputs (columns) change the output of each position (rows)."""
    tokens = torch.randint(5, 21, (1, cells)).expand(cells, -1).clone()
    others = tokens.clone()
    others.diagonal().copy_(5 + (tokens.diagonal() - 4) % 16)
    with torch.no_grad():
        apart = (model(others).logits - model(tokens).logits).abs().amax(-1)
    return (apart > 0).T


@pytest.mark.parametrize("channels", [1, 2])
def test_one_dimension(channels: int) -> None:
    cells = 24 * channels
    sizes: dict[str, Any] = {"height": 6, "width": 4, "channels": channels, "block": 7, "memory_block": 4}
    actual = influence(built("image-transformer", **sizes), cells)
    rule = [[j <= i and j >= i // 7 * 7 - 4 for j in range(cells)] for i in range(cells)]
    assert torch.equal(actual, torch.tensor(rule))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("above", "beside"), [(2, 3), (3, None), (None, 2)])
def test_two_dimensions(channels: int, above: int | None, beside: int | None) -> None:
    """By the rows and columns of pixels, in the order in which they are written."""
    sizes: dict[str, Any] = {"height": 4, "width": 6, "channels": channels, "block_height": 2, "block_width": 3}
    actual = influence(built("image-transformer-2d", **sizes, memory_height=above, memory_width=beside), 24 * channels)
    place = [(cell // channels // 6, cell // channels % 6) for cell in pixel_order((4, 6, channels), (2, 3)).tolist()]
    upper, side = above or 0, beside or 0

    def rule(i: int, j: int) -> bool:
        (row, column), (top, left) = place[j], (place[i][0] // 2 * 2, place[i][1] // 3 * 3)
        if top <= row < top + 2 and left <= column < left + 3:
            return j <= i
        over = top - upper <= row < top and left - side <= column < left + 3 + side
        return over or (top <= row < top + 2 and left - side <= column < left)

    expected = torch.tensor([[rule(i, j) for j in range(24 * channels)] for i in range(24 * channels)])
    assert not expected.triu(1).any()
    assert torch.equal(actual, expected)


def test_positions_are_those_of_the_value_to_be_predicted() -> None:
    sizes: dict[str, Any] = {"height": 4, "width": 6, "channels": 2}
    rows, blocks = (
        built("image-transformer", **sizes),
        built("image-transformer-2d", **sizes, block_height=2, block_width=3),
    )
    order = torch.from_numpy(pixel_order((4, 6, 2), (2, 3)))
    pos = torch.arange(48)
    one, other = (model.embed.position.rows(pos) for model in (rows, blocks))
    torch.testing.assert_close(one[order], other)
    # half of the width for the row, half for column and channel
    assert torch.equal(one[:12, :8], one[:1, :8].expand(12, -1))
    assert torch.equal(one[:12, 8:], one[12:24, 8:])
    assert len(one.unique(dim=0)) == 48


def test_every_channel_has_a_table_of_its_own() -> None:
    model = built("image-transformer", height=2, width=2, channels=3)
    tokens = torch.tensor([[1, 7, 7, 7, 7, 8]])
    place, _ = positions_of(tokens, None, None)
    actual = (model.embed(tokens, place) - model.embed.position.rows(place.position_ids)) / 16**0.5
    table = model.embed.token.weight.view(3, 21, 16)
    # the start token stands before the first channel
    expected = torch.stack([table[2, 1], table[0, 7], table[1, 7], table[2, 7], table[0, 7], table[1, 8]])
    torch.testing.assert_close(actual[0], expected)


OUTPUT = ["loss", "gradients", "cached", "batch", "float64", "bfloat16", "saving"]
"""The contracts that another output could break."""


@pytest.mark.parametrize("only", [OUTPUT, pytest.param(None, marks=pytest.mark.slow)], ids=["output", "all"])
def test_every_promise_is_kept_with_logistics(only: list[str] | None) -> None:
    colours = {"channels": 2, "width": 8}
    report = mf.check("image-transformer-2d", only=only, skip={"compile"}, keywords={"logistic_mixtures": 3, **colours})
    assert not report.failed, report.failed[0].sentence


def test_a_cache_holds_what_can_still_be_seen() -> None:
    sizes: dict[str, Any] = {"height": 8, "width": 10, "channels": 1}
    one = built("image-transformer", **sizes, block=20, memory_block=10)
    two = built("image-transformer-2d", **sizes, block_height=2, block_width=2, memory_height=2, memory_width=2)
    tokens = torch.randint(5, 21, (2, 80))
    for model, slots in ((one, 30), (two, (5 + 1 + 1) * 4)):
        with torch.no_grad():
            full, state, steps = model(tokens).logits, model.init_state(2, capacity=80), []
            for column in range(80):
                logits, state, _ = model(tokens[:, column : column + 1], None, state)
                steps.append(logits)
        torch.testing.assert_close(torch.cat(steps, 1), full, rtol=1e-5, atol=1e-5)
        (ring,) = [kept.source for kept in states(state.body) if hasattr(kept, "source")]
        assert isinstance(ring, RingCache)
        assert ring.k.shape[2] == slots


def states(state: Any) -> list[Any]:
    """All records in a tree of states."""
    if isinstance(state, torch.Tensor) or not isinstance(state, list | tuple):
        return []
    inner = [actual for part in state for actual in states(part)]
    return [state, *inner] if hasattr(state, "_fields") else inner


def test_bits_by_hand() -> None:
    """Two levels at -1 and 1: one distribution gives the lower one the chance that it lies below 0."""
    output = LogisticMixture(4, 7, 1, first=5)
    with torch.no_grad():
        output.project.weight.zero_()
        # three quarters
        output.project.bias.copy_(torch.tensor([0.0, -0.5 * math.log(3), math.log(0.5)]))
    output.requires_grad_(False)
    x, targets = torch.randn(2, 3, 4), torch.tensor([[5, 5, 6], [6, 5, IGNORE_INDEX]])
    bits = (3 * -math.log2(3 / 4) + 2 * -math.log2(1 / 4)) / 5
    scored, lost = output.score(x, targets), output.loss(x, targets, label_smoothing=0.0)
    assert int(scored.targets) == int(lost.targets) == 5
    assert int(scored.correct) == 3
    for nats in (scored.nll, lost.total):
        assert bits_per_dimension(float(nats), 5).value == pytest.approx(bits, abs=1e-5)
    assert output(x).softmax(-1)[0, 0, 5:].tolist() == pytest.approx([0.75, 0.25], abs=1e-5)


def test_bits_of_an_image_are_those_of_its_values_in_turn() -> None:
    model = built(
        "image-transformer-2d", height=4, width=4, channels=1, block_height=2, block_width=2, logistic_mixtures=2
    )
    values = torch.randint(5, 21, (3, 16))
    tokens = torch.cat([torch.ones_like(values[:, :1]), values[:, :-1]], 1)
    nats = 0.0
    with torch.no_grad():
        for count in range(1, 17):
            chances = model(tokens[:, :count]).logits[:, -1].softmax(-1)
            nats -= float(chances.gather(1, values[:, count - 1 : count]).log().sum())
        actual = model.score(CausalLMBatch(tokens, values))
    expected = nats / math.log(2) / 48
    assert bits_per_dimension(float(actual.nll), int(actual.targets)).value == pytest.approx(expected, rel=1e-5)


def test_mixtures_are_sums_of_their_parts() -> None:
    torch.manual_seed(0)
    output = LogisticMixture(8, 5 + 16, 4, first=5).double()
    x = torch.randn(3, 8, dtype=torch.float64)
    weight, mean, log_scale = (x @ output.project.weight.T + output.project.bias).view(3, 3, 4).unbind(1)
    edges = np.concatenate([[-np.inf], np.arange(-14, 15, 2) / 15, [np.inf]])
    below = torch.sigmoid((torch.from_numpy(edges) - mean[..., None]) * torch.exp(-log_scale)[..., None])
    chances = (weight.softmax(-1)[..., None] * below.diff(dim=-1)).sum(1)
    torch.testing.assert_close(output(x)[:, 5:], chances.log(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(output(x)[:, 5:].exp().sum(-1), torch.ones(3, dtype=torch.float64))
    targets = torch.tensor([5, 12, 20])
    for smoothing in (0.0, 0.2):
        expected = F.cross_entropy(output(x), targets, reduction="sum", label_smoothing=smoothing)
        torch.testing.assert_close(output.loss(x, targets, label_smoothing=smoothing).total, expected)


@pytest.mark.parametrize(
    ("recipe", "keywords", "message"),
    [
        ("image-transformer", {"dim": 18}, r"dim \(18\) must be a multiple of 4"),
        ("image-transformer", {"vocab": 6, "logistic_mixtures": 2}, "6 classes from 5 on are 1 levels"),
        ("image-transformer", {"logistic_mixtures": 0}, "mixtures: must be a whole number >= 1 or null, got 0"),
        ("image-transformer-2d", {"block_height": 3}, "an image of 4 x 4 cannot be cut into blocks of 3 x 2"),
    ],
)
def test_what_is_refused(recipe: str, keywords: dict[str, Any], message: str) -> None:
    sizes = {"height": 4, "width": 4, "channels": 1} | (
        {"block_height": 2, "block_width": 2} if recipe.endswith("2d") else {}
    )
    with pytest.raises(ValueError, match=message):
        built(recipe, **{**sizes, **keywords})


@pytest.mark.slow
def test_rows_above_are_needed_for_stripes() -> None:
    """Columns that are black or white by chance: four values back tell nothing, the row above tells all."""

    def learnt(recipe: str, order: Tensor, **keywords: Any) -> float:
        model = built(recipe, vocab=7, depth=2, dim=32, ff_dim=64, height=8, width=8, channels=1, **keywords).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        bits = []
        for step in range(300):
            stripes = torch.randint(5, 7, (32, 1, 8)).expand(-1, 8, -1).flatten(1)[:, order]
            tokens = torch.cat([torch.ones_like(stripes[:, :1]), stripes[:, :-1]], 1)
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * min(1, (step + 1) / 20, 2 - step / 150)
            loss = model.loss(CausalLMBatch(tokens, stripes))
            optimizer.zero_grad()
            (loss.total / loss.targets).backward()
            optimizer.step()
            bits.append(float(loss.total.detach() / loss.targets) / math.log(2))
        return sum(bits[-20:]) / 20

    raster, blocks = (torch.from_numpy(pixel_order((8, 8, 1), block)) for block in ((1, 8), (4, 4)))
    assert learnt("image-transformer", raster, block=2, memory_block=1) > 0.8
    # the first row of an image is chance: an eighth of a bit a pixel
    assert (
        learnt("image-transformer-2d", blocks, block_height=4, block_width=4, memory_height=4, memory_width=None) < 0.2
    )
