"""The analysis of whole models: planted heads get their labels, and every recipe is analysed or says why not."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import manyformer as mf
from manyformer.analysis.heads import HeadAnalysis, TokenFrequencies
from manyformer.analysis.heads.attention_statistics import SyntaxStatistics
from manyformer.analysis.heads.run_measures import tree_of_tokens, treebank_sentences
from manyformer.analysis.own_models import build_tiny
from manyformer.base.errors import UserError
from manyformer.config import TextData
from manyformer.data.text.treebank import TreebankSentence, WordsInText, tokens_in_text
from manyformer.data.tokenizers.foreign_tokenizer import ForeignTokenizer
from manyformer.data.tokenizers.saved_tokenizers import TokenizerPair, train_tokenizer
from manyformer.models import ClassHead, MaskedLM, TokenEmbedding
from manyformer.models.tasks import EncodedText
from manyformer.nn import Attention, SoftmaxKernel
from manyformer.nn.core import Chain
from manyformer.nn.positions import LearnedPosition
from manyformer.nn.residual import Residual
from manyformer.recipes import RECIPES
from manyformer.recipes.parts.recurrent_layers import SIGNED_SUMS
from manyformer.recipes.parts.registry import task_of
from odd_tokenizers import KINDS, tokenizer_of_kind, word_pieces

CHARACTERS = train_tokenizer("char", ["abcdefgh ijkl"])
TEXT_DATA = {"text", "pairs", "labels", "trees"}
"""The kinds of data that have plain text to analyse."""
NO_PAIR_WEIGHTS = {
    name for name, recipe in RECIPES.items() if {"pair_weights", "attention_maps"} & recipe.card.reasons.keys()
}
NEEDS_TREES = {"structural"}
SUMS = {
    name
    for name, recipe in RECIPES.items()
    if recipe.card.reasons.get("convex_weights") == SIGNED_SUMS["convex_weights"]
}
"""Recipes whose outputs are sums of values with weights of any sign and size."""


def encode(text: str) -> EncodedText:
    return EncodedText(CHARACTERS.encode(text), CHARACTERS, lambda tokens: tuple(map(str, tokens)))


def sentence(model: Any, text: str) -> EncodedText:
    encoded = encode(text)
    return encoded._replace(answer=encode("dcba")) if task_of(model).takes_source else encoded


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", mf.recipes())
def test_every_recipe_is_analyzed_or_says_why_not(name: str) -> None:
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


def test_the_head_with_the_most_rare_tokens_is_labeled() -> None:
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
    parsed = TreebankSentence(words, ["dep", "root", *["dep"] * 4], [2, 0, 2, 3, 3, 1], [True] * 6)
    tree = tree_of_tokens(parsed.tokens(CHARACTERS, in_text=True), parsed)
    assert tree.first_tokens == [0, 2, 6, 8, 10, 12]
    for _ in range(19):
        analysis.read_tree(text, tree)
    analysis.read(text)
    for report in analysis.reports():
        # 95 edges are fewer than a relation needs
        assert report.syntax == ()
    analysis.read_tree(text, tree)
    with_syntax = {report.part for report in analysis.reports() if report.syntax}
    assert with_syntax == {"encoder.0.attention", "encoder.1.attention"}


TREEBANK = """1\tthe\t_\tDET\t_\t_\t2\tdet\t_\t_
2\tcat\t_\tNOUN\t_\t_\t3\tnsubj\t_\tSpaceAfter=No
3\t's\t_\tAUX\t_\t_\t0\troot\t_\t_
4\tnaïve\t_\tADJ\t_\t_\t3\txcomp\t_\tSpaceAfter=No
5\t.\t_\tPUNCT\t_\t_\t3\tpunct\t_\t_

"""
FORMS, RUNNING_TEXT = ["the", "cat", "'s", "naïve", "."], "the cat's naïve."


@pytest.mark.parametrize("kind", KINDS)
def test_trees_are_laid_over_the_tokens_of_the_running_text(kind: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of_kind(kind)
    (tmp_path / "trees.conllu").write_text(TREEBANK)
    run: Any = SimpleNamespace(
        tokenizers=TokenizerPair(tokenizer, tokenizer),
        config=SimpleNamespace(recipe="bert", data=TextData(path="stdlib"), task=None),
        folder=tmp_path,
    )
    ((text, tree),) = treebank_sentences(run, tmp_path / "trees.conllu", 5, max_length=None)
    if tokenizer.reads_spaces:
        words = tokens_in_text(WordsInText(RUNNING_TEXT, [0, 4, 7, 10, 15], [3, 7, 9, 15, 16]), tokenizer)
        assert words.is_divided or text.ids == tokenizer.encode(RUNNING_TEXT)
    else:
        assert text.ids == [token for form in FORMS for token in tokenizer.encode(form)]
    assert (tree.heads, tree.relations) == ([2, 3, 0, 3, 3], ["det", "nsubj", "root", "xcomp", "punct"])
    assert len(tree.first_tokens) == len(FORMS)
    for word, start, end in zip(FORMS, tree.first_tokens, [*tree.first_tokens[1:], len(text.ids)]):
        decoded = tokenizer.decode(text.ids[start:end]).replace(" ", "")
        # unknown letters have no text of their own, and some tokenizers drop accents
        assert decoded in (word, "naive") or tokenizer.unk in text.ids[start:end]


def test_words_of_a_tree_are_kept_where_the_end_token_stands_for_unknown_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = ForeignTokenizer.of_files(word_pieces().content()["tokenizers"], {"eos": "[SEP]"}, [])
    assert tokenizer.unk == tokenizer.eos == tokenizer.bos == tokenizer.pad
    sentence = TreebankSentence(["the", "\u200b", "cat"], ["det", "dep", "root"], [3, 3, 0], [True] * 3)
    tokens = sentence.tokens(tokenizer, in_text=True)
    assert tokens.ids.tolist().count(tokenizer.eos) == 1
    text = EncodedText(tokens.ids.tolist(), tokenizer, lambda ids: tuple(map(str, ids)))
    widths = list[tuple[int, ...]]()
    monkeypatch.setattr(SyntaxStatistics, "add", lambda _, weights, tree: widths.append(weights.shape[1:]))
    model: Any = mf.build("bert", vocab=tokenizer.vocab, dim=16, depth=1, heads=2, ff_dim=16, max_length=16)
    HeadAnalysis(model).read_tree(text, tree_of_tokens(tokens, sentence))
    assert widths == [(3, 3)]
