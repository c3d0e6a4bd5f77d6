"""Batched text generation: greedy decoding, sampling and beam search through the model's explicit state.

`generate(model, prompts, ...)` is the main entry point. A `Decoding` holds how tokens are chosen (`GreedyChoice`,
`SampledChoice`, `BeamSettings`), the logits processors (`TopPProcessor(0.9)`, ...) and the limits. Everything needs
only `model.init_state`, `model(tokens, segments, state)` and `tree_map`."""

from typing import TYPE_CHECKING

from manyformer.base.lazy_names import offer_names as _offer_names

if TYPE_CHECKING:
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

_MODULES = {
    "AverageLogProbPenalty": "manyformer.inference.generate.decoding",
    "BanTokensProcessor": "manyformer.inference.generate.logits_processors",
    "BeamScores": "manyformer.inference.generate.decoding",
    "BeamSettings": "manyformer.inference.generate.decoding",
    "BeamStopping": "manyformer.inference.generate.decoding",
    "Decoding": "manyformer.inference.generate.decoding",
    "ExactStopping": "manyformer.inference.generate.decoding",
    "FullBeamStopping": "manyformer.inference.generate.decoding",
    "GNMTPenalty": "manyformer.inference.generate.decoding",
    "GenerationResult": "manyformer.inference.generate.result",
    "GenerationStats": "manyformer.inference.generate.result",
    "GreedyChoice": "manyformer.inference.generate.decoding",
    "Hypothesis": "manyformer.inference.generate.result",
    "LengthPenalty": "manyformer.inference.generate.decoding",
    "LikelyStopping": "manyformer.inference.generate.decoding",
    "LogitsProcessor": "manyformer.inference.generate.logits_processors",
    "MinPProcessor": "manyformer.inference.generate.logits_processors",
    "NoRepeatNGramProcessor": "manyformer.inference.generate.logits_processors",
    "RepetitionPenaltyProcessor": "manyformer.inference.generate.logits_processors",
    "SampledChoice": "manyformer.inference.generate.decoding",
    "SourceBatch": "manyformer.inference.generate.prompts",
    "SourceLengthLimit": "manyformer.inference.generate.decoding",
    "StreamPiece": "manyformer.inference.generate.result",
    "TemperatureProcessor": "manyformer.inference.generate.logits_processors",
    "TopKProcessor": "manyformer.inference.generate.logits_processors",
    "TopPProcessor": "manyformer.inference.generate.logits_processors",
    "Translator": "manyformer.inference.generate.translator",
    "answer_sources": "manyformer.inference.generate.translator",
    "complete": "manyformer.inference.generate.image_generation",
    "decoding_from_options": "manyformer.inference.generate.decoding",
    "enlarge": "manyformer.inference.generate.image_generation",
    "forget_captured_steps": "manyformer.inference.generate.kept_steps",
    "generate": "manyformer.inference.generate.generate",
    "paint": "manyformer.inference.generate.image_generation",
    "paint_classes": "manyformer.inference.generate.image_generation",
    "stream": "manyformer.inference.generate.generate",
    "translate": "manyformer.inference.generate.translator",
}

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


_offer_names(__name__, _MODULES)
