"""Write the folders beside this file with the code of the version that they are named after.

PYTHONPATH=OTHER_CHECKOUT/src python write.py FOLDER
"""

import json
import os
import shutil
import sys
from pathlib import Path

import torch

import manyformer as mf
from manyformer.cli import run
from manyformer.inference.evaluate import evaluate

LINE = "the cat sat on the mat and the dog lay by the door; one day the cat saw the dog and ran up the tree\n"
SETTINGS = (
    *("data.path=text.txt", "data.tokenizer=char", "data.length=32", "dim=8", "depth=2", "heads=2", "max_length=64"),
    *("batch.tokens=128", "optim.lr=0.01", "schedule.warmup=2", "log.every=1", "evaluate.every=10", "save.every=10"),
    *("out=run", "device=cpu"),
)
STEPS = 20
STEPS_AFTER_RESUMING = 26
PROMPT = "the cat "


def train(steps: int) -> None:
    """Train the language model up to this step, or resume it."""
    assert run(["train", "transformer-lm", *SETTINGS, f"limits.steps={steps}", "--quiet"]) == 0


def main(folder: Path) -> None:
    """A run with its checkpoint, the model exported from it, a saved model, and what they compute."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    Path("text.txt").write_text(LINE * 12)
    train(STEPS)
    shutil.copytree("run", "kept")
    model = mf.load("run")
    expected = {
        "version": mf.__version__,
        "settings": SETTINGS,
        "generated": mf.generate(model, PROMPT, max_new=24, temperature=0.0).tokens[0],
        "sampled": mf.generate(model, PROMPT, max_new=24, seed=5).tokens[0],
        "beam": mf.generate(model, PROMPT, max_new=12, beam=3).tokens[0],
    }
    evaluation = evaluate("run")
    expected["scores"] = {score.name: score.value for score in evaluation.scores}
    assert run(["export", "run", "--out", "exported"]) == 0
    train(STEPS_AFTER_RESUMING)
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    expected["losses"] = {row["step"]: row["loss"] for row in rows if "loss" in row}
    expected["valid"] = {row["step"]: row["valid_loss"] for row in rows if "valid_loss" in row}
    shutil.rmtree("run")
    Path("kept").rename("run")
    # what is large and nobody reads
    Path("run/curves.png").unlink()
    shutil.rmtree("run/checkpoints/step-00000010")
    torch.manual_seed(0)
    encoder = mf.build("longformer", vocab=13, dim=16, depth=1, heads=2, ff_dim=24, window=4, max_length=32).eval()
    encoder.save("model")
    tokens = torch.arange(24)[None] % 13
    with torch.no_grad():
        expected["logits"] = encoder(tokens).logits[0, ::6, :4].tolist()
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
