"""Datastores of contexts and what followed them, and language models that look into them.

`build(work_of(run, data=...))` writes one, `Datastore(folder)` opens it, and `knn_lm(model, store)` is a language model
that mixes its own predictions with what followed the nearest contexts (Khandelwal et al. 2020, arXiv:1911.00172).
"""

from manyformer.datastore.building import build
from manyformer.datastore.facts import Facts
from manyformer.datastore.indexing import Flat, Quantized, make_index
from manyformer.datastore.looking import Looking
from manyformer.datastore.mixture import Neighbourly, check_fits, knn_lm
from manyformer.datastore.neighbouring import find_neighbours
from manyformer.datastore.search import Ban, Found
from manyformer.datastore.store import Datastore, Mix
from manyformer.datastore.work import Work, plan, work_of

__all__ = [
    "Ban",
    "Datastore",
    "Facts",
    "Flat",
    "Found",
    "Looking",
    "Mix",
    "Neighbourly",
    "Quantized",
    "Work",
    "build",
    "check_fits",
    "find_neighbours",
    "knn_lm",
    "make_index",
    "plan",
    "work_of",
]
