"""How often the guarantee of `manyformer calibrate` is broken in 200 resamplings of real texts.

    python benchmarks/calibration_guarantee.py                  # Python's standard library; a few minutes of two cores
    python benchmarks/calibration_guarantee.py --minutes 0.2 --prompts 2 --documents 40     # to see that it works

A small early-exit language model is trained on Python's standard library, and its test files are the population: their
losses under each threshold are computed once, so that the expected loss of each threshold is known exactly. Then
calibrations draw files from the population, with replacement, and the promise of each is compared with the expected
loss. Each file gives several prompts that overlap, so that they depend on each other. Four ways to choose a
threshold: by the guarantee from 100 files; from 10 files, which are too few for most tolerances; from the prompts of 10
files, counted as if they were independent; and, as a floor, without a bound (the mean loss of 100 files is at most the
tolerance). The losses stay in the folder of `--out`, and a second start uses them.
"""

import argparse
import itertools
import math
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from frame import argument_parser, set_threads
from numpy.typing import NDArray

import manyformer as mf
from manyformer.inference.early_exit import DecodingWorkload
from manyformer.inference.early_exit.calibration import fixed_sequence_test
from manyformer.inference.early_exit.early_decoding import rouge_l_distance
from manyformer.inference.evaluate.eval_data import open_run
from manyformer.training import silent

THRESHOLDS = (0.999, 0.99, 0.97, 0.95, 0.92, 0.9, 0.87, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4, 0.3)
HARD_THRESHOLDS = 3
"""The tolerances are just below the expected losses of the lowest thresholds: who certifies one of these is wrong."""

PROMPT_TOKENS, NEW_TOKENS = 32, 24
STRIDE = 4
"""Tokens between the beginnings of two prompts of a file."""

Losses = NDArray[np.float64]
"""The loss of each threshold, file and prompt: (t, n, p)."""


class Procedure(NamedTuple):
    """A way to choose a threshold, and what it did: how often the promise was broken, and the mean expected loss."""

    name: str
    broken: int
    mean_loss: float


def main() -> None:
    arguments = read_arguments()
    set_threads(arguments.threads)
    losses = population_losses(Path(arguments.out), arguments)
    print(f"population: {losses.shape[1]} files with {losses.shape[2]} prompts each; expected loss of each threshold:")
    print("  ".join(f"{t:g}: {loss:.4f}" for t, loss in zip(THRESHOLDS, losses.mean((1, 2)))))
    print(f"\n{'tolerance':>10}{'allowed':>9}  {'threshold chosen from':<26}{'broken':>8}{'share':>8}{'mean loss':>11}")
    kept = True
    for tolerance in arguments.tolerances or 0.95 * losses.mean((1, 2))[-HARD_THRESHOLDS:]:
        for risk in arguments.risks:
            procedures = resample(losses, tolerance, 1 - risk, arguments)
            for name, broken, mean_loss in procedures:
                share = f"{broken / arguments.resamplings:.1%}"
                print(f"{tolerance:>10.4f}{risk:>9.0%}  {name:<26}{broken:>8}{share:>8}{mean_loss:>11.4f}")
            noise = 2 * math.sqrt(arguments.resamplings * risk * (1 - risk))
            kept &= all(procedure.broken <= arguments.resamplings * risk + noise for procedure in procedures[:2])
    print("\nthe guarantee is", "kept" if kept else "BROKEN more often than it says")
    sys.exit(not kept)


def resample(losses: Losses, tolerance: float, confidence: float, arguments: argparse.Namespace) -> list[Procedure]:
    """Choose thresholds by each procedure in so many samples of files."""
    random = np.random.default_rng(arguments.seed)
    # the expected loss of a prompt of a new file; no exits lose nothing
    expected = np.append(losses.mean((1, 2)), 0.0)
    files, few, prompts = arguments.documents, arguments.few, losses.shape[2]
    chosen: dict[str, list[int]] = {}
    for _ in range(arguments.resamplings):
        sample, planted = (losses[:, random.integers(losses.shape[1], size=count)] for count in (files, few))
        passing = np.flatnonzero(np.minimum.accumulate(sample.mean((1, 2)) <= tolerance))
        choices = {
            f"{files} files": lowest_certified(sample.mean(2), tolerance, confidence),
            f"{few} files": lowest_certified(planted.mean(2), tolerance, confidence),
            f"{few * prompts} prompts of {few} files": lowest_certified(
                planted.reshape(len(planted), -1), tolerance, confidence
            ),
            "no bound (floor)": int(passing[-1]) if len(passing) else -1,
        }
        for name, index in choices.items():
            chosen.setdefault(name, []).append(index)
    return [
        Procedure(name, int((expected[indices] > tolerance).sum()), float(expected[indices].mean()))
        for name, indices in chosen.items()
    ]


