"""Whole models: an embedding, a layer, a head."""

from manyformer.models.base import Loss, Model, ModelOut, Score, Spec
from manyformer.models.classifier import Classifier
from manyformer.models.embedding import Embedding
from manyformer.models.head import Head
from manyformer.models.language_model import LanguageModel
from manyformer.models.masked_lm import MaskedLM
from manyformer.models.seq2seq import EncoderDecoder

__all__ = [
    "Classifier",
    "Embedding",
    "EncoderDecoder",
    "Head",
    "LanguageModel",
    "Loss",
    "MaskedLM",
    "Model",
    "ModelOut",
    "Score",
    "Spec",
]
