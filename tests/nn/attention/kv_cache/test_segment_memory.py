"""Segment recurrence: with everything remembered it is one pass, rows reset by document, the past gets no gradient."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.models import LanguageModel
from manyformer.models.embedding import empty_tail, positions_of
from manyformer.nn import Attention, SoftmaxKernel
from manyformer.nn.attention.kv_cache import SegmentMemorySource
from manyformer.nn.attention.kv_cache.segment_memory import RememberedBuffer, RememberedInputs, RememberedKV
from manyformer.nn.core import (
    PADDING_SEGMENT,
    AlignedLayout,
    Context,
    ContiguousLayout,
    State,
    TokenPositions,
    tree_map,
)
from manyformer.nn.masks import Causal
from manyformer.nn.positions import TransformerXLPosition
from perturbing import perturb

VOCAB, SMALL = 13, {"vocab": 13, "dim": 8, "depth": 2, "heads": 2, "ff_dim": 12, "dropout": 0.0}


def made(**words: Any) -> LanguageModel:
    torch.manual_seed(3)
    model = mf.build("transformer-xl", **{**SMALL, **words}).double()
    perturb(model, 0.3)
    assert isinstance(model, LanguageModel)
    return model


def read(
    model: LanguageModel, tokens: Tensor, sizes: list[int], segments: Tensor | None = None, capacity: int | None = None
) -> tuple[Tensor, State]:
    state, parts, begin = model.init_state(len(tokens), capacity=capacity), [], 0
    for size in sizes:
        columns = slice(begin, begin + size)
        logits, state, _ = model(tokens[:, columns], None if segments is None else segments[:, columns], state)
        parts.append(logits)
        begin += size
    return torch.cat(parts, 1), state


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("sizes", [[8, 8, 8], [1] * 24, [5, 18, 1]])
def test_a_memory_of_everything_is_one_pass(sizes: list[int], training: bool, norm: str) -> None:
    model, tokens = made(memory_length=24, norm_order=norm).train(training), torch.randint(0, VOCAB, (2, 24))
    actual, _ = read(model, tokens, sizes)
    torch.testing.assert_close(actual, model(tokens).logits, atol=1e-10, rtol=0)


DOCUMENTS = torch.tensor(
    [
        [0] * 9 + [1] * 11 + [2] * 4,
        [3] * 24,
        [PADDING_SEGMENT] * 5 + [4] * 6 + [7] * 13,
        [0] * 12 + [PADDING_SEGMENT] * 4 + [9] * 8,
    ]
)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("capacity", [None, 24])
def test_rows_reset_where_their_documents_end(training: bool, capacity: int | None) -> None:
    """Each document as if it were alone, whatever was in its row before it, with padding on either side."""
    model, tokens = made(memory_length=24).train(training), torch.randint(0, VOCAB, (4, 24))
    with torch.set_grad_enabled(capacity is None):
        actual, _ = read(model, tokens, [7, 7, 1, 9], DOCUMENTS, None if training else capacity)
        for row, number in ((0, 0), (0, 1), (0, 2), (1, 3), (2, 4), (2, 7), (3, 0), (3, 9)):
            at = DOCUMENTS[row] == number
            alone = model(tokens[row][at][None]).logits[0]
            torch.testing.assert_close(actual[row, at], alone, atol=1e-10, rtol=0)


def test_padding_in_between_takes_no_room_in_the_memory() -> None:
    model, tokens = made(memory_length=6).eval(), torch.randint(0, VOCAB, (1, 12))
    holes = torch.zeros(1, 12, dtype=torch.long)
    holes[0, [3, 4, 9]] = PADDING_SEGMENT
    for capacity in (None, 12):
        with torch.no_grad():
            actual, _ = read(model, tokens, [1] * 12, holes, capacity)
            expected, _ = read(model, tokens[holes != PADDING_SEGMENT][None], [1] * 9, None, capacity)
        torch.testing.assert_close(actual[holes != PADDING_SEGMENT], expected[0], atol=1e-10, rtol=0)


def test_the_gradient_ends_with_the_segment() -> None:
    """Inside the segment it is that of one pass in which the past is given; the past itself gets none."""
    layer = Attention(
        8,
        2,
        SoftmaxKernel(Causal()),
        position=TransformerXLPosition(8, 2),
        source=SegmentMemorySource(9, 8),
        bias=False,
    ).double()
    x = torch.randn(2, 9, 8, dtype=torch.float64, requires_grad=True)
    state, outs = layer.init_state(2, device=x.device, dtype=x.dtype), []
    for begin in (0, 4):
        end = 4 if begin == 0 else 9
        pos = torch.arange(begin, end).expand(2, -1)
        out = layer(
            x[:, begin:end], Context(TokenPositions(pos, torch.zeros_like(pos), ContiguousLayout(begin))), state
        )
        state = out.state
        outs.append(out.y)
    grad_output = torch.randn_like(outs[1])
    actual = torch.autograd.grad(outs[1], [x, *layer.parameters()], grad_output)
    given = torch.cat([x[:, :4].detach(), x[:, 4:]], 1)
    pos = torch.arange(9).expand(2, -1)
    full = layer(given, Context(TokenPositions(pos, torch.zeros_like(pos), ContiguousLayout()))).y[:, 4:]
    expected = torch.autograd.grad(full, [x, *layer.parameters()], grad_output)
    for ours, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-10, rtol=0)
    assert not actual[0][:, :4].any()


def test_the_state_holds_what_the_layer_was_given_last() -> None:
    model, tokens = made(memory_length=5), torch.randint(0, VOCAB, (2, 12))
    _, state = read(model.train(), tokens, [6, 6])
    kept = state.body[0][0].source
    assert isinstance(kept, RememberedInputs)
    x = model.embed(tokens, positions_of(tokens, None, None)[0])
    torch.testing.assert_close(kept.x, x[:, -5:])
    assert not kept.x.requires_grad
    assert kept.position_ids.tolist() == [[7, 8, 9, 10, 11]] * 2
    _, state = read(model.eval(), tokens, [6, 6])
    assert isinstance(state.body[0][0].source, RememberedKV)
    assert state.body[0][0].source.k.shape == (2, 2, 5, 4)


@pytest.mark.parametrize("capacity", [None, 30])
def test_with_an_equal_view_it_does_not_matter_how_a_text_is_cut(capacity: int | None) -> None:
    """Every token sees as many as are remembered, itself among them: also far beyond the memory."""
    model, tokens = made(memory_length=6, context="same-length").eval(), torch.randint(0, VOCAB, (2, 30))
    with torch.no_grad():
        full = model(tokens).logits
        for sizes in ([1] * 30, [10, 10, 10], [4, 25, 1]):
            actual, state = read(model, tokens, sizes, None, capacity)
            torch.testing.assert_close(actual, full, atol=1e-10, rtol=0)
            if capacity is not None:
                assert isinstance(state.body[0][0].source, RememberedBuffer)
                # a step writes in place; nothing is moved but once for a whole memory
                assert state.body[0][0].source.k.shape[2] <= 31


def test_other_lengths_than_those_of_training() -> None:
    """The weights fit any memory and segment; a growing view sees all of its segment and the memory before it."""
    model, longer = made(memory_length=4), made(memory_length=10, clamp_length=8)
    longer.load_state_dict(model.state_dict())
    tokens = torch.randint(0, VOCAB, (1, 9))
    _, state = read(longer.eval(), tokens, [3, 3])
    assert state.body[1][0].source.k.shape[2] == 6
    torch.testing.assert_close(read(longer, tokens, [9])[0][:, :8], model.eval()(tokens).logits[:, :8])


def test_states_are_chosen_copied_and_moved_like_any_other() -> None:
    model, tokens = made(memory_length=7).eval(), torch.randint(0, VOCAB, (3, 14))
    segments = torch.tensor([[0] * 14, [1] * 5 + [2] * 9, [3] * 14])
    with torch.no_grad():
        _, state = read(model, tokens, [5, 5], segments)
        expected = model(tokens[:, 10:], segments[:, 10:], state).logits
        order = torch.tensor([2, 0, 0])
        chosen = tree_map(lambda t: t.index_select(0, order), state)
        actual = model(tokens[order, 10:], segments[order, 10:], chosen).logits
        torch.testing.assert_close(actual, expected[order], atol=1e-12, rtol=0)
        again = pickle.loads(pickle.dumps(tree_map(lambda t: t.to("cpu", copy=True), state)))
        copied = model(tokens[:, 10:], segments[:, 10:], again).logits
        torch.testing.assert_close(copied, expected, atol=1e-12, rtol=0)
        reset = segments[:, 10:] + torch.tensor([[9], [0], [0]])
        others = model(tokens[:, 10:], reset, state).logits
    torch.testing.assert_close(others[1:], expected[1:], atol=1e-12, rtol=0)
    torch.testing.assert_close(others[0], model(tokens[:1, 10:]).logits[0], atol=1e-10, rtol=0)


@pytest.mark.parametrize("remembered", [40, 6])
def test_it_writes_from_its_memory(remembered: int) -> None:
    """With a memory of everything as without any cache; with an equal view in the same way however short it is."""
    model = made(memory_length=remembered, context="growing" if remembered == 40 else "same-length").float().eval()
    prompt = torch.randint(0, VOCAB, (9,)).tolist()
    written = [
        mf.generate(model, prompt, max_new=30, seed=1, use_cache=use, stop_ids=()).tokens for use in (True, False)
    ]
    assert len(set(written[0][0])) > 5
    assert written[0] == written[1]


def test_a_reserved_state_is_for_writing() -> None:
    model, tokens = made(memory_length=4).eval(), torch.randint(0, VOCAB, (1, 5))
    with pytest.raises(ValueError, match="written in place"):
        model(tokens, None, model.init_state(1, capacity=8))


@pytest.mark.usefixtures("unchecked")
def test_a_context_without_memory_odd_heads_and_an_empty_memory_are_refused() -> None:
    with pytest.raises(UserError, match="context 'same-length'"):
        mf.build("transformer-xl", **SMALL, memory_length=None, context="same-length")
    with pytest.raises(UserError, match=r"dim \(8\) must be a multiple of heads \(3\)"):
        mf.build("transformer-xl", **{**SMALL, "heads": 3})
    with pytest.raises(ValueError, match=r"SegmentMemorySource: size \(0\)"):
        SegmentMemorySource(0, 8)


def test_layers_share_the_biases_or_have_their_own() -> None:
    shared, own = (sum(p.numel() for p in made(bias_sharing=kind).parameters()) for kind in ("all-layers", "per-layer"))
    assert own - shared == 2 * 8


def test_where_tokens_stand_side_by_side_is_known() -> None:
    tail, layouts = empty_tail(2, torch.device("cpu")), []
    steps = (
        [[0, 0, 1], [3, 3, 3]],
        [[1, 1, 1], [3, 4, 4]],
        [[1, PADDING_SEGMENT, 1], [4, 4, 4]],
        [[1, 2, 2], [4, 4, 5]],
    )
    for numbers in (*steps, [[5, 5, 5], [6, 6, 6]], [[5, 5, 5], [6, 7, 7]]):
        segments = torch.tensor(numbers)
        place, tail = positions_of(segments, segments, tail)
        assert tail is not None
        layouts.append(place.layout)
    assert layouts[1:] == [AlignedLayout(3), None, None, AlignedLayout(12), AlignedLayout(15)]
    copied = copy.copy(place).columns(1, 3)
    assert copied.layout == AlignedLayout(16)


def test_kept_rows_of_distances_follow_the_weights() -> None:
    """Projected once for many steps; anew after any change of the weights."""
    xl = TransformerXLPosition(8, 2).eval()
    with torch.no_grad():
        first = xl.distance_vectors(5, 0)
        assert xl.distance_vectors(4, 0).data_ptr() == first[:, 1:].data_ptr()
        xl.r_proj.weight.mul_(2)
        torch.testing.assert_close(xl.distance_vectors(5, 0), 2 * first)
    assert xl.distance_vectors(5, 0).requires_grad


def test_weights_made_in_inference_mode_keep_no_rows() -> None:
    with torch.inference_mode():
        xl = TransformerXLPosition(8, 2).eval()
        first = xl.distance_vectors(5, 0)
        xl.r_proj.weight.mul_(2)
        torch.testing.assert_close(xl.distance_vectors(5, 0), 2 * first)
