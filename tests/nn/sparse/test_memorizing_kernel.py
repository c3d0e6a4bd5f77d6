"""Looking up old keys: its limits in closed form, who sees what, what is kept, and what gets a gradient."""

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import manyformer as mf
from manyformer.models import LanguageModel
from manyformer.models.embedding import empty_tail, positions_of
from manyformer.nn import Attention, KernelCall, MemorizingKernel, QKNormKernel, SoftmaxKernel
from manyformer.nn.core import PADDING_SEGMENT, ContiguousLayout, TokenPositions, tree_map
from manyformer.nn.masks import Causal
from manyformer.nn.positions import NoPosition, RotaryPosition
from manyformer.nn.sparse.kv_buffer import (
    UNUSED_SEGMENT,
    BlockHistory,
    KVBuffer,
    append,
    empty_buffer,
    shared_key_ranges,
    trim,
)
from manyformer.nn.sparse.memorizing_kernel import ExactSearch, FaissSearch, GatedCombiner, JointSoftmaxCombiner
from perturbing import perturb

HEADS, WIDTH, VOCAB = 2, 4, 13


def kernel(**words: Any) -> MemorizingKernel:
    sizes: dict[str, Any] = {"size": 9, "neighbours": 100, "block": 3, **words}
    return MemorizingKernel(SoftmaxKernel(Causal()), HEADS, WIDTH, **sizes).double()


def plain(begin: int, end: int, rows: int = 2) -> TokenPositions:
    pos = torch.arange(begin, end).expand(rows, -1)
    return TokenPositions(pos, torch.zeros_like(pos), ContiguousLayout(begin))


def draw(length: int, rows: int = 2, grad: bool = False) -> list[Tensor]:
    return [torch.randn(rows, HEADS, length, WIDTH, dtype=torch.float64, requires_grad=grad) for _ in range(3)]


def run(model: MemorizingKernel, tensors: list[Tensor], sizes: list[int]) -> tuple[Tensor, KVBuffer]:
    """Step by step over its own keys alone: what is near is the step."""
    state = model.init_state(len(tensors[0]), device=tensors[0].device, dtype=tensors[0].dtype)
    parts, begin = [], 0
    for size in sizes:
        place = plain(begin, begin + size)
        given = [x[:, :, begin : begin + size] for x in tensors]
        out = model(KernelCall(*given, place, place, NoPosition(), state))
        state = out.state
        parts.append(out.y)
        begin += size
    return torch.cat(parts, 2), state


def dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    weights = (q @ k.mT / WIDTH**0.5).masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return weights @ v


@pytest.mark.parametrize("combine", ["gate", "joint"])
def test_with_all_as_neighbours_it_is_dense_attention(combine: str) -> None:
    """Mixed by the gate with what is near, or in one softmax with it; with the gradients of a memory that is given."""
    model = kernel(combine=JointSoftmaxCombiner() if combine == "joint" else None)
    q, k, v = tensors = draw(12, grad=True)
    actual, _ = run(model, tensors, [3, 3, 3, 3])
    at = torch.arange(12)
    edge = at // 3 * 3
    far = (at < edge[:, None]) & (at >= edge[:, None] - 9)
    near = (at <= at[:, None]) & (at >= edge[:, None])
    if combine == "joint":
        keys, values = (torch.cat([x.detach(), x], 2) for x in (k, v))
        expected = dense(q, keys, values, torch.cat([far, near], 1))
    else:
        assert isinstance(model.combine, GatedCombiner)
        with torch.no_grad():
            model.combine.bias.copy_(torch.tensor([0.7, -1.0]))
        actual, _ = run(model, tensors, [3, 3, 3, 3])
        gate = model.combine.bias.sigmoid()[:, None, None] * far.any(-1, keepdim=True)
        expected = (1 - gate) * dense(q, k, v, near) + gate * dense(q, k.detach(), v.detach(), far)
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=0)
    grad_output, inputs = torch.randn_like(actual), [*tensors, *model.parameters()]
    for ours, reference in zip(
        torch.autograd.grad(actual, inputs, grad_output), torch.autograd.grad(expected, inputs, grad_output)
    ):
        torch.testing.assert_close(ours, reference, atol=1e-10, rtol=0)


