"""Long short-term memory: one row and one token at a time by `torch.nn.LSTMCell`, anew in every document."""

import pytest
import torch
from torch import Tensor, nn

from manyformer.models.embedding import empty_tail, materialize_tail, positions_of
from manyformer.nn.core import PADDING_SEGMENT, Context
from manyformer.nn.recurrent.lstm import LSTM, LSTMState

DIM = 4
SEGMENTS = torch.tensor(
    [
        [0, 0, 0, 1, 1, 2, 2, 2, 2],
        [3, 3, 3, 3, 3, 3, 3, 3, 3],
        [PADDING_SEGMENT, 5, PADDING_SEGMENT, 5, 6, 6, PADDING_SEGMENT, PADDING_SEGMENT, 7],
        [PADDING_SEGMENT] * 9,
    ]
)


def make_layer() -> LSTM:
    torch.manual_seed(0)
    return LSTM(DIM).double()


def reference_lstm(layer: LSTM, x: Tensor, segments: Tensor) -> Tensor:
    """One token at a time; a state for each row, which another segment replaces by zeros."""
    cell = nn.LSTMCell(DIM, DIM).double()
    cell.load_state_dict({name.removesuffix("_l0"): weight for name, weight in layer.cells.state_dict().items()})
    outputs = torch.zeros_like(x)
    for row, row_segments in enumerate(segments.tolist()):
        state, latest = None, None
        for column, segment in enumerate(row_segments):
            if segment == PADDING_SEGMENT:
                continue
            state = cell(x[row, column, None], state if segment == latest else None)
            outputs[row, column], latest = state[0][0], segment
    return outputs


def test_documents_are_read_one_token_at_a_time() -> None:
    layer, x = make_layer(), torch.randn(4, 9, DIM, dtype=torch.float64, requires_grad=True)
    valid = (SEGMENTS != PADDING_SEGMENT)[..., None]
    outputs = [layer(x, Context(positions_of(SEGMENTS, SEGMENTS, None)[0])).y, reference_lstm(layer, x, SEGMENTS)]
    torch.testing.assert_close(*(output * valid for output in outputs))
    torch.testing.assert_close(*(torch.autograd.grad((out * valid).square().sum(), x)[0] for out in outputs))


@pytest.mark.parametrize("sizes", [[1] * 9, [4, 1, 4], [2, 7]])
def test_a_state_continues_documents(sizes: list[int]) -> None:
    layer, x = make_layer(), torch.randn(4, 9, DIM, dtype=torch.float64)
    expected, parts, start = reference_lstm(layer, x, SEGMENTS), [], 0
    state = layer.init_state(4, device=x.device, dtype=x.dtype)
    tail = materialize_tail(empty_tail(4, x.device))
    for size in sizes:
        columns = slice(start, start + size)
        positions, tail = positions_of(SEGMENTS[:, columns], SEGMENTS[:, columns], tail)
        y, state, _ = layer(x[:, columns], Context(positions), state)
        parts.append(y)
        start += size
    valid = (SEGMENTS != PADDING_SEGMENT)[..., None]
    torch.testing.assert_close(torch.cat(parts, 1) * valid, expected * valid)
    assert isinstance(state, LSTMState)
    assert not state.hidden[3].any()


def test_the_forget_gate_begins_open() -> None:
    weights = dict(make_layer().cells.named_parameters())
    bias = (weights["bias_ih_l0"] + weights["bias_hh_l0"]).view(4, DIM)
    assert bias.tolist() == [[0.0] * DIM, [1.0] * DIM, [0.0] * DIM, [0.0] * DIM]
