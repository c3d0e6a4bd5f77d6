"""`evaluate`: the scores of a trained run on held-out data or on a file.

A model with a memory reads windows that are longer than its rows in pieces, from an empty memory on."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from manyformer.base.context_windows import ContextWindows
from manyformer.base.errors import UserError
from manyformer.base.type_aliases import LogFn, ProgressFn
from manyformer.config import RunConfig
from manyformer.config.training_sections import BatchConfig
from manyformer.conversion import load
from manyformer.data import TokenizerPair
from manyformer.data.batching.given_feed import GivenHeldOut, GivenSource
from manyformer.data.generated.synthetic_floors import GuessFloors, guess_floors
from manyformer.data.pipeline.kind import no_log
from manyformer.data.pipeline.opened import EvaluationData
from manyformer.inference.evaluate.eval_data import open_run_or_model, task_of_run
from manyformer.inference.generate import SourceBatch, Translator, answer_sources, decoding_from_options
from manyformer.models import Model
from manyformer.models.head import BatchScore
from manyformer.models.model import CarriedState, eval_mode
from manyformer.models.scores import ScoreRecord
from manyformer.models.tasks import EvaluationRequest, EvaluationResult, EvaluationSettings, ScoreSums
from manyformer.nn.batches import CausalLMBatch
from manyformer.nn.core import State
from manyformer.nn.runtime.devices import SMALLER_WORK, report_missing_operator, report_out_of_memory
from manyformer.recipes.parts.own_modules import LossFn
from manyformer.recipes.parts.registry import task_of
from manyformer.training.given_training import as_given_model, batch_of


@dataclass(frozen=True)
class Evaluation:
    """The scores of a model on `data` (a split or a file); `how` describes how they were computed.

    `reading` has the numbers of how a text was cut: `context` and `stride` of windows, or the `lanes` of rows that
    continue each other; it is part of every signature. `guesses` are the baselines of generated data, else None.
    """

    task: str
    data: str
    scores: tuple[ScoreRecord, ...]
    how: str
    reading: Mapping[str, int]
    guesses: GuessFloors | None = None

    def __getitem__(self, name: str) -> ScoreRecord:
        """The score with this name. Raises KeyError if the task has no such score."""
        return {score.name: score for score in self.scores}[name]


def evaluate(
    run: str | Path | nn.Module,
    data: Any = None,
    *,
    split: str | None = None,
    loss: LossFn | None = None,
    windows: ContextWindows | None = None,
    settings: EvaluationSettings | None = None,
    keywords: Mapping[str, Any] | None = None,
    device: str | None = None,
    wrap: Callable[[Model], Model] = lambda model: model,
    on_progress: ProgressFn = lambda share: None,
    log: LogFn = no_log,
) -> Evaluation:
    """Score the final model of the run in the folder `run`, or any module on batches.

    `split` is "test" or "valid", by default test if the run has one; `data` is a file in the format of the training
    data, or two parallel files. It may also be batches, as `train` takes them, which a module needs: then the scores
    are the loss, and accuracy and perplexity where classes are predicted, and `loss` is as in `train`.

    With `windows` a text is read in overlapping windows, which give each scored token earlier ones of its document,
    else in the rows of the training. `keywords` override recipe keywords that change no weights, as for `load`.
    `device` None selects a GPU if there is one. `wrap` replaces the model by the one to score.
    `on_progress` is called with the completed share, 0 to 1; `log` receives a line for each change of what is in a
    file. Raises UserError.
    """
    if isinstance(run, nn.Module) or not _names_files(data):
        if split is not None or windows is not None or settings is not None:
            raise UserError("split, windows and settings are for a run and its data; batches are scored as they are")
        return score_batches(run, data, loss, keywords=keywords, device=device, wrap=wrap)
    if loss is not None:
        raise UserError("loss goes with data= of batches; a run computes its own")
    if split is not None and data is not None:
        raise UserError("give either a split or data to score, not both")
    trained = open_run_or_model(run)
    config = trained.config
    tokenizers = trained.tokenizers
    # before windows are read: what wraps it may change how much it can read
    model = wrap(trained.load_model(device, keywords))
    if windows is not None:
        model = window_reader(model, windows, config.data.row_length)
    with (
        report_out_of_memory(f"in the evaluation of {run}", SMALLER_WORK),
        report_missing_operator(config.recipe),
        trained.open_data(split, data, windows=windows, log=log) as eval_data,
        torch.inference_mode(),
    ):
        result = score_model(
            model, config, tokenizers, eval_data, windows=windows, settings=settings, on_progress=on_progress
        )
    scores = tuple(result.scores)
    # a file need not follow the rule whose guesses these are
    guesses = guess_floors(config.data) if data is None else None
    return Evaluation(task_of_run(config).name, eval_data.name, scores, result.description, result.reading, guesses)


def _names_files(data: Any) -> bool:
    """Whether data is none, a file or several."""
    if isinstance(data, list | tuple):
        return all(isinstance(item, str | Path) for item in data)
    return data is None or isinstance(data, str | Path)


def score_batches(
    source: Any,
    data: Any,
    loss: LossFn | None = None,
    *,
    keywords: Mapping[str, Any] | None = None,
    device: str | None = None,
    wrap: Callable[[Model], Model] = lambda model: model,
) -> Evaluation:
    """The scores of a module, or of the model in a folder, on batches that a program gives. Raises UserError."""
    if data is None:
        raise UserError("a model that is given as an object needs data=, such as a DataLoader; a run names its own")
    if isinstance(source, str | Path):
        model = wrap(load(source, keywords=keywords).to(device))
    elif keywords:
        raise UserError(f"keywords ({', '.join(keywords)}) are for a folder; this model is built already")
    else:
        module = source if device is None else source.to(device)
        model = wrap(as_given_model(module, loss).as_model())
    held_out = GivenHeldOut(GivenSource(data, BatchConfig().tokens, 0, shuffle=False), partial(batch_of, model))
    carried = CarriedState(model, rows_continue=False)
    sums = ScoreSums()
    with eval_mode(model), torch.inference_mode():
        for batch in held_out:
            sums = sums.plus(carried.score(batch))
    if not sums.targets:
        raise UserError("data gave nothing to score: no batch, or none with a target")
    task = task_of(model)
    signature = f"per:target|targets:{sums.targets}"
    scores = tuple(ScoreRecord(name, value, signature, digits=4) for name, value in task.validation(sums, None).items())
    return Evaluation(task.name, type(data).__name__, scores, f"{sums.targets:,} targets", {})


def score_model(
    model: Any,
    run: RunConfig,
    tokenizers: TokenizerPair,
    data: EvaluationData,
    *,
    windows: ContextWindows | None = None,
    settings: EvaluationSettings | None = None,
    on_progress: ProgressFn = lambda share: None,
) -> EvaluationResult:
    """Score a model on held-out data with the scores of the run's task, in inference mode."""
    chosen = EvaluationSettings() if settings is None else settings
    task = task_of_run(run)
    if (chosen.wanted or chosen.environment) and not task.plays_for_returns:
        raise UserError(f"wanted returns and an environment are for models of trajectories; this is {task.title}")
    if chosen.lengths and task.generates != "answer":
        raise UserError(f"BLEU by source length is for models that write a text for a text; this is {task.title}")
    decoding = decoding_from_options(beam=chosen.beam, length_penalty=chosen.length_penalty)
    pair = (tokenizers.source, tokenizers.target)

    def translate(texts: Iterable[str]) -> Iterator[str]:
        translator = Translator(model, tokenizer=pair, decoding=decoding)
        return (answers[0].text or "" for answers in translator(texts))

    def answer(source: Tensor, segments: Tensor | None) -> list[str]:
        return answer_sources(model, SourceBatch(source, segments), tokenizer=pair, decoding=decoding).texts

    return task.evaluate(
        EvaluationRequest(
            model=model,
            tokenizers=tokenizers,
            batches=data.batches,
            examples=data.examples,
            row_length=run.data.row_length,
            windows=windows,
            section=run.data,
            settings=chosen,
            translate=translate,
            answer_sources=answer,
            on_progress=on_progress,
        )
    )


