"""Published figures whose training takes minutes of a GPU: shipped runs to their ends, scores beside published ones.

The data are those of the tests: MANYFORMER_DATA names their folder.
"""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from gpu_parts.outcome import Item, Outcome, Setting, judged
from gpu_parts.verbs import RUN, run_verb

REHEARSAL = (
    *("model.depth=1", "model.dim=32", "model.heads=2", "limits.steps=6", "limits.epochs=null"),
    *("schedule.warmup=2", "evaluate.every=3", "save.every=3"),
)
"""Settings of a rehearsal."""


class PublishedFigure(NamedTuple):
    """A shipped run with a published score."""

    shipped: str
    """The name of the run."""
    data: Mapping[str, Sequence[str]]
    """For each setting of the data its files, relative to the folder of all data."""
    score: str
    """The name of the score."""
    published: float
    tolerance: float
    """What the source's own spread allows between its figure and a repetition."""
    source: str
    evaluation: Sequence[str] | None = None
    """Options of `manyformer evaluate`; None means the best loss on held-out data during training."""
    higher_is_better: bool = False
    package: str | None = None
    """What computes the score, looked for before minutes are spent."""


FIGURES: Mapping[str, PublishedFigure] = {
    "Shakespeare characters": PublishedFigure(
        shipped="lm/nanogpt-characters-gpu",
        data={"data.path": ["tinyshakespeare/input.txt"]},
        score="best loss, nats",
        published=1.4697,
        tolerance=0.02,
        source="karpathy/nanoGPT, README",
    ),
    "Multi30k, English to German": PublishedFigure(
        shipped="translate/multi30k-gpu",
        data={
            "data.path": ["multi30k/tok/train.lc.norm.tok.en.gz", "multi30k/tok/train.lc.norm.tok.de.gz"],
            "data.valid": ["multi30k/tok/val.lc.norm.tok.en", "multi30k/tok/val.lc.norm.tok.de"],
            "data.test": [
                "multi30k/tok/test_2016_flickr.lc.norm.tok.en",
                "multi30k/tok/test_2016_flickr.lc.norm.tok.de",
            ],
        },
        score="BLEU",
        published=41.0,
        tolerance=0.8,
        source="Wu et al. 2021, arXiv:2105.14462",
        evaluation=("--split", "test", "--tokenize", "none", "--beam", "5"),
        higher_is_better=True,
        package="sacrebleu",
    ),
}


def items(setting: Setting) -> dict[str, Item]:
    """Each figure."""
    return {name: partial(measure, setting, figure) for name, figure in FIGURES.items()}


def measure(setting: Setting, figure: PublishedFigure) -> Outcome:
    """Train, score and compare; worse than published by more than the tolerance is a failure."""
    folder = os.environ.get("MANYFORMER_DATA")
    files = [name for names in figure.data.values() for name in names]
    if folder is None or not all(Path(folder, name).is_file() for name in files):
        # not "not run", which is final: with the data it is tried again
        return Outcome("failed", f"MANYFORMER_DATA must name a folder with {', '.join(files)}")
    if figure.package is not None and find_spec(figure.package) is None:
        return Outcome("failed", f"{figure.score} needs the package {figure.package}")
    places = {key: [str(Path(folder, name).resolve()) for name in names] for key, names in figure.data.items()}
    settings = [f"{key}={names[0] if len(names) == 1 else json.dumps(names)}" for key, names in places.items()]
    rehearsal = REHEARSAL if setting.tiny else ()
    with tempfile.TemporaryDirectory() as place:
        words = ["train", figure.shipped, *settings, f"out={RUN}", *rehearsal]
        _, fault = run_verb(words, Path(place), seconds=None)
        if fault:
            return Outcome("failed", fault)
        value = best_loss(Path(place, RUN))
        if figure.evaluation is not None:
            output, fault = run_verb(["evaluate", RUN, *figure.evaluation, "--json"], Path(place), seconds=None)
            if fault:
                return Outcome("failed", fault)
            scores = {score["name"]: score["value"] for score in json.loads(output)["scores"]}
            value = scores[figure.score]
        minutes = json.loads(Path(place, RUN, "metrics.jsonl").read_text().splitlines()[-1])["seconds"] / 60
    worse_by = figure.published - value if figure.higher_is_better else value - figure.published
    misses = []
    if not setting.tiny and worse_by > figure.tolerance:
        misses.append(f"worse than published by more than {figure.tolerance:g}")
    numbers = {figure.score: value, "published": figure.published, "training, minutes": minutes}
    return judged(f"{figure.source}; one seed", misses, numbers)


def best_loss(run: Path) -> float:
    """The least loss on held-out data in the log of a run."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float(min(record["valid_loss"] for record in records if "valid_loss" in record))
