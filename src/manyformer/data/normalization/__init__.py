"""Generated pairs of real text normalisation: dates, amounts and numbers as languages write them, to plain form."""

from manyformer.data.normalization.corpus import NormalizationPair, pairs

__all__ = ["NormalizationPair", "pairs"]
