"""The analysis of whole models: planted heads get their labels, and every recipe is analysed or says why not."""

from typing import Any

import numpy as np
import pytest
import torch

import manyformer as mf
from manyformer.attention import Attention
from manyformer.check.tiny_models import build_tiny
from manyformer.core import Chain
from manyformer.data.tokenizer_kinds import train_tokenizer
from manyformer.errors import UserError
from manyformer.heads import HeadAnalysis, TokenFrequencies
from manyformer.heads.analysed_text import first_tokens
from manyformer.heads.syntactic_heads import WordTree
from manyformer.kernels import SoftmaxKernel
from manyformer.models import ClassHead, MaskedLM, TokenEmbedding
from manyformer.position import LearnedPosition
from manyformer.recipes import RECIPES
from manyformer.recipes.registry import task_of
from manyformer.residual import Residual
from manyformer.tasks import EncodedText

CHARACTERS = train_tokenizer("char", ["abcdefgh ijkl"])
TEXT_DATA = {"text", "pairs", "labels", "trees"}
"""The kinds of data that have plain text to analyse."""
NO_PAIR_WEIGHTS = {
    "fnet",
    "linformer",
    "nystromformer",
    "perceiver",
    "sinkhorn-encoder",
    "sinkhorn-transformer",
    "etc",
    "bigbird-etc",
    "lstm-lm",
    "mamba",
    "rwkv-7",
    "nsa",
    "infini-attention",
    "deltanet",
    "gated-deltanet",
    "kda",
}
"""Recipes without weights for pairs of tokens of the text."""
NEEDS_TREES = {"structural"}
SUMS = {"gla", "hgrn2", "lightning", "mamba-2", "mlstm", "retnet"}
"""Recipes whose outputs are sums of values with weights of any sign and size."""


def encode(text: str) -> EncodedText:
    return EncodedText(CHARACTERS.encode(text), CHARACTERS, lambda tokens: tuple(map(str, tokens)))


def sentence(model: Any, text: str) -> EncodedText:
    encoded = encode(text)
    return encoded._replace(answer=encode("dcba")) if task_of(model).takes_source else encoded


@pytest.mark.parametrize("name", mf.recipes())
def test_every_recipe_is_analysed_or_says_why_not(name: str) -> None:
    model = build_tiny(name, {}, 0)
    analysis = HeadAnalysis(model)
    reads_text = bool(TEXT_DATA & RECIPES[name].card.task.data_forms.keys())
    is_analysed = reads_text and name not in NO_PAIR_WEIGHTS | NEEDS_TREES
    try:
        analysis.read(sentence(model, "abcd abcdefgh"))
        reports = analysis.reports()
    except UserError:
        assert not is_analysed
        return
    assert is_analysed
    assert name in SUMS or all(0 <= report.confidence <= 1 + 1e-6 for report in reports)
    assert all(report.rare is None for report in reports)
    assert model.training


def planted() -> Any:
    """An encoder whose first head attends to the previous token and the second to the same, by one-hot positions."""
    width, length = 20, 18
    layer = Attention(2 * width, 2, SoftmaxKernel())
    embed = TokenEmbedding(CHARACTERS.vocab, 2 * width, position=LearnedPosition(2 * width, length))
    model = MaskedLM(embed, Chain(attention=Residual(layer)), ClassHead(2 * width, CHARACTERS.vocab))
    shifted, same = torch.eye(length, length).roll(-1, 0), torch.eye(length)
    with torch.no_grad():
        embed.token.weight.zero_()
        embed.position.weight.copy_(torch.eye(length, 2 * width))
        assert layer.q_proj is not None
        for projection, blocks in ((layer.q_proj, (shifted, same)), (layer.kv_proj, (same, same))):
            projection.weight.zero_()
            for head, block in enumerate(blocks):
                projection.weight[head * width : head * width + length, :length] = 30 * block
    return model


def test_planted_heads_are_positional() -> None:
    model = planted()
    analysis = HeadAnalysis(model)
    for text in ("abc", "bcdefgh", "a bcd efgh"):
        analysis.read(encode(text))
    previous, same = analysis.reports()
    assert (previous.part, previous.labels, same.labels) == ("body.attention", ("positional -1",), ("positional +0",))
    assert previous.offset == (-1, 1.0)


def test_the_head_with_the_most_rare_tokens_is_labelled() -> None:
    model = planted()
    counts = np.full(CHARACTERS.vocab, 100)
    counts[CHARACTERS.encode("c")] = 1
    analysis = HeadAnalysis(model, TokenFrequencies(counts))
    # the second head attends to the token itself, the first one to the token before it
    for text in ("cc", "cccd", "dccc"):
        analysis.read(encode(text))
    previous, same = analysis.reports()
    assert previous.rare is not None
    assert same.rare is not None
    assert same.rare.least == pytest.approx(8 / 10)
    assert same.rare.chance == pytest.approx((1 * 2 + 0.75 * 8) / 10)


def test_trees_are_read_by_the_parts_over_the_text() -> None:
    model = build_tiny("transformer", {}, 0)
    analysis = HeadAnalysis(model)
    words = ["ab", "cde", "f", "g", "h", "i"]
    text = sentence(model, " ".join(words))
    tree = WordTree(first_tokens(words, CHARACTERS), ["dep", "root", *["dep"] * 4], [2, 0, 2, 3, 3, 1])
    for _ in range(19):
        analysis.read_tree(text, tree)
    analysis.read(text)
    for report in analysis.reports():
        # 95 edges are fewer than a relation needs
        assert report.syntax == ()
    analysis.read_tree(text, tree)
    with_syntax = {report.part for report in analysis.reports() if report.syntax}
    assert with_syntax == {"encoder.0.attention", "encoder.1.attention"}


@pytest.mark.parametrize("kind", ["char", "byte", "bpe", "word"])
def test_words_begin_at_their_tokens(kind: Any) -> None:
    words = ["the", "cat's", "naïve", "n't", ".", "1 000"]
    size = 300 if kind == "bpe" else None
    tokenizer = train_tokenizer(kind, [" ".join(words)] * 3, size)
    starts, ids = first_tokens(words, tokenizer), tokenizer.encode(" ".join(words))
    for word, start, end in zip(words, starts, [*starts[1:], len(ids)]):
        assert tokenizer.decode(ids[start:end]).strip(" ") == word
