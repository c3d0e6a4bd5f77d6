"""The Compressive Transformer: queues, compressions, what learns from what, and Transformer-XL as a special case."""

import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.models import LanguageModel
from manyformer.nn import Attention, SoftmaxKernel
from manyformer.nn.attention.compressive_attention import (
    AttentionReconstructionLoss,
    AutoEncodingLoss,
    CompressiveAttention,
    ConvolutionCompression,
    MaxPoolCompression,
    MeanPoolCompression,
    MemoryCompression,
    MemorySlots,
    MostAttendedCompression,
    ThroughTimeLoss,
    slot_segments,
)
from manyformer.nn.attention.kv_cache import PrefixSource, SegmentMemorySource, SelfSource
from manyformer.nn.batches import CausalLMBatch
from manyformer.nn.core import PADDING_SEGMENT, Context, ContiguousLayout, TokenPositions, tree_map
from manyformer.nn.masks import Causal
from manyformer.nn.positions import TransformerXLPosition

DIM, HEADS, VOCAB = 8, 2, 13


def attention(source: Any, norm: bool = False) -> Attention:
    torch.manual_seed(1)
    layer = Attention(
        DIM,
        HEADS,
        SoftmaxKernel(Causal()),
        position=TransformerXLPosition(DIM, HEADS),
        source=source,
        bias=False,
        pre_norm=nn.LayerNorm(DIM),
    )
    layer.pre_norm = layer.pre_norm if norm else None
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(std=0.4)
    return layer.double()


def layer(compression: MemoryCompression, teacher: Any = None, **words: Any) -> CompressiveAttention:
    sizes: dict[str, Any] = {"memory_length": 4, "compressed_length": 6, **words}
    return CompressiveAttention(attention(PrefixSource()), compression.double(), teacher=teacher, **sizes).double()


def place(begin: int, end: int, rows: int = 2) -> TokenPositions:
    pos = torch.arange(begin, end).expand(rows, -1)
    return TokenPositions(pos, torch.zeros_like(pos), ContiguousLayout(begin))


def read(mixer: Any, x: Tensor, sizes: list[int]) -> tuple[list[Tensor], list[Any], list[Any]]:
    state = mixer.init_state(len(x), device=x.device, dtype=x.dtype)
    ys, states, losses, begin = [], [], [], 0
    for size in sizes:
        y, state, loss = mixer(x[:, begin : begin + size], Context(place(begin, begin + size, len(x))), state)
        ys.append(y)
        states.append(state)
        losses.append(loss)
        begin += size
    return ys, states, losses


