"""Datastores of contexts with their next tokens, and language models that retrieve from them.

`build(datastore_job(run, data=...))` writes a datastore, `Datastore(folder)` opens it, and `knn_lm(model, store)` is a
language model that interpolates its predictions with the tokens that followed the nearest contexts (Khandelwal et al.
2020, arXiv:1911.00172).
"""

from manyformer.inference.datastore.build_datastore import DatastoreJob, build, datastore_job, plan
from manyformer.inference.datastore.datastore import Datastore, DatastoreFacts, KNNSettings
from manyformer.inference.datastore.knn_head import KNNHead, check_fits, knn_lm
from manyformer.inference.datastore.nearest_keys import ExcludedRanges, FlatIndex, IVFPQIndex, make_index
from manyformer.inference.datastore.retrieval import RetrievalAugmentedModel, find_neighbours

__all__ = [
    "Datastore",
    "DatastoreFacts",
    "DatastoreJob",
    "ExcludedRanges",
    "FlatIndex",
    "IVFPQIndex",
    "KNNHead",
    "KNNSettings",
    "RetrievalAugmentedModel",
    "build",
    "check_fits",
    "datastore_job",
    "find_neighbours",
    "knn_lm",
    "make_index",
    "plan",
]
