"""RNNsearch by hand: one pair at a time, one word at a time, with torch's own units where these can be the same.

`torch.nn.GRU` resets after the product and calls 1 - z what the paper calls z. With the signs of z turned, and with a
diagonal matrix, whose product commutes with the reset, it is the paper's unit.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import manyformer as mf
from manyformer.models.embedding import positions_of
from manyformer.nn import AttendingGRU, BidirectionalGRU
from manyformer.nn.core import PADDING_SEGMENT, Context, ContiguousLayout, PackedLayout, TokenPositions
from manyformer.nn.kernels.pairwise_kernel import SoftmaxWeights
from manyformer.nn.recurrent.gru import GRUWeights, mirrored_columns
from manyformer.nn.runtime.costs import count_flops
from perturbing import perturb

DIM, WORDS, ALIGN, MAXOUT, VOCAB = 5, 4, 6, 3, 11
SOURCES, TARGETS = (4, 1, 6), (3, 5, 2)

Step = Callable[[GRUWeights, Tensor, Tensor | None, Tensor], Tensor]
"""From a unit, what a token is, what is added to what it says, and a state, to the next state; one row."""


def built() -> Any:
    torch.manual_seed(1)
    model = mf.build("bahdanau", vocab=VOCAB, dim=DIM, embedding_dim=WORDS, align_dim=ALIGN, maxout=MAXOUT)
    return perturb(model, 0.4).double()


def written_out(unit: GRUWeights, x: Tensor, more: Tensor | None, state: Tensor) -> Tensor:
    """Appendix A.1.1, equation by equation."""
    said = unit.input_proj.weight @ x + unit.input_proj.bias + (0 if more is None else more)
    update, reset = ((said[i * DIM : (i + 1) * DIM] + unit.gates.weight[i * DIM : (i + 1) * DIM] @ state).sigmoid()
                     for i in (0, 1))  # fmt: skip
    candidate = (said[2 * DIM :] + unit.candidate.weight @ (reset * state)).tanh()
    return (1 - update) * state + update * candidate


def weights_for_torch(unit: GRUWeights) -> dict[str, Tensor]:
    """A unit's weights as those of `torch.nn.GRUCell`: reset, update turned round, candidate."""

    def turned(weight: Tensor) -> Tensor:
        update, reset, *rest = weight.split(DIM)
        return torch.cat([reset, -update, *rest])

    state = turned(torch.cat([unit.gates.weight, unit.candidate.weight]))
    zeros = torch.zeros_like(unit.input_proj.bias)
    return {
        "weight_ih": turned(unit.input_proj.weight),
        "weight_hh": state,
        "bias_ih": turned(unit.input_proj.bias),
    } | {"bias_hh": zeros}


def by_torch(unit: GRUWeights, x: Tensor, more: Tensor | None, state: Tensor) -> Tensor:
    """`torch.nn.GRUCell`, where what is looked at is added to what the token says by way of the bias."""
    weights = weights_for_torch(unit)
    if more is not None:
        update, reset, candidate = more.split(DIM)
        weights["bias_ih"] = weights["bias_ih"] + torch.cat([reset, -update, candidate])
    new: Tensor = functional_call(nn.GRUCell(WORDS, DIM).double(), weights, (x[None], state[None]))  # type: ignore[no-untyped-call]
    return new[0]


def logits_by_hand(model: Any, source: Tensor, target: Tensor, step: Step) -> Tensor:
    """Sections 3.1, 3.2 and A.2 for one pair."""
    encoder, decoder, head = model.encoder, model.decoder, model.head
    words, past = model.embed_source.token.weight[source], torch.zeros(2, DIM, dtype=torch.float64)
    ahead, back = [past[0]], [past[1]]
    for x in words:
        ahead.append(step(encoder.forward_gru, x, None, ahead[-1]))
    for x in words.flip(0):
        back.append(step(encoder.backward_gru, x, None, back[-1]))
    annotations = [torch.cat(pair) for pair in zip(ahead[1:], back[:0:-1])]
    state = (decoder.initial_proj.weight @ annotations[0][DIM:] + decoder.initial_proj.bias).tanh()
    logits = []
    for token in target:
        x = model.embed_target.token.weight[token]
        scores = [decoder.score.energy.weight[0] @ (decoder.score.query.weight @ state + decoder.score.key.weight @ h
                  ).tanh() for h in annotations]  # fmt: skip
        weights = torch.stack(scores).softmax(0)
        context = sum(weight * h for weight, h in zip(weights, annotations))
        both = decoder.readout.weight @ torch.cat([state, x, context]) + decoder.readout.bias
        paired = torch.maximum(both[:MAXOUT], both[MAXOUT:])
        logits.append(head.weight @ paired + head.bias)
        state = step(decoder.gru, x, decoder.context_proj.weight @ context, state)
    return torch.stack(logits)


