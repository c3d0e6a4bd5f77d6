"""Whole models: an embedding, a layer, a head."""

from manyformer.models.base import Loss, Model, ModelOut, Score, Spec
from manyformer.models.classifier import Classifier
from manyformer.models.embedding import Embedding
from manyformer.models.encoder import Encoder
from manyformer.models.head import Head
from manyformer.models.image_classifier import ImageClassifier
from manyformer.models.language_model import LanguageModel
from manyformer.models.logistic import LogisticMixture
from manyformer.models.masked_lm import MaskedLM
from manyformer.models.output import Output
from manyformer.models.patches import Patches
from manyformer.models.seq2seq import EncoderDecoder
from manyformer.models.tagger import Tagger

__all__ = [
    "Classifier",
    "Embedding",
    "Encoder",
    "EncoderDecoder",
    "Head",
    "ImageClassifier",
    "LanguageModel",
    "LogisticMixture",
    "Loss",
    "MaskedLM",
    "Model",
    "ModelOut",
    "Output",
    "Patches",
    "Score",
    "Spec",
    "Tagger",
]
