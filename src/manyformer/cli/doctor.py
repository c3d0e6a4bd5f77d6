"""`manyformer doctor`: check the installation and this machine."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from manyformer.cli.app import DEFECT, FIND, command
from manyformer.cli.console import print_json, print_result, print_table
from manyformer.cli.shared_options import JsonOption


@command(FIND, "manyformer doctor", "manyformer doctor runs/lm-stdlib", "manyformer doctor --json")
def doctor(
    folder: Annotated[
        str | None,
        Argument(metavar="[FOLDER]", help="A run, a saved model or a datastore to verify.", show_default=False),
    ] = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Check this machine, or verify the files of a folder.

    Of the machine: Python, torch, device, threads, extras, attention kernels, disk, default data. Of a run, a saved
    model or a datastore: the size and SHA-256 of every file, also of those that were verified before. Ends with exit
    code 1 if something that the core needs does not work, or if a file is damaged.
    """
    from manyformer.cli.doctor_checks import examine, verify_folder

    findings = examine() if folder is None else verify_folder(Path(folder))
    broken = sum(finding.state == "broken" for finding in findings)
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        print_table(("subject", "", "result"), [(f.subject, f.state, f.result) for f in findings])
        print_result("", f"{broken} broken, see above." if broken else "All checks passed.")
    if broken:
        raise typer.Exit(DEFECT)