@pytest.mark.parametrize("sizes", [[4, 4, 4, 4, 4], [1] * 20, [7, 2, 11]])
def test_slots_of_one_token_are_a_longer_memory(sizes: list[int]) -> None:
    """A convolution of one weight starts as the identity."""
    x = torch.randn(2, 20, DIM, dtype=torch.float64)
    ours = layer(ConvolutionCompression(DIM, 1), memory_length=4, compressed_length=5)
    xl = attention(SegmentMemorySource(9, DIM)).train()
    for actual, expected in zip(read(ours, x, sizes)[0], read(xl, x, sizes)[0], strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_what_leaves_the_memory_becomes_slots_in_order() -> None:
    x = torch.arange(20.0, dtype=torch.float64)[None, :, None].expand(1, -1, DIM)
    ours = layer(MeanPoolCompression(2), memory_length=4, compressed_length=5)
    _, states, _ = read(ours, x, [4, 4, 4, 3, 5])
    assert [state.memory.x[0, :, 0].tolist() for state in states[:3]] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [state.slots.x[0, :, 0].tolist() for state in states[:3]] == [[], [0.5, 2.5], [0.5, 2.5, 4.5, 6.5]]
    # three more: one pair leaves, the odd one stays until its slot is full
    assert states[3].memory.x[0, :, 0].tolist() == [10, 11, 12, 13, 14]
    assert states[4].memory.x[0, :, 0].tolist() == [16, 17, 18, 19]
    assert states[4].slots.x[0, :, 0].tolist() == [6.5, 8.5, 10.5, 12.5, 14.5]
    blocks = layer(MeanPoolCompression(2), memory_length=4, compressed_length=5, block=4)
    _, states, _ = read(blocks, x, [4, 3, 1, 4])
    assert [state.memory.x.shape[1] for state in states] == [4, 7, 4, 4]


def test_the_five_compressions() -> None:
    x, seg = torch.randn(2, 6, DIM), torch.zeros(2, 6, dtype=torch.long)
    pairs = x.unflatten(1, (3, 2))
    torch.testing.assert_close(MaxPoolCompression(2)(MemorySlots(x, seg)).x, pairs.max(2).values)
    torch.testing.assert_close(MeanPoolCompression(2)(MemorySlots(x, seg)).x, pairs.mean(2))
    torch.testing.assert_close(ConvolutionCompression(DIM, 2)(MemorySlots(x, seg)).x, pairs.mean(2))
    dilated = ConvolutionCompression(DIM, 2, dilation=2)
    weight, bias = dilated.conv.weight, dilated.conv.bias
    assert bias is not None
    nn.init.normal_(weight)
    earlier = torch.cat([torch.zeros(2, 1, DIM), x[:, 1:5:2]], 1)
    expected = earlier @ weight[:, :, 0].T + x[:, 1::2] @ weight[:, :, 1].T + bias
    torch.testing.assert_close(dilated(MemorySlots(x, seg)).x, expected, atol=1e-5, rtol=1e-5)
    used = MostAttendedCompression(3)(
        MemorySlots(x, seg), torch.tensor([[0.1, 0.9, 0, 0.2, 0.3, 0], [5, 0, 0, 0, 0, 6.0]])
    )
    assert torch.equal(used.x, torch.stack([x[0, [1, 4]], x[1, [0, 5]]]))


def test_slots_of_several_documents_belong_to_none() -> None:
    seg = torch.tensor([[0, 0, 0, 1, 1, 1], [PADDING_SEGMENT, 2, 2, 2, 3, 3]])
    assert slot_segments(seg, 2, 2).tolist() == [[0, PADDING_SEGMENT, 1], [PADDING_SEGMENT, 2, 3]]
    assert slot_segments(seg, 2, 3).tolist() == [[0, PADDING_SEGMENT, 1], [PADDING_SEGMENT, 2, PADDING_SEGMENT]]


def test_rows_reset_where_their_documents_end() -> None:
    ours, x = layer(MeanPoolCompression(2)).eval(), torch.randn(2, 18, DIM, dtype=torch.float64)
    seg = torch.tensor([[0] * 18, [0] * 10 + [1] * 8])
    pos = torch.stack([torch.arange(18), torch.cat([torch.arange(10), torch.arange(8)])])
    state, outs = ours.init_state(2, device=x.device, dtype=x.dtype), []
    for columns in torch.arange(18).split(5):
        out = ours(x[:, columns], Context(TokenPositions(pos[:, columns], seg[:, columns])), state)
        state = out.state
        outs.append(out.y)
    actual = torch.cat(outs, 1)
    full = torch.cat(read(ours, x, [5, 5, 5, 3])[0], 1)
    torch.testing.assert_close(actual[0], full[0], atol=1e-10, rtol=0)
    fresh, _, _ = read(ours, x[1:, 10:], [5, 3])
    torch.testing.assert_close(actual[1, 10:], torch.cat(fresh, 1)[0], atol=1e-10, rtol=0)
    swapped = tree_map(lambda t: t.index_select(0, torch.tensor([1, 0])), state)
    at = Context(TokenPositions(torch.tensor([[8], [18]]), torch.tensor([[1], [0]])))
    again = ours(x[:, :1], at, swapped).y
    straight = ours(
        x[[1, 0], :1],
        Context(TokenPositions(at.positions.position_ids.flip(0), at.positions.segment_ids.flip(0))),
        state,
    ).y
    torch.testing.assert_close(again, straight.flip(0), atol=1e-12, rtol=0)


@pytest.mark.parametrize("norm", [False, True])
def test_attention_reconstruction_is_its_closed_form(norm: bool) -> None:
    """Written out head by head, with gradients for the slots alone."""
    at, old = torch.randn(2, 5, DIM, dtype=torch.float64), torch.randn(2, 6, DIM, dtype=torch.float64)
    inner = attention(PrefixSource(), norm)
    compression = ConvolutionCompression(DIM, 3).double()
    nn.init.normal_(compression.conv.weight, std=0.3)
    zeros = (torch.zeros(2, n, dtype=torch.long) for n in (5, 6))
    here, tokens = (MemorySlots(x.requires_grad_(), seg) for x, seg in zip((at, old), zeros))
    memory = compression(MemorySlots(tokens.x.detach(), tokens.segment_ids))
    loss = AttentionReconstructionLoss()(inner, here, tokens, memory)

    def attend(to: Tensor) -> Tensor:
        before = inner.pre_norm if inner.pre_norm is not None else (lambda x: x)
        q, (k, v) = inner.q_proj(before(at)), inner.kv_proj(before(to)).chunk(2, -1)  # type: ignore[misc]
        heads = []
        for head in range(HEADS):
            part = slice(head * 4, head * 4 + 4)
            heads.append((q[..., part] @ k[..., part].mT / math.sqrt(4)).softmax(-1) @ v[..., part])
        return torch.cat(heads, -1)

    expected = (attend(memory.x) - attend(old)).square().mean()
    torch.testing.assert_close(loss, expected)
    actual = torch.autograd.grad(loss, [at, old, *inner.parameters()], retain_graph=True, allow_unused=True)
    assert not any(grad is not None for grad in actual)
    weights = list(compression.parameters())
    gradients = torch.autograd.grad(loss, weights, retain_graph=True)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, weights))
    assert all(gradient.abs().max() > 0 for gradient in gradients)


