"""`manyformer doctor`: check the installation and this machine."""

from typing import Annotated

import typer

from manyformer.cli.app import FIND, app, examples


@app.command("doctor", rich_help_panel=FIND, epilog=examples("manyformer doctor", "manyformer doctor --json"))
def doctor(*, as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Check this machine: Python, torch, device, threads, extras, attention kernels, disk, default data.

    Ends with exit code 1 if something that the core needs does not work.
    """
    from manyformer.cli.console import print_json, print_result, print_table
    from manyformer.cli.doctor_checks import examine

    findings = examine()
    broken = [finding for finding in findings if finding.state == "broken"]
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        print_table(("subject", "", "result"), [(f.subject, f.state, f.result) for f in findings])
        print_result()
        print_result(f"{len(broken)} broken, see above." if broken else "All checks passed.")
    if broken:
        raise typer.Exit(1)
