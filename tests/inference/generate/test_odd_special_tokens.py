"""Texts begin, end and are filled up as their tokenizer says, wherever its special tokens stand."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors
from writers import Table

import manyformer as mf
from manyformer.data.tokenizers.foreign_tokenizer import ForeignTokenizer
from manyformer.data.tokenizers.saved_tokenizers import train_tokenizer
from manyformer.data.tokenizers.tokenizer import Tokenizer
from manyformer.inference.early_exit.early_decoding import exit_layers, exit_threshold
from manyformer.inference.generate import (
    AverageLogProbPenalty,
    BeamSettings,
    Decoding,
    GreedyChoice,
    LikelyStopping,
    SampledChoice,
    SourceBatch,
    answer_sources,
    generate,
    stream,
)
from manyformer.nn.core import PADDING_SEGMENT
from odd_tokenizers import FOREIGN, KINDS, SPECIAL, tokenizer_of_kind, word_pieces

PROMPTS = ["the cat", "dogs", "birds across fields because"]


def end_is_start() -> ForeignTokenizer:
    """GPT-2's kind of special tokens: one stands for the start, the end, padding and unknown words."""
    return ForeignTokenizer.of_files(word_pieces().content()["tokenizers"], {"eos": SPECIAL["eos"]}, [])


def tokenizer_named(kind: str) -> Tokenizer:
    return end_is_start() if kind == "end-is-start" else tokenizer_of_kind(kind)


def shaken(model: Any) -> Any:
    """The model with weights that are large enough for sharp distributions."""
    torch.manual_seed(3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.4)
    return model.eval()


def special_ids(tokenizer: Tokenizer) -> set[int]:
    return {tokenizer.pad, tokenizer.bos}


def likeliest(logits: torch.Tensor, tokenizer: Tokenizer) -> int:
    """The likeliest token that a text may have."""
    banned = sorted(special_ids(tokenizer) - set(tokenizer.stop_ids))
    allowed = logits.clone()
    allowed[banned] = float("-inf")
    return int(allowed.argmax())


@pytest.mark.oracle
@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("kind", [*FOREIGN, "end-is-start"])
def test_texts_of_unequal_prompts_are_those_of_transformers(kind: str, begins: bool, tmp_path: Path) -> None:
    import transformers

    tokenizer: Any = tokenizer_named(kind)
    inner = tokenizer._inner
    start = SPECIAL["bos" if kind != "end-is-start" else "eos"]
    if begins:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", pair=f"{start} $A $B", special_tokens=[(start, tokenizer.bos)]
        )
    names = {"bos": start, "eos": SPECIAL["eos"], "pad": SPECIAL["pad"], "unk": SPECIAL["unk"]}
    names = names if kind != "end-is-start" else {"bos": start, "eos": start, "pad": start}
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, padding_side="left", **{f"{name}_token": token for name, token in names.items()}
    )
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        **{f"{name}_token_id": getattr(tokenizer, name) for name in ("bos", "eos", "pad")},
    )
    reference = shaken(transformers.LlamaForCausalLM(config))
    reference.save_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path)
    model: Any = mf.load(str(tmp_path))
    encoded = theirs(PROMPTS, return_tensors="pt", padding=True, return_token_type_ids=False)
    for beams in (1, 3):
        texts = reference.generate(
            **encoded,
            max_new_tokens=9,
            do_sample=False,
            num_beams=beams,
            suppress_tokens=sorted(special_ids(tokenizer) - {tokenizer.eos}) or None,
        )[:, encoded["input_ids"].shape[1] :].tolist()
        expected = [text[: text.index(tokenizer.eos)] if tokenizer.eos in text else text for text in texts]
        beam = BeamSettings(beams, AverageLogProbPenalty(1.0), stopping=LikelyStopping())
        choice = beam if beams > 1 else GreedyChoice()
        result = generate(model, PROMPTS, decoding=Decoding(choice=choice, max_new=9))
        assert result.tokens == expected
        assert result.texts == theirs.batch_decode(expected, skip_special_tokens=True)
        assert result.stats.prompt_tokens == int(encoded["attention_mask"].sum())


@pytest.mark.parametrize("kind", [*KINDS, "end-is-start"])
def test_translations_begin_and_end_as_the_tokenizer_of_the_target_says(kind: str) -> None:
    source, target = tokenizer_named(kind), word_pieces()
    model: Any = shaken(
        mf.build("transformer", vocab=target.vocab, source_vocab=source.vocab, dim=16, depth=1, heads=2, ff_dim=16)
    )
    model.tokenizer = (source, target)
    result = generate(model, PROMPTS, max_new=8)
    streamed = list(stream(model, PROMPTS, Decoding(max_new=8)))
    for number, (prompt, tokens, text) in enumerate(zip(PROMPTS, result.tokens, result.texts)):
        # by itself, without padding, and without a state
        ids, written = torch.tensor([[*source.encode(prompt), source.eos]]), [target.bos]
        while len(written) <= 8:
            with torch.no_grad():
                written.append(likeliest(model(ids, torch.tensor([written])).logits[0, -1], target))
            if written[-1] == target.eos:
                break
        assert tokens == [token for token in written[1:] if token != target.eos]
        assert text == target.decode(tokens)
        assert not any(name in text for name in SPECIAL.values())
        assert "".join(piece.text for piece in streamed if piece.row == number) == text