@pytest.mark.parametrize("unit", ["written out", "torch"])
def test_a_padded_batch_is_every_pair_by_hand(unit: str) -> None:
    model, step = built(), by_torch if unit == "torch" else written_out
    squares = [
        part.candidate.weight for part in (model.encoder.forward_gru, model.encoder.backward_gru, model.decoder.gru)
    ]
    if unit == "torch":
        for square in squares:
            square.data.mul_(torch.eye(DIM))
    (source, source_segments), (target, segments) = padded(SOURCES), padded(TARGETS)
    ups = [torch.randn(length, VOCAB, dtype=torch.float64) for length in TARGETS]
    logits = model(source, target, source_segments, segments).logits
    actual = sum((grad_output * logits[row, : len(grad_output)]).sum() for row, grad_output in enumerate(ups))
    hand = [logits_by_hand(model, source[row, :s], target[row, :t], step) for row, (s, t) in
            enumerate(zip(SOURCES, TARGETS))]  # fmt: skip
    for row, one in enumerate(hand):
        torch.testing.assert_close(logits[row, : len(one)], one, atol=1e-10, rtol=1e-10)
    expected = sum((grad_output * one).sum() for grad_output, one in zip(ups, hand))
    assert isinstance(actual, Tensor)
    assert isinstance(expected, Tensor)
    names, weights = zip(*model.named_parameters())
    for name, weight, gradient, expected_gradient in zip(
        names, weights, torch.autograd.grad(actual, weights), torch.autograd.grad(expected, weights)
    ):
        if unit == "torch" and any(weight is square for square in squares):
            gradient, expected_gradient = gradient.diagonal(), expected_gradient.diagonal()
        torch.testing.assert_close(
            gradient, expected_gradient, atol=1e-10, rtol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


def padded(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (len(lengths), max(lengths)))
    return tokens, torch.where(torch.arange(max(lengths)) < torch.tensor(lengths)[:, None], 0, PADDING_SEGMENT)


def test_the_encoder_is_torch_s_own_where_resets_commute() -> None:
    layer = BidirectionalGRU(WORDS, DIM).double()
    for unit in (layer.forward_gru, layer.backward_gru):
        unit.candidate.weight.data.mul_(torch.eye(DIM))
    reference = nn.GRU(WORDS, DIM, bidirectional=True, batch_first=True).double()
    for unit, suffix in ((layer.forward_gru, "l0"), (layer.backward_gru, "l0_reverse")):
        for name, weight in weights_for_torch(unit).items():
            getattr(reference, f"{name}_{suffix}").data.copy_(weight)
    tokens, segments = padded((7, 3, 5))
    place, _ = positions_of(tokens, segments, None)
    x = torch.randn(3, 7, WORDS, dtype=torch.float64)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([7, 3, 5]), batch_first=True, enforce_sorted=False)
    expected, _ = nn.utils.rnn.pad_packed_sequence(reference(packed)[0], batch_first=True)
    actual = layer(x, Context(place)).y * (segments != PADDING_SEGMENT)[..., None]
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


def test_a_document_is_mirrored_where_it_stands() -> None:
    segments = torch.tensor([[-1, 4, 4, 4, 7, -1, 7, 9], [0, 0, -1, -1, 2, 2, 2, 2], [-1, -1, -1, -1, -1, -1, -1, -1]])
    place, _ = positions_of(torch.zeros_like(segments), segments, None)
    expected = [[0, 3, 2, 1, 6, 5, 4, 7], [1, 0, 2, 3, 7, 6, 5, 4], list(range(8))]
    assert mirrored_columns(place).tolist() == expected
    full = TokenPositions(torch.arange(4)[None], torch.zeros(1, 4, dtype=torch.long), ContiguousLayout())
    assert (
        mirrored_columns(full).tolist()
        == mirrored_columns(full._replace(layout=PackedLayout(((0, 0, 4),)))).tolist()
        == [[3, 2, 1, 0]]
    )


def test_the_alignment_is_the_additive_kernel_s() -> None:
    model = built()
    (source, source_segments), (target, segments) = padded(SOURCES), padded(TARGETS)
    memory, watched = model.encode(source, source_segments), []
    model.decode(target, memory, segments, watch=lambda module, name, value: watched.append((module, name, value)))
    [(module, name, weights)] = watched
    assert isinstance(module, AttendingGRU)
    assert (name, weights.shape) == ("weights", (3, 1, 5, 6))
    state = module.initial_proj(memory.y[:, :1, DIM:]).tanh()
    seen = (source_segments != PADDING_SEGMENT)[:, None]
    torch.testing.assert_close(weights[:, 0, :1], SoftmaxWeights()(module.score(state, memory.y), seen))