def lowest_certified(losses: NDArray[np.float64], tolerance: float, confidence: float) -> int:
    """The index of the lowest certified threshold, -1 if there is none."""
    rows = zip(THRESHOLDS, losses.tolist())
    tests = fixed_sequence_test(rows, tolerance=tolerance, confidence=confidence)
    return sum(test.certified for test in tests) - 1


def population_losses(out: Path, arguments: argparse.Namespace) -> Losses:
    """The distance (1 - ROUGE-L) from the full model's text for all prompts of the test files; computed once."""
    file = out / f"losses-{arguments.prompts}.npy"
    if not file.exists():
        train(out / "run", arguments.minutes)
        prompts = read_prompts(out / "run", arguments.prompts)
        flat = [text for texts in prompts for text in texts]
        workload = DecodingWorkload(mf.load(out / "run"), flat, NEW_TOKENS, rows=128)
        full = workload.decode(None).texts
        rows = []
        for threshold in THRESHOLDS:
            texts, _, _, layers = workload.decode(threshold)
            rows.append(list(map(rouge_l_distance, texts, full)))
            print(f"threshold {threshold:g}: {layers:.2f} layers, mean loss {np.mean(rows[-1]):.4f}", flush=True)
        np.save(file, np.array(rows).reshape(len(THRESHOLDS), len(prompts), arguments.prompts))
    losses: Losses = np.load(file)
    return losses


def train(folder: Path, minutes: float) -> None:
    """A language model of four layers, all of which learn to predict the next token."""
    print(f"training for {minutes:g} minutes of one core", flush=True)
    keywords = "model.base_keywords={dim: 96, depth: 4, heads: 4, ff_dim: 256, dropout: 0.0}"
    settings = [
        *(
            keywords,
            "model.rule=softmax",
            "data.valid=0.33",
            "data.tokenizer=bpe",
            "data.vocab=1000",
            "data.length=128",
            "batch.tokens=2048",
        ),
        *("optim.lr=0.002", "schedule.warmup=50", f"limits.cpu_minutes={minutes}", "limits.steps=100000"),
        *("evaluate.every=null", "device=cpu", f"out={folder}"),
    ]
    mf.train("early-exit-lm", settings, on_event=silent)


def read_prompts(run: Path, count: int) -> list[list[str]]:
    """`count` overlapping prompts from the middle of each test file that is long enough."""
    trained = open_run(run)
    length = PROMPT_TOKENS + STRIDE * count
    with trained.open_data("test", None) as data:
        assert data.text is not None
        tokens, offsets = data.text.tokens, data.text.offsets
        middles = [(start + stop) // 2 for start, stop in itertools.pairwise(offsets) if stop - start >= 2 * length]
        return [
            [
                trained.tokenizers.source.decode(tokens[start : start + PROMPT_TOKENS].astype(np.int64))
                for start in range(middle, middle + STRIDE * count, STRIDE)
            ]
            for middle in middles
        ]


def read_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="processor minutes of training [2]")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch [2]")
    parser.add_argument("--prompts", type=int, default=20, help="prompts of each file [20]")
    parser.add_argument("--documents", type=int, default=100, help="files of a calibration [100]")
    parser.add_argument("--few", type=int, default=10, help="files of a calibration with dependent prompts [10]")
    parser.add_argument("--resamplings", type=int, default=200, help="calibrations [200]")
    parser.add_argument("--tolerances", type=float, nargs="+", help="tolerances instead of the hardest ones")
    parser.add_argument("--risks", type=float, nargs="+", default=[0.05, 0.2], help="1 - confidence [0.05 0.2]")
    parser.add_argument("--seed", type=int, default=0, help="of the samples [0]")
    parser.add_argument("--out", default="calibration-guarantee", help="where the run and its losses go")
    return parser.parse_args()


if __name__ == "__main__":
    main()
