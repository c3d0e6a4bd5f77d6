"""Joint decoding: the hypotheses of a beam, ranked by the decoder and by CTC of the encoder."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from manyformer.generate.decoding import Decoding
from manyformer.generate.prompts import SourceBatch
from manyformer.generate.protocol import TranslatesText
from manyformer.generate.result import Hypothesis
from manyformer.generate.token_choice import BeamSettings


@dataclass(frozen=True)
class JointRanking:
    """Ranks by weight x log p_CTC + (1 - weight) x score (Watanabe et al. 2017, section II-D, rescoring).

    `decoding` keeps all hypotheses of the beam, of which `rank` returns the `best`. A model without CTC, and decoding
    without a beam, leave the hypotheses as they are."""

    model: Any
    decoding: Decoding
    best: int | None

    def rank(self, sources: SourceBatch, answers: Sequence[tuple[Hypothesis, ...]]) -> Sequence[tuple[Hypothesis, ...]]:
        """The best hypotheses of each source, with their joint scores."""
        if self.best is None:
            return answers
        with torch.inference_mode():
            return [self._rank_row(sources, row, hypotheses) for row, hypotheses in enumerate(answers)]

    def _rank_row(self, sources: SourceBatch, row: int, hypotheses: tuple[Hypothesis, ...]) -> tuple[Hypothesis, ...]:
        source, segments = (None if part is None else part[row : row + 1].to(self.model.device) for part in sources)
        memory = self.model.encode(source, segments)
        ctc = self.model.ctc
        scored = [
            hypothesis._replace(
                score=ctc.weight * ctc.log_probability(memory, hypothesis.tokens)
                + (1 - ctc.weight) * (hypothesis.score or 0.0)
            )
            for hypothesis in hypotheses
        ]
        return tuple(sorted(scored, key=lambda hypothesis: hypothesis.score or 0.0, reverse=True)[: self.best])


def joint_ranking(model: TranslatesText, decoding: Decoding) -> JointRanking:
    """The ranking of what a model writes."""
    choice = decoding.choice
    if getattr(model, "ctc", None) is None or not isinstance(choice, BeamSettings):
        return JointRanking(model, decoding, None)
    return JointRanking(model, replace(decoding, choice=replace(choice, best=choice.width)), choice.best)
