"""Sources and targets of imported encoder-decoders have the tokens around a text that `transformers` puts there."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tiny_encoder_decoders import saved
from tokenizers import models, pre_tokenizers, processors

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.config import PairsData
from manyformer.conversion.hugging_face import import_model
from manyformer.conversion.hugging_face.model_import import save_imported
from manyformer.data import open_file
from manyformer.data.pipeline.kind import OpenRequest
from manyformer.data.tokenizers.saved_tokenizers import TokenizerPair
from manyformer.inference.generate import Decoding, translate

pytestmark = pytest.mark.oracle

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "en_XX")
TEMPLATES = {"bart": "<s> $A </s>", "mbart": "$A </s> en_XX", "t5": "$A </s>"}


def write_tokenizer(folder: Path, template: str) -> tokenizers.Tokenizer:
    words = [*SPECIAL, *"abcdefghijklmnopqrstuvwxyz"]
    inner = tokenizers.Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(list(SPECIAL))
    ids = [(word, inner.token_to_id(word)) for word in SPECIAL]
    inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    inner.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return inner


@pytest.mark.parametrize("case", TEMPLATES)
def test_texts_of_sources_and_targets(case: str, tmp_path: Path) -> None:
    reference = saved(case, tmp_path / "theirs")
    inner = write_tokenizer(tmp_path / "theirs", TEMPLATES[case])
    text = "a b z q"
    source = torch.tensor([inner.encode(text).ids])
    save_imported(import_model(tmp_path / "theirs").model, tmp_path / "saved")
    for folder in ("theirs", "saved"):
        model: Any = mf.load(tmp_path / folder)
        read, write = model.tokenizer
        assert [*read.encode(text), read.eos] == source[0].tolist()
        assert read.decode(read.encode(text)) == write.decode(write.encode(text)) == text
        assert write.bos == reference.generation_config.decoder_start_token_id
        # what has no token is never generated here
        options: Any = {"suppress_tokens": list(range(len(SPECIAL) + 26, 60)), "max_new_tokens": 9, "do_sample": False}
        tokens = reference.generate(source, **options)[0].tolist()
        expected = inner.decode(tokens, skip_special_tokens=True)
        assert translate(model, [text], tokenizer=model.tokenizer, decoding=Decoding(max_new=9)) == [expected]


@pytest.mark.parametrize("case", ["bart", "t5"])
def test_targets_are_scored_as_transformers_scores_them(case: str, tmp_path: Path) -> None:
    reference = saved(case, tmp_path)
    inner = write_tokenizer(tmp_path, TEMPLATES[case])
    if case == "bart":
        reference.generation_config.forced_bos_token_id = inner.token_to_id("<s>")
        reference.generation_config.save_pretrained(tmp_path)
    model: Any = mf.load(tmp_path)
    pairs = [("a b z", "q r"), ("c", "d e f g")]
    (tmp_path / "pairs.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    section = PairsData(path="unused.tsv")
    request = OpenRequest(200, tmp_path / "scratch")
    request.cache.mkdir()
    pair = TokenizerPair(*model.tokenizer)
    held_out = open_file(section, "pairs", pair, str(tmp_path / "pairs.tsv"), request)
    assert held_out.batches is not None
    scores = [model.score(batch) for batch in held_out.batches]
    total = 0.0
    for source, target in pairs:
        labels = torch.tensor([inner.encode(target).ids])
        with torch.no_grad():
            total += float(reference(torch.tensor([inner.encode(source).ids]), labels=labels).loss) * labels.numel()
    assert sum(int(score.targets) for score in scores) == sum(len(inner.encode(target).ids) for _, target in pairs)
    assert sum(float(score.nll.detach()) for score in scores) == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"decoder_start_token_id": 99}, r"decoder_start_token_id \(99\) must be a token id from 0 to 59"),
        ({"forced_bos_token_id": [1, 2]}, r"forced_bos_token_id \(\[1, 2\]\) must be one token id"),
        ({"bad_words_ids": [[1, 2]]}, r"bad_words_ids \(\[\[1, 2\]\]\) must be a list of single tokens"),
        ({"bad_words_ids": [["a"]]}, "bad_words_ids"),
        ({"begin_suppress_tokens": [3]}, "begin_suppress_tokens is .*, which our generation does not have"),
        ([], "must hold an object"),
    ],
)
def test_settings_of_generation_that_cannot_be(settings: Any, sentence: str, tmp_path: Path) -> None:
    saved("bart", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=rf"generation_config\.json.*{sentence}"):
        import_model(tmp_path)


def test_an_end_and_a_start_are_needed(tmp_path: Path) -> None:
    saved("bart", tmp_path)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    for missing, sentence in (("decoder_start_token_id", "the token that texts begin with"), ("eos_token_id", "ends")):
        (tmp_path / "config.json").write_text(json.dumps({**config, missing: None, "bos_token_id": None}))
        with pytest.raises(UserError, match=sentence):
            import_model(tmp_path)


def test_settings_of_a_search_are_told(tmp_path: Path) -> None:
    saved("bart", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"num_beams": 4, "min_length": 56}))
    left_out = import_model(tmp_path).report.left_out
    assert left_out["generation_config.json: num_beams 4"] == "each call decides it (--beam)"
    assert "generation_config.json: min_length 56" in left_out


@pytest.mark.parametrize("case", ["mbart", "t5"])
def test_further_training_keeps_tokenizers_and_generation(case: str, tmp_path: Path) -> None:
    saved(case, tmp_path / "theirs")
    write_tokenizer(tmp_path / "theirs", TEMPLATES[case])
    imported = import_model(tmp_path / "theirs")
    save_imported(imported.model, tmp_path / "saved")
    (tmp_path / "pairs.tsv").write_text("".join(f"{a} b {b}\t{b} {a}\n" for a in "acegikm" for b in "bdfhjln"))
    keywords = [f"model.{name}={json.dumps(value)}" for name, value in imported.report.keywords.items()]
    settings = [f"data.path={tmp_path / 'pairs.tsv'}", "data.kind=pairs", f"data.tokenizer_of={tmp_path / 'saved'}"]
    run = [*settings, f"init_from={tmp_path / 'saved'}", f"out={tmp_path / 'run'}", "batch.tokens=64", *keywords]
    mf.train(imported.report.recipe, [*run, "limits.steps=2"])
    tuned: Any = mf.load(tmp_path / "run")
    first: Any = mf.load(tmp_path / "saved")
    assert tuned.spec.keywords["vocab"] == 60 > tuned.tokenizer[1].vocab
    assert tuned.generation == first.generation
    # a run that is resumed reads it there
    assert (tmp_path / "run/generation.json").read_bytes() == (tmp_path / "saved/generation.json").read_bytes()
    assert [side.content() for side in tuned.tokenizer] == [side.content() for side in first.tokenizer]


def test_one_vocabulary_or_two(tmp_path: Path) -> None:
    saved("bart", tmp_path / "theirs")
    write_tokenizer(tmp_path / "theirs", TEMPLATES["bart"])
    save_imported(import_model(tmp_path / "theirs").model, tmp_path / "saved")
    (tmp_path / "pairs.tsv").write_text("a b\tb a\n" * 9)
    settings = [f"data.path={tmp_path / 'pairs.tsv'}", "data.kind=pairs", "data.shared=false"]
    with pytest.raises(UserError, match=r"has one vocabulary for both sides, so data\.shared must be true"):
        mf.train(
            "transformer", [*settings, f"data.tokenizer_of={tmp_path / 'saved'}", f"out={tmp_path / 'run'}", "dim=32"]
        )


def test_what_a_language_model_may_not_write_is_told_where_it_is_not_used(tmp_path: Path) -> None:
    import transformers

    sizes = {"n_positions": 32, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=40, eos_token_id=7, **sizes))  # type: ignore[arg-type]
    model.generation_config.suppress_tokens = [11, 12]
    model.generation_config.forced_eos_token_id = 7
    model.save_pretrained(tmp_path)
    left_out = import_model(tmp_path).report.left_out
    reason = "only padding and the start token are never written"
    assert left_out["generation_config.json: suppress_tokens [11, 12]"] == reason
    assert left_out["generation_config.json: forced_eos_token_id 7"] == reason
