"""Special tokens are those of the tokenizer, wherever they stand: in every form of data, and for masked objectives."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from manyformer.base.errors import UserError
from manyformer.base.files.verified_folder import write_manifest
from manyformer.config import (
    LabelsData,
    ModalitiesData,
    PairsData,
    QuestionsData,
    SentencePairsData,
    TextData,
    TreesData,
)
from manyformer.data import open_data, survey_data
from manyformer.data.audio.utterances import TargetTexts
from manyformer.data.batching.epochs import random_generator
from manyformer.data.batching.row_layouts import TextRows
from manyformer.data.batching.text_epochs import mask_tokens
from manyformer.data.modalities import open_modalities
from manyformer.data.pipeline.kind import OpenRequest
from manyformer.data.tokenizers.foreign_tokenizer import ForeignTokenizer
from manyformer.data.tokenizers.saved_tokenizers import TokenizerPair
from manyformer.data.tokenizers.tokenizer import Tokenizer
from manyformer.nn.batches import IGNORE_INDEX
from manyformer.nn.core import PADDING_SEGMENT
from odd_tokenizers import KINDS, LINES, SPECIAL, byte_level, tokenizer_of_kind, word_pieces

TREE = """1\tThe\t_\tDET\t_\t_\t2\tdet\t_\t_
2\tcat\t_\tNOUN\t_\t_\t3\tnsubj\t_\t_
3\tsat\t_\tVERB\t_\t_\t0\troot\t_\t_

