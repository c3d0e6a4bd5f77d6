"""Likelihoods count what is text and the ends of texts, each once, wherever the special tokens of a tokenizer stand."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import manyformer as mf
from manyformer.base.context_windows import ContextWindows
from manyformer.base.files.verified_folder import write_manifest
from manyformer.config import PairsData, RunConfig
from manyformer.data import open_data, open_file
from manyformer.data.pipeline.kind import OpenRequest
from manyformer.data.tokenizers.foreign_tokenizer import ForeignTokenizer
from manyformer.data.tokenizers.saved_tokenizers import TokenizerPair
from manyformer.data.tokenizers.tokenizer import Tokenizer
from manyformer.inference.evaluate.evaluate import score_model
from odd_tokenizers import FOREIGN, LINES, SPECIAL, tokenizer_of_kind, word_pieces

TOKENIZERS = [*FOREIGN, "end-is-start"]
SIZES = {"dim": 16, "depth": 1, "heads": 2, "ff_dim": 16}
TEXTS = [*LINES, "the cat", "日 birds"]
WINDOWS = ContextWindows(7, 3)


def tokenizer_named(kind: str) -> Tokenizer:
    if kind == "end-is-start":
        return ForeignTokenizer.of_files(word_pieces().content()["tokenizers"], {"eos": SPECIAL["eos"]}, [])
    return tokenizer_of_kind(kind)


def saved(tokenizer: Tokenizer, folder: Path) -> str:
    folder.mkdir()
    TokenizerPair(tokenizer, tokenizer).save(folder)
    write_manifest(folder)
    return str(folder)


def sharp(name: str, **keywords: Any) -> Any:
    torch.manual_seed(1)
    model = mf.build(name, **SIZES, **keywords).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    return model.requires_grad_(False)


@torch.no_grad()
def nats_by_hand(model: Any, rows: list[list[int]], windows: ContextWindows | None, smoothing: float = 0.0) -> Tensor:
    """Each window of a text by itself, which has no padding then."""
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        context, stride = (len(row), len(row)) if windows is None else windows
        scored, start = 0, 0
        while scored < len(row) - 1:
            window = torch.tensor([row[start : start + context]])
            targets = torch.tensor(row[start + 1 : start + context + 1])
            logits = model(window).logits[0, : len(targets)]
            fresh = slice(scored - start, None)
            total += F.cross_entropy(logits[fresh], targets[fresh], reduction="sum", label_smoothing=smoothing)
            scored, start = start + len(targets), start + stride
    return total


@pytest.mark.parametrize("packing", ["documents", "concat", "contiguous"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_scores_of_a_text_count_each_token_and_end_once(kind: str, packing: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_named(kind)
    run_folder = saved(tokenizer, tmp_path / "run")
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    texts = str(tmp_path / "texts")
    data = {"kind": "text", "path": texts, "tokenizer_of": run_folder, "packing": packing, "length": 96}
    run = RunConfig.model_validate({"recipe": "transformer-lm", "data": data, "batch": {"tokens": 192}})
    model, pair = sharp("transformer-lm", vocab=tokenizer.vocab, max_length=400), TokenizerPair(tokenizer, tokenizer)
    rows = [[tokenizer.bos, *tokenizer.encode(text), tokenizer.eos] for text in TEXTS]
    count = sum(len(row) - 1 for row in rows)
    for windows in (None, WINDOWS) if packing == "documents" else (None,):
        request = OpenRequest(192, tmp_path / f"scratch-{windows is None}", windows=windows)
        request.cache.mkdir()
        held_out = open_file(run.data, "next-token", pair, texts, request)
        scores = {score.name: score for score in score_model(model, run, pair, held_out, windows=windows).scores}
        assert f"tokens:{count}" in scores["perplexity"].signature
        nats = scores["perplexity"].parts["nats"] * count
        characters, size = sum(map(len, TEXTS)), sum(len(text.encode()) for text in TEXTS)
        assert scores["bits per character"].value == pytest.approx(nats / math.log(2) / characters)
        assert scores["bits per byte"].value == pytest.approx(nats / math.log(2) / size)
        if packing == "documents":
            assert nats == pytest.approx(nats_by_hand(model, rows, windows).item(), rel=1e-6)
            assert held_out.batches is not None
            smoothed = [model.loss(batch, label_smoothing=0.2) for batch in held_out.batches]
            assert sum(int(loss.targets) for loss in smoothed) == count
            total = sum(float(loss.total) for loss in smoothed)
            assert total == pytest.approx(nats_by_hand(model, rows, windows, 0.2).item(), rel=1e-6)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_scores_of_translations_count_each_token_and_end_once(kind: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_named(kind)
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{text}\t{' '.join(text.split()[::-1])}\n" for text in TEXTS))
    section = PairsData(path=str(path), valid=str(path), tokenizer_of=saved(tokenizer, tmp_path / "run"))
    data = open_data(section, "pairs", batch_tokens=90, cache=tmp_path / "cache", seed=0)
    model = sharp("transformer", vocab=tokenizer.vocab)
    nats, smoothed, count = (torch.zeros((), dtype=torch.float64) for _ in range(3))
    with torch.no_grad():
        for text in TEXTS:
            source = torch.tensor([[*tokenizer.encode(text), tokenizer.eos]])
            answer = tokenizer.encode(" ".join(text.split()[::-1]))
            logits = model(source, torch.tensor([[tokenizer.bos, *answer]])).logits[0]
            targets = torch.tensor([*answer, tokenizer.eos])
            nats += F.cross_entropy(logits, targets, reduction="sum")
            smoothed += F.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.1)
            count += len(targets)
    batches: Any = list(data.valid)
    assert any(batch.target_segments is not None for batch in batches)
    scores = [model.score(batch) for batch in batches]
    assert sum(int(score.targets) for score in scores) == int(count)
    assert sum(float(score.nll) for score in scores) == pytest.approx(nats.item(), rel=1e-6)
    losses = [model.loss(batch, label_smoothing=0.1) for batch in batches]
    assert sum(float(loss.total) for loss in losses) == pytest.approx(smoothed.item(), rel=1e-6)
