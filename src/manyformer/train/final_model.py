"""The end of a run: which weights become the model, averages of checkpoints, and the model's folder."""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from manyformer.models import Model
from manyformer.models.model_files import replace_folder, write_parts
from manyformer.train.engine import TrainingEngine
from manyformer.train.validation import Validator


class WeightChoice(NamedTuple):
    """The weights that were chosen, in words, and their scores on the validation data."""

    what: str
    scores: dict[str, float]


def choose(
    engine: TrainingEngine,
    *,
    last: WeightChoice,
    best: tuple[Path, WeightChoice] | None,
    averaged: Sequence[Path],
    judge: Validator,
) -> WeightChoice:
    """Put the final weights into the model: the best checkpoint, else the last, or an average where that is better.

    The model holds the last weights when this is called.
    """
    single = last if best is None else best[1]
    if best is not None:
        engine.read_weights(best[0])
    if len(averaged) < 2:
        return single
    engine.average(averaged)
    scores = judge()
    assert scores is not None
    what = f"the average of the last {len(averaged)} checkpoints"
    if judge.sort_key(scores) < judge.sort_key(single.scores):
        return WeightChoice(f"{what}, better than {single.what}", scores)
    engine.read_weights(averaged[-1] if best is None else best[0])
    return single._replace(what=f"{single.what}; {what} is not better ({judge.metric} {scores[judge.metric]:.4f})")


def save_model(model: Model, path: Path, *, extras: Callable[[Path], None]) -> None:
    """The model's folder, whole or not at all; `extras` adds tokenizers and a card to it."""
    fresh = Path(tempfile.mkdtemp(prefix=f".{path.name}-", suffix=".part", dir=path.parent))
    try:
        extras(fresh)
        write_parts(model, fresh)
        replace_folder(fresh, path)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
