"""Generated pairs of text normalization: dates, amounts and numbers in the formats of 25 languages, to plain form."""

from manyformer.data.normalization.corpus import NormalizationPair, generate_pairs

__all__ = ["NormalizationPair", "generate_pairs"]
