"""Batched text generation: greedy decoding, sampling and beam search through the model's explicit state.

`generate(model, prompts, ...)` is the main entry point. A `Decoding` holds how tokens are chosen (`GreedyChoice`,
`SampledChoice`, `BeamSettings`), the logits processors (`TopPProcessor(0.9)`, ...) and the limits. Everything needs
only `model.init_state`, `model(tokens, segments, state)` and `tree_map`."""

from manyformer.inference.generate.decoding import (
    AverageLogProbPenalty,
    BeamScores,
    BeamSettings,
    BeamStopping,
    Decoding,
    ExactStopping,
    FullBeamStopping,
    GNMTPenalty,
    GreedyChoice,
    LengthPenalty,
    LikelyStopping,
    SampledChoice,
    SourceLengthLimit,
    decoding_from_options,
)
from manyformer.inference.generate.generate import generate, stream
from manyformer.inference.generate.image_generation import complete, enlarge, paint, paint_classes
from manyformer.inference.generate.kept_steps import forget_captured_steps
from manyformer.inference.generate.logits_processors import (
    BanTokensProcessor,
    LogitsProcessor,
    MinPProcessor,
    NoRepeatNGramProcessor,
    RepetitionPenaltyProcessor,
    TemperatureProcessor,
    TopKProcessor,
    TopPProcessor,
)
from manyformer.inference.generate.prompts import SourceBatch
from manyformer.inference.generate.result import GenerationResult, GenerationStats, Hypothesis, StreamPiece
from manyformer.inference.generate.translator import Translator, answer_sources, translate

__all__ = [
    "AverageLogProbPenalty",
    "BanTokensProcessor",
    "BeamScores",
    "BeamSettings",
    "BeamStopping",
    "Decoding",
    "ExactStopping",
    "FullBeamStopping",
    "GNMTPenalty",
    "GenerationResult",
    "GenerationStats",
    "GreedyChoice",
    "Hypothesis",
    "LengthPenalty",
    "LikelyStopping",
    "LogitsProcessor",
    "MinPProcessor",
    "NoRepeatNGramProcessor",
    "RepetitionPenaltyProcessor",
    "SampledChoice",
    "SourceBatch",
    "SourceLengthLimit",
    "StreamPiece",
    "TemperatureProcessor",
    "TopKProcessor",
    "TopPProcessor",
    "Translator",
    "answer_sources",
    "complete",
    "decoding_from_options",
    "enlarge",
    "forget_captured_steps",
    "generate",
    "paint",
    "paint_classes",
    "stream",
    "translate",
]
