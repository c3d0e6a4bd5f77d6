"""Where a token is: parts that add or rotate position into embeddings, queries, keys, scores or values."""

from manyformer.position.absolute import Learned, Sinusoid
from manyformer.position.base import NoPosition, Position

__all__ = ["Learned", "NoPosition", "Position", "Sinusoid"]
