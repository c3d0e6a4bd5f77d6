"""The batches that data loading produces and models take."""

from manyformer.nn.batches.batch import (
    IGNORE_INDEX,
    NO_NEIGHBOUR,
    AnswerSpanBatch,
    Batch,
    BatchT,
    CausalLMBatch,
    ClassificationBatch,
    MaskedLMBatch,
    Seq2SeqBatch,
    TaggingBatch,
    TextUnits,
    count_scored,
    count_valid,
    ignore_all,
    to_device,
)
from manyformer.nn.batches.episode_batches import ClippedObjective, RolloutBatch, TrajectoryBatch, count_action_targets
from manyformer.nn.batches.media_batches import (
    AudioClassificationBatch,
    GraphBatch,
    ImageClassificationBatch,
    ModalitiesBatch,
    TranscriptionBatch,
)
from manyformer.nn.batches.noised_batch import NoisedBatch

__all__ = [
    "IGNORE_INDEX",
    "NO_NEIGHBOUR",
    "AnswerSpanBatch",
    "AudioClassificationBatch",
    "Batch",
    "BatchT",
    "CausalLMBatch",
    "ClassificationBatch",
    "ClippedObjective",
    "GraphBatch",
    "ImageClassificationBatch",
    "MaskedLMBatch",
    "ModalitiesBatch",
    "NoisedBatch",
    "RolloutBatch",
    "Seq2SeqBatch",
    "TaggingBatch",
    "TextUnits",
    "TrajectoryBatch",
    "TranscriptionBatch",
    "count_action_targets",
    "count_scored",
    "count_valid",
    "ignore_all",
    "to_device",
]
