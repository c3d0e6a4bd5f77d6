"""The command of the package of the checks alone: `manyformer-check MODULE:NAME`."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from manyformer.base.errors import UserError

HONEST = 0
NOT_HONEST = 1
NOT_TRIED = 2
"""The exit codes: no contract failed, one did, or the model could not be tried."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a model and print the report; gives the exit code."""
    parser = argparse.ArgumentParser("manyformer-check", description="Is my model honest?")
    parser.add_argument("model", help="MODULE:NAME of a module or of a function that returns one")
    parser.add_argument("--length", type=int, help="tokens in each sequence")
    parser.add_argument("--only", help="only these contracts, separated by commas")
    parser.add_argument("--skip", default="", help="all but these contracts, separated by commas")
    parser.add_argument("--seed", type=int, default=0, help="seed of the inputs")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    options = parser.parse_args(arguments)
    from manyformer.analysis.contracts import check

    module_name, _, name = options.model.partition(":")
    try:
        sys.path.insert(0, "")
        model = getattr(importlib.import_module(module_name), name)
        report = check(
            model() if callable(model) and not hasattr(model, "forward") else model,
            length=options.length,
            seed=options.seed,
            only=options.only.split(",") if options.only else None,
            skip=options.skip.split(",") if options.skip else (),
        )
    except (UserError, ImportError, AttributeError) as error:
        print(f"manyformer-check: {error}", file=sys.stderr)
        return NOT_TRIED
    print(report.to_json() if options.json else report.table())
    return HONEST if report.ok else NOT_HONEST


if __name__ == "__main__":
    raise SystemExit(main())
