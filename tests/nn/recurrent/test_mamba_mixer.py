"""Mamba's layer: documents alone, in pieces and with padding between tokens, and how it begins."""

import pytest
import torch

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face.families.recurrent_decoders import MAMBA
from manyformer.models.embedding import empty_tail, materialize_tail, positions_of
from manyformer.nn.core import PADDING_SEGMENT, Context
from manyformer.nn.recurrent.mamba_mixer import MambaMixer, MambaState
from token_rows import range_positions

DIM = 6
SEGMENTS = torch.tensor(
    [
        [0, 0, 0, 1, 1, 2, 2, 2, 2],
        [PADDING_SEGMENT, 5, PADDING_SEGMENT, 5, 6, 6, PADDING_SEGMENT, PADDING_SEGMENT, 7],
        [PADDING_SEGMENT] * 9,
    ]
)


def make_layer(*, signed: bool = False) -> MambaMixer:
    torch.manual_seed(0)
    return MambaMixer(DIM, 8, state_dim=3, rank=2, conv_size=3, negative_eigenvalues=signed).double()


@pytest.mark.parametrize("signed", [False, True])
def test_each_document_is_read_alone(*, signed: bool) -> None:
    layer, x = make_layer(signed=signed), torch.randn(3, 9, DIM, dtype=torch.float64, requires_grad=True)
    y = layer(x, Context(positions_of(SEGMENTS, SEGMENTS, None)[0])).y
    grad_output, total = torch.randn_like(y), torch.zeros((), dtype=torch.float64)
    expected_total = total.clone()
    for row, segments in enumerate(SEGMENTS):
        for segment in set(segments.tolist()) - {PADDING_SEGMENT}:
            columns = (segments == segment).nonzero()[:, 0]
            alone = layer(x[row, None, columns], Context(range_positions(len(columns)))).y
            torch.testing.assert_close(y[row, None, columns], alone)
            total = total + (y[row, columns] * grad_output[row, columns]).sum()
            expected_total = expected_total + (alone * grad_output[row, None, columns]).sum()
    weights = [x, *layer.parameters()]
    grads = [torch.autograd.grad(out, weights, retain_graph=True) for out in (total, expected_total)]
    torch.testing.assert_close(grads[0], grads[1])
    assert all(grad.any() for grad in grads[0])


@pytest.mark.parametrize(("sizes", "signed"), [([1] * 9, False), ([2, 7], False), ([1] * 9, True), ([2, 7], True)])
def test_a_state_of_constant_size_continues_documents(sizes: list[int], *, signed: bool) -> None:
    layer, x, parts, start = make_layer(signed=signed), torch.randn(3, 9, DIM, dtype=torch.float64), [], 0
    expected = layer(x, Context(positions_of(SEGMENTS, SEGMENTS, None)[0])).y
    state, tail = layer.init_state(3, device=x.device, dtype=x.dtype), materialize_tail(empty_tail(3, x.device))
    for size in sizes:
        columns = slice(start, start + size)
        positions, tail = positions_of(SEGMENTS[:, columns], SEGMENTS[:, columns], tail)
        y, state, _ = layer(x[:, columns], Context(positions), state)
        parts.append(y)
        start += size
    valid = (SEGMENTS != PADDING_SEGMENT)[..., None]
    torch.testing.assert_close(torch.cat(parts, 1) * valid, expected * valid)
    assert isinstance(state, MambaState)
    assert state.memory.shape == (3, 8, 3)
    assert not state.memory[2].any()


def test_steps_begin_between_a_thousandth_and_a_tenth() -> None:
    layer = MambaMixer(DIM, 400, state_dim=3, rank=2)
    steps = torch.nn.functional.softplus(layer.dt_proj.bias.detach())
    assert 0.001 <= float(steps.min()) < 0.002
    assert 0.05 < float(steps.max()) <= 0.1001
    torch.testing.assert_close(layer.a_log.exp().view(400, 3), torch.tensor([1.0, 2.0, 3.0]).expand(400, 3))


def test_a_large_step_changes_the_sign_of_a_memory_with_negative_eigenvalues_alone() -> None:
    for signed, factor in ((False, 0.0), (True, -1.0)):
        layer = make_layer(signed=signed)
        with torch.no_grad():
            # steps of about 60, and tokens of zeros, which write nothing
            layer.dt_proj.bias.fill_(60.0)
            assert layer.short_convolution.bias is not None
            layer.short_convolution.bias.zero_()
            before = layer.init_state(1, device=torch.device("cpu"), dtype=torch.float64)
            assert isinstance(before, MambaState)
            before = before._replace(memory=torch.ones_like(before.memory), segment_ids=torch.zeros(1).long())
            x = torch.zeros(1, 1, DIM, dtype=torch.float64)
            after = layer(x, Context(range_positions(1)), before).state
        torch.testing.assert_close(after.memory, factor * before.memory)


def test_a_model_with_negative_eigenvalues_is_not_exported_as_one_without() -> None:
    keywords = mf.build("mamba", vocab=11, dim=8, depth=1, negative_eigenvalues=True).spec.keywords
    with pytest.raises(UserError, match="negative_eigenvalues is True, and a MambaForCausalLM has False alone"):
        MAMBA.write_config(keywords)
