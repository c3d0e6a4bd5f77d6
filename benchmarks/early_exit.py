"""Depth-adaptive Transformer and CALM on Multi30k: BLEU against layers and tokens a second, and a calibration.

    python benchmarks/early_exit.py DATA                              # about 30 minutes of one core
    python benchmarks/early_exit.py DATA --batch 1                    # sentence by sentence, where exits save most
    python benchmarks/early_exit.py DATA --minutes 2 --sentences 50   # to see that it works

DATA is the folder of the tokenised train, val and test_2016_flickr. A decoder of six layers is trained so that every
layer can say the next word; from its weights begin the second stages: CALM's unit of confidence, with all else frozen,
and the geometric-like rule of the depth-adaptive Transformer. Then all write under several thresholds, in turns, and
CALM is calibrated. A run that is finished is not trained again.
"""

import argparse
from pathlib import Path
from typing import Any

from frame import argument_parser, set_threads

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.config import RunConfig
from manyformer.inference.early_exit import ThresholdPoint, calibrate, load_calibration_prompts, load_prompts, sweep
from manyformer.inference.early_exit.sweep import TABLE_HEADER, table_rows, write_points
from manyformer.training.events import format_duration

MODEL = {"dim": 128, "depth": 6, "heads": 4, "ff_dim": 384, "dropout": 0.1, "norm_order": "pre"}
STAGES: dict[str, dict[str, Any]] = {
    "calm-softmax": {"recipe": "calm", "model": {"threshold_decay": None}, "share": 0.75, "lr": 2e-3},
    "calm-saturation": {"trained": "calm-softmax", "threshold": (0.99, 0.97, 0.95, 0.9, 0.85, 0.8)},
    "calm-classifier": {
        "recipe": "calm",
        "model": {"confidence": "classifier", "threshold_decay": None},
        "share": 0.05,
        "init_from": "calm-softmax",
        "lr": 1e-2,
    },
    "depth-adaptive": {
        "recipe": "depth-adaptive-transformer",
        "model": {"classifier_sharing": "shared", "predictor": "geometric"},
        "share": 0.2,
        "init_from": "calm-softmax",
        "lr": 5e-4,
    },
}
"""What is trained, for which share of the time, with whose weights it begins and at what rate it learns."""

VALUES = (0.95, 0.9, 0.8, 0.7, 0.5, 0.4, 0.3)
GOAL = 1.5
SIDES = ("en", "de")


def main() -> None:
    arguments = _arguments()
    set_threads(arguments.threads)
    out = Path(arguments.out)
    points: list[ThresholdPoint] = []
    for name, stage in STAGES.items():
        folder = _trained(name, stage, arguments, out)
        prompts = load_prompts(folder, split="test", count=arguments.sentences, rows=arguments.batch)
        if name == "calm-saturation":
            prompts = _as_saturation(prompts)
        values = stage.get("threshold", VALUES)
        points_of_stage = sweep(name, prompts, values, tokenize="none", rounds=arguments.rounds)
        _show(points_of_stage)
        points += points_of_stage
    files = write_points(points, out)
    print("\nall together")
    _show(points)
    _verdict(points)
    _calibrated(out / "calm-classifier", arguments)
    print(f"wrote {', '.join(map(str, files))}")


def _trained(name: str, stage: dict[str, Any], arguments: argparse.Namespace, out: Path) -> Path:
    """The folder of the stage's run, trained for its share of the processor minutes."""
    folder = out / stage.get("trained", name)
    if (folder / "result.json").is_file() or "trained" in stage:
        return folder
    run = {
        "recipe": stage["recipe"],
        "model": MODEL | stage["model"],
        "init_from": str(out / stage["init_from"]) if "init_from" in stage else None,
        "data": {
            "kind": "pairs",
            **_pairs(Path(arguments.data)),
            "tokenizer": "bpe",
            "vocab": 2000,
            "shared": True,
            "max_length": 100,
        },
        "optim": {"lr": stage["lr"], "weight_decay": 0.01},
        "schedule": {"warmup": 20 if "init_from" in stage else 200},
        "loss": {"label_smoothing": 0.0},
        "batch": {"tokens": 1024},
        "limits": {"cpu_minutes": stage["share"] * arguments.minutes},
        "evaluate": {"every": None},
        "save": {"every": 100},
        "device": "cpu",
        "out": str(folder),
    }
    print(f"training {name} for {format_duration(60 * stage['share'] * arguments.minutes)} of one core", flush=True)
    result = mf.train(RunConfig.model_validate(run), on_event=lambda event: None)
    print(
        f"   {result.step} steps, {', '.join(f'{key} {value:.3f}' for key, value in result.scores.items())}", flush=True
    )
    return folder


