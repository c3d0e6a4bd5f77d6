"""Datastores of contexts with their next tokens, and language models that retrieve from them.

`build(datastore_job(run, data=...))` writes a datastore, `Datastore(folder)` opens it, and `knn_lm(model, store)` is a
language model that interpolates its predictions with the tokens that followed the nearest contexts (Khandelwal et al.
2020, arXiv:1911.00172).
"""

from typing import TYPE_CHECKING

from manyformer.base.lazy_names import offer_names as _offer_names

if TYPE_CHECKING:
    from manyformer.inference.datastore.build_datastore import DatastoreJob, build, datastore_job, plan
    from manyformer.inference.datastore.datastore import Datastore, DatastoreFacts, KNNSettings
    from manyformer.inference.datastore.knn_head import KNNHead, check_fits, knn_lm
    from manyformer.inference.datastore.nearest_keys import ExcludedRanges, FlatIndex, IVFPQIndex, make_index
    from manyformer.inference.datastore.retrieval import RetrievalAugmentedModel, find_neighbours

_MODULES = {
    "Datastore": "manyformer.inference.datastore.datastore",
    "DatastoreFacts": "manyformer.inference.datastore.datastore",
    "DatastoreJob": "manyformer.inference.datastore.build_datastore",
    "ExcludedRanges": "manyformer.inference.datastore.nearest_keys",
    "FlatIndex": "manyformer.inference.datastore.nearest_keys",
    "IVFPQIndex": "manyformer.inference.datastore.nearest_keys",
    "KNNHead": "manyformer.inference.datastore.knn_head",
    "KNNSettings": "manyformer.inference.datastore.datastore",
    "RetrievalAugmentedModel": "manyformer.inference.datastore.retrieval",
    "build": "manyformer.inference.datastore.build_datastore",
    "check_fits": "manyformer.inference.datastore.knn_head",
    "datastore_job": "manyformer.inference.datastore.build_datastore",
    "find_neighbours": "manyformer.inference.datastore.retrieval",
    "knn_lm": "manyformer.inference.datastore.knn_head",
    "make_index": "manyformer.inference.datastore.nearest_keys",
    "plan": "manyformer.inference.datastore.build_datastore",
}

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


_offer_names(__name__, _MODULES)