def test_few_neighbours_are_those_with_the_largest_products() -> None:
    model, (q, k, v) = kernel(neighbours=2, size=50, block=10, combine=JointSoftmaxCombiner()), draw(20)
    actual, _ = run(model, [q, k, v], [10, 10])
    products = q[:, :, 10:] @ k[:, :, :10].mT
    best = torch.zeros_like(products, dtype=torch.bool).scatter(-1, products.topk(2).indices, True)
    near = torch.ones(10, 10, dtype=torch.bool).tril().expand(2, HEADS, -1, -1)
    torch.testing.assert_close(actual[:, :, 10:], dense(q[:, :, 10:], k, v, torch.cat([best, near], -1)))


@given(st.integers(1, 9), st.integers(1, 5), st.lists(st.integers(1, 7), min_size=1, max_size=5), st.data())
@settings(max_examples=60, deadline=None)
def test_who_sees_what(size: int, block: int, sizes: list[int], data: st.DataObject) -> None:
    """Stretches of queries and keys are what the definition shows, in rows of any documents."""
    sight, tail, pos, seg = BlockHistory(size, block), empty_tail(2, torch.device("cpu")), [], []
    numbers = [
        data.draw(st.lists(st.sampled_from([0, 0, 0, 1]), min_size=sum(sizes), max_size=sum(sizes))) for _ in "12"
    ]
    documents = torch.tensor(numbers).cumsum(1)
    for begin, count in zip([sum(sizes[:n]) for n in range(len(sizes))], sizes):
        segments = documents[:, begin : begin + count]
        place, tail = positions_of(segments, segments, tail)
        assert tail is not None
        pos.append(place.position_ids)
        seg.append(place.segment_ids.expand(2, -1))
        of = TokenPositions(torch.cat([p.expand(2, -1) for p in pos], 1), torch.cat(seg, 1))
        at = TokenPositions(place.position_ids.expand(2, -1), place.segment_ids.expand(2, -1), place.layout)
        seen = torch.zeros(2, count, of.position_ids.shape[1], dtype=torch.bool)
        actual = shared_key_ranges(sight, at, of.position_ids.shape[1])
        assert actual is not None
        for rows, queries, keys in actual:
            assert not seen[rows, queries].any()
            seen[rows, queries, keys] = True
        assert torch.equal(seen, ~sight.masked_keys(at, of))
        assert not (sight.has_no_visible_keys(at) and seen.any())


def test_first_in_first_out_in_place_and_every_state_stays_as_it_was() -> None:
    """Numbers as keys: the last ones are there, in order; going on twice from one state writes over nothing."""
    keep, state, states = 10, empty_buffer(1, 1, 1, 1, device=torch.device("cpu"), dtype=torch.float64), []
    moves = 0
    for begin in range(0, 200, 5):
        codes = torch.arange(begin, begin + 5.0, dtype=torch.float64).view(1, 1, 5, 1)
        place = plain(begin, begin + 5, rows=1)
        before = state.k.data_ptr()
        state = trim(append(state, codes, -codes, place, keep), place, keep)
        moves += state.k.data_ptr() != before
        held = state.used
        expected = list(range(max(0, begin + 5 - keep), begin + 5))
        assert held.k.flatten().tolist() == [-x for x in held.v.flatten().tolist()] == expected
        assert held.position_ids.flatten().tolist() == expected
        assert state.k.shape[2] <= 2 * keep + 16
        states.append(state)
    # a whole room is filled before anything is moved
    assert moves < 20
    old, later = states[10], states[11]
    codes = torch.full((1, 1, 5, 1), 777.0, dtype=torch.float64)
    again = append(old, codes, codes, plain(55, 60, rows=1), keep)
    assert again.used.k.flatten()[-5:].tolist() == [777.0] * 5
    assert later.used.k.flatten()[-5:].tolist() == [55.0, 56.0, 57.0, 58.0, 59.0]


