"""The task of finding the second part of an example by its first one, and vice versa."""

import math
from collections.abc import Mapping
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from manyformer.batches import to_device
from manyformer.models.modalities_model import TwoTowers
from manyformer.scores import ScoreKind, ScoreRecord
from manyformer.tasks.drawn_parts import PartsTask
from manyformer.tasks.encoder_task import BIDIRECTIONAL
from manyformer.tasks.requests import EvaluationRequest, EvaluationResult
from manyformer.tasks.task import Inputs
from manyformer.tasks.toy import ROWS, Toy, ToyDraw

RANKS = (1, 10)
"""The numbers of retrieved parts among which the right one counts."""


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
        ranks.append((part >= part.diagonal()[:, None]).sum(1))
        is_same_label.append(labels[part.argmax(1)] == labels)
    recalls = {rank: float((torch.cat(ranks) <= rank).cpu().double().mean()) for rank in RANKS}
    signature = f"pairs:{len(labels)}|both directions"
    return [
        *(ScoreRecord(f"recall at {rank}", 100 * recall, signature) for rank, recall in recalls.items()),
        ScoreRecord("same label", 100 * float(torch.cat(is_same_label).cpu().double().mean()), signature),
    ]


CONTRAST = Contrast()
