"""The likelihood of held-out batches under a model."""

from typing import Any

from manyformer.batches import to_device
from manyformer.models.carried_state import CarriedState
from manyformer.scores import ScoreRecord, perplexity, token_accuracy
from manyformer.tasks.score_sums import ScoreSums
from manyformer.tasks.task import EvaluationRequest


def likelihood(request: EvaluationRequest[Any], *, final_progress: float = 1.0) -> ScoreSums:
    """The sums over all batches, with a carried state where the model has one and the rows continue."""
    assert request.batches is not None
    model, sums = request.model, ScoreSums()
    carried = CarriedState(model, rows_continue=request.batches.rows_continue)
    for number, batch in enumerate(request.batches, 1):
        scored = model.score(to_device(batch, model.device), state=carried.state_for(batch))
        carried.update(scored)
        sums = sums.plus(scored)
        request.on_progress(final_progress * number / len(request.batches))
    return sums


def token_scores(sums: ScoreSums) -> list[ScoreRecord]:
    """Perplexity and accuracy of the targets."""
    return [perplexity(sums.nats, sums.targets), token_accuracy(sums.correct, sums.targets)]