"""
QUESTION = {"document": LINES[2], "question": "how much?", "answer": "$3.50"}


def saved(tokenizer: Tokenizer, folder: Path) -> str:
    """A folder as of a saved model, with the tokenizer."""
    folder.mkdir()
    TokenizerPair(tokenizer, tokenizer).save(folder)
    write_manifest(folder)
    return str(folder)


def write_rows(path: Path, *rows: dict[str, str]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def text_section(folder: Path, **settings: Any) -> TextData:
    for number, line in enumerate([*LINES, LINES[0][:9]] * 5):
        (folder / f"{number:02}.txt").write_text(line)
    return TextData(path=str(folder), valid=0.3, **settings)


def sections(folder: Path, run: str) -> Iterator[tuple[Any, str]]:
    """A section of each kind of data with a borrowed tokenizer, and its form."""
    more: dict[str, Any] = {"tokenizer_of": run}
    for packing in ("documents", "concat", "contiguous"):
        (folder / packing).mkdir()
        yield text_section(folder / packing, packing=packing, length=24, **more), "next-token"
    for parts in ("equal", "sentences"):
        (folder / parts).mkdir()
        yield text_section(folder / parts, length=24, text_parts=parts, **more), "masked"
    labels = [{"text": line, "label": name} for line, name in zip(LINES, "abc")]
    paths = {"path": write_rows(folder / "labels.jsonl", *labels * 6)}
    yield LabelsData(**paths, valid=paths["path"], **more), "labelled"
    pairs = [{"source": line, "target": line[::-1].strip()} for line in LINES]
    paths = {"path": write_rows(folder / "pairs.jsonl", *pairs * 6)}
    yield PairsData(**paths, source="source", target="target", valid=paths["path"], **more), "pairs"
    two = [{"first": line, "second": line[:9].strip(), "label": name} for line, name in zip(LINES, "aba")]
    paths = {"path": write_rows(folder / "two.jsonl", *two * 6)}
    yield SentencePairsData(**paths, valid=paths["path"], **more), "labelled"
    paths = {
        "path": write_rows(folder / "questions.jsonl", *[QUESTION, {**QUESTION, "document": LINES[2] + " More."}] * 6)
    }
    yield QuestionsData(**paths, valid=paths["path"], **more), "spans"
    (folder / "trees.conllu").write_text((TREE + TREE.replace("cat", "dogs")) * 12)
    yield (
        TreesData(path=str(folder / "trees.conllu"), valid=str(folder / "trees.conllu"), label="upos", **more),
        "tagged",
    )


def token_columns(batch: Any) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """The tokens of each side of a batch with their segments."""
    names = {"tokens": "segments", "source": "source_segments", "target": "target_segments"}
    for side, segments_name in names.items():
        tokens, segments = getattr(batch, side, None), getattr(batch, segments_name, None)
        if tokens is not None and not tokens.is_floating_point():
            yield tokens.numpy(), np.zeros(tokens.shape, np.int64) if segments is None else segments.numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_batches_have_the_special_tokens_of_their_tokenizer_and_no_others(kind: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of_kind(kind)
    run = saved(tokenizer, tmp_path / "run")
    padded = 0
    for number, (section, form) in enumerate(sections(tmp_path, run)):
        data = open_data(section, form, batch_tokens=96, cache=tmp_path / f"cache-{number}", seed=0)
        allowed = {tokenizer.bos, tokenizer.eos, tokenizer.unk} | ({tokenizer.mask} if form == "masked" else set())
        for batch in data.valid:
            for tokens, segments in token_columns(batch):
                is_padding = segments == PADDING_SEGMENT
                padded += int(is_padding.sum())
                assert (tokens[is_padding] == tokenizer.pad).all(), (section.kind, form)
                used = tokens[~is_padding]
                assert set(used[~tokenizer.is_ordinary[used]].tolist()) <= allowed, (section.kind, form)
                assert tokenizer.eos in used or tokenizer.bos in used
            if form == "masked":
                # for losses that hide more than the batch does, whatever the parts of the text are
                assert (batch.mask == tokenizer.mask).all()  # type: ignore[union-attr]
            targets = getattr(batch, "targets", None)
            if form in ("next-token", "masked") and targets is not None:
                scored = targets[targets != IGNORE_INDEX].numpy()
                special = set(scored[~tokenizer.is_ordinary[scored]].tolist())
                assert special <= ({tokenizer.eos, tokenizer.unk} if form == "next-token" else set())
    assert padded > 0


@pytest.mark.parametrize("kind", KINDS)
def test_captions_and_transcripts_begin_and_end_as_the_tokenizer_says(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_of_kind(kind)
    texts = ["the cat", "dogs chased birds"]
    expected = [[tokenizer.bos, *tokenizer.encode(text)] for text in texts]
    width = max(map(len, expected))
    filled = [row + [tokenizer.pad] * (width - len(row)) for row in expected]
    monkeypatch.setattr(open_modalities, "train_tokenizer", lambda *_: tokenizer)
    index = np.arange(4)
    images = np.zeros((4, 4, 4), np.uint8)
    np.savez(
        tmp_path / "x.npz",
        images=images,
        image_index=index,
        texts=texts * 2,
        text_index=index,
        train=index[:2],
        valid=index[2:],
    )
    section = ModalitiesData(path=str(tmp_path / "x.npz"))
    captions = next(iter(open_data(section, "captions", batch_tokens=99, cache=tmp_path / "c", seed=0).valid))
    assert sorted(captions.target.tolist()) == sorted(filled)  # type: ignore[union-attr]
    contrast = next(iter(open_data(section, "contrast", batch_tokens=99, cache=tmp_path / "d", seed=0).valid))
    framed = [[*row, tokenizer.eos] for row in expected]
    framed = [row + [tokenizer.pad] * (width + 1 - len(row)) for row in framed]
    assert sorted(contrast.tokens.tolist()) == sorted(framed)  # type: ignore[union-attr]

    transcripts = TargetTexts.__new__(TargetTexts)
    transcripts._tokenizer, transcripts._labels = tokenizer, None
    transcripts._text = lambda number: texts[number]  # type: ignore[method-assign]
    batch: Any = transcripts.make_batch(torch.zeros(2, 1, 1), None, [np.array([0]), np.array([1])])
    assert batch.target.tolist() == filled
    assert batch.targets[1, len(expected[1]) - 1] == tokenizer.eos


def rows_of(tokenizer: Tokenizer, count: int) -> TextRows:
    line = [tokenizer.bos, *tokenizer.encode(" ".join(LINES)), tokenizer.unk, tokenizer.eos, tokenizer.pad]
    tokens = np.array([line] * count)
    return TextRows(tokens, tokens, None, np.ones_like(tokens, dtype=bool))


@pytest.mark.parametrize("make", [word_pieces, byte_level])
def test_masks_are_drawn_as_transformers_draws_them(make: Callable[[], ForeignTokenizer]) -> None:
    tokenizer = make()
    rows = rows_of(tokenizer, 400)
    tokens, targets = mask_tokens(rows, 0.15, tokenizer, random_generator(0))
    names = {f"{kind}_token": name for kind, name in SPECIAL.items() if kind not in ("bos", "eos")}
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._inner, cls_token=SPECIAL["bos"], sep_token=SPECIAL["eos"], **names
    )
    torch.manual_seed(0)
    masked = DataCollatorForLanguageModeling(theirs, mlm_probability=0.15)([{"input_ids": row} for row in rows.tokens])
    drawn = [(tokens, targets), (masked["input_ids"].numpy(), masked["labels"].numpy())]
    shares = []
    for shown, wanted in drawn:
        chosen = wanted != IGNORE_INDEX
        special = [tokenizer.pad, tokenizer.bos, tokenizer.eos, tokenizer.unk, tokenizer.mask]
        assert not np.isin(wanted[chosen], special).any()
        shares.append([chosen.mean(), (shown == tokenizer.mask)[chosen].mean(), (shown == wanted)[chosen].mean()])
    np.testing.assert_allclose(shares[0], shares[1], atol=0.02)
    replaced = tokens[(targets != IGNORE_INDEX) & (tokens != targets) & (tokens != tokenizer.mask)]
    # transformers draws from the whole vocabulary; special tokens and placeholders teach nothing
    assert tokenizer.is_ordinary[replaced].all()
    assert len(set(replaced.tolist())) > 10


def test_ordinary_tokens_are_those_that_text_has() -> None:
    tokenizer = word_pieces()
    names = {tokenizer._inner.id_to_token(token) for token in set(range(tokenizer.vocab)) - set(tokenizer.ordinary_ids)}
    # an id without a token is none, either
    assert names - {None} == {*SPECIAL.values(), "[unused0]", "[unused1]", "[unused2]"}
    fallback = tokenizer_of_kind("byte-fallback")
    # bytes stand for characters, so that text has them
    assert set(fallback.encode("日")) <= set(fallback.ordinary_ids.tolist())


def test_masked_objectives_need_a_mask(tmp_path: Path) -> None:
    names = {kind: name for kind, name in SPECIAL.items() if kind != "mask"}
    content = word_pieces().content()["tokenizers"]
    run = saved(ForeignTokenizer.of_files(content, names, []), tmp_path / "run")
    (tmp_path / "texts").mkdir()
    section = text_section(tmp_path / "texts", length=24, tokenizer_of=run)
    with pytest.raises(UserError, match="the tokenizer has no mask token, which masked language modelling needs"):
        open_data(section, "masked", batch_tokens=96, cache=tmp_path / "cache", seed=0)


def test_no_part_takes_the_special_ids_of_this_library_for_those_of_all_tokenizers() -> None:
    for kind in ("pad", "bos", "eos", "unk", "mask", "stop_ids"):
        assert not hasattr(Tokenizer, kind)


def test_answers_that_end_inside_a_token_are_widened_and_told(tmp_path: Path) -> None:
    document = "the dogs ran far away\u200b to the birds"
    rows = [
        {"document": document, "question": "who?", "answer": "dogs"},
        {"document": document, "question": "what?", "answer": "the bird"},
        {"document": document, "question": "which?", "answer": "og"},
        {"document": document, "question": "nothing?", "answer": ""},
        {"document": document, "question": "unseen?", "answer": "\u200b"},
    ]
    run = saved(word_pieces(), tmp_path / "run")
    path = write_rows(tmp_path / "questions.jsonl", *rows)
    section = QuestionsData(path=path, valid=path, tokenizer_of=run)
    data = open_data(section, "spans", batch_tokens=40, cache=tmp_path / "cache", seed=0)
    assert data.summary is not None
    left_out = [str(finding) for finding in data.summary.left_out]
    # word pieces have "dog" and "##s", so that "dogs" and "bird" end with a token, and "og" does not; both splits count
    assert left_out == [
        f"2 answers widened to whole tokens, because an end lies inside one (first: {path}:3)",
        f"2 answers counted as none, because the tokenizer leaves out every character (first: {path}:5)",
    ]
    assert left_out[0] in "\n".join(data.describe())
    # a look at the data before training prepares it twice
    (tmp_path / "survey").mkdir()
    surveyed = survey_data(section, "spans", OpenRequest(40, tmp_path / "survey")).summary
    assert surveyed is not None
    assert list(map(str, surveyed.left_out)) == left_out
    short = QuestionsData(path=path, valid=path, tokenizer_of=run, max_length=10)
    cut = open_data(short, "spans", batch_tokens=40, cache=tmp_path / "short", seed=0)
    assert cut.summary is not None
    assert f"2 answers beyond data.max_length, counted as none (first: {path}:2)" in map(str, cut.summary.left_out)
