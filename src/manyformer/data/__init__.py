"""Data: text, pairs, labelled texts, trees and images from files, data sets or the default corpora, to batches."""

from manyformer.data.opened import Data, Example
from manyformer.data.opening import open_data
from manyformer.data.plan import Held, Units
from manyformer.data.sampler import Sampler
from manyformer.data.saved import Tokenizers, load_tokenizers
from manyformer.data.tokenizer import Decoder, Tokenizer

__all__ = [
    "Data",
    "Decoder",
    "Example",
    "Held",
    "Sampler",
    "Tokenizer",
    "Tokenizers",
    "Units",
    "load_tokenizers",
    "open_data",
]
