"""Rotary positions of `transformers`: GPT-J, RoFormer, Llama, their scalings, and two whole models with our weights."""

from typing import Any

import pytest
import torch
from mapping import by_family, weights_of
from pairs import DEPTH, DIM, HEADS, HIDDEN, VOCAB, shaken
from torch import Tensor

import manyformer as mf
from manyformer.nn.core import PADDING_SEGMENT
from manyformer.nn.positions import (
    DynamicNTKRotaryScaling,
    LinearRotaryScaling,
    Llama3RotaryScaling,
    LongRoPERotaryScaling,
    NTKRotaryScaling,
    RotaryPosition,
    YaRNRotaryScaling,
    convert_pairs,
)
from manyformer.nn.positions.rotary import RotaryScaling
from token_rows import range_positions
from transformers_cache import cached_pass

pytestmark = pytest.mark.oracle

WIDTH, LENGTH = 16, 40


@pytest.fixture
def queries() -> Tensor:
    return torch.randn(2, 3, LENGTH, WIDTH)


@pytest.mark.parametrize("rotated", [WIDTH, 8])
def test_gptj(queries: Tensor, rotated: int) -> None:
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb, create_sinusoidal_positions

    sin, cos = create_sinusoidal_positions(LENGTH, rotated).chunk(2, dim=-1)
    # their heads stand behind the sequence
    x = queries.transpose(1, 2)
    turned = apply_rotary_pos_emb(x[..., :rotated], sin[None], cos[None])
    expected = torch.cat([turned, x[..., rotated:]], dim=-1).transpose(1, 2)
    actual = RotaryPosition(WIDTH, rotated=rotated).query(queries, range_positions(LENGTH))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_roformer_pairs(queries: Tensor) -> None:
    from transformers.models.roformer.modeling_roformer import (
        RoFormerSelfAttention,
        RoFormerSinusoidalPositionalEmbedding,
    )

    table = RoFormerSinusoidalPositionalEmbedding(LENGTH, WIDTH)
    table.weight = torch.nn.Parameter(table.create_weight(), requires_grad=False)
    sines = table(torch.Size([2, LENGTH]))[None, None]
    expected = RoFormerSelfAttention.apply_rotary_position_embeddings(sines, queries, queries)[0]
    torch.testing.assert_close(
        RotaryPosition(WIDTH).query(queries, range_positions(LENGTH)), expected, atol=1e-5, rtol=0
    )


DIVISORS = [1.0, 1.3, 2.2, 3.9]

ROPES: list[tuple[dict[str, Any], RotaryScaling | None]] = [
    ({"rope_type": "default"}, None),
    ({"rope_type": "linear", "factor": 4.0}, LinearRotaryScaling(4.0)),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}, YaRNRotaryScaling(4.0, 24)),
    ({"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 2048}, YaRNRotaryScaling(16.0, 2048)),
    (
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 128, "low_freq_factor": 1.0}
        | {"high_freq_factor": 4.0},
        Llama3RotaryScaling(8.0, 128),
    ),
    (
        {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 24, "short_factor": DIVISORS}
        | {"long_factor": DIVISORS},
        LongRoPERotaryScaling(tuple(DIVISORS), 4.0, 24),
    ),
]


ROPE_NAMES = [("default", "rope"), ("linear", "rope-linear"), ("yarn", "rope-yarn"), ("llama3", "rope-llama3")]


def llama_config(rope: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=HIDDEN,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=rope.get("original_max_position_embeddings", 24),
        rope_parameters={"rope_theta": 10_000.0, **rope},
        # ours is torch's: the smallest step of the type
        rms_norm_eps=torch.finfo(torch.float32).eps,
        tie_word_embeddings=True,
    )