def test_nothing_is_lost_where_tokens_of_a_slot_are_alike() -> None:
    x = torch.randn(2, 3, DIM, dtype=torch.float64).repeat_interleave(2, 1)
    old = MemorySlots(x, torch.zeros(2, 6, dtype=torch.long))
    memory = MeanPoolCompression(2)(old)
    loss = AttentionReconstructionLoss()(attention(PrefixSource()), MemorySlots(x, old.segment_ids), old, memory)
    torch.testing.assert_close(loss, torch.zeros_like(loss))  # type: ignore[arg-type]
    coder = AutoEncodingLoss(DIM, 2).double()
    with torch.no_grad():
        coder.decoder.weight.copy_(torch.eye(DIM)[:, :, None].expand(-1, -1, 2))
        coder.decoder.bias.zero_()  # type: ignore[union-attr]
    lost = coder(attention(PrefixSource()), MemorySlots(x, old.segment_ids), old, memory)
    torch.testing.assert_close(lost, torch.zeros_like(lost))


def test_auto_encoding_counts_whole_slots_alone() -> None:
    coder = AutoEncodingLoss(DIM, 2)
    x, seg = torch.randn(1, 6, DIM), torch.tensor([[0, 0, 0, 1, 1, 1]])
    memory = MemorySlots(torch.randn(1, 3, DIM), slot_segments(seg, 2, 2))
    decoded = coder.decoder(memory.x.mT).mT
    expected = (decoded - x)[:, [0, 1, 4, 5]].square().mean()
    torch.testing.assert_close(
        coder(attention(PrefixSource()), MemorySlots(x, seg), MemorySlots(x, seg), memory), expected
    )


@pytest.mark.parametrize("teacher", ["attention", "auto-encoding", "through-time"])
def test_what_learns_from_what(teacher: str) -> None:
    """The task never teaches the compression, but for the third; the auxiliary loss never teaches anything else."""
    model = small(teacher=teacher).train()
    state, tokens = model.init_state(2), torch.randint(0, VOCAB, (2, 40))
    for begin in (0, 8, 16):
        batch = CausalLMBatch(tokens[:, begin : begin + 8], tokens[:, begin + 1 : begin + 9])
        actual = model.loss(batch, state=state)
        state = actual.state
    names = [name for name, _ in model.named_parameters()]
    ours = {name for name in names if ".compression." in name or ".teacher." in name}
    assert ours
    by_task = taught(model, actual.total, names)
    assert by_task == (set(names) - ours) | (ours if teacher == "through-time" else set())
    if teacher == "through-time":
        assert actual.extra == 0.0
    else:
        assert taught(model, actual.extra, names) == ours  # type: ignore[arg-type]


def taught(model: nn.Module, loss: Tensor, names: list[str]) -> set[str]:
    grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
    return {name for name, grad in zip(names, grads) if grad is not None and grad.any()}