@final
class WindowReader(Model[CausalLMBatch]):
    """A model with a memory that reads each row of a batch in pieces of `length` tokens, the memory empty before it."""

    def __init__(self, model: Model[CausalLMBatch], length: int) -> None:
        super().__init__()
        self.model = model
        self.length = length

    def score(self, batch: CausalLMBatch, *, state: State = None) -> BatchScore:
        scores = list[BatchScore]()
        # the state that was passed is that of earlier rows, which windows never see
        state = self.model.init_state(len(batch.tokens))
        for piece in batch.in_pieces(self.length):
            # each piece goes on from the memory of the one before
            scores.append(self.model.score(piece, state=state))
            state = scores[-1].state
        return reduce(BatchScore.plus, scores)._replace(state=None)


def window_reader(model: Model, windows: ContextWindows, row_length: int) -> Model:
    """The model for rows that are `windows`: with a memory in pieces of `row_length` tokens, else as it is.

    Raises UserError for a context that is longer than the model allows.
    """
    check_context(model, windows, row_length)
    if model.carries_state:
        return WindowReader(model, row_length)
    return model


def check_context(model: Model, windows: ContextWindows, row_length: int) -> None:
    """Raise UserError for a context that is longer than the model, with a memory after `row_length` tokens, allows."""
    if model.carries_state:
        # the memory holds what came before, so that no more than a row is read at once
        at_once = min(windows.context, row_length)
    else:
        at_once = windows.context
    if model.max_length is not None and at_once > model.max_length:
        raise UserError(f"the context ({windows.context}) must be at most {model.max_length}, the model's max_length")
