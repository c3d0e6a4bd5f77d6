"""`evaluate`: the scores of a trained run on held-out data or on a file."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from manyformer.config import RunConfig
from manyformer.data import TokenizerPair
from manyformer.data.opened import EvaluationData
from manyformer.device_memory import SMALLER_WORK, report_out_of_memory
from manyformer.errors import UserError
from manyformer.evaluate.eval_data import open_run, task_of_run
from manyformer.generate import Translator, decoding_from_options
from manyformer.models import Model
from manyformer.scores import ScoreRecord
from manyformer.tasks import EvaluationRequest, EvaluationResult, EvaluationSettings
from manyformer.type_aliases import ProgressFn


@dataclass(frozen=True)
class Evaluation:
    """The scores of a model on `data` (a split or a file); `how` describes how they were computed."""

    task: str
    data: str
    scores: tuple[ScoreRecord, ...]
    how: str

    def __getitem__(self, name: str) -> ScoreRecord:
        """The score with this name. Raises KeyError if the task has no such score."""
        return {score.name: score for score in self.scores}[name]


def evaluate(
    run: str | Path,
    *,
    split: str | None = None,
    data: str | Sequence[str] | None = None,
    settings: EvaluationSettings | None = None,
    keywords: Mapping[str, Any] | None = None,
    device: str | None = None,
    wrap: Callable[[Model], Model] = lambda model: model,
    on_progress: ProgressFn = lambda share: None,
) -> Evaluation:
    """Score the final model of the run in the folder `run`.

    `split` is "test" or "valid", by default test if the run has one; `data` is a file in the format of the training
    data, or two parallel files. `keywords` override recipe keywords that change no weights, as for `load`. `device`
    None selects a GPU if there is one. `wrap` replaces the model by the one to score. `on_progress` is called with the
    completed share, 0 to 1. Raises UserError.
    """
    if split is not None and data is not None:
        raise UserError("give either a split or data to score, not both")
    _, config, tokenizers = trained = open_run(run)
    model = wrap(trained.load_model(device, keywords))
    with (
        report_out_of_memory(f"in the evaluation of {run}", SMALLER_WORK),
        trained.open_data(split, data) as eval_data,
        torch.inference_mode(),
    ):
        result = score_model(model, config, tokenizers, eval_data, settings=settings, on_progress=on_progress)
    return Evaluation(task_of_run(config).name, eval_data.name, tuple(result.scores), result.description)


def score_model(
    model: Any,
    run: RunConfig,
    tokenizers: TokenizerPair,
    data: EvaluationData,
    *,
    settings: EvaluationSettings | None = None,
    on_progress: ProgressFn = lambda share: None,
) -> EvaluationResult:
    """Score a model on held-out data with the scores of the run's task, in inference mode."""
    chosen, task = EvaluationSettings() if settings is None else settings, task_of_run(run)
    if (chosen.wanted or chosen.environment) and not task.plays_for_returns:
        raise UserError(f"wanted returns and an environment are for models of trajectories; this is {task.title}")

    def translate(texts: Iterable[str]) -> Iterator[str]:
        decoding = decoding_from_options(beam=chosen.beam, length_penalty=chosen.length_penalty)
        translator = Translator(model, tokenizer=(tokenizers.source, tokenizers.target), decoding=decoding)
        return (answers[0].text or "" for answers in translator(texts))

    return task.evaluate(
        EvaluationRequest(
            model=model,
            tokenizers=tokenizers,
            batches=data.batches,
            examples=data.examples,
            row_length=run.data.row_length,
            section=run.data,
            settings=chosen,
            translate=translate,
            on_progress=on_progress,
        )
    )