def test_what_does_not_need_the_state_is_projected_once() -> None:
    """Keys, and what values say to the gates, cost as much for 40 words as for 1."""
    model = mf.build("bahdanau", vocab=7, dim=32, embedding_dim=16, align_dim=24, maxout=8)
    source = torch.zeros(2, 12, dtype=torch.long)
    memory = model.encode(source)  # type: ignore[operator]

    def cost(length: int) -> int:
        target = torch.zeros(2, length, dtype=torch.long)
        return count_flops(lambda: model.decode(target, memory))  # type: ignore[operator]

    token = (cost(40) - cost(1)) / 39
    once = cost(1) - token
    # the energies are a product with a vector, which torch does not count
    step = 32 * (64 + 32) + 32 * 24 + 12 * 96
    rest = 16 * 96 + 12 * 64 + (32 + 16 + 64) * 16 + 8 * 7
    assert token == 2 * 2 * (step + rest)
    assert once == 2 * 2 * (12 * 64 * (24 + 96) + 32 * 32)


def test_a_decoder_needs_a_source() -> None:
    layer = AttendingGRU(4, 4, 8, align_dim=4, out_dim=4, dropout=0.0)
    place = TokenPositions(torch.arange(2)[None], torch.zeros(1, 2, dtype=torch.long), ContiguousLayout())
    with pytest.raises(ValueError, match="the context has no memory"):
        layer(torch.zeros(1, 2, 4), Context(place))
    with pytest.raises(ValueError, match="cannot continue from a state"):
        BidirectionalGRU(4, 4)(torch.zeros(1, 2, 4), Context(place), ())


def fixed_vector_by_hand(model: Any, source: Tensor, target: Tensor) -> Tensor:
    """RNNencdec for one pair: every context vector is the last state of the forward encoder."""
    decoder, state = model.decoder, torch.zeros(DIM, dtype=torch.float64)
    for x in model.embed_source.token.weight[source]:
        state = written_out(model.encoder.gru, x, None, state)
    vector, logits = state, []
    state = (decoder.initial_proj.weight @ vector + decoder.initial_proj.bias).tanh()
    for token in target:
        x = model.embed_target.token.weight[token]
        both = decoder.readout.weight @ torch.cat([state, x, vector]) + decoder.readout.bias
        logits.append(model.head.weight @ torch.maximum(both[:MAXOUT], both[MAXOUT:]) + model.head.bias)
        state = written_out(decoder.gru, x, decoder.context_proj.weight @ vector, state)
    return torch.stack(logits)


def built_fixed_vector() -> Any:
    torch.manual_seed(2)
    sizes = {"vocab": VOCAB, "dim": DIM, "embedding_dim": WORDS, "maxout": MAXOUT}
    return perturb(mf.build("bahdanau", **sizes, context="fixed-vector"), 0.4).double()


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_fixed_vector_is_the_last_state_of_the_source(side: str) -> None:
    model = built_fixed_vector()
    source, target = torch.randint(VOCAB, (3, max(SOURCES))), torch.randint(VOCAB, (3, max(TARGETS)))
    column = torch.arange(max(SOURCES))
    lengths = torch.tensor(SOURCES)[:, None]
    real = column < lengths if side == "right" else column >= max(SOURCES) - lengths
    logits = model(source, target, torch.where(real, 0, PADDING_SEGMENT)).logits
    for row in range(3):
        hand = fixed_vector_by_hand(model, source[row][real[row]], target[row])
        torch.testing.assert_close(logits[row], hand, atol=1e-10, rtol=1e-10)


def test_the_fixed_vector_is_decoded_step_by_step_and_in_packed_rows() -> None:
    model = built_fixed_vector()
    source, target = torch.randint(VOCAB, (2, 6)), torch.randint(VOCAB, (2, 5))
    full = model(source, target).logits
    memory, state, parts = model.encode(source), model.init_state(2), []
    for part in target.split([2, 1, 2], dim=1):
        out = model.decode(part, memory, None, state)
        state = out.state
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-10, rtol=1e-10)
    packed = model(
        source.view(1, -1), target.view(1, -1), torch.arange(2).repeat_interleave(6)[None],
        torch.arange(2).repeat_interleave(5)[None],
    ).logits  # fmt: skip
    torch.testing.assert_close(packed.view_as(full), full, atol=1e-10, rtol=1e-10)