def small(**words: Any) -> LanguageModel:
    sizes = {"vocab": VOCAB, "dim": DIM, "depth": 2, "heads": 2, "ff_dim": 12, "dropout": 0.0}
    memories = {"memory_length": 8, "compressed_length": 6, "rate": 2}
    model = mf.build("compressive-transformer", **{**sizes, **memories, **words})
    assert isinstance(model, LanguageModel)
    return model


@pytest.mark.parametrize("compression", ["max", "mean", "convolution", "dilated", "most-used"])
def test_every_compression_reads_on_in_steps_of_any_length(compression: str) -> None:
    model, tokens = small(compression=compression).eval(), torch.randint(0, VOCAB, (2, 30))
    with torch.no_grad():
        state = model.init_state(2)
        for columns in tokens.split([9, 1, 1, 12, 7], dim=1):
            logits, state, _ = model(columns, None, state)
            assert logits.isfinite().all()
    assert state.body[0][0].slots.x.shape == (2, 6, DIM)


def test_pooled_slots_do_not_depend_on_the_pieces_a_text_is_read_in() -> None:
    model, tokens = small(compression="mean", depth=1).eval(), torch.randint(0, VOCAB, (1, 31))
    with torch.no_grad():
        states = []
        for sizes in ([10, 10, 10], [1] * 30):
            state = model.init_state(1)
            for columns in tokens[:, :30].split(sizes, dim=1):
                _, state, _ = model(columns, None, state)
            states.append(state)
        torch.testing.assert_close(*(s.body[0][0].slots.x for s in states))
        torch.testing.assert_close(*(model(tokens[:, 30:], None, s).logits for s in states))


def test_states_are_chosen_copied_and_moved_like_any_other() -> None:
    model, tokens = small(compression="mean").double().eval(), torch.randint(0, VOCAB, (3, 34))
    with torch.no_grad():
        state = model.init_state(3)
        for columns in tokens[:, :30].split(10, dim=1):
            _, state, _ = model(columns, None, state)
        expected, order = model(tokens[:, 30:], None, state).logits, torch.tensor([2, 0, 0])
        chosen = tree_map(lambda t: t.index_select(0, order), state)
        actual = model(tokens[order, 30:], None, chosen).logits
        torch.testing.assert_close(actual, expected[order], atol=1e-12, rtol=0)
        again = pickle.loads(pickle.dumps(tree_map(lambda t: t.to("cpu", copy=True), state)))
        torch.testing.assert_close(model(tokens[:, 30:], None, again).logits, expected, atol=1e-12, rtol=0)
        # a new document in the first row begins with empty memories, and leaves the other rows alone
        numbers = torch.tensor([[9], [0], [0]]).expand(-1, 4)
        others = model(tokens[:, 30:], numbers, state).logits
    torch.testing.assert_close(others[1:], expected[1:], atol=1e-12, rtol=0)
    torch.testing.assert_close(others[0], model(tokens[:1, 30:]).logits[0], atol=1e-10, rtol=0)


def test_the_shares_of_attention_are_told() -> None:
    model, tokens = small().eval(), torch.randint(0, VOCAB, (2, 24))
    seen: list[Tensor] = []

    def watch(module: nn.Module, name: str, value: Tensor) -> None:
        if name == "mass":
            assert isinstance(module, CompressiveAttention)
            seen.append(value)

    state = model.init_state(2)
    for columns in tokens.split(8, dim=1):
        _, state, _ = model(columns, None, state, watch=watch)
    assert len(seen) == 6
    for mass in seen:
        assert float(mass.sum()) == pytest.approx(1)
    assert seen[0].tolist() == pytest.approx([0, 0, 1])
    assert (seen[4] > 0.05).all()


@pytest.mark.usefixtures("unchecked")
def test_a_compression_without_weights_to_teach_and_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match="'mean' has no weights to train"):
        small(compression="mean", teacher="attention")
    with pytest.raises(ValueError, match=r"block \(3\) must be a multiple of the rate \(2\)"):
        small(block=3)
    with pytest.raises(ValueError, match=r"the source must be PrefixSource\(\), not SelfSource"):
        CompressiveAttention(attention(SelfSource()), MeanPoolCompression(2), memory_length=2, compressed_length=2)
    with pytest.raises(ValueError, match=r"MaxPoolCompression: rate \(0\)"):
        MaxPoolCompression(0)
    assert ThroughTimeLoss().next_step_gradients
