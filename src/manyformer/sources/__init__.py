"""Which tokens become keys and values."""

from manyformer.sources.after import After
from manyformer.sources.base import Keys, Project, Source
from manyformer.sources.encoder import Encoded
from manyformer.sources.own import Own
from manyformer.sources.remembered import Remembered
from manyformer.sources.ring import Recent
from manyformer.sources.still import Beside, Still
from manyformer.sources.trimmed import Trimmed

__all__ = ["After", "Beside", "Encoded", "Keys", "Own", "Project", "Recent", "Remembered", "Source", "Still", "Trimmed"]
