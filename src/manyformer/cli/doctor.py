"""`manyformer doctor`: check the installation and this machine."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from manyformer.cli.app import DEFECT, FIND, command
from manyformer.cli.console import print_json, print_note, print_result, print_table
from manyformer.cli.shared_options import JsonOption
from manyformer.cli.shell_completion import complete_runs
from manyformer.errors import UserError

ROUNDS = 5
"""How often each cost is measured; the median counts."""


@command(
    FIND,
    "manyformer doctor",
    "manyformer doctor --tune",
    "manyformer doctor --recipes",
    "manyformer doctor runs/lm-stdlib",
    "manyformer doctor --json",
)
def doctor(
    folder: Annotated[
        str | None,
        Argument(
            metavar="[FOLDER]",
            help="A run, a saved model or a datastore to verify.",
            show_default=False,
            autocompletion=complete_runs,
        ),
    ] = None,
    *,
    tune: Annotated[
        bool, Option("--tune", help="Measure what attention costs on this machine, in seconds, and use it from now on.")
    ] = False,
    recipes: Annotated[
        bool, Option("--recipes", help="Train and decode with every recipe, tiny, on this machine's GPU or CPU.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check this machine, measure its costs, or verify the files of a folder.

    Of the machine: Python, torch, device, threads, extras, attention kernels, disk, default data; with `--recipes` also
    which recipes need an operator that torch lacks on its device, in half a minute. Of a run, a saved
    model or a datastore: the size and SHA-256 of every file, also of those that were verified before. Ends with exit
    code 1 if something that the core needs does not work, or if a file is damaged.
    """
    from manyformer.cli.doctor_checks import examine, verify_folder

    if tune:
        if folder is not None:
            raise UserError("--tune measures this machine; leave the folder out")
        _tune(as_json=as_json)
        return
    if recipes and folder is not None:
        raise UserError("--recipes tries this machine; leave the folder out")
    findings = examine() if folder is None else verify_folder(Path(folder))
    if recipes:
        from manyformer.cli.device_trials import try_recipes
        from manyformer.system.devices import best_device

        findings += try_recipes(best_device())
    broken = sum(finding.state == "broken" for finding in findings)
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        print_table(("subject", "", "result"), [(f.subject, f.state, f.result) for f in findings])
        print_result("", f"{broken} broken, see above." if broken else "All checks passed.")
    if broken:
        raise typer.Exit(DEFECT)


def _tune(*, as_json: bool) -> None:
    """Measure the costs of this machine and write them to the user's cache folder."""
    from manyformer.bench import load_warning
    from manyformer.bench.call_costs import tune_costs
    from manyformer.costs.cost_model import CostModel
    from manyformer.costs.tuned_costs import costs_file

    if warning := load_warning():
        print_note(f"warning: {warning}")
    tuned, library, path = tune_costs(ROUNDS), CostModel(), costs_file()
    tuned.write(path)
    if as_json:
        print_json({"file": str(path), "machine": tuned.machine, **tuned.values})
        return
    rows = [(name, str(getattr(library, name)), str(value)) for name, value in tuned.values.items()]
    print_table(("cost, in pairs of a query and a key", "library", "this machine"), rows)
    print_result("", f"Written to {path}; remove it to use the library's again.")
