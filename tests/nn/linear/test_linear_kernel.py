"""Linear attention: pairs written out, chunks, single tokens and sums give the same, gradients too."""

import itertools
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from layouts import LAYOUTS, LENGTH, ROWS, apart, differentiated, in_steps, place_of, real_of, segments_of, tensors
from manyformer.nn import Attention, KernelCall, LinearKernel
from manyformer.nn.attention.kv_cache import CrossAttentionSource
from manyformer.nn.core import PADDING_SEGMENT, Context, ContiguousLayout, MemorySequence, TokenPositions, tree_map
from manyformer.nn.linear import (
    ArcCosineFeatures,
    CosineReweightingFeatures,
    DPFPFeatures,
    EluPlusOneFeatures,
    FavorPlusFeatures,
    FeatureMap,
    GeneralizedFavorFeatures,
    HedgehogFeatures,
    RandomFourierFeatures,
    T2RFeatures,
    TaylorFeatures,
    linear_attention,
    matrix_recurrence,
)
from manyformer.nn.linear.memory_rules import DeltaRule, GatedRule, MemoryRule, SumRule
from manyformer.nn.masks import AllKeys, Causal
from manyformer.nn.positions import NoPosition

HEADS, KEY, VALUE = 4, 6, 5
NOWHERE = NoPosition()

MAPS: dict[str, Any] = {
    "elu + 1": lambda groups: EluPlusOneFeatures(),
    "cosine": lambda groups: CosineReweightingFeatures(64),
    "Taylor": lambda groups: TaylorFeatures(),
    "DPFP": lambda groups: DPFPFeatures(reach=2),
    "FAVOR+": lambda groups: FavorPlusFeatures(KEY, 16),
    "FAVOR+ ReLU": lambda groups: GeneralizedFavorFeatures(KEY, 16),
    "Fourier": lambda groups: RandomFourierFeatures(KEY, 64, heads=groups),
    "arc-cosine": lambda groups: ArcCosineFeatures(KEY, 16, heads=groups),
    "T2R": lambda groups: T2RFeatures(KEY, 16, heads=groups),
    "Hedgehog": lambda groups: HedgehogFeatures(KEY, heads=groups),
}


def run(
    kernel: LinearKernel, qkv: tuple[Tensor, ...], grad_output: Tensor, positions: TokenPositions, real: Tensor
) -> tuple[Tensor, ...]:
    y = kernel(KernelCall(*qkv, positions, positions, NOWHERE)).y * real
    return differentiated(y, grad_output, [*qkv, *kernel.features.parameters()])


RULES: dict[str, MemoryRule] = {"sum": SumRule(), "gated": GatedRule(), "delta": DeltaRule()}
# the delta rule divides features by their sum
PAIRS = [(name, rule) for name in MAPS for rule in RULES if not (rule == "delta" and MAPS[name](1).signed)]


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("features", "name"), PAIRS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_causal_form_is_the_definition(layout: str, features: str, name: str) -> None:
    place, real, groups, rule = place_of(layout), real_of(layout), 2, RULES[name]
    feature_map: FeatureMap = MAPS[features](groups).double()
    qkv = tensors(HEADS, groups, KEY, VALUE + rule.gate_dim)
    grad_output = torch.randn(ROWS, HEADS, LENGTH, VALUE, dtype=torch.float64) * real
    actual = {
        path: run(
            LinearKernel(feature_map, Causal(), rule=rule, chunk=8, floor=1e-3, path=path),
            qkv,
            grad_output,
            place,
            real,
        )
        for path in rule.forms
    }
    expected = actual.pop("quadratic" if "quadratic" in actual else "recurrent")
    assert actual
    for path, result in actual.items():
        assert apart(result, expected) < 1e-10, path


