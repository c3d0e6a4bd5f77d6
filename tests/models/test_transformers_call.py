"""`forward` with the keywords of Hugging Face's models, against models of transformers; and peft's task type."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import manyformer as mf
from manyformer.base.errors import UserError

VOCAB = 37
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def theirs(kind: str) -> Any:
    import transformers

    torch.manual_seed(3)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=16, n_layer=2, n_head=2, **ids)
        return transformers.GPT2LMHeadModel(config).eval()
    if kind == "llama":
        config = transformers.LlamaConfig(**SIZES, intermediate_size=24, max_position_embeddings=32, **ids)
        return transformers.LlamaForCausalLM(config).eval()
    if kind == "bert":
        config = transformers.BertConfig(**SIZES, intermediate_size=24, max_position_embeddings=32, pad_token_id=0)
        return transformers.BertForMaskedLM(config).eval()
    if kind == "marian":
        config = transformers.MarianConfig(
            vocab_size=VOCAB,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            scale_embedding=True,
            max_position_embeddings=32,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=2,
            forced_eos_token_id=2,
        )
        return transformers.MarianMTModel(config).eval()
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def pair(kind: str, folder: Path) -> tuple[Any, Any]:
    from manyformer.conversion.hugging_face import import_model

    model = theirs(kind)
    model.save_pretrained(folder / "theirs")
    return model, import_model(folder / "theirs")[0].eval()


def rows(padding: str) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(3, VOCAB, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    for row, count in enumerate((0, 2, 5)):
        mask[row, 9 - count if padding == "right" else 0 : 9 if padding == "right" else count] = 0
    return tokens.masked_fill(mask == 0, 0), mask


@pytest.mark.parametrize(
    ("kind", "padding"), [("gpt2", "right"), ("llama", "right"), ("llama", "left"), ("bert", "right"), ("t5", "right")]
)
def test_masks_and_labels_mean_what_they_mean_in_transformers(kind: str, padding: str, tmp_path: Path) -> None:
    model, ours = pair(kind, tmp_path)
    tokens, mask = rows(padding)
    labels = tokens.masked_fill(mask == 0, -100)
    with torch.no_grad():
        expected = model(input_ids=tokens, attention_mask=mask, labels=labels)
        actual = ours(input_ids=tokens, attention_mask=mask, labels=labels)
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-5, atol=1e-6)
    # all of a target is scored where the source alone has padding
    is_token = torch.ones_like(mask).bool() if kind == "t5" else mask.bool()
    torch.testing.assert_close(actual.logits[is_token], expected.logits[is_token], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_vectors_in_place_of_tokens_give_the_logits_of_transformers(kind: str, tmp_path: Path) -> None:
    model, ours = pair(kind, tmp_path)
    vectors = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(
            ours(inputs_embeds=vectors).logits, model(inputs_embeds=vectors).logits, rtol=1e-4, atol=1e-5
        )
    vectors.requires_grad_()
    ours(inputs_embeds=vectors).logits.sum().backward()
    assert vectors.grad is not None
    assert vectors.grad.abs().min() > 0


@pytest.mark.parametrize("kind", ["t5", "marian"])
def test_vectors_of_both_sides_give_the_logits_of_transformers(kind: str, tmp_path: Path) -> None:
    """Ours are those of the table, which is scaled afterwards. Transformers does so for the targets of Marian alone."""
    model, ours = pair(kind, tmp_path)
    source, target = (torch.randn(2, 7 + side, 16, generator=torch.Generator().manual_seed(side)) for side in range(2))
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    assert ours.embed_source.scale == ours.embed_target.scale == 4
    with torch.no_grad():
        expected = model(
            inputs_embeds=source * 4,
            decoder_inputs_embeds=target * 4 if kind == "t5" else target,
            attention_mask=mask,
        )
        actual = ours(inputs_embeds=source, decoder_inputs_embeds=target, attention_mask=mask)
        torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-4, atol=1e-5)
        tokens, _ = rows("right")
        vectors = [embed.token(tokens) for embed in (ours.embed_source, ours.embed_target)]
        named = ours(inputs_embeds=vectors[0], decoder_inputs_embeds=vectors[1])
        torch.testing.assert_close(named.logits, ours(tokens, tokens).logits)


def test_vectors_of_a_source_that_is_no_text_are_refused() -> None:
    model = mf.build("captioner", vocab=VOCAB, height=8, width=8, channels=3, patch=4, dim=16, depth=1, heads=2)
    vectors = torch.zeros(2, 4, 16)
    with pytest.raises(UserError, match="inputs_embeds stand for tokens, and the source of this model is read by a"):
        model(inputs_embeds=vectors, decoder_input_ids=TOKENS)
    with pytest.raises(UserError, match="give the target once"):
        model(torch.rand(2, 8, 8, 3), decoder_input_ids=TOKENS, decoder_inputs_embeds=vectors)


@pytest.mark.parametrize("recipe", ["transformer-lm", "mamba-2", "gated-deltanet", "mixtral", "transformer-xl"])
def test_vectors_and_masks_of_other_recipes_are_those_of_tokens_and_segments(recipe: str) -> None:
    torch.manual_seed(0)
    model = mf.build(recipe, vocab=VOCAB, dim=16, depth=1, heads=2).eval()
    tokens, mask = rows("left")
    with torch.no_grad():
        plain = model(tokens, mask - 1)
        vectors = model.embed.token(tokens)
        named = model(inputs_embeds=vectors, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100))
    torch.testing.assert_close(named.logits[mask.bool()], plain.logits[mask.bool()])
    loss = F.cross_entropy(plain.logits[:, :-1][mask[:, 1:].bool()], tokens[:, 1:][mask[:, 1:].bool()])
    torch.testing.assert_close(named.loss, loss + plain.loss)


def test_a_state_continues_rows_whose_mask_covers_all_tokens() -> None:
    torch.manual_seed(0)
    model = mf.build("llama", vocab=VOCAB, dim=16, depth=1, heads=2).eval()
    tokens, mask = rows("left")
    with torch.no_grad():
        whole = model(tokens, attention_mask=mask).logits
        first = model(tokens[:, :6], attention_mask=mask[:, :6], state=model.init_state(3))
        second = model(tokens[:, 6:], attention_mask=mask, state=first.state)
    torch.testing.assert_close(second.logits, whole[:, 6:], rtol=1e-4, atol=1e-5)


def lm() -> Any:
    return mf.build("llama", vocab=VOCAB, dim=16, depth=1, heads=2)


TOKENS = torch.arange(6).reshape(2, 3)
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "tokens twice": ({"input_ids": TOKENS}, "give tokens once"),
    "mask and segments": ({"attention_mask": TOKENS, "segments": TOKENS}, "give attention_mask or segments, not both"),
    "mask of another shape": ({"attention_mask": TOKENS[:, :2]}, "attention_mask has the shape (2, 2)"),
    "mask of pairs": ({"attention_mask": torch.ones(2, 1, 3, 3)}, "it must be (batch, length)"),
    "labels of another shape": ({"labels": TOKENS[:1]}, "labels must have the shape (2, 3)"),
    "attention weights": ({"output_attentions": True}, "watch= gives attention weights"),
    "a cache": ({"past_key_values": 1}, "state= is its own"),
    "a target": ({"decoder_input_ids": TOKENS}, "takes no decoder_input_ids; of the keywords of transformers it takes"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_keyword_that_a_model_cannot_take_is_named(name: str) -> None:
    options, sentence = REFUSALS[name]
    with pytest.raises(UserError) as refused:
        lm()(TOKENS, **options)
    assert sentence in str(refused.value)


def test_a_model_of_images_takes_labels_alone() -> None:
    torch.manual_seed(0)
    model = mf.build("vit", classes=3, height=8, width=8, channels=3, patch=4, dim=16, depth=1, heads=2).eval()
    images = torch.rand(4, 8, 8, 3)
    labels = torch.tensor([0, 2, 1, -100])
    out = model(images, labels=labels)
    torch.testing.assert_close(out.loss, F.cross_entropy(model(images).logits, labels))
    with pytest.raises(UserError, match="takes no attention_mask"):
        model(images, attention_mask=labels)


def test_peft_wraps_a_model_by_its_task_type() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed, whose wrapper this calls")
    torch.manual_seed(0)
    model = lm().eval()
    tokens, mask = rows("right")
    labels = tokens.masked_fill(mask == 0, -100)
    plain = model(tokens, attention_mask=mask, labels=labels).loss
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "kv_proj"]))
    out = wrapped(input_ids=tokens, attention_mask=mask, labels=labels)
    torch.testing.assert_close(out.loss, plain)
    out.loss.backward()
    trained = [name for name, weight in wrapped.named_parameters() if weight.grad is not None]
    assert trained
    assert all("lora_" in name for name in trained)
