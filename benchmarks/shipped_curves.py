"""Take the curves of finished trainings of a shipped run into the package: `shipped_curves.py lm/stdlib RUN...`.

Each RUN is the folder of `manyformer train lm/stdlib seed=N limits.minutes=6000 out=RUN`: all steps of the shipped run,
without its limit of minutes. Curves of the same run and seed are replaced. The seed of the shipped run is left out: a
first run, which has it, would be compared with itself.
"""

import argparse
from pathlib import Path

from manyformer.analysis.figures.curves import read_curves
from manyformer.analysis.shipped_curves import ShippedCurve, is_same_run, shipped_curves
from manyformer.base.errors import UserError
from manyformer.base.files.json_records import JsonLines
from manyformer.config.shipped import SHIPPED_CURVES
from manyformer.training.run_folder import as_training_run

EVERY = 20
"""Of training losses, those of every so many steps are kept."""
COLUMNS = ("step", "tokens", "loss", "valid_loss", "valid_bits_per_byte")


def curve_of(name: str, folder: Path) -> ShippedCurve:
    """The curve of the run in a folder. Raises UserError if it is another run, or has not made all its steps."""
    run = as_training_run(str(folder))
    shipped = as_training_run(name)
    if not is_same_run(shipped, run):
        raise UserError(f"{folder} has other settings than {name}")
    if run.seed == shipped.seed:
        raise UserError(f"{folder} has the seed {run.seed} of {name}, whose runs would be compared with themselves")
    rows = read_curves(folder).rows
    if rows[-1]["step"] != shipped.limits.steps:
        raise UserError(f"{folder} ended at step {rows[-1]['step']}, not at the {shipped.limits.steps} of {name}")
    card = (folder / "model" / "README.md").read_text(encoding="utf-8")
    data = next(line for line in card.splitlines() if line.startswith("- text: "))
    kept = [row for row in rows if row["step"] % EVERY == 0]
    return ShippedCurve(
        key=f"{name} {run.seed}",
        run=name,
        seed=run.seed,
        data=data.removeprefix("- text: "),
        rows=tuple({key: round(row[key], 4) for key in COLUMNS if row.get(key) is not None} for row in kept),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="the name of a shipped run")
    parser.add_argument("folders", nargs="+", type=Path, help="folders of its trainings")
    arguments = parser.parse_args()
    own_seed = as_training_run(arguments.run).seed
    curves = {curve.key: curve for curve in shipped_curves() if (curve.run, curve.seed) != (arguments.run, own_seed)}
    curves |= {curve.key: curve for curve in (curve_of(arguments.run, folder) for folder in arguments.folders)}
    lines = JsonLines(SHIPPED_CURVES.with_suffix(".draft"), ShippedCurve, "the curve of a shipped run")
    for key in sorted(curves):
        lines.add(curves[key])
    lines.path.replace(SHIPPED_CURVES)


if __name__ == "__main__":
    main()
