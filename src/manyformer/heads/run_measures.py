"""Measures of how much a trained run depends on each head, on its held-out data."""

from collections.abc import Callable, Iterator

import torch

from manyformer.batches import Batch
from manyformer.data.epochs import HeldOutBatches
from manyformer.errors import UserError, suggest_names
from manyformer.evaluate.eval_data import TrainedRun, task_of_run
from manyformer.evaluate.evaluate import score_model
from manyformer.heads.analysed_text import held_out_sentences
from manyformer.heads.head_importance import HeadValues, ablate_heads, head_importance, normalize_layers
from manyformer.models import Model
from manyformer.models.model import CarriedState
from manyformer.relevance import head_relevance, layer_relevance
from manyformer.rollouts import EpisodeBatch
from manyformer.tasks import Inputs
from manyformer.training_hooks import eval_mode

LOSS = "loss"
"""The mean loss per target in nats, as a score of ablation."""


def importance_in_run(trained: TrainedRun, model: Model, rows: int) -> HeadValues:
    """`head_importance` over the first batches with `rows` held-out rows, divided by its norm in each layer."""
    held_out = held_out_batches(trained)
    return normalize_layers(head_importance(model, _first_rows(held_out, rows), rows_continue=held_out.rows_continue))


def ablation_in_run(
    trained: TrainedRun, model: Model, score_name: str, rows: int, *, on_head: Callable[[], None] = lambda: None
) -> HeadValues:
    """The change of a score without each head: of "loss", or of any score of the evaluation of the run.

    The first batches with `rows` held-out rows are read, or `rows` sentences. Raises UserError for an unknown score."""
    if score_name == LOSS:
        score = _mean_loss
    else:
        score = _evaluation_score
    compute = score(trained, model, score_name, rows)
    return ablate_heads(model, compute, on_head=on_head)


def relevance_in_run(
    trained: TrainedRun, model: Model, sentences: int, *, on_sentence: Callable[[int], None] = lambda count: None
) -> HeadValues:
    """The mean of `layer_relevance` over all predictions for the first held-out sentences. Raises UserError."""
    task = task_of_run(trained.config)
    totals = dict[str, torch.Tensor]()
    predictions = 0
    for count, text in enumerate(held_out_sentences(trained, sentences), 1):
        target = task.text_passes(model, text)[-1]
        tokens, source = (torch.tensor([ids], device=model.device) for ids in (target.tokens, target.source_tokens))
        relevances = head_relevance(model, Inputs(tokens, source=source if target.source_tokens else None))
        for part, relevance in relevances.items():
            totals[part] = totals.get(part, torch.zeros(())) + layer_relevance(relevance).cpu().double() * len(
                relevance
            )
        predictions += len(next(iter(relevances.values())))
        on_sentence(count)
    return {part: total / predictions for part, total in totals.items()}


def held_out_batches(trained: TrainedRun) -> HeldOutBatches:
    """The held-out batches of a run. Raises UserError for one that is scored without batches, such as a policy."""
    batches = trained.load_split(None).batches
    assert batches is not None
    if isinstance(next(iter(batches), None), EpisodeBatch):
        title = task_of_run(trained.config).title
        raise UserError(f"{title} has no held-out batches: it is scored by the episodes that it plays")
    return batches


def _first_rows(batches: HeldOutBatches, rows: int) -> Iterator[Batch]:
    """The batches up to the one that completes this number of rows."""
    count = 0
    for batch in batches:
        yield batch
        count += len(batch[0])
        if count >= rows:
            return


def _mean_loss(trained: TrainedRun, model: Model, score_name: str, rows: int) -> Callable[[], float]:
    held_out = held_out_batches(trained)
    batches = list(_first_rows(held_out, rows))

    def mean_loss() -> float:
        carried = CarriedState(model, rows_continue=held_out.rows_continue)
        nats = 0.0
        targets = 0
        with torch.inference_mode(), eval_mode(model):
            for batch in batches:
                scored = carried.score(batch)
                nats = nats + float(scored.nll)
                targets = targets + int(scored.targets)
        return nats / max(targets, 1)

    return mean_loss


def _evaluation_score(trained: TrainedRun, model: Model, score_name: str, rows: int) -> Callable[[], float]:
    data = trained.load_split(None)
    data = data._replace(examples=data.examples[:rows])

    def score() -> float:
        with torch.inference_mode():
            result = score_model(model, trained.config, trained.tokenizers, data)
        values = {record.name: record.value for record in result.scores}
        if score_name not in values:
            raise UserError(f"there is no score '{score_name}'; {suggest_names(score_name, [LOSS, *values])}")
        return values[score_name]

    return score