@pytest.mark.parametrize(("rope", "scaling"), ROPES, ids=[str(rope) for rope, _ in ROPES])
def test_llama_halves(rope: dict[str, Any], scaling: RotaryScaling | None) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    x, pos = torch.randn(2, HEADS, LENGTH, DIM // HEADS), torch.arange(LENGTH)[None]
    cos, sin = LlamaRotaryEmbedding(llama_config(rope))(x, pos)
    expected = apply_rotary_pos_emb(x, x, cos, sin)[0]
    actual = RotaryPosition(DIM // HEADS, pairs="halves", scaling=scaling).query(x, range_positions(LENGTH))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


MORE: dict[str, dict[str, Any]] = {
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"short_factor": DIVISORS, "long_factor": DIVISORS},
}


def rope_settings(name: str) -> dict[str, Any]:
    return {"rope_type": name, "factor": 4.0, "original_max_position_embeddings": 24, **MORE.get(name, {})}


STATIC: dict[str, RotaryScaling] = {
    "linear": LinearRotaryScaling(4.0),
    "yarn": YaRNRotaryScaling(4.0, 24),
    "llama3": Llama3RotaryScaling(4.0, 24),
    "longrope": LongRoPERotaryScaling(tuple(DIVISORS), 4.0, 24),
}


@pytest.mark.parametrize("length", [20, 24, 60, 500])
@pytest.mark.parametrize("name", ["linear", "dynamic", "yarn", "llama3", "longrope"])
def test_scaled_rates(name: str, length: int) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = llama_config(rope_settings(name))
    reference, gain = ROPE_INIT_FUNCTIONS[name](config, "cpu", seq_len=length)
    width = DIM // HEADS
    if name == "dynamic":
        ours = DynamicNTKRotaryScaling(4.0, 24).frequencies(width, 10_000.0, torch.tensor(length))
        if length > 24:
            torch.testing.assert_close(ours, NTKRotaryScaling(4.0 * length / 24 - 3).frequencies(width, 10_000.0))
    else:
        scaling = STATIC[name]
        ours = scaling.frequencies(width, 10_000.0)
        assert scaling.attention_factor == pytest.approx(gain, abs=1e-12)
    torch.testing.assert_close(ours, reference.double(), atol=4e-8, rtol=1e-6)


@pytest.mark.parametrize("lengths", [[9, 9, 9], [30, 3, 17]])
def test_roformer_as_a_whole(lengths: list[int]) -> None:
    from transformers import RoFormerConfig, RoFormerForMaskedLM

    torch.manual_seed(4)
    config = RoFormerConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        intermediate_size=HIDDEN,
        max_position_embeddings=64,
    )
    reference = shaken(RoFormerForMaskedLM(config))
    with torch.no_grad():
        # the sentence type of all tokens is part of every word
        reference.roformer.embeddings.token_type_embeddings.weight.zero_()
    ours: Any = mf.build("roformer", vocab=VOCAB, dim=DIM, depth=DEPTH, heads=HEADS, ff_dim=HIDDEN).eval()
    # a BERT without positions at the embedding
    as_bert = {name.replace("roformer.", "bert.", 1): value for name, value in weights_of(reference).items()}
    ours.load_state_dict(by_family("bert", ours, as_bert, sentence_types=None))
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    tokens = torch.randint(3, VOCAB, real.shape)
    with torch.no_grad():
        expected = reference(tokens, attention_mask=real.long()).logits
        actual = ours(tokens, torch.where(real, 0, PADDING_SEGMENT)).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(actual[real], expected[real], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("rope", "position"), ROPE_NAMES)
def test_llama_as_a_whole(rope: str, position: str) -> None:
    """Their halves as our interleaved pairs, by reordering rows; beyond the original length, with a cache too."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(5)
    config = llama_config(rope_settings(rope))
    reference = shaken(LlamaForCausalLM(config))
    sizes = {"vocab": VOCAB, "dim": DIM, "depth": DEPTH, "heads": HEADS, "kv_heads": 2, "ff_dim": HIDDEN}
    ours: Any = mf.build(
        "compose",
        **sizes,
        **{"feedforward": "swiglu", "norm_kind": "rms", "position": position, "max_length": 24, "length_scale": 4.0},
    ).eval()
    weights = weights_of(reference)
    weights["model.embed_tokens.weight"] = weights["lm_head.weight"] = weights["lm_head.weight"] / DIM**0.5
    for name, value in weights.items():
        if ".q_proj." in name or ".k_proj." in name:
            weights[name] = convert_pairs(value, HEADS if ".q_proj." in name else 2, to="interleaved")
    biases = {name: torch.zeros_like(value) for name, value in ours.state_dict().items() if name.endswith(".bias")}
    keywords = mf.build("llama", **sizes, tied=True).spec.keywords
    ours.load_state_dict(biases | by_family("llama", ours, weights, **keywords))
    tokens = torch.randint(3, VOCAB, (2, 70))
    with torch.no_grad():
        expected = reference(tokens).logits
        # our words are scaled up where they come in, and tied to those that go out
        actual = ours(tokens).logits * DIM**0.5
        assert expected.std() > 0.3
        # theirs interpolates the frequencies of Llama 3 in float32
        atol = 5e-5 if rope == "llama3" else 1e-5
        torch.testing.assert_close(actual, expected, atol=atol, rtol=1e-5)
        state, past = ours.init_state(2), None
        for part in tokens.split([60, 1, 1, 8], dim=1):
            mine, (expected, past) = ours(part, state=state), cached_pass(reference, past, input_ids=part)
            state = mine.state
            torch.testing.assert_close(mine.logits * DIM**0.5, expected, atol=atol, rtol=1e-5)