@pytest.mark.thinned(2)
@pytest.mark.parametrize("sizes", [[1] * LENGTH, [5, 1, 9, 8], [LENGTH]], ids=["steps", "chunks", "whole"])
@pytest.mark.parametrize("rule", [SumRule(), GatedRule(), DeltaRule()], ids=["sum", "gated", "delta"])
@pytest.mark.parametrize("features", ["elu + 1", "cosine", "FAVOR+"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stream_gives_what_one_pass_gives(layout: str, features: str, rule: MemoryRule, sizes: list[int]) -> None:
    """Documents begin and end anywhere between steps; what was before them is forgotten."""
    kernel = LinearKernel(MAPS[features](2).double(), Causal(), rule=rule, chunk=4)
    q, k, v = (x.detach() for x in tensors(HEADS, 2, KEY, VALUE + rule.gate_dim))
    place, state, outputs = place_of(layout), kernel.init_state(ROWS, device=q.device, dtype=q.dtype), []
    for part, at in in_steps(layout, sizes):
        y, state, _ = kernel(KernelCall(q[:, :, part], k[:, :, part], v[:, :, part], at, at, NOWHERE, state))
        outputs.append(y)
    full = kernel(KernelCall(q, k, v, place, place, NOWHERE)).y
    real = real_of(layout)
    assert apart((torch.cat(outputs, 2) * real,), (full * real,)) < 1e-10


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("features", MAPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_over_whole_documents_are_the_definition(layout: str, features: str, groups: int) -> None:
    place, real = place_of(layout), real_of(layout)
    feature_map = MAPS[features](groups).double()
    qkv = tensors(HEADS, groups, KEY, VALUE)
    grad_output = torch.randn(ROWS, HEADS, LENGTH, VALUE, dtype=torch.float64) * real
    expected, actual = (
        run(LinearKernel(feature_map, floor=1e-3, path=p), qkv, grad_output, place, real)
        for p in ("quadratic", "summed")
    )
    assert apart(actual, expected) < 1e-10


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
def test_the_definition_itself(layout: str, causal: bool) -> None:
    """One query at a time, in words of the paper: section 3.2, equation 4 and, causal, 9."""
    place, segments = place_of(layout), place_of(layout).segment_ids
    q, k, v = (x.detach() for x in tensors(HEADS, HEADS, KEY, VALUE))
    y = LinearKernel(EluPlusOneFeatures(), Causal() if causal else None, path="quadratic")(
        KernelCall(q, k, v, place, place, NOWHERE)
    ).y
    phi = [torch.where(x > 0, x + 1, x.exp()) for x in (q, k)]
    for b in range(ROWS):
        for i in range(LENGTH):
            if segments[b, i] == PADDING_SEGMENT:
                continue
            seen = [j for j in range(LENGTH) if segments[b, j] == segments[b, i] and (j <= i or not causal)]
            weights = torch.einsum("he,hje->hj", phi[0][b, :, i], phi[1][b][:, seen])
            mean = torch.einsum("hj,hjf->hf", weights, v[b][:, seen]) / weights.sum(-1, keepdim=True)
            torch.testing.assert_close(y[b, :, i], mean, atol=1e-12, rtol=0)


@pytest.mark.parametrize("path", ["quadratic", "chunked", "recurrent", "summed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_maps_of_queries_and_keys_by_the_definition(layout: str, path: Any) -> None:
    """Zhang et al. 2024, equation 6 and section 4.1, one query of one head at a time, and the gradients of all maps."""
    place, segments, groups, causal = place_of(layout), place_of(layout).segment_ids, 2, path != "summed"
    maps = [HedgehogFeatures(KEY, heads=heads).double() for heads in (HEADS, groups)]
    for features in maps:
        torch.nn.init.normal_(features.weight)
    kernel = LinearKernel(maps[0], Causal() if causal else None, key_features=maps[1], chunk=8, path=path)
    q, k, v = tensors(HEADS, groups, KEY, VALUE)
    expected = torch.zeros(ROWS, HEADS, LENGTH, VALUE, dtype=torch.float64)
    for b, h, i in itertools.product(range(ROWS), range(HEADS), range(LENGTH)):
        if segments[b, i] == PADDING_SEGMENT:
            continue
        g = h // (HEADS // groups)
        keys = [j for j in range(LENGTH) if segments[b, j] == segments[b, i] and (j <= i or not causal)]
        a = maps[0].weight[h] @ q[b, h, i]
        c = k[b, g][keys] @ maps[1].weight[g].T
        weights = a.softmax(0) @ c.softmax(1).T + (-a).softmax(0) @ (-c).softmax(1).T
        expected[b, h, i] = weights @ v[b, g][keys] / weights.sum()
    grad_output = torch.randn_like(expected)
    inputs = [q, k, v, *(features.weight for features in maps)]
    y = kernel(KernelCall(q, k, v, place, place, NOWHERE)).y * real_of(layout)
    assert apart(differentiated(y, grad_output, inputs), differentiated(expected, grad_output, inputs)) < 1e-10


@pytest.mark.parametrize("features", ["elu + 1", "FAVOR+", "cosine"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_precision_and_less(features: str, dtype: torch.dtype) -> None:
    """Sums are taken in float32 at least: what bfloat16 loses, it loses at the ends."""
    place = place_of("packed")
    qkv = [x.detach().to(dtype) for x in tensors(HEADS, 2, KEY, VALUE)]
    kernel = LinearKernel(MAPS[features](2), Causal(), chunk=8)
    y = kernel(KernelCall(*qkv, place, place, NOWHERE)).y
    exact = kernel.double()(KernelCall(*(x.double() for x in qkv), place, place, NOWHERE)).y
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_chunks_are_steps_whatever_there_is(data: st.DataObject) -> None:
    """Lengths, chunks, decays, documents and memories in any combination; gradients of everything."""
    length, chunk, block = (data.draw(st.integers(1, most)) for most in (20, 9, 5))

    def leaf(*shape: int) -> Tensor:
        return torch.randn(2, 3, *shape, dtype=torch.float64, requires_grad=True)

    a, c, v = leaf(length, 4), leaf(length, 4), leaf(length, 5)
    channels = data.draw(st.sampled_from([None, 1, 4]))
    decay = None if channels is None else (-leaf(length, channels).detach().abs()).requires_grad_()
    memory = leaf(4, 5) if data.draw(st.booleans()) else None
    steps = st.lists(st.lists(st.integers(0, 1), min_size=length, max_size=length), min_size=2, max_size=2)
    run = torch.tensor(data.draw(steps)).cumsum(1) if data.draw(st.booleans()) else None
    leaves = [x for x in (a, c, v, decay, memory) if x is not None]
    grad_output, last = torch.randn(2, 3, length, 5, dtype=torch.float64), torch.randn(2, 3, 4, 5, dtype=torch.float64)
    actual = []
    with patch.object(matrix_recurrence, "MIN_CHUNK", block):
        in_chunks = linear_attention.chunked(a, c, v, decay, run, memory, chunk=chunk)
    for summed in (matrix_recurrence.recurrent(a, c, v, decay, run, memory), in_chunks):
        loss = (summed.y * grad_output).sum() + (summed.memory * last).sum()
        actual.append((*summed, *torch.autograd.grad(loss, leaves)))
    torch.testing.assert_close(actual[1], actual[0], atol=1e-10, rtol=1e-10)


def test_a_correction_replaces_what_was_said() -> None:
    """With full strength and orthogonal keys, the memory says the last value of each key (Schlag et al. 2021)."""
    keys = torch.eye(3, dtype=torch.float64)[[0, 1, 0, 2, 1]].expand(1, 1, -1, -1)
    values = torch.randn(1, 1, 5, 2, dtype=torch.float64)
    strength = torch.ones(1, 1, 5, dtype=torch.float64)
    _, memory = matrix_recurrence.chunked(keys, keys, values, strength=strength)
    torch.testing.assert_close(memory[0, 0], values[0, 0, [2, 4, 3]])
    # a sum would have added them
    _, added = linear_attention.chunked(keys, keys, values)
    torch.testing.assert_close(added[0, 0, 0], values[0, 0, 0] + values[0, 0, 2])


def test_a_constant_gate_is_a_moving_average() -> None:
    """With one feature of 1 and a gate g, y_t is the mean of values weighted by g^(t - j)."""
    gate = torch.tensor(0.3, dtype=torch.float64)
    rule = GatedRule(gate_bias=float(torch.logit(gate)))
    place = place_of("plain")
    values = torch.randn(ROWS, 1, LENGTH, 3, dtype=torch.float64)
    v = torch.cat([values, torch.zeros_like(values[..., :1])], -1)

    class One(FeatureMap):
        def forward(self, x: Tensor, positions: TokenPositions) -> Any:
            return EluPlusOneFeatures()(torch.zeros_like(x), positions)

    x = torch.randn(ROWS, 1, LENGTH, 1, dtype=torch.float64)
    y = LinearKernel(One(), Causal(), rule=rule, floor=1e-12)(KernelCall(x, x, v, place, place, NOWHERE)).y
    mean, weight = torch.zeros_like(values[:, :, 0]), 0.0
    for t in range(LENGTH):
        mean, weight = gate * mean + (1 - gate) * values[:, :, t], gate * weight + (1 - gate)
        torch.testing.assert_close(y[:, :, t], mean / weight)


def test_an_open_gate_writes_nothing_and_forgets_nothing() -> None:
    kernel = LinearKernel(EluPlusOneFeatures(), Causal(), rule=GatedRule(gate_bias=800.0))
    q, k, v = (x.detach() for x in tensors(HEADS, HEADS, KEY, VALUE + 1))
    place = place_of("plain")
    state = kernel.init_state(ROWS, device=q.device, dtype=q.dtype)
    state = LinearKernel(EluPlusOneFeatures(), Causal(), rule=GatedRule(gate_bias=0.0))(
        KernelCall(q, k, v, place, place, NOWHERE, state)
    ).state
    later = TokenPositions(place.position_ids + LENGTH, place.segment_ids, ContiguousLayout(LENGTH))
    after = kernel(KernelCall(q, k, v, later, later, NOWHERE, state)).state
    torch.testing.assert_close(after.memory.matrix, state.memory.matrix)


@pytest.mark.parametrize("features", ["elu + 1", "FAVOR+", "Fourier"])
def test_no_bit_comes_from_the_future(features: str) -> None:
    """Even a key of enormous size, which would set the scale of all others, moves nothing before it."""
    kernel = LinearKernel(MAPS[features](HEADS), Causal(), chunk=8)
    place = place_of("plain")
    q, k, v = (x.detach() for x in tensors(HEADS, HEADS, KEY, VALUE, torch.float32))
    before = kernel(KernelCall(q, k, v, place, place, NOWHERE)).y
    for cut in (1, 7, 8, 9, 22):
        changed = k.clone()
        changed[:, :, cut:] *= 40.0
        after = kernel(
            KernelCall(
                q, changed, v * torch.where(torch.arange(LENGTH) < cut, 1.0, -3.0)[:, None], place, place, NOWHERE
            )
        ).y
        assert torch.equal(after[:, :, :cut], before[:, :, :cut])
        assert not torch.equal(after[:, :, cut:], before[:, :, cut:])


def test_keys_of_any_size_leave_finite_weights() -> None:
    """Positive features of large keys underflow unless the largest of them sets the scale."""
    kernel = LinearKernel(FavorPlusFeatures(KEY, 32), Causal(), chunk=4)
    place = place_of("plain")
    q, k, v = (x.detach() for x in tensors(HEADS, HEADS, KEY, VALUE, torch.float32))
    for size in (1e-3, 1.0, 60.0):
        y = kernel(KernelCall(q * size, k * size, torch.ones_like(v), place, place, NOWHERE)).y
        torch.testing.assert_close(y, torch.ones_like(y))


@pytest.mark.parametrize("layout", ["plain", "packed"])
def test_watched_weights_are_what_the_outputs_are_made_of(layout: str) -> None:
    place, real = place_of(layout), real_of(layout)
    q, k, v = (x.detach() for x in tensors(HEADS, 2, KEY, VALUE))
    for mask in (Causal(), AllKeys()):
        for feature_map in (EluPlusOneFeatures(), FavorPlusFeatures(KEY, 16)):
            kernel = LinearKernel(feature_map.double(), mask)
            seen: list[Tensor] = []
            y = kernel(KernelCall(q, k, v, place, place, NOWHERE, None, lambda m, n, w, kept=seen: kept.append(w))).y  # type: ignore[misc]
            torch.testing.assert_close((seen[0] * real).sum(-1, keepdim=True), real.double().expand(-1, HEADS, -1, -1))
            torch.testing.assert_close((seen[0] @ v.repeat_interleave(2, 1)) * real, y * real)
            torch.testing.assert_close(kernel(KernelCall(q, k, v, place, place, NOWHERE)).y * real, y * real)


@pytest.mark.parametrize("features", ["elu + 1", "FAVOR+"])
@pytest.mark.parametrize("layout", ["plain", "packed"])
def test_another_sequence_is_summed_once(layout: str, features: str) -> None:
    """Cross-attention in steps: the first projects and sums the encoder's output, later ones only look."""
    layer = Attention(
        12, 2, LinearKernel(MAPS[features](2), None), kv_heads=1, head_dim=KEY, source=CrossAttentionSource()
    ).double()
    x, other = torch.randn(ROWS, LENGTH, 12, dtype=torch.float64), torch.randn(ROWS, 9, 12, dtype=torch.float64)
    of = TokenPositions(torch.arange(9).expand(ROWS, -1), torch.zeros(ROWS, 9, dtype=torch.long), ContiguousLayout())
    if layout == "packed":
        of = TokenPositions(
            of.position_ids, torch.tensor([[0] * 4 + [1] * 3 + [2] * 2, [PADDING_SEGMENT, 2, 2, 2, 1, 0, 0, 0, 0]])
        )
    memory = MemorySequence(other, of)
    full = layer(x, Context(place_of(layout), memory)).y
    state, outputs = layer.init_state(ROWS, device=x.device, dtype=x.dtype), []
    for part, at in in_steps(layout, [1, 1, 4, 17]):
        y, state, _ = layer(x[:, part], Context(at, memory), state)
        outputs.append(y)
        assert state.source.k.numel() == 0
        state = tree_map(lambda t: t.index_select(0, torch.arange(ROWS)), state)
    real = real_of(layout)[:, 0]
    assert apart((torch.cat(outputs, 1) * real,), (full * real,)) < 1e-10
    pairs = Attention(
        12,
        2,
        LinearKernel(layer.kernel.features, None, path="quadratic"),
        kv_heads=1,
        head_dim=KEY,
        source=CrossAttentionSource(),
    )
    pairs.double().load_state_dict(layer.state_dict())
    assert apart((pairs(x, Context(place_of(layout), memory)).y * real,), (full * real,)) < 1e-10


def test_the_state_does_not_grow() -> None:
    kernel = LinearKernel(EluPlusOneFeatures(), Causal())
    sizes = set()
    state = kernel.init_state(ROWS, device=torch.device("cpu"), dtype=torch.float32)
    for step in range(5):
        at = TokenPositions(torch.full((ROWS, 1), step), torch.zeros(ROWS, 1, dtype=torch.long), ContiguousLayout(step))
        x = torch.randn(ROWS, HEADS, 1, KEY)
        state = kernel(KernelCall(x, x, x, at, at, NOWHERE, state)).state
        sizes.add(str(tree_map(lambda t: torch.tensor(t.shape), state)))
    assert len(sizes) == 1


def test_it_says_how() -> None:
    q = torch.zeros(1, 1, 3, 2)
    place = TokenPositions(torch.arange(3)[None], torch.zeros(1, 3, dtype=torch.long), ContiguousLayout())
    arguments = (q, q, q, place, place, NOWHERE)
    assert (
        LinearKernel(EluPlusOneFeatures(), Causal()).explain(KernelCall(*arguments))
        == "chunked: causal, 64 tokens at a time"
    )
    assert (
        LinearKernel(EluPlusOneFeatures()).explain(KernelCall(*arguments))
        == "summed: every key is visible, so the keys are summed once"
    )
    assert (
        LinearKernel(EluPlusOneFeatures(), Causal(), path="recurrent").explain(KernelCall(*arguments))
        == "recurrent: forced"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: LinearKernel(
                EluPlusOneFeatures(), Causal(), key_features=FavorPlusFeatures(4, 4, redraw=1), carried=True
            ),
            r"features that are never redrawn",
        ),
        (
            lambda: LinearKernel(EluPlusOneFeatures(), Causal(), key_features=TaylorFeatures(), rule=DeltaRule()),
            r"may be 0 for TaylorFeatures",
        ),
        (lambda: T2RFeatures(4, 0, heads=2), r"T2RFeatures: features \(0\) must be at least 1"),
        (lambda: HedgehogFeatures(4, heads=0), r"HedgehogFeatures: heads \(0\) must be at least 1"),
        (
            lambda: LinearKernel(EluPlusOneFeatures(), ~Causal()),
            r"mask ~Causal\(\) must be Causal\(\), AllKeys\(\) or None",
        ),
        (lambda: LinearKernel(EluPlusOneFeatures(), rule=GatedRule()), r"GatedRule updates its memory token by token"),
        (lambda: LinearKernel(EluPlusOneFeatures(), Causal(), chunk=0), r"chunk \(0\) must be at least 1"),
        (
            lambda: LinearKernel(EluPlusOneFeatures(), path="chunked"),
            r"path 'chunked' must be auto or one of quadratic, summed",
        ),
        (
            lambda: LinearKernel(EluPlusOneFeatures(), Causal(), rule=DeltaRule(), path="quadratic"),
            r"one of chunked, recurrent here",
        ),
        (
            lambda: LinearKernel(TaylorFeatures(), Causal(), rule=DeltaRule()),
            r"DeltaRule divides features by their sum, .* TaylorFeatures",
        ),
        (lambda: CosineReweightingFeatures(0), r"max_length \(0\) must be at least 1"),
        (lambda: FavorPlusFeatures(4, 0), r"features \(0\) must be at least 1"),
        (lambda: FavorPlusFeatures(4, 8, redraw=0), r"redraw \(0\) must be at least 1"),
        (lambda: RandomFourierFeatures(4, 7, heads=1), r"features \(7\) must be even"),
        (lambda: DPFPFeatures(reach=0), r"reach \(0\) must be at least 1"),
    ],
)
def test_mistakes_get_a_sentence(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_calls_that_cannot_be_get_a_sentence() -> None:
    q, k, v = (x.detach() for x in tensors(HEADS, HEADS, KEY, VALUE))
    place = place_of("plain")
    with pytest.raises(ValueError, match="needs a key for each query, got 5 keys, 23 queries"):
        LinearKernel(EluPlusOneFeatures(), Causal())(KernelCall(q, k[:, :, :5], v[:, :, :5], place, place, NOWHERE))
    with pytest.raises(
        ValueError, match="position 22 does not exist: CosineReweightingFeatures was built for max_length=22"
    ):
        LinearKernel(CosineReweightingFeatures(22), Causal())(KernelCall(q, k, v, place, place, NOWHERE))
    packed = place_of("packed")
    with pytest.raises(
        ValueError, match="position 9 does not exist: CosineReweightingFeatures was built for max_length=9"
    ):
        LinearKernel(CosineReweightingFeatures(9), Causal())(KernelCall(q, k, v, packed, packed, NOWHERE))
    kernel = LinearKernel(EluPlusOneFeatures(), Causal(), path="quadratic")
    state = kernel(
        KernelCall(q, k, v, place, place, NOWHERE, kernel.init_state(ROWS, device=q.device, dtype=q.dtype))
    ).state
    later = TokenPositions(place.position_ids + LENGTH, place.segment_ids, ContiguousLayout(LENGTH))
    with pytest.raises(ValueError, match="'quadratic' needs all keys, but the state holds only their sum"):
        kernel(KernelCall(q, k, v, later, later, NOWHERE, state))


def test_a_document_that_comes_back_is_a_new_one() -> None:
    """As its positions are: in one pass and in a stream alike."""
    segments = torch.tensor([[0, 0, 1, 1, 0, 0]])
    from manyformer.models.embedding import positions_of

    place = positions_of(segments, segments, None)[0]
    q, k, v = (torch.randn(1, 2, 6, 3, dtype=torch.float64) for _ in range(3))
    y = LinearKernel(EluPlusOneFeatures(), Causal())(KernelCall(q, k, v, place, place, NOWHERE)).y
    alone = TokenPositions(torch.arange(2)[None], torch.zeros(1, 2, dtype=torch.long), ContiguousLayout())
    for begin in (0, 2, 4):
        part = (slice(None), slice(None), slice(begin, begin + 2))
        torch.testing.assert_close(
            y[part],
            LinearKernel(EluPlusOneFeatures(), Causal())(
                KernelCall(q[part], k[part], v[part], alone, alone, NOWHERE)
            ).y,
        )
    assert segments_of("plain") is None
