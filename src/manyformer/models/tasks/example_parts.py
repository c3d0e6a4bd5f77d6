"""The tasks of examples of several parts (image, sound, text): to label an example, and to find one part by another."""

import math
from collections.abc import Mapping
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor
from typing_extensions import TypeVar

from manyformer.models import PatchEmbedding
from manyformer.models.frame_embedding import FrameEmbedding
from manyformer.models.modalities_model import MultimodalClassifier, PartEmbedding, TwoTowers
from manyformer.models.scores import ScoreKind, ScoreRecord
from manyformer.models.tasks.label_task import BatchLabelTask
from manyformer.models.tasks.masked_language_modelling import BIDIRECTIONAL
from manyformer.models.tasks.requests import EvaluationRequest, EvaluationResult
from manyformer.models.tasks.task import Task
from manyformer.models.tasks.toy import FIRST_SYMBOL, ROWS, STAND_IN_IDS, SYMBOLS, Toy, ToyDraw, stand_in_vectors
from manyformer.nn.batches import ModalitiesBatch, to_device
from manyformer.nn.core import PADDING_SEGMENT
from manyformer.nn.model_inputs import Inputs
from manyformer.nn.runtime.torch_internals import compiler_disabled

PartsModelT = TypeVar("PartsModelT", bound=MultimodalClassifier | TwoTowers, default=Any)
"""The model class of a task."""
RANKS = (1, 10)
"""The numbers of retrieved parts among which the right one counts."""


class PartsTask(Task[PartsModelT]):
    """Reads examples of several parts; drawn tokens stand for them."""

    def token_ids(self, model: PartsModelT) -> int:
        return model.embed.parts["text"].vocab if "text" in model.embed.parts else STAND_IN_IDS  # type: ignore[return-value]

    def arguments(self, model: PartsModelT, inputs: Inputs) -> tuple[Any, ...]:
        return self.batch(model, inputs, torch.zeros(len(inputs.tokens), dtype=torch.long)).inputs

    def batch(self, model: PartsModelT, inputs: Inputs, targets: Tensor) -> ModalitiesBatch:
        batch: ModalitiesBatch = batch_of_tokens(model.embed, inputs, targets)
        return batch


