"""`manyformer doctor`: check the installation and this machine."""

import typer

from manyformer.cli.app import DEFECT, FIND, command
from manyformer.cli.console import print_json, print_result, print_table
from manyformer.cli.shared_options import JsonOption


@command(FIND, "manyformer doctor", "manyformer doctor --json")
def doctor(*, as_json: JsonOption = False) -> None:
    """Check this machine: Python, torch, device, threads, extras, attention kernels, disk, default data.

    Ends with exit code 1 if something that the core needs does not work.
    """
    from manyformer.cli.doctor_checks import examine

    findings = examine()
    broken = sum(finding.state == "broken" for finding in findings)
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        print_table(("subject", "", "result"), [(f.subject, f.state, f.result) for f in findings])
        print_result("", f"{broken} broken, see above." if broken else "All checks passed.")
    if broken:
        raise typer.Exit(DEFECT)
