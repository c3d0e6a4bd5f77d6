"""Encoders of `transformers` and their imports compute the same for every head, with padding, and so do exports."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_encoders import CASES, LENGTH, VOCAB, save_encoder, their_output
from tiny_models import exported
from torch import Tensor

import manyformer as mf
from manyformer.conversion.hugging_face import export_model, import_model
from manyformer.conversion.hugging_face.model_import import save_imported
from manyformer.models import EncoderModel

pytestmark = pytest.mark.oracle

TOLERANCE = 1e-4
FIRST_TOKEN = 4


def padded_rows() -> tuple[Tensor, Tensor]:
    """Token ids of rows of 24, 7 and 15 tokens, and which are no padding."""
    is_token = torch.arange(LENGTH) < torch.tensor([LENGTH, 7, 15])[:, None]
    return torch.randint(FIRST_TOKEN, VOCAB, (3, LENGTH)), is_token


def tokens_for(model: Any, tokens: Tensor, is_token: Tensor) -> Tensor:
    """The tokens with the padding of a model, from which some families count positions."""
    return tokens.masked_fill(~is_token, model.config.pad_token_id or 0)


def assert_same(theirs: Any, model: Any) -> None:
    tokens, is_token = padded_rows()
    # without marks, a Longformer that answers questions looks for three separators
    options = {"global_attention_mask": torch.zeros_like(tokens)} if "LongformerForQ" in type(theirs).__name__ else {}
    expected = their_output(theirs, tokens_for(theirs, tokens, is_token), is_token, **options)
    with torch.no_grad():
        logits = model(tokens, is_token.long() - 1).logits
    scored = is_token if logits.ndim == 3 else slice(None)
    torch.testing.assert_close(logits[scored], expected[scored], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_the_same_logits_after_import_and_export(case: str, tmp_path: Path) -> None:
    reference = save_encoder(case, tmp_path / "theirs")
    model = import_model(tmp_path / "theirs").model
    assert_same(reference, model)
    if "Classification" in case:
        assert model.labels == ("yes", "no", "perhaps")
    model_type = reference.config.model_type
    has_relu = case == "DistilBertForSequenceClassification"
    for exported_type in {None, "roberta" if model_type == "xlm-roberta" else model_type}:
        folder = tmp_path / (exported_type or "default")
        own_recipe = {"longformer": "Longformer", "big_bird": "BigBird"}
        default = "DistilBert" if has_relu else own_recipe.get(model_type, "Bert")
        # BERT has a pooler that this head does not use
        back = exported(model, folder, assert_same, model_type=exported_type, missing="pooler")
        assert type(back).__name__.startswith(default) or exported_type


@pytest.mark.parametrize("case", ["BertForMaskedLM", "BertForSequenceClassification", "BertForQuestionAnswering"])
def test_pairs_of_texts(case: str, tmp_path: Path) -> None:
    reference = save_encoder(case, tmp_path)
    tokens, is_token = padded_rows()
    parts = (torch.arange(LENGTH) > 4).long().expand(3, -1)
    expected = their_output(reference, tokens, is_token, token_type_ids=parts)
    with torch.no_grad():
        logits = import_model(tmp_path).model(tokens, is_token.long() - 1, parts=parts).logits
    scored = is_token if logits.ndim == 3 else slice(None)
    torch.testing.assert_close(logits[scored], expected[scored], atol=TOLERANCE, rtol=0)


def test_a_long_text_is_sparse_and_a_short_one_full(tmp_path: Path) -> None:
    save_encoder("BigBirdForMaskedLM", tmp_path)
    model, report = import_model(tmp_path)
    assert report.keywords["full_length"] == (5 + 2 * 1) * 4
    full = mf.build("bigbird", **{**report.keywords, "full_length": 64}).eval()
    sparse = mf.build("bigbird", **{**report.keywords, "full_length": None}).eval()
    for other in (full, sparse):
        other.load_state_dict(model.state_dict())
    for length, same, different in ((28, full, sparse), (29, sparse, full)):
        tokens = torch.randint(FIRST_TOKEN, VOCAB, (2, length))
        with torch.no_grad():
            logits = model(tokens).logits
            torch.testing.assert_close(logits, same(tokens).logits, atol=1e-6, rtol=0)
            assert (logits - different(tokens).logits).abs().max() > 1e-3


def test_what_a_recipe_does_not_promise_whose_attention_depends_on_the_length_of_rows() -> None:
    model = mf.build("bigbird", vocab=VOCAB, dim=8, depth=1, heads=2, block=4, max_length=64, full_length=30)
    report = mf.check(model, only=["padding-right", "packing", "batch"])
    assert report.ok, report.table()
    assert report["batch"].verdict == "passed"
    assert report["packing"].sentence.startswith("not promised: the length of a row, with its padding")


def test_full_attention_at_all_lengths(tmp_path: Path) -> None:
    reference = save_encoder("BigBirdForMaskedLM", tmp_path / "theirs")
    reference.bert.set_attention_type("original_full")
    reference.config.attention_type = "original_full"
    reference.save_pretrained(tmp_path / "full")
    model = import_model(tmp_path / "full").model
    tokens = torch.randint(FIRST_TOKEN, VOCAB, (2, 60))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, reference(tokens).logits, atol=TOLERANCE, rtol=0)
    export_model(model, tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["attention_type"] == "original_full"


@pytest.mark.parametrize("head", ["MaskedLM", "QuestionAnswering"])
def test_tokens_that_a_call_marks_as_global(head: str, tmp_path: Path) -> None:
    reference = save_encoder(f"LongformerFor{head}", tmp_path)
    tokens, is_token = padded_rows()
    is_global = (torch.arange(LENGTH) < torch.tensor([5, 2, 3])[:, None]).long()
    expected = their_output(
        reference, tokens_for(reference, tokens, is_token), is_token, global_attention_mask=is_global
    )
    with torch.no_grad():
        logits = import_model(tmp_path).model(tokens, is_token.long() - 1, roles=is_global).logits
    torch.testing.assert_close(logits[is_token], expected[is_token], atol=TOLERANCE, rtol=0)


def test_names_of_older_versions_and_what_is_left_out(tmp_path: Path) -> None:
    save_encoder("BertForPreTraining", tmp_path)
    model, report = import_model(tmp_path)
    assert {name.split(".weight")[0].split(".bias")[0] for name in report.left_out} == {
        "bert.pooler.dense",
        "cls.seq_relationship",
        "config.json: attention_probs_dropout_prob 0.1",
    }
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {}
    for name, tensor in tensors.items():
        for new_part, old_part in old.items():
            name = name.replace(new_part, old_part)
        renamed[name] = tensor
    save_file({**renamed, "bert.embeddings.position_ids": torch.arange(64)[None]}, file)
    again, _ = import_model(tmp_path)
    assert all(torch.equal(again.state_dict()[name], weight) for name, weight in model.state_dict().items())


def test_an_encoder_of_ours_without_sentence_types(tmp_path: Path) -> None:
    import transformers

    model = mf.build("bert", vocab=VOCAB, dim=32, depth=2, heads=4, max_length=40, head="tagging", classes=4).eval()
    export_model(model, tmp_path)
    back = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path)
    assert_same(back, model)
    assert back.config.num_labels == 4


def test_labels_are_saved_and_loaded(tmp_path: Path) -> None:
    import tokenizers

    save_encoder("BertForSequenceClassification", tmp_path / "theirs")
    words = {word: number for number, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "##b"))}
    inner = tokenizers.BertWordPieceTokenizer(words)
    inner.save(str(tmp_path / "theirs" / "tokenizer.json"))
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
    (tmp_path / "theirs" / "tokenizer_config.json").write_text(json.dumps({**special, "unk_token": "[UNK]"}))
    imported = import_model(tmp_path / "theirs")
    tokenizer = imported.model.tokenizer
    assert tokenizer.encode("A ab") == [5, 5, 6]
    assert (tokenizer.pad, tokenizer.unk, tokenizer.bos, tokenizer.eos, tokenizer.mask) == (0, 1, 2, 3, 4)
    assert tokenizer.decode([2, 5, 6, 3]) == "ab"
    save_imported(imported.model, tmp_path / "ours")
    loaded = mf.load(tmp_path / "ours")
    assert isinstance(loaded, EncoderModel)
    assert loaded.labels == ("yes", "no", "perhaps")
    assert loaded.tokenizer.encode("ab a") == [5, 6, 5]
