"""Position encodings, which act on embeddings, queries, keys, scores or values."""

from manyformer.nn.positions.absolute import (
    AbsolutePosition,
    ConcatenatedGridPosition,
    LearnedPosition,
    SentenceTypePosition,
    SinusoidalPosition,
    SummedGridPosition,
)
from manyformer.nn.positions.content_positions import AllHeadsNorm, ContextualPosition, HeadNorm, ScoreCap
from manyformer.nn.positions.distance_bias import (
    AlibiPosition,
    DistanceAwarePosition,
    FirePosition,
    KerplePosition,
    T5BiasPosition,
)
from manyformer.nn.positions.position import ComposedPosition, DistanceTerms, NoPosition, Position
from manyformer.nn.positions.relative import (
    FusedTreePosition,
    KeyDistancePosition,
    RelativeLabelPosition,
    ShawPosition,
    TreeOffsetPosition,
)
from manyformer.nn.positions.rotary import (
    DynamicNTKRotaryScaling,
    LinearRotaryScaling,
    Llama3RotaryScaling,
    LongRoPERotaryScaling,
    NTKRotaryScaling,
    RotaryPosition,
    RotaryScaling,
    YaRNRotaryScaling,
    convert_pairs,
)
from manyformer.nn.positions.step_signal import (
    LearnedQKPosition,
    LearnedStepSignal,
    NoStepSignal,
    PositionLayer,
    PositionStepSignal,
    SinusoidalStepSignal,
    StepSignal,
)
from manyformer.nn.positions.transformer_xl import TransformerXLBiases, TransformerXLPosition

__all__ = [
    "AbsolutePosition",
    "AlibiPosition",
    "AllHeadsNorm",
    "ComposedPosition",
    "ConcatenatedGridPosition",
    "ContextualPosition",
    "DistanceAwarePosition",
    "DistanceTerms",
    "DynamicNTKRotaryScaling",
    "FirePosition",
    "FusedTreePosition",
    "HeadNorm",
    "KerplePosition",
    "KeyDistancePosition",
    "LearnedPosition",
    "LearnedQKPosition",
    "LearnedStepSignal",
    "LinearRotaryScaling",
    "Llama3RotaryScaling",
    "LongRoPERotaryScaling",
    "NTKRotaryScaling",
    "NoPosition",
    "NoStepSignal",
    "Position",
    "PositionLayer",
    "PositionStepSignal",
    "RelativeLabelPosition",
    "RotaryPosition",
    "RotaryScaling",
    "ScoreCap",
    "SentenceTypePosition",
    "ShawPosition",
    "SinusoidalPosition",
    "SinusoidalStepSignal",
    "StepSignal",
    "SummedGridPosition",
    "T5BiasPosition",
    "TransformerXLBiases",
    "TransformerXLPosition",
    "TreeOffsetPosition",
    "YaRNRotaryScaling",
    "convert_pairs",
]