def test_columns_of_padding_and_of_old_documents_leave_when_room_is_needed() -> None:
    keep, state = 4, empty_buffer(2, 1, 1, 1, device=torch.device("cpu"), dtype=torch.float64)
    for begin in range(0, 300, 3):
        pos = torch.tensor([[begin, 0, begin + 1], [0, 1, 2]])
        seg = torch.tensor([[0, PADDING_SEGMENT, 0], [begin, begin, begin]])
        new = torch.zeros(2, 1, 3, 1, dtype=torch.float64)
        state = trim(append(state, new, new, TokenPositions(pos, seg), keep), TokenPositions(pos, seg), keep)
    assert state.segment_ids.shape[1] < 60
    assert int((state.segment_ids == UNUSED_SEGMENT).sum()) == 2 * (state.segment_ids.shape[1] - state.stop)


def made(**words: Any) -> LanguageModel:
    torch.manual_seed(3)
    sizes = {"vocab": VOCAB, "dim": 8, "depth": 2, "heads": 2, "ff_dim": 12, "dropout": 0.0, "memory_length": 6}
    own = {"knn_memory_size": 12, "neighbours": 3, "block": 4, "layer": 1}
    model = mf.build("memorizing-transformer", **{**sizes, **own, **words}).double()
    perturb(model, 0.3)
    assert isinstance(model, LanguageModel)
    return model


@pytest.mark.parametrize(
    "words", [{}, {"combine": "joint"}, {"position": "xl", "qk_similarity": "product", "norm_order": "post"}]
)
@pytest.mark.parametrize("training", [True, False])
def test_it_does_not_matter_in_which_pieces_a_text_is_read(words: dict[str, Any], training: bool) -> None:
    model, tokens = made(**words).train(training), torch.randint(0, VOCAB, (2, 40))
    full = model(tokens).logits
    for sizes in ([1] * 40, [16, 7, 17]):
        state, parts = model.init_state(2), []
        for columns in tokens.split(sizes, dim=1):
            logits, state, _ = model(columns, None, state)
            parts.append(logits)
        torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-10, rtol=0)


def test_a_closed_gate_is_the_model_without_a_memory() -> None:
    model, without = made(), made(knn_memory_size=None)
    without.load_state_dict(model.state_dict(), strict=False)
    tokens = torch.randint(0, VOCAB, (2, 30))
    assert (model(tokens).logits - without(tokens).logits).abs().max() > 1e-3
    (gate,) = (part for part in model.modules() if isinstance(part, GatedCombiner))
    nn.init.constant_(gate.bias, -60.0)
    torch.testing.assert_close(model(tokens).logits, without(tokens).logits, atol=1e-12, rtol=0)


def test_nothing_that_is_kept_has_a_gradient() -> None:
    model, tokens = made().train(), torch.randint(0, VOCAB, (1, 16))
    state = model.init_state(1)
    for columns in tokens.split(8, dim=1):
        logits, state, _ = model(columns, None, state)
        assert logits.requires_grad
        assert not any(leaf.requires_grad for leaf in leaves(state))


def leaves(state: Any) -> list[Tensor]:
    actual: list[Tensor] = []
    tree_map(lambda t: actual.append(t) or t, state)  # type: ignore[func-returns-value]
    return actual


def test_states_are_chosen_copied_and_moved_like_any_other() -> None:
    model, tokens = made().eval(), torch.randint(0, VOCAB, (3, 34))
    segments = torch.tensor([[0] * 34, [1] * 15 + [2] * 19, [3] * 34])
    with torch.no_grad():
        state = model.init_state(3)
        for columns in torch.arange(30).split(10):
            _, state, _ = model(tokens[:, columns], segments[:, columns], state)
        last = tokens[:, 30:], segments[:, 30:]
        expected = model(*last, state).logits
        order = torch.tensor([2, 0, 0])
        chosen = tree_map(lambda t: t.index_select(0, order), state)
        torch.testing.assert_close(model(*(x[order] for x in last), chosen).logits, expected[order], atol=1e-12, rtol=0)
        again = pickle.loads(pickle.dumps(tree_map(lambda t: t.to("cpu", copy=True), state)))
        torch.testing.assert_close(model(*last, again).logits, expected, atol=1e-12, rtol=0)
        others = model(last[0], last[1] + torch.tensor([[9], [0], [0]]), state).logits
        torch.testing.assert_close(others[1:], expected[1:], atol=1e-12, rtol=0)
        torch.testing.assert_close(others[0], model(tokens[:1, 30:]).logits[0], atol=1e-10, rtol=0)
    with torch.inference_mode():
        _, inside, _ = model(tokens, segments, model.init_state(3))
    # a state from there is gone on from here
    assert model(tokens, segments + 9, inside).logits.isfinite().all()


