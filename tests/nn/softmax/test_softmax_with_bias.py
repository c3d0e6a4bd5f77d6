"""Positions that act on scores and values: every path is the definition, gradients too, wherever tokens are."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from manyformer.analysis.benchmarks import LargestTensorMode
from manyformer.models.embedding import positions_of
from manyformer.nn import KernelCall, SoftmaxKernel
from manyformer.nn.core import PADDING_SEGMENT, ContiguousLayout, TokenPositions
from manyformer.nn.masks import AllKeys, Causal, Mask, PerHead, Window
from manyformer.nn.ops import attention_with_lse
from manyformer.nn.positions import (
    AlibiPosition,
    FirePosition,
    KerplePosition,
    NoPosition,
    Position,
    ShawPosition,
    T5BiasPosition,
)
from manyformer.nn.softmax import band, softmax_forms, softmax_kernel, toeplitz_attention
from token_rows import segment_positions

HEADS, KEY, VALUE = 4, 6, 5


class Bent(Position):
    """A score that no table of distances gives, and a value besides, both with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2))

    def score(
        self, logits: Tensor, q: Tensor, k: Tensor, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> Tensor:
        far = (query_positions.position_ids[:, None, :, None] - key_positions.position_ids[:, None, None, :]).abs()
        return logits * torch.sigmoid(self.weight[0] - far)

    def value(
        self, y: Tensor, weights: Tensor, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> Tensor:
        late = key_positions.position_ids[:, None, :, None].to(weights.dtype)
        return y + self.weight[1] * (weights @ late)


POSITIONS: dict[str, Callable[[], Position]] = {
    "alibi": lambda: AlibiPosition(HEADS),
    "t5": lambda: T5BiasPosition(HEADS, buckets=8, max_distance=9),
    "t5 past": lambda: T5BiasPosition(HEADS, buckets=8, max_distance=9, direction="past"),
    "kerple": lambda: KerplePosition(HEADS),
    "fire": lambda: FirePosition(HEADS, width=5, length=6.0),
    "shaw": lambda: ShawPosition(KEY, 3, value_width=VALUE),
    "shaw past": lambda: ShawPosition(KEY, 3, value_width=VALUE, heads=HEADS, direction="past"),
    "bent": Bent,
}

LAYOUTS = {
    "plain": [[0] * 21] * 2,
    "right padding": [[0] * 21, [0] * 13 + [PADDING_SEGMENT] * 8],
    "left padding": [[0] * 21, [PADDING_SEGMENT] * 8 + [0] * 13],
    "packed": [[0] * 9 + [1] * 12, [0] + [1] * 15 + [PADDING_SEGMENT] * 5],
    "in pieces": [[0, 0, 1, 1, 0, 1, 0] * 3, [0, 1, 0, PADDING_SEGMENT, 0, 1, 2] * 3],
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, and nothing too small for them."""
    for module, name, value in (
        *((module, "BLOCK", size) for module, size in ((softmax_forms, 7), (toeplitz_attention, 8), (band, 4))),
        *((softmax_kernel, name, 0) for name in ("MAX_REFERENCE_PAIRS", "MAX_REFERENCE_QUERIES", "BLOCK")),
        (softmax_forms, "MIN_DOCUMENT_LENGTH", 0),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.fixture(params=["private operators", "public ones"])
def operators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_with_lse, "FUSED", attention_with_lse.FUSED and request.param == "private operators")


def draw(
    query_positions: TokenPositions, key_positions: TokenPositions, groups: int = HEADS
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (
        (HEADS, query_positions.position_ids.shape[1], KEY),
        (groups, key_positions.position_ids.shape[1], KEY),
        (groups, key_positions.position_ids.shape[1], VALUE),
    )
    return tuple(  # type: ignore[return-value]
        torch.randn(query_positions.position_ids.shape[0], *shape, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    )


def run(
    kernel: SoftmaxKernel,
    position: Position,
    qkv: tuple[Tensor, ...],
    grad_output: Tensor,
    query_positions: TokenPositions,
    key_positions: TokenPositions,
) -> list[Tensor]:
    """Outputs and the gradients of everything that has one."""
    y = kernel(KernelCall(*qkv, query_positions, key_positions, position)).y
    actual = torch.autograd.grad((y * grad_output).sum(), [*qkv, *position.parameters()])
    return [y * (grad_output != 0), *actual]


def assert_paths_agree(
    mask: Mask,
    position: Position,
    query_positions: TokenPositions,
    key_positions: TokenPositions,
    groups: int,
    path: str = "blocked",
) -> str:
    """The path's results are those of the definition; what path it was, and why."""
    qkv = draw(query_positions, key_positions, groups)
    grad_output = (
        torch.randn(*qkv[0].shape[:3], VALUE, dtype=torch.float64)
        * (query_positions.segment_ids != PADDING_SEGMENT)[:, None, :, None]
    )
    kernel = SoftmaxKernel(mask, path=path)  # type: ignore[arg-type]
    expected = run(SoftmaxKernel(mask, path="naive"), position, qkv, grad_output, query_positions, key_positions)
    torch.testing.assert_close(
        run(kernel, position, qkv, grad_output, query_positions, key_positions), expected, atol=1e-10, rtol=0
    )
    return kernel.explain(KernelCall(*qkv, query_positions, key_positions, position))


@pytest.mark.thinned(2)
@pytest.mark.usefixtures("small", "operators")
@pytest.mark.parametrize("mask", [Causal(), AllKeys(), PerHead({1: Causal()}, default=~Causal())], ids=repr)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", POSITIONS)
def test_every_path_is_the_definition(name: str, layout: str, mask: Mask) -> None:
    place = segment_positions(LAYOUTS[layout])
    position = POSITIONS[name]().double()
    for path, groups in (("blocked", 2), ("auto", HEADS)):
        said = assert_paths_agree(mask, position, place, place, groups, path)
        assert said.startswith("blocked: ")
    cut = name in ("bent", "kerple", "fire") or isinstance(mask, PerHead) or layout == "in pieces"
    if not (mask == AllKeys() and "past" in name):
        assert ("computed in" in said) == cut, said


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("past", "new"), [(5, 1), (5, 9), (0, 4), (30, 3)])
@pytest.mark.parametrize("name", POSITIONS)
def test_queries_at_the_end_of_a_cache(name: str, past: int, new: int) -> None:
    of = positions_of(torch.zeros(2, past + new, dtype=torch.long), None, None)[0]
    at = of.columns(past, past + new)
    assert at.layout == ContiguousLayout(past)
    assert_paths_agree(Causal(), POSITIONS[name]().double(), at, of, 2)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", POSITIONS)
def test_queries_of_another_sequence(name: str) -> None:
    at, of = segment_positions([[0] * 11] * 2), segment_positions([[0] * 6] * 2)
    for mask, (a, b) in itertools.product((AllKeys(), Causal()), ((at, of), (of, at))):
        assert_paths_agree(mask, POSITIONS[name]().double(), a, b, HEADS)


@pytest.mark.parametrize("name", sorted(POSITIONS.keys() - {"bent", "fire"}))
def test_only_distances_count(name: str) -> None:
    place = segment_positions(LAYOUTS["packed"])
    later = place._replace(position_ids=place.position_ids + 1000, layout=None)
    qkv, position = draw(place, place), POSITIONS[name]().double()
    for path in ("naive", "blocked"):
        kernel = SoftmaxKernel(Causal(), path=path)  # type: ignore[arg-type]
        ys = [kernel(KernelCall(*qkv, where, where, position)).y for where in (place, later)]
        torch.testing.assert_close(*ys, atol=1e-12, rtol=0)


def test_it_says_which_way_it_goes_and_why() -> None:
    place, short = segment_positions([[0] * 200]), segment_positions([[0] * 20])
    packed = segment_positions([[0] * 90 + [1] * 110])

    def say(position: Position, where: TokenPositions, **words: Any) -> str:
        return SoftmaxKernel(Causal(), **words).explain(KernelCall(*draw(where, where), where, where, position))

    fused = "one fused call per 256 queries, its bias a view of one vector"
    assert say(AlibiPosition(HEADS), place) == f"blocked: AlibiPosition adds a number for each distance: {fused}"
    assert say(AlibiPosition(HEADS), packed).endswith(f"{fused}, one call for each of 2 documents")
    near = "a band of close keys, fused calls for all other keys"
    assert say(T5BiasPosition(HEADS), place) == f"blocked: T5BiasPosition clips distances: {near}"
    with torch.no_grad():
        assert say(T5BiasPosition(HEADS), place) == f"blocked: T5BiasPosition adds a number for each distance: {fused}"
    acts = "acts on the score and value of each pair"
    assert say(ShawPosition(KEY, value_width=VALUE), short) == f"naive: ShawPosition {acts}, and there are few pairs"
    assert say(Bent(), place) == f"blocked: Bent {acts}: computed in blocks of 128 queries"
    assert say(AlibiPosition(HEADS), place, dropout=0.1).endswith("computed in blocks of 128 queries")
    assert say(AlibiPosition(HEADS), short, path="flex").startswith(
        "flex: AlibiPosition acts on the score of each pair: one compiled"
    )
    for position, words in (
        (ShawPosition(KEY, value_width=VALUE), {}),
        (Bent(), {}),
        (AlibiPosition(HEADS), {"dropout": 0.5}),
    ):
        with pytest.raises(ValueError, match="path 'flex' needs a position that adds to scores by distance alone"):
            say(position, place, path="flex", **words)


def test_dropout_acts_on_weights_and_keeps_the_mean() -> None:
    place = segment_positions([[0] * 300])
    q = torch.zeros(1, HEADS, 300, KEY)
    v = torch.ones(1, HEADS, 300, VALUE)
    kernel = SoftmaxKernel(AllKeys(), dropout=0.5, path="blocked")
    y = kernel(KernelCall(q, q, v, place, place, AlibiPosition(HEADS))).y
    assert y.std() > 0.05
    assert abs(y.mean().item() - 1) < 0.05
    # a dropped weight takes the value and the vector of its position alike: where these cancel, nothing is left
    position = ShawPosition(KEY, value_width=VALUE)
    torch.nn.init.constant_(position.values.data, -1.0)
    assert kernel(KernelCall(q, q, v, place, place, position)).y.abs().max() < 1e-5


@pytest.mark.thinned(3)
@pytest.mark.parametrize("mask", [Causal(), AllKeys()], ids=repr)
@pytest.mark.parametrize("name", ["alibi", "t5", "t5 past", "shaw", "shaw past", "bent"])
def test_no_tensor_grows_with_the_square_of_the_length(name: str, mask: Mask) -> None:
    sizes = []
    for length in (512, 1024, 2048):
        place = positions_of(torch.zeros(1, length, dtype=torch.long), None, None)[0]
        qkv = tuple(torch.randn(1, HEADS, length, width, requires_grad=True) for width in (KEY, KEY, VALUE))
        with LargestTensorMode() as largest:
            SoftmaxKernel(mask)(KernelCall(*qkv, place, place, POSITIONS[name]())).y.sum().backward()
        sizes.append(largest.elements)
    assert sizes[2] <= 2.1 * sizes[1] <= 4.5 * sizes[0]
    assert sizes[2] < HEADS * 2048**2 / 4


@pytest.mark.parametrize("width", [8, 16])
def test_narrow_heads_have_no_compiled_kernel_on_a_gpu(width: int) -> None:
    """Shapes alone stand for tensors on a GPU; torch 2.13 compiles FlexAttention from 16 channels on."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, HEADS, 512, width, device="cuda")
        place = positions_of(torch.zeros(1, 512, dtype=torch.long, device="cuda"), None, None)[0]
        masked = SoftmaxKernel(Causal() & Window(64)).explain(KernelCall(q, q, q, place, place, NoPosition()))
        biased = SoftmaxKernel(Causal()).explain(KernelCall(q, q, q, place, place, AlibiPosition(HEADS)))
    assert masked.startswith("flex") is biased.startswith("flex") is (width == 16)
    assert ("FlexAttention needs 16 channels" in masked) is (width == 8)


@pytest.mark.parametrize("name", ["alibi", "t5", "t5 past"])
def test_few_queries_take_the_definition_on_a_gpu(name: str) -> None:
    """Each decoded token would have a block mask and an offset of its own, for which a kernel is compiled."""
    position = POSITIONS[name]()
    for queries, path in [(1, "naive"), (127, "naive"), (128, "flex")]:
        with FakeTensorMode(allow_non_fake_inputs=True):
            q, kv = torch.empty(2, HEADS, queries, 32, device="cuda"), torch.empty(2, HEADS, 500, 32, device="cuda")
            query_ids, ids = (torch.empty(2, n, dtype=torch.long, device="cuda") for n in (queries, 500))
            query_place = TokenPositions(query_ids, query_ids, ContiguousLayout(500 - queries))
            call = KernelCall(q, kv, kv, query_place, TokenPositions(ids, ids, ContiguousLayout()), position)
            assert SoftmaxKernel(Causal()).explain(call).startswith(path)
