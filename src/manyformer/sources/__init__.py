"""Which tokens become keys and values."""

from manyformer.sources.base import Keys, Project, Source
from manyformer.sources.encoder import Encoded
from manyformer.sources.own import Own

__all__ = ["Encoded", "Keys", "Own", "Project", "Source"]
