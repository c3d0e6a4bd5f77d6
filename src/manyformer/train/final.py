"""The end of a run: which weights become the model, averages of checkpoints, and the model's folder."""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

from manyformer.models import Model
from manyformer.models.files import replace_folder, write_parts
from manyformer.train.engine import Engine
from manyformer.train.evaluation import Judge

WEIGHTS = "model.safetensors"


class Choice(NamedTuple):
    """The weights that were chosen, in words, and their scores on the validation data."""

    what: str
    scores: dict[str, float]


def average(folders: Sequence[Path], into: Path) -> None:
    """The mean of the weights in these folders, tensor by tensor, in float32 (Vaswani et al. 2017, section 6.1).

    A tied weight is stored once and so counted once; tensors that are not floats are taken from the last folder.
    """
    # the files are mapped, not read: one tensor of each is in memory at a time
    files = [load_file(folder / WEIGHTS) for folder in folders]
    mean = {}
    for name, last in files[-1].items():
        if not last.is_floating_point():
            mean[name] = last
            continue
        total = torch.zeros_like(last, dtype=torch.float32)
        for file in files:
            total += file[name]
        mean[name] = (total / len(files)).to(last.dtype)
    save_file(mean, into / WEIGHTS)
    shutil.copyfile(folders[-1] / "config.json", into / "config.json")


def choose(
    engine: Engine,
    *,
    last: Choice,
    best: tuple[Path, Choice] | None,
    averaged: Sequence[Path],
    judge: Judge,
) -> Choice:
    """Put the final weights into the model: the best checkpoint, else the last, or an average where that is better.

    The model holds the last weights when this is called.
    """
    single = last if best is None else best[1]
    if best is not None:
        engine.read_weights(best[0])
    if len(averaged) < 2:
        return single
    with tempfile.TemporaryDirectory(prefix=".average-", suffix=".part", dir=averaged[-1].parent) as room:
        average(averaged, Path(room))
        engine.read_weights(Path(room))
    scores = judge()
    assert scores is not None
    what = f"the average of the last {len(averaged)} checkpoints"
    if judge.badness(scores) < judge.badness(single.scores):
        return Choice(f"{what}, better than {single.what}", scores)
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
