"""Models: an embedding, a layer (usually a stack) and a head."""

from manyformer.models.audio_encoders import AudioClassifier, SpeechRecognizer
from manyformer.models.decision_transformer import DecisionTransformer, EpisodeDecoder
from manyformer.models.embedding import TokenEmbedding
from manyformer.models.encoder_model import EncoderModel, SpanReader, Tagger, TextClassifier
from manyformer.models.generative_model import GenerativeModel, LanguageModel
from manyformer.models.graph_encoder import GraphClassifier, NodeClassifier
from manyformer.models.head import BatchLoss, BatchScore, ClassHead, LogisticMixture, OutputHead
from manyformer.models.image_classifier import ImageClassifier, PatchEmbedding
from manyformer.models.masked_lm import MaskedLM
from manyformer.models.model import Model, ModelOutput
from manyformer.models.model_files import ModelSpec
from manyformer.models.policy_model import PolicyModel
from manyformer.models.seq2seq import EncoderDecoder

__all__ = [
    "AudioClassifier",
    "BatchLoss",
    "BatchScore",
    "ClassHead",
    "DecisionTransformer",
    "EncoderDecoder",
    "EncoderModel",
    "EpisodeDecoder",
    "GenerativeModel",
    "GraphClassifier",
    "ImageClassifier",
    "LanguageModel",
    "LogisticMixture",
    "MaskedLM",
    "Model",
    "ModelOutput",
    "ModelSpec",
    "NodeClassifier",
    "OutputHead",
    "PatchEmbedding",
    "PolicyModel",
    "SpanReader",
    "SpeechRecognizer",
    "Tagger",
    "TextClassifier",
    "TokenEmbedding",
]
