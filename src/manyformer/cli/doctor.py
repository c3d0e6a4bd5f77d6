"""`manyformer doctor`: check the installation and this machine."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from manyformer.cli.app import FIND, command
from manyformer.cli.console import Output, PageTable
from manyformer.cli.shell_completion import complete_runs
from manyformer.errors import UserError


@command(
    FIND,
    "manyformer doctor",
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
        bool, Option("--tune", hidden=True, help="Gone: the library uses the same costs on every machine.")
    ] = False,
    recipes: Annotated[
        bool, Option("--recipes", help="Train and decode with every recipe, tiny, on this machine's GPU or CPU.")
    ] = False,
) -> Output:
    """Check this machine, or verify the files of a folder.

    Of the machine: Python, torch, device, threads, extras, attention kernels, disk, default data; with `--recipes` also
    which recipes need an operator that torch lacks on its device, in half a minute. Of a run, a saved
    model or a datastore: the size and SHA-256 of every file, also of those that were verified before. Ends with exit
    code 1 if something that the core needs does not work, or if a file is damaged.
    """
    from manyformer.cli.doctor_checks import examine, verify_folder

    if tune:
        raise UserError(
            "--tune is gone: the costs that it wrote to the home folder changed the last digits of results, and no run "
            "recorded them; ~/.cache/manyformer/costs.json is not read any more, and can be removed"
        )
    if recipes and folder is not None:
        raise UserError("--recipes tries this machine; leave the folder out")
    if folder is None:
        findings = examine()
    else:
        findings = verify_folder(Path(folder))
    if recipes:
        from manyformer.cli.device_trials import try_recipes
        from manyformer.system.devices import best_device

        findings += try_recipes(best_device())
    broken = sum(finding.state == "broken" for finding in findings)
    table = PageTable(("subject", "", "result"), findings)
    verdict = "All checks passed."
    if broken:
        verdict = f"{broken} broken, see above."
    return Output(findings, [table, "", verdict], ok=not broken)
