"""Encoder-decoders with every kind of attention: cached steps, beams and padding are exact, others are refused."""

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.inference.generate import BeamSettings, Decoding, GNMTPenalty, generate
from manyformer.inference.generate.prompts import BOS
from manyformer.nn.core import PADDING_SEGMENT, Context, state_bytes, tree_map
from manyformer.recipes.parts.attention_kernels import ATTENTION_LAYERS, CROSS, DECODER, ENCODER, KERNELS
from perturbing import perturb

SIZES: dict[str, Any] = {"vocab": 19, "dim": 16, "depth": 2, "heads": 2, "ff_dim": 16, "max_length": 24, "window": 8}
NAMES = dict.fromkeys([*ENCODER.kernels, *KERNELS, *ATTENTION_LAYERS])
ROLES = (ENCODER, DECODER, CROSS)
SOURCE, TARGET = torch.randint(3, 19, (2, 9)), torch.randint(3, 19, (2, 7))


def build(name: str) -> Any:
    """The kernel in all roles that it can have, softmax in the others; in float64, away from initial weights."""
    own = {role.keyword: name for role in ROLES if name not in role.refusals}
    torch.manual_seed(0)
    return perturb(mf.build("transformer", **SIZES, **own), 0.2).double().eval()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_translates_exactly(name: str) -> None:
    model = build(name)
    segments = torch.tensor([[0] * 9, [0] * 5 + [PADDING_SEGMENT] * 4])
    with torch.inference_mode():
        full = model(SOURCE, TARGET, segments).logits
        # padding of the source changes nothing
        torch.testing.assert_close(full[1:], model(SOURCE[1:, :5], TARGET[1:]).logits, atol=1e-10, rtol=0)
        # a later token changes nothing before it
        torch.testing.assert_close(model(SOURCE, TARGET[:, :4], segments).logits, full[:, :4], atol=1e-10, rtol=0)
        memory, state = model.encode(SOURCE, segments), model.init_state(2)
        steps = []
        for token in TARGET[:, :4].split(1, dim=1):
            output = model.decode(token, memory, None, state)
            steps.append(output.logits)
            state = output.state
        torch.testing.assert_close(torch.cat(steps, 1), full[:, :4], atol=1e-10, rtol=0)
        order = torch.tensor([1, 1, 0])
        rows = tree_map(lambda t: t.index_select(0, order), (memory, state))
        rest = model.decode(TARGET[order, 4:], rows[0], None, rows[1]).logits
    torch.testing.assert_close(rest, full[order, 4:], atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ["linear", "rfa", "favor", "lsh", "linformer", "collaborative", "synthesizer-random"])
def test_beams_of_uncached_and_cached_decoding_agree(name: str) -> None:
    """The score of the best beam is the sum of log-probabilities of one uncached pass."""
    model, source = build(name), SOURCE[:1, :6].tolist()
    decoding = Decoding(choice=BeamSettings(4, GNMTPenalty(0.0), best=1), max_new=5, stop_ids=(2,))
    answer = generate(model, source, decoding=decoding).rows[0][0]
    tokens = [*answer.tokens, 2] if answer.finish == "end" else answer.tokens
    target = torch.tensor([[BOS, *tokens]])
    with torch.inference_mode():
        gains = model(SOURCE[:1, :6], target[:, :-1]).logits.log_softmax(-1).gather(2, target[:, 1:, None])
    assert answer.score == pytest.approx(float(gains.sum()), abs=1e-6)


@pytest.mark.parametrize(("role", "name"), [(role, name) for role in ROLES for name in role.refusals])
def test_a_kernel_that_a_role_cannot_have_is_refused_with_the_reason(role: Any, name: str) -> None:
    with pytest.raises(
        UserError, match=rf"{role.keyword} cannot be {re.escape(name)}: .{{20,}}; set {role.keyword} to"
    ):
        mf.build("transformer", **SIZES, **{role.keyword: name})


def test_every_name_is_built_or_refused_in_every_role() -> None:
    for role in ROLES:
        assert {*role.kernels, *ATTENTION_LAYERS, *role.refusals} == set(NAMES)
        assert not role.kernels.keys() & role.refusals.keys()


def test_a_kernel_for_all_is_replaced_where_another_is_given() -> None:
    model: Any = mf.build("transformer", **SIZES, kernel="linear", decoder_kernel="softmax")
    layer = model.decoder.get_submodule("0")
    kernels = [type(layer.get_submodule(f"{name}.inner").kernel).__name__ for name in ("attention", "cross")]
    assert kernels == ["SoftmaxKernel", "LinearKernel"]
    with pytest.raises(UserError, match=r"cross_kernel cannot be lsh: its queries are the keys"):
        mf.build("transformer", **SIZES, kernel="lsh")
    with pytest.raises(UserError, match=r"encoder_kernel: 'linaer' is not one of softmax, "):
        mf.build("transformer", **SIZES, encoder_kernel="linaer")


def test_linear_cross_attention_by_its_definition() -> None:
    """Each target token averages the values of its source, weighted by products of elu(x) + 1."""
    model = build("linear")
    layer = model.decoder.get_submodule("0").get_submodule("cross.inner")
    segments = torch.tensor([[0] * 9, [0] * 5 + [PADDING_SEGMENT] * 4])
    memory, x = model.encode(SOURCE, segments), torch.randn(2, 3, 16, dtype=torch.float64)
    positions = model.embed_target.read_source(TARGET[:, :3], None)[1]
    y = layer(x, Context(positions, memory)).y

    def features(values: Tensor) -> Tensor:
        return torch.where(values > 0, values + 1, values.exp())

    expected = torch.zeros(2, 3, 16, dtype=torch.float64)
    weight, bias = layer.kv_proj.weight, layer.kv_proj.bias
    for row, token, head in itertools.product(range(2), range(3), range(2)):
        channels = slice(8 * head, 8 * head + 8)
        q = features(layer.q_proj(x[row, token])[channels])
        total, norm = torch.zeros(8, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for source in range(9 if row == 0 else 5):
            k, v = (weight @ memory.y[row, source] + bias).split(16)
            share = q @ features(k[channels])
            total, norm = total + share * v[channels], norm + share
        expected[row, token, channels] = total / norm
    torch.testing.assert_close(y, layer.out_proj(expected), atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ["linear", "favor", "rfa"])
def test_a_summed_source_is_a_state_of_constant_size(name: str) -> None:
    model = build(name)
    sizes = []
    with torch.inference_mode():
        for length in (5, 20):
            memory = model.encode(torch.randint(3, 19, (1, length)))
            sizes.append(state_bytes(model.decode(TARGET[:1], memory, None, model.init_state(1)).state))
    assert sizes[0] == sizes[1]


def test_a_kernel_with_a_table_of_positions_limits_the_length() -> None:
    """Sinusoids have no largest position; decoding ends at the kernel's, and a longer source is refused."""
    model = mf.build(
        "transformer", **SIZES | {"max_length": 6}, kernel="synthesizer-random+dot", cross_kernel="softmax"
    )
    assert model.max_length == model.max_source_length == 6
    assert len(generate(model, [[5] * 6]).tokens[0]) <= 6
    with pytest.raises(UserError, match="source 0 has 7 tokens, but the model allows at most 6"):
        generate(model, [[5] * 7])