def test_it_writes_from_its_memory() -> None:
    model = made().float().eval()
    prompt = torch.randint(0, VOCAB, (9,)).tolist()
    written = [
        mf.generate(model, prompt, max_new=30, seed=1, use_cache=use, stop_ids=()).tokens for use in (True, False)
    ]
    assert len(set(written[0][0])) > 5
    assert written[0] == written[1]


def test_a_larger_memory_in_evaluation() -> None:
    model, larger = made(knn_memory_size=4), made(knn_memory_size=40, neighbours=5)
    larger.load_state_dict(model.state_dict())
    tokens = torch.randint(0, VOCAB, (1, 30))
    actual, expected = larger(tokens).logits, model(tokens).logits
    torch.testing.assert_close(actual[:, :4], expected[:, :4])
    assert (actual - expected)[:, 12:].abs().max() > 1e-3


def test_faiss_finds_the_same() -> None:
    pytest.importorskip("faiss")
    q, k = torch.randn(3, 5, 8), torch.randn(3, 70, 8)
    ours, reference = (search(q, k, 6, None) for search in (ExactSearch(), FaissSearch()))
    torch.testing.assert_close(ours.products, reference.products)
    assert torch.equal(ours.columns, reference.columns)
    tokens = torch.randint(0, VOCAB, (2, 24))
    segments = torch.tensor([[PADDING_SEGMENT] * 3 + [0] * 21, [0] * 24])
    one, other = made().float(), made(search="faiss").float()
    for read in ((tokens,), (tokens, segments)):
        torch.testing.assert_close(one(*read).logits, other(*read).logits, atol=1e-5, rtol=1e-5)


def test_the_shares_of_attention_are_told() -> None:
    for words in ({}, {"combine": "joint"}):
        model, tokens, seen = made(**words).eval(), torch.randint(0, VOCAB, (2, 24)), []

        def watch(module: nn.Module, name: str, value: Tensor, seen: list[Tensor] = seen) -> None:
            if name == "mass":
                assert isinstance(module, MemorizingKernel)
                seen.append(value)

        state = model.init_state(2)
        for columns in tokens.split(8, dim=1):
            _, state, _ = model(columns, None, state, watch=watch)
        assert all(float(mass.sum()) == pytest.approx(1) for mass in seen)
        assert seen[0][1] == 0
        assert (seen[2] > 0.05).all()


def test_queries_and_keys_are_of_one_length() -> None:
    model, (q, k, v) = QKNormKernel(SoftmaxKernel(Causal(), scale=1.0), HEADS).double(), draw(5)
    nn.init.constant_(model.scale, -3.0)
    here = plain(0, 5)
    one = model(KernelCall(q, k, v, here, here, NoPosition())).y
    other = model(KernelCall(7 * q, 2 * k, v, here, here, NoPosition())).y
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    units = [x / x.norm(dim=-1, keepdim=True) for x in (q, k)]
    expected = SoftmaxKernel(Causal(), scale=3.0)(KernelCall(*units, v, here, here, NoPosition())).y
    torch.testing.assert_close(one, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("unchecked")
def test_rotary_positions_and_an_empty_memory_are_refused() -> None:
    with pytest.raises(ValueError, match=r"MemorizingKernel does not support \['key'\], which RotaryPosition needs"):
        Attention(8, 2, kernel(), position=RotaryPosition(4))
    with pytest.raises(ValueError, match=r"size \(0\)"):
        kernel(size=0)
