"""How layers follow each other: what is not simply one after the other."""

from manyformer.depth.adaptive import Adaptive
from manyformer.depth.halting import Graves, Halting, Released
from manyformer.depth.reversible import Reversible
from manyformer.depth.universal import Block, Repeated

__all__ = ["Adaptive", "Block", "Graves", "Halting", "Released", "Repeated", "Reversible"]
