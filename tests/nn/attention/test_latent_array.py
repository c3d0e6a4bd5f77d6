"""The latent array of Perceiver: its definition, documents of packed rows, permuted inputs, and the model it equals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyformer as mf
from manyformer.analysis.own_models import build_tiny
from manyformer.analysis.viewer.model_view import view_image, view_text
from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face import export_model, import_model
from manyformer.data.tokenizers.saved_tokenizers import train_tokenizer
from manyformer.models import MaskedLM
from manyformer.nn.attention.latent_array import LatentArrayEncoder, LatentArrayLayer
from manyformer.nn.core import PADDING_SEGMENT, Context, TokenPositions, contiguous_positions
from manyformer.recipes.perceiver import latent_encoder

SIZES = {"latents": 5, "latent_dim": 12, "head_dim": 3, "loops": 2, "dropout": 0.0}
TOLERANCE = 1e-4


def small_encoder() -> LatentArrayEncoder:
    encoder = latent_encoder(8, 2, 2, None, latents=5, latent_dim=12, head_dim=3, loops=1, dropout=0.0).double()
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
    return encoder


def by_definition(encoder: Any, x: Tensor) -> Tensor:
    """Latents (b, n, z) of documents without padding, written out head by head."""

    def attend(attention: Any, queries: Tensor, memory: Tensor) -> Tensor:
        q, keys_values = attention.q_proj(queries), attention.kv_proj(memory)
        width = q.shape[-1] // attention.heads
        k, v = keys_values[..., : q.shape[-1]], keys_values[..., q.shape[-1] :]
        heads = []
        for q_head, k_head, v_head in zip(q.split(width, -1), k.split(width, -1), v.chunk(attention.heads, -1)):
            heads.append((q_head @ k_head.mT / width**0.5).softmax(-1) @ v_head)
        y: Tensor = attention.out_proj(torch.cat(heads, -1))
        return y

    z, memory = encoder.latents.expand(len(x), -1, -1), encoder.input_norm(x)
    reading = encoder.inner.reading
    z = z + attend(reading.attention.inner, reading.attention.pre_norm(z), memory)
    z = z + reading.ff.inner(reading.ff.pre_norm(z), Context(contiguous_positions(1, 0, 5, x.device))).y
    for number in range(2):
        block = getattr(encoder.inner.layers, str(number))
        normed = block.attention.pre_norm(z)
        z = z + attend(block.attention.inner, normed, normed)
        z = z + block.ff.inner.down(nn.functional.gelu(block.ff.inner.up(block.ff.pre_norm(z))))
    normed_z: Tensor = encoder.inner.layers.norm.inner(z)
    return normed_z


@pytest.mark.parametrize("length", [1, 3, 17])
def test_the_definition_with_gradients(length: int) -> None:
    encoder = small_encoder()
    x = torch.randn(2, length, 8, dtype=torch.float64, requires_grad=True)
    y = encoder(x, Context(contiguous_positions(2, 0, length, x.device))).y
    expected = by_definition(encoder, x)
    torch.testing.assert_close(y, expected, atol=1e-12, rtol=0)
    weights = [x, *encoder.parameters()]
    seed = torch.randn_like(y)
    for own, definition in zip(torch.autograd.grad(y, weights, seed), torch.autograd.grad(expected, weights, seed)):
        torch.testing.assert_close(own, definition, atol=1e-11, rtol=0)


def test_each_document_has_latents_of_its_own() -> None:
    encoder = small_encoder()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    segments = torch.tensor([[7, 7, 7, 7, 2, 2, -1, 2, 2], [4, 4, -1, -1, -1, -1, -1, -1, -1]])
    position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 2, 3], [0, 1, 0, 0, 0, 0, 0, 0, 0]])
    sequence, _ = encoder.encode(x, Context(TokenPositions(position_ids, segments)))
    for row, segment in ((0, 7), (0, 2), (1, 4)):
        tokens = x[row, segments[row] == segment][None]
        alone = encoder(tokens, Context(contiguous_positions(1, 0, tokens.shape[1], x.device))).y
        torch.testing.assert_close(
            sequence.y[row, sequence.positions.segment_ids[row] == segment], alone[0], atol=1e-12, rtol=0
        )
    assert (sequence.positions.segment_ids[1] == PADDING_SEGMENT).sum() == 5


def test_permuted_inputs_with_their_positions_change_nothing() -> None:
    model = mf.build("perceiver", vocab=11, dim=8, depth=2, heads=2, max_length=20, **SIZES).double().eval()
    assert isinstance(model, MaskedLM)
    assert isinstance(model.body, LatentArrayLayer)
    tokens, order = torch.randint(0, 11, (2, 13)), torch.randperm(13)
    positions = TokenPositions(torch.arange(13).expand(2, -1), torch.zeros(2, 13, dtype=torch.long))
    permuted = TokenPositions(positions.position_ids[:, order], positions.segment_ids)
    with torch.no_grad():
        y = model.body(model.embed(tokens, positions), Context(positions)).y
        moved = model.body(model.embed(tokens[:, order], permuted), Context(permuted)).y
        without_positions = model.body(model.embed(tokens[:, order], positions), Context(positions)).y
    torch.testing.assert_close(moved, y[:, order], atol=1e-12, rtol=0)
    assert (without_positions - y[:, order]).abs().max() > 1e-6


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(UserError, match=r"latent_dim \(12\) must be a multiple of heads \(5\)"):
        mf.build("perceiver", dim=10, heads=5, latent_dim=12, depth=1)
    with pytest.raises(UserError, match=r"latent_dim \(10\) must be a multiple of heads \(4\)"):
        mf.build("perceiver-classifier", dim=8, heads=4, latent_dim=10, depth=1)
    with pytest.raises(ValueError, match=r"count \(0\) must be at least 1"):
        LatentArrayEncoder(nn.Identity(), 0, 4, input_norm=nn.Identity())  # type: ignore[arg-type]


def saved_perceiver(folder: Path, **settings: Any) -> Any:
    """A model of `transformers` whose weights are all shaken, saved in a folder."""
    import transformers

    sizes = {"vocab_size": 30, "d_model": 24, "d_latents": 16, "num_latents": 6, "num_self_attends_per_block": 2}
    config = transformers.PerceiverConfig(
        **sizes,
        qk_channels=256,
        v_channels=16,
        max_position_embeddings=20,
        attention_probs_dropout_prob=0.0,
        **settings,
    )
    model = transformers.PerceiverForMaskedLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.oracle
@pytest.mark.parametrize("settings", [{}, {"num_blocks": 3, "self_attention_widening_factor": 2}])
def test_a_perceiver_of_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    import transformers

    reference = saved_perceiver(tmp_path / "theirs", **settings)
    model, report = import_model(tmp_path / "theirs")
    assert report.parameters == sum(weight.numel() for weight in reference.parameters())
    tokens = torch.randint(0, 30, (3, 13))
    is_token = torch.arange(13) < torch.tensor([13, 4, 9])[:, None]
    with torch.no_grad():
        expected = reference(tokens, attention_mask=is_token.long()).logits[:, :13]
        logits = model(tokens, is_token.long() - 1).logits
        torch.testing.assert_close(logits[is_token], expected[is_token], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(model(tokens).logits, reference(tokens).logits[:, :13], atol=TOLERANCE, rtol=0)
    export_model(model, tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["architectures"] == ["PerceiverForMaskedLM"]
    back, loading = transformers.PerceiverForMaskedLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(back(tokens).logits, reference(tokens).logits, atol=TOLERANCE, rtol=0)


def test_what_no_recipe_has_is_refused(tmp_path: Path) -> None:
    saved_perceiver(tmp_path / "theirs")
    file = tmp_path / "theirs" / "config.json"
    config = json.loads(file.read_text())
    for field, value in {"use_query_residual": False, "qk_channels": 128, "v_channels": 32}.items():
        file.write_text(json.dumps({**config, field: value}))
        with pytest.raises(UserError, match=f"config.json: {field} is {value}, and no recipe has that"):
            import_model(tmp_path / "theirs")
    file.write_text(json.dumps({**config, "architectures": ["PerceiverForSequenceClassification"]}))
    with pytest.raises(UserError, match="the recipe equals a PerceiverForMaskedLM alone"):
        import_model(tmp_path / "theirs")
    for keywords, message in {
        "heads": "heads is 2 and head_dim 6, and the output queries of a PerceiverForMaskedLM have 8 and 32",
        "ff_dim": "ff_dim is 20, and that of a PerceiverForMaskedLM is a multiple of latent_dim",
    }.items():
        sizes = {"heads": 2} if keywords == "heads" else {"heads": 8, "head_dim": 32, "ff_dim": 20}
        dims = {"vocab": 9, "dim": 8, "depth": 1, "latent_dim": 12 if keywords == "heads" else 16, "max_length": 8}
        with pytest.raises(UserError, match=message):
            export_model(mf.build("perceiver", **dims, **sizes), tmp_path / "x", model_type="perceiver")


def test_maps_of_weights_label_latents() -> None:
    tokenizer = train_tokenizer("char", ["abcdefgh "])
    model = mf.build("perceiver", vocab=tokenizer.vocab, dim=8, depth=1, heads=2, max_length=20, **SIZES)
    model.tokenizer = tokenizer
    reading, *layers, writing = view_text(model, "abc").maps
    latents = tuple(f"latent {number}" for number in range(5))
    assert reading.rows == writing.columns == latents
    assert reading.columns == writing.rows == ("<bos>", "a", "b", "c", "<eos>")
    assert [(part.rows, part.columns) for part in layers] == [(latents, latents)] * 2
    assert all(part.keys == "slots" for part in (reading, *layers, writing))


def test_an_image_is_read_by_latents() -> None:
    model = build_tiny("perceiver-classifier", {}, 0)
    view = view_image(model, torch.zeros(8, 12, 2, dtype=torch.uint8).numpy())
    assert [(len(part.rows), len(part.columns)) for part in view.maps] == [(5, 6)] + [(5, 5)] * 4
