"""Models: an embedding, a layer (usually a stack) and a head."""

from manyformer.models.audio_classifier import AudioClassifier
from manyformer.models.classifier import TextClassifier
from manyformer.models.decision_transformer import DecisionTransformer
from manyformer.models.embedding import TokenEmbedding
from manyformer.models.encoder_model import EncoderModel
from manyformer.models.episode_decoder import EpisodeDecoder
from manyformer.models.generative_model import GenerativeModel, LanguageModel
from manyformer.models.graph_encoder import GraphClassifier, NodeClassifier
from manyformer.models.head import BatchLoss, BatchScore, ClassHead, OutputHead
from manyformer.models.image_classifier import ImageClassifier
from manyformer.models.logistic_mixture import LogisticMixture
from manyformer.models.masked_lm import MaskedLM
from manyformer.models.model import Model, ModelOutput
from manyformer.models.model_files import ModelSpec
from manyformer.models.patch_embedding import PatchEmbedding
from manyformer.models.policy_model import PolicyModel
from manyformer.models.seq2seq import EncoderDecoder
from manyformer.models.span_reader import SpanReader
from manyformer.models.speech_recognizer import SpeechRecognizer
from manyformer.models.tagger import Tagger

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
