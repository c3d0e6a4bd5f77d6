"""Which tokens become keys and values."""

from manyformer.sources.base import Keys, Project, Source
from manyformer.sources.encoder import Encoded
from manyformer.sources.own import Own
from manyformer.sources.ring import Recent

__all__ = ["Encoded", "Keys", "Own", "Project", "Recent", "Source"]
