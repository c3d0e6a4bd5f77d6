"""XLNet in one direction is a Transformer-XL: segment by segment, with a memory shorter than the text."""

from typing import Any

import pytest
import torch

import manyformer as mf
from manyformer.models import LanguageModel

pytestmark = pytest.mark.oracle

DIM, HEADS, HIDDEN, DEPTH, VOCAB, MEMORY = 12, 3, 20, 3, 11, 7


def theirs() -> Any:
    from transformers import XLNetConfig, XLNetModel

    sizes = {"d_model": DIM, "n_head": HEADS, "d_inner": HIDDEN, "n_layer": DEPTH, "vocab_size": VOCAB}
    words = {"attn_type": "uni", "mem_len": MEMORY, "clamp_len": -1, "dropout": 0.0, "ff_activation": "relu"}
    model = XLNetModel(XLNetConfig(**sizes, **words, layer_norm_eps=1e-5)).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.4)
    return model


def ours(model: Any) -> LanguageModel:
    words = {"vocab": VOCAB, "dim": DIM, "depth": DEPTH, "heads": HEADS, "ff_dim": HIDDEN, "dropout": 0.0}
    mine = mf.build("transformer-xl", **words, memory_length=MEMORY, bias_sharing="per-layer").double()
    assert isinstance(mine, LanguageModel)
    state = dict(mine.state_dict())
    state["embed.token.weight"] = model.word_embedding.weight / DIM**0.5
    state["head.weight"] = state["embed.token.weight"]
    for number, layer in enumerate(model.layer):
        at, ff, attention = f"body.{number}.attention.", f"body.{number}.ff.", layer.rel_attn
        state |= {
            f"{at}inner.q_proj.weight": attention.q.flatten(1).T,
            f"{at}inner.kv_proj.weight": torch.cat([attention.k.flatten(1), attention.v.flatten(1)], 1).T,
            f"{at}inner.out_proj.weight": attention.o.flatten(1),
            f"{at}inner.position.r_proj.weight": attention.r.flatten(1).T,
            f"{at}inner.position.biases.u": attention.r_w_bias,
            f"{at}inner.position.biases.v": attention.r_r_bias,
        }
        parts = {f"{at}post_norm": attention.layer_norm, f"{ff}post_norm": layer.ff.layer_norm}
        parts |= {f"{ff}inner.up": layer.ff.layer_1, f"{ff}inner.down": layer.ff.layer_2}
        for name, part in parts.items():
            state |= {f"{name}.{kind}": value for kind, value in part.state_dict().items()}
    mine.load_state_dict(state)
    return mine


@pytest.mark.parametrize("training", [True, False])
def test_segments_that_remember(training: bool) -> None:
    released = theirs()
    model = ours(released).train(training)
    tokens = torch.randint(0, VOCAB, (2, 20))
    state, memories = model.init_state(2), None
    for columns in tokens.split(5, dim=1):
        with torch.no_grad():
            out = released(columns, mems=memories, use_mems=True)
            memories = out.mems
            logits, state, _ = model(columns, None, state)
        torch.testing.assert_close(logits, model.head(out.last_hidden_state), atol=1e-5, rtol=0)
        assert out.last_hidden_state.std() > 0.2
