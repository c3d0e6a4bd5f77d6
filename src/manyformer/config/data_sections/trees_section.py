"""Sentences with dependency trees."""

from typing import Literal

from manyformer.config.data_sections.data_section import DataPaths, SplitSpec, register_section
from manyformer.config.data_sections.tokenized_sections import EncodedTextData, VocabSize, WordTokenizerKind
from manyformer.config.section import PositiveInt

ASSUMED_WORDS = 10_000
"""The assumed vocabulary size of a word model, unknown until the data is read."""


@register_section
class TreesData(EncodedTextData):
    """Sentences with dependency trees and a label for every word, for taggers."""

    kind: Literal["trees"] = "trees"
    """Sentences with dependency trees."""
    path: DataPaths
    """A CoNLL-U file, `-` (standard input), or a list of these. Each also gzipped."""
    tokenizer: WordTokenizerKind = "word"  # type: ignore[assignment]
    """What a token is: a word, or a character, byte or byte pair of one; all tokens of a word have its position in the
    tree, and the first one has its label."""
    vocab: VocabSize | None = None
    """Size of a vocabulary of words or byte pairs; null for words means all words that occur at least twice."""
    label: Literal["relation", "deprel", "upos", "xpos"] = "relation"
    """The label of every word: its relation to its head without or with subtypes (relation, deprel), or its universal
    or language-specific part of speech (upos, xpos)."""
    valid: SplitSpec = 0.1
    """Validation data: the fraction of the sentences held out, or a path."""
    test: DataPaths | None = None
    """Test data, scored by `manyformer evaluate` alone: a path."""
    max_length: PositiveInt = 128
    """The most tokens in a sentence: longer sentences are left out of training, and their number is reported."""

    def _expected_vocab(self) -> tuple[int, str]:
        if self.tokenizer == "word" and self.vocab is None and self.tokenizer_of is None:
            return ASSUMED_WORDS, f"as if there were {ASSUMED_WORDS:,} different words; the data decides"
        return super()._expected_vocab()