def _pairs(data: Path) -> dict[str, list[str]]:
    """The two files of each part, whatever stands between its name and the language: also train.lc.norm.tok.en.gz."""
    names = {"path": "train", "valid": "val", "test": "test_2016_flickr"}
    files_by_split: dict[str, list[str]] = {}
    for part, stem in names.items():
        sides = [
            sorted(str(file) for end in ("", ".gz") for file in data.glob(f"{stem}*.{side}{end}")) for side in SIDES
        ]
        if not all(sides):
            raise UserError(f"{data} has no {stem}.en and {stem}.de")
        files_by_split[part] = [files[0] for files in sides]
    return files_by_split


def _as_saturation(prompts: Any) -> Any:
    """The weights of the first stage, by another measure, which needs none of its own."""
    from dataclasses import replace

    model = prompts.workload.model
    keywords = {**model.spec.keywords, "confidence": "saturation"}
    converted = mf.build(model.spec.recipe, **keywords).eval()
    converted.load_state_dict(model.state_dict())
    converted.tokenizer = model.tokenizer
    return prompts._replace(workload=replace(prompts.workload, model=converted))


def _show(points: list[ThresholdPoint]) -> None:
    for row in (TABLE_HEADER, *table_rows(points)):
        print("  ".join(f"{cell:>15}" for cell in row), flush=True)


def _verdict(points: list[ThresholdPoint], loss: float = 1.0) -> None:
    """The fastest of those that lose at most so much BLEU."""
    full = {point.model: point for point in points if point.threshold is None}
    acceptable_points = [p for p in points if p.bleu is not None and p.bleu >= (full[p.model].bleu or 0.0) - loss]
    best = max(acceptable_points, key=lambda p: p.tokens_per_second / full[p.model].tokens_per_second)
    ratio = best.tokens_per_second / full[best.model].tokens_per_second
    verdict = "reached" if ratio >= GOAL else "MISSED"
    print(f"at most {loss} BLEU lost: {ratio:.2f} times as fast ({best.model}, {best.label}); goal {GOAL}: {verdict}")


def _calibrated(folder: Path, arguments: argparse.Namespace) -> None:
    """A guarantee from the test sentences, and what it means on the validation sentences."""
    prompts = load_calibration_prompts(folder, count=arguments.prompts, rows=arguments.batch)
    try:
        calibration = calibrate(
            prompts.workload, tolerance=arguments.tolerance, documents=prompts.documents, source=prompts.source
        )
    except UserError as error:
        print(f"calibration: {error}")
        return
    print(f"calibration: {calibration.statement}")
    valid = load_prompts(folder, split="valid", count=arguments.sentences, rows=arguments.batch)
    _show(sweep("calibrated", valid, [calibration.threshold], tokenize="none", rounds=arguments.rounds))


def _arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("data", help="the folder of Multi30k, tokenised and in lower case")
    parser.add_argument("--minutes", type=float, default=20.0, help="processor minutes of all trainings together [20]")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch [1]")
    parser.add_argument("--sentences", type=int, default=300, help="test sentences that are translated [300]")
    parser.add_argument("--prompts", type=int, default=400, help="test sentences of the calibration [400]")
    parser.add_argument("--tolerance", type=float, default=0.1, help="of 1 - ROUGE-L, for the calibration [0.1]")
    parser.add_argument("--batch", type=int, default=32, help="sentences that are translated together [32]")
    parser.add_argument("--rounds", type=int, default=3, help="how often all is timed, in turns [3]")
    parser.add_argument("--out", default="early-exit", help="where runs, table and picture go [early-exit]")
    return parser.parse_args()


if __name__ == "__main__":
    main()
