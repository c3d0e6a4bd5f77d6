"""How layers follow each other: what is not simply one after the other."""

from manyformer.depth.reversible import Reversible

__all__ = ["Reversible"]
