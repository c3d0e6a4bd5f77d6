"""Models: an embedding, a layer (usually a stack) and a head."""

from typing import TYPE_CHECKING

from manyformer.base.lazy_names import offer_names as _offer_names

if TYPE_CHECKING:
    from manyformer.models.audio_encoders import AudioClassifier, SpeechRecognizer
    from manyformer.models.decision_transformer import DecisionTransformer, EpisodeDecoder
    from manyformer.models.diffusion_lm import BlockDiffusionLM, DiffusionLM, MaskedDiffusionLM
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

_MODULES = {
    "AudioClassifier": "manyformer.models.audio_encoders",
    "BatchLoss": "manyformer.models.head",
    "BatchScore": "manyformer.models.head",
    "BlockDiffusionLM": "manyformer.models.diffusion_lm",
    "ClassHead": "manyformer.models.head",
    "DecisionTransformer": "manyformer.models.decision_transformer",
    "DiffusionLM": "manyformer.models.diffusion_lm",
    "EncoderDecoder": "manyformer.models.seq2seq",
    "EncoderModel": "manyformer.models.encoder_model",
    "EpisodeDecoder": "manyformer.models.decision_transformer",
    "GenerativeModel": "manyformer.models.generative_model",
    "GraphClassifier": "manyformer.models.graph_encoder",
    "ImageClassifier": "manyformer.models.image_classifier",
    "LanguageModel": "manyformer.models.generative_model",
    "LogisticMixture": "manyformer.models.head",
    "MaskedDiffusionLM": "manyformer.models.diffusion_lm",
    "MaskedLM": "manyformer.models.masked_lm",
    "Model": "manyformer.models.model",
    "ModelOutput": "manyformer.models.model",
    "ModelSpec": "manyformer.models.model_files",
    "NodeClassifier": "manyformer.models.graph_encoder",
    "OutputHead": "manyformer.models.head",
    "PatchEmbedding": "manyformer.models.image_classifier",
    "PolicyModel": "manyformer.models.policy_model",
    "SpanReader": "manyformer.models.encoder_model",
    "SpeechRecognizer": "manyformer.models.audio_encoders",
    "Tagger": "manyformer.models.encoder_model",
    "TextClassifier": "manyformer.models.encoder_model",
    "TokenEmbedding": "manyformer.models.embedding",
}

__all__ = [
    "AudioClassifier",
    "BatchLoss",
    "BatchScore",
    "BlockDiffusionLM",
    "ClassHead",
    "DecisionTransformer",
    "DiffusionLM",
    "EncoderDecoder",
    "EncoderModel",
    "EpisodeDecoder",
    "GenerativeModel",
    "GraphClassifier",
    "ImageClassifier",
    "LanguageModel",
    "LogisticMixture",
    "MaskedDiffusionLM",
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


_offer_names(__name__, _MODULES)
