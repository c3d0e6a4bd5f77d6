"""ALiBi, T5's buckets and Shaw's vectors against Bloom, MPT, T5, Wav2Vec2-BERT and x-transformers."""

from typing import Any

import pytest
import torch
from mapping import weights_of
from pairs import DEPTH, VOCAB, shaken
from torch import Tensor

import manyformer as mf
from manyformer.models.embedding import positions_of
from manyformer.nn import Attention, SoftmaxKernel
from manyformer.nn.core import PADDING_SEGMENT, Context
from manyformer.nn.positions import AlibiPosition, ShawPosition, T5BiasPosition

pytestmark = [
    pytest.mark.oracle,
    # said while x-transformers is imported
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
]

DIM, HEADS = 24, 3
"""Heads that are no power of two."""


@pytest.mark.parametrize("heads", range(1, 65))
def test_slopes(heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
    from x_transformers.x_transformers import AlibiPositionalBias

    bloom = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    mpt = -build_mpt_alibi_tensor(heads, 2)[:, 0, 0]
    other = torch.tensor(AlibiPositionalBias._get_slopes(heads))
    for slopes in (bloom, mpt, other):
        torch.testing.assert_close(AlibiPosition(heads).slopes, slopes, atol=1.2e-7, rtol=0)


@pytest.mark.parametrize("sides", ["past", "both"])
@pytest.mark.parametrize(("buckets", "far"), [(32, 128), (16, 100)])
def test_buckets(sides: Any, buckets: int, far: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention
    from x_transformers.x_transformers import RelativePositionBias

    ahead = torch.arange(-300, 301)
    ours = T5BiasPosition(1, buckets=buckets, max_distance=far, direction=sides).bucket_index(ahead)
    both = sides == "both"
    bucket = T5Attention._relative_position_bucket
    assert ours.equal(bucket(ahead, bidirectional=both, num_buckets=buckets, max_distance=far))
    bucket = RelativePositionBias._relative_position_bucket
    assert ours.equal(bucket(ahead, causal=not both, num_buckets=buckets, max_distance=far))


@pytest.mark.parametrize(("length", "path"), [(7, "naive"), (7, "blocked"), (150, "auto")])
def test_shaw_keys_are_those_of_wav2vec2_bert(length: int, path: Any) -> None:
    from transformers import Wav2Vec2BertConfig
    from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertSelfAttention

    config = Wav2Vec2BertConfig(
        hidden_size=DIM,
        num_attention_heads=HEADS,
        position_embeddings_type="relative_key",
        left_max_position_embeddings=4,
        right_max_position_embeddings=4,
        attention_dropout=0.0,
        attn_implementation="eager",
    )
    reference = shaken(Wav2Vec2BertSelfAttention(config)).double()
    ours = Attention(DIM, HEADS, SoftmaxKernel(path=path), position=ShawPosition(DIM // HEADS, 4)).double()
    weights = weights_of(reference)
    mapped = {"position.keys": weights["distance_embedding.weight"], "position.values": torch.zeros(9, DIM // HEADS)}
    for kind in ("weight", "bias"):
        q, k, v, out = (weights[f"linear_{name}.{kind}"] for name in ("q", "k", "v", "out"))
        mapped |= {f"q_proj.{kind}": q, f"kv_proj.{kind}": torch.cat([k, v]), f"out_proj.{kind}": out}
    ours.load_state_dict(mapped)
    x = torch.randn(2, length, DIM, dtype=torch.float64)
    place = positions_of(torch.zeros(2, length, dtype=torch.long), None, None)[0]
    torch.testing.assert_close(ours(x, Context(place)).y, reference(x)[0], atol=1e-12, rtol=0)


def mpt() -> tuple[Any, dict[str, Tensor]]:
    from transformers import MptConfig, MptForCausalLM

    config = MptConfig(d_model=DIM, n_heads=HEADS, n_layers=DEPTH, max_seq_len=256, vocab_size=VOCAB)
    reference = shaken(MptForCausalLM(config))
    weights = {name.removeprefix("transformer."): value for name, value in weights_of(reference).items()}
    mapped = {"embed.token.weight": weights["wte.weight"], "body.norm.inner.weight": weights["norm_f.weight"]}
    for n in range(DEPTH):
        q, kv = weights[f"blocks.{n}.attn.Wqkv.weight"].split([DIM, 2 * DIM])
        mapped |= {
            f"body.{n}.attention.pre_norm.weight": weights[f"blocks.{n}.norm_1.weight"],
            f"body.{n}.attention.inner.q_proj.weight": q,
            f"body.{n}.attention.inner.kv_proj.weight": kv,
            f"body.{n}.attention.inner.out_proj.weight": weights[f"blocks.{n}.attn.out_proj.weight"],
            f"body.{n}.ff.pre_norm.weight": weights[f"blocks.{n}.norm_2.weight"],
            f"body.{n}.ff.inner.up.weight": weights[f"blocks.{n}.ffn.up_proj.weight"],
            f"body.{n}.ff.inner.down.weight": weights[f"blocks.{n}.ffn.down_proj.weight"],
        }
    return lambda tokens: reference(tokens).logits, mapped


def x_transformers() -> tuple[Any, dict[str, Tensor]]:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=DIM, depth=DEPTH, heads=HEADS, attn_dim_head=DIM // HEADS, alibi_pos_bias=True)
    reference = shaken(TransformerWrapper(num_tokens=VOCAB, max_seq_len=256, use_abs_pos_emb=False, attn_layers=layers))
    reference.to_logits.weight.data = reference.token_emb.emb.weight.data
    weights = weights_of(reference)
    # a gain is one more than it says
    gains = {name: value + 1 for name, value in weights.items() if name.endswith(".gamma")}
    mapped = {
        "embed.token.weight": weights["token_emb.emb.weight"],
        "body.norm.inner.weight": gains["attn_layers.final_norm.gamma"],
    }
    for n in range(DEPTH):
        attention, ff = f"attn_layers.layers.{2 * n}", f"attn_layers.layers.{2 * n + 1}"
        q, k, v, out = (weights[f"{attention}.1.to_{name}.weight"] for name in ("q", "k", "v", "out"))
        mapped |= {
            f"body.{n}.attention.pre_norm.weight": gains[f"{attention}.0.0.gamma"],
            f"body.{n}.attention.inner.q_proj.weight": q,
            f"body.{n}.attention.inner.kv_proj.weight": torch.cat([k, v]),
            f"body.{n}.attention.inner.out_proj.weight": out,
            f"body.{n}.ff.pre_norm.weight": gains[f"{ff}.0.0.gamma"],
        }
        for kind in ("weight", "bias"):
            mapped |= {
                f"body.{n}.ff.inner.up.{kind}": weights[f"{ff}.1.ff.0.0.{kind}"],
                f"body.{n}.ff.inner.down.{kind}": weights[f"{ff}.1.ff.2.{kind}"],
            }
    return reference, mapped


@pytest.mark.parametrize("length", [9, 150])
@pytest.mark.parametrize("make", [mpt, x_transformers])
def test_alibi_as_a_whole(make: Any, length: int) -> None:
    """In one pass and step by step; where they have no bias, ours is zero."""
    torch.manual_seed(6)
    reference, mapped = make()
    ours: Any = mf.build("alibi", vocab=VOCAB, dim=DIM, depth=DEPTH, heads=HEADS).eval()
    zeros = {name: torch.zeros_like(value) for name, value in ours.state_dict().items() if name.endswith("bias")}
    ours.load_state_dict(zeros | mapped | {"head.weight": mapped["embed.token.weight"]})
    tokens = torch.randint(3, VOCAB, (2, length))
    with torch.no_grad():
        expected = reference(tokens)
        assert expected.std() > 0.3
        torch.testing.assert_close(ours(tokens).logits, expected, atol=1e-5, rtol=1e-5)
        state = ours.init_state(2)
        for part in tokens.split([length - 5, 1, 4], dim=1):
            actual, state, _ = ours(part, state=state)
        torch.testing.assert_close(actual, expected[:, -4:], atol=1e-5, rtol=1e-5)
        left = torch.cat([torch.full((2, 3), PADDING_SEGMENT), torch.zeros_like(tokens)], dim=1)
        actual = ours(torch.cat([tokens[:, :3], tokens], dim=1), left).logits[:, 3:]
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
