"""Data pipelines from files, data sets or default corpora to batches of text, pairs, labels, trees or images."""

from manyformer.batches import TextUnits
from manyformer.data.epochs import HeldOutBatches, Sampler, TrainingFeed
from manyformer.data.kind import DataKind, OpenRequest, register
from manyformer.data.opened import HeldOutExample, OpenedData
from manyformer.data.opening import open_data
from manyformer.data.saved_tokenizers import TokenizerPair, load_tokenizers
from manyformer.data.tokenizer import StreamDecoder, Tokenizer

__all__ = [
    "DataKind",
    "HeldOutBatches",
    "HeldOutExample",
    "OpenRequest",
    "OpenedData",
    "Sampler",
    "StreamDecoder",
    "TextUnits",
    "Tokenizer",
    "TokenizerPair",
    "TrainingFeed",
    "load_tokenizers",
    "open_data",
    "register",
]