@final
class MultimodalClassification(BatchLabelTask[MultimodalClassifier], PartsTask[MultimodalClassifier]):
    """Assigns a label to each example; drawn tokens stand for its parts."""

    name = "multimodal-classification"
    title = "labelling examples of several parts"
    model = MultimodalClassifier
    data_forms: Mapping[str, str] = {"modalities": "labelled"}
    reasons: Mapping[str, str] = {
        **BIDIRECTIONAL,
        "packing": "a row has one label, so it holds one example",
        "per_token": "an example has one label, its parts have none",
    }
    argument = "EXAMPLES.npz"
    nouns = "examples"

    def toy(self, model: MultimodalClassifier, draw: ToyDraw) -> Toy:
        """The label is whether the first of two tokens is the smaller one, where image and frames show both."""
        tokens = draw.symbols(2)
        labels = (tokens[:, 0] < FIRST_SYMBOL + SYMBOLS // 2).long()
        return Toy(self.batch(model, Inputs(tokens), labels), math.log(2))

    def read(self, model: MultimodalClassifier, batch: ModalitiesBatch) -> tuple[Tensor, Tensor]:
        return model(*batch.inputs).logits, batch.labels


@final
class Contrast(PartsTask[TwoTowers]):
    """Compares two parts of examples; drawn tokens stand for both, and outputs are the embeddings of a row's parts."""

    name = "contrast"
    title = "contrastive learning of pairs"
    model = TwoTowers
    data_forms: Mapping[str, str] = {"modalities": "contrast"}
    reasons: Mapping[str, str] = {
        **BIDIRECTIONAL,
        "packing": "a row is one example",
        "per_token": "a row has one embedding of each part",
        "cross_entropy": "the loss compares every row with all others of its batch",
    }
    score_kinds: Mapping[str, ScoreKind] = {
        **{f"recall_at_{rank}": ScoreKind("%") for rank in RANKS},
        "same_label": ScoreKind("%"),
    }
    per_token = False

    def random_targets(self, model: TwoTowers, inputs: Inputs, generator: Generator) -> Int[Tensor, " b"]:
        return torch.zeros(len(inputs.tokens), dtype=torch.long, device=inputs.tokens.device)

    def toy(self, model: TwoTowers, draw: ToyDraw) -> Toy:
        """Both parts show the same tokens, of which rows have different ones."""
        labels = torch.zeros(ROWS, dtype=torch.long, device=draw.device)
        return Toy(self.batch(model, Inputs(draw.period), labels), math.log(ROWS))

    def evaluate(self, request: EvaluationRequest[TwoTowers]) -> EvaluationResult:
        """Recall at 1 and 10 over all held-out pairs, both ways, and the share of nearest parts with the same label."""
        assert request.batches is not None
        first = list[Tensor]()
        second = list[Tensor]()
        labels = list[Tensor]()
        for number, batch in enumerate(request.batches, 1):
            moved: Any = to_device(batch, request.model.device)
            # all held-out pairs are compared with each other, so all embeddings are kept
            for rows, embedded in zip((first, second), request.model.embeddings(moved), strict=True):
                rows.append(embedded)
            labels.append(moved.labels)
            request.on_progress(number / len(request.batches))
        scores = retrieval_scores(torch.cat(first), torch.cat(second), torch.cat(labels))
        pairs = sum(map(len, labels))
        chance = ", ".join(f"{100 * min(1, rank / pairs):.2f} at {rank}" for rank in RANKS)
        return EvaluationResult(scores, f"{pairs:,} pairs, means of both directions; chance is {chance}")


def retrieval_scores(
    first: Float[Tensor, "n e"], second: Float[Tensor, "n e"], labels: Int[Tensor, " n"]
) -> list[ScoreRecord]:
    """Recall at each of `RANKS`, and how often the nearest part has the label of its query, in per cent.

    Both are means over both directions; of equally near parts the right one comes last."""
    cosines = first @ second.mT
    ranks = list[Tensor]()
    is_same_label = list[Tensor]()
    for part in (cosines, cosines.mT):
        # counted with ties, so that equal embeddings of everything score nothing
        ranks.append((part >= part.diagonal()[:, None]).sum(1))
        is_same_label.append(labels[part.argmax(1)] == labels)
    recalls = {rank: float((torch.cat(ranks) <= rank).cpu().double().mean()) for rank in RANKS}
    signature = f"pairs:{len(labels)}|both directions"
    return [
        *(ScoreRecord(f"recall at {rank}", 100 * recall, signature) for rank, recall in recalls.items()),
        ScoreRecord("same label", 100 * float(torch.cat(is_same_label).cpu().double().mean()), signature),
    ]


@compiler_disabled
def batch_of_tokens(embed: PartEmbedding, inputs: Inputs, labels: Int[Tensor, " b"]) -> ModalitiesBatch:
    """The examples that rows of tokens stand for: each is a frame and a word, and the first one an image.

    Padding is that of the tokens; a row of padding alone has no part."""
    tokens = inputs.tokens
    parts = embed.parts
    segments = inputs.segments
    if segments is None:
        is_token = torch.ones_like(tokens, dtype=torch.bool)
    else:
        is_token = segments != PADDING_SEGMENT
    batch = ModalitiesBatch(labels)
    if "image" in parts:
        patches: PatchEmbedding = parts["image"]  # type: ignore[assignment]
        if tokens.shape[1]:
            # the first token that is no padding
            index = is_token.long().argmax(1, keepdim=True)
            first = tokens.gather(1, index)[:, 0]
        else:
            first = tokens.new_zeros(len(tokens))
        pixels = stand_in_vectors(torch.rand, math.prod(patches.shape), tokens.device)(first % STAND_IN_IDS)
        images = (pixels.view(-1, *patches.shape) * 255).to(torch.uint8)
        batch = batch._replace(images=images, image_segments=torch.where(is_token.any(1), 0, PADDING_SEGMENT))
    if "sound" in parts:
        frames: FrameEmbedding = parts["sound"]  # type: ignore[assignment]
        batch = batch._replace(
            frames=stand_in_vectors(torch.rand, frames.mels, tokens.device)(tokens % STAND_IN_IDS),
            frame_segments=segments,
        )
    if "text" in parts:
        return batch._replace(tokens=tokens, token_segments=segments)
    return batch


MULTIMODAL_CLASSIFICATION = MultimodalClassification()
CONTRAST = Contrast()
