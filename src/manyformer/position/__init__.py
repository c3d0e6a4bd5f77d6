"""Position encodings, which act on embeddings, queries, keys, scores or values."""

from manyformer.position.absolute import AbsolutePosition, LearnedPosition, SinusoidalPosition
from manyformer.position.composed import ComposedPosition
from manyformer.position.contextual_position import ContextualPosition
from manyformer.position.distance_aware import DistanceAwarePosition
from manyformer.position.distance_bias import AlibiPosition, T5BiasPosition
from manyformer.position.distance_terms import DistanceTerms
from manyformer.position.grid_position import ConcatenatedGridPosition, SummedGridPosition
from manyformer.position.head_norm import HeadNorm
from manyformer.position.key_distance import KeyDistancePosition
from manyformer.position.layerwise import LearnedQKPosition, PositionLayer
from manyformer.position.learned_distance_bias import FirePosition, KerplePosition
from manyformer.position.position import NoPosition, Position
from manyformer.position.relative import ShawPosition
from manyformer.position.relative_labels import RelativeLabelPosition
from manyformer.position.rotary import (
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
from manyformer.position.score_cap import ScoreCap
from manyformer.position.sentence_types import SentenceTypePosition
from manyformer.position.step_signal import (
    LearnedStepSignal,
    NoStepSignal,
    PositionStepSignal,
    SinusoidalStepSignal,
    StepSignal,
)
from manyformer.position.transformer_xl import TransformerXLBiases, TransformerXLPosition
from manyformer.position.tree_position import FusedTreePosition, TreeOffsetPosition

__all__ = [
    "AbsolutePosition",
    "AlibiPosition",
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