@pytest.mark.parametrize("recipe", ["captioner", "speech-transformer"])
@pytest.mark.parametrize("kind", ["word-pieces", "byte-level", "end-is-start", "byte"])
def test_captions_and_transcripts_begin_and_end_as_the_tokenizer_says(kind: str, recipe: str) -> None:
    tokenizer = tokenizer_named(kind)
    sizes = {"vocab": tokenizer.vocab, "dim": 16, "depth": 1, "heads": 2, "ff_dim": 16}
    if recipe == "captioner":
        model = mf.build(recipe, height=4, width=4, channels=1, patch=2, **sizes)
        sources, segments = torch.randint(256, (2, 4, 4, 1), dtype=torch.uint8), None
    else:
        model = mf.build(recipe, mels=8, decoder_depth=1, channels=3, ctc_weight=0.3, **sizes)
        sources, segments = torch.randn(2, 24, 8), torch.zeros(2, 24, dtype=torch.long)
        segments[1, 17:] = PADDING_SEGMENT
    reader: Any = shaken(model)
    answers = answer_sources(reader, SourceBatch(sources, segments), tokenizer=tokenizer, decoding=Decoding(max_new=6))
    for row, (tokens, text) in enumerate(zip(answers.tokens, answers.texts)):
        written = [tokenizer.bos]
        marks = None if segments is None else segments[row : row + 1]
        while len(written) <= 6 and (len(written) == 1 or written[-1] != tokenizer.eos):
            with torch.no_grad():
                logits = reader(sources[row : row + 1], torch.tensor([written]), marks).logits[0, -1]
            written.append(likeliest(logits, tokenizer))
        assert tokens == [token for token in written[1:] if token != tokenizer.eos]
        assert text == tokenizer.decode(tokens)


@pytest.mark.parametrize("kind", [*KINDS, "end-is-start"])
def test_sampled_texts_have_neither_start_nor_padding(kind: str) -> None:
    tokenizer = tokenizer_named(kind)
    logits = torch.zeros(tokenizer.vocab, tokenizer.vocab)
    # all that is likely is special
    logits[:, [tokenizer.pad, tokenizer.bos]] = 9.0
    logits[:, tokenizer.eos] = 4.0
    model = Table(logits)
    result = generate(
        model, PROMPTS, tokenizer=tokenizer, decoding=Decoding(choice=SampledChoice(seed=0, samples=8), max_new=20)
    )
    finishes = set[str]()
    for rows in result.rows:
        for row in rows:
            assert not {tokenizer.pad, tokenizer.bos, tokenizer.eos} & set(row.tokens)
            finishes.add(row.finish)
    assert "end" in finishes


def table_of(tokens: Sequence[int], vocab: int) -> Table:
    """A model that writes the tokens one after another, whatever the prompt is; they must differ."""
    logits = torch.zeros(vocab, vocab)
    logits[:, tokens[0]] = 50
    for now, then in pairwise(tokens):
        logits[now, then] = 99
    return Table(logits)


@pytest.mark.parametrize("limit", [2, 9])
@pytest.mark.parametrize("kind", ["byte", "byte-fallback"])
def test_a_stop_string_that_appears_only_at_the_end_stops(kind: str, limit: int) -> None:
    tokenizer = train_tokenizer("byte", []) if kind == "byte" else tokenizer_of_kind(kind)
    first, second = tokenizer.encode("日")[-3:-1]
    # two bytes of three are held back until nothing can follow them
    model = table_of([first, second, tokenizer.eos], tokenizer.vocab)
    prompt = [[tokenizer.encode("a")[-1]]]
    plain = generate(model, prompt, tokenizer=tokenizer, max_new=limit)
    assert plain.tokens == [[first, second]]
    assert "\N{REPLACEMENT CHARACTER}" in plain.texts[0]
    assert plain.rows[0][0].finish == ("limit" if limit == 2 else "end")
    decoding = Decoding(max_new=limit, stop=("\N{REPLACEMENT CHARACTER}",))
    stopped = generate(model, prompt, tokenizer=tokenizer, decoding=decoding)
    assert (stopped.rows[0][0].finish, stopped.texts) == ("stop", [""])
    pieces = list(stream(model, prompt, decoding, tokenizer=tokenizer))
    assert ("".join(piece.text for piece in pieces), pieces[-1].finish) == ("", "stop")


@pytest.mark.parametrize("kind", ["unigram", "byte-level", "end-is-start"])
@pytest.mark.parametrize("recipe", ["early-exit-lm", "early-exit-seq2seq"])
def test_early_exits_are_counted_from_the_tokens_that_the_tokenizer_begins_with(recipe: str, kind: str) -> None:
    tokenizer = tokenizer_named(kind)
    sizes = {"dim": 16, "depth": 3, "heads": 2, "ff_dim": 16}
    model: Any = shaken(mf.build(recipe, vocab=tokenizer.vocab, base_keywords=sizes))
    model.tokenizer = tokenizer
    decoding = Decoding(max_new=7)
    for threshold in (None, 0.0, 0.9):
        with exit_threshold(model, threshold):
            result = generate(model, PROMPTS, decoding=decoding)
            layers = exit_layers(model, PROMPTS, result.tokens)
            pieces = list(stream(model, PROMPTS, decoding))
            alone = [generate(model, prompt, decoding=decoding).tokens[0] for prompt in PROMPTS]
        assert result.tokens == alone
        assert [len(row) for row in layers] == [len(row) for row in result.tokens]
        assert {layer for row in layers for layer in row} <= {1, 2, 3}
        if threshold is None:
            assert all(layer == 3 for row in layers for layer in row)
        for number, text in enumerate(result.texts):
            assert "".join(piece.text for piece in pieces if piece.row == number) == text
