"""Generated pairs of real text normalisation: dates, amounts and numbers as languages write them, to plain form."""

from manyformer.data.normalization.corpus import Pair, pairs

__all__ = ["Pair", "pairs"]
