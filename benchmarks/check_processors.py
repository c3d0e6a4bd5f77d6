"""Check all recipes under several instruction sets and numbers of threads, on which rounding depends.

Recipes whose operators depend on token values are checked with several seeds. Prints one row per instruction set and
number of threads, and the contracts that failed.

    python benchmarks/check_processors.py
    python benchmarks/check_processors.py --recipes reformer-strict --capabilities default --threads 2 --seeds 6
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

CAPABILITIES = ("default", "avx2", "native")
"""Values of ATEN_CPU_CAPABILITY, which limits the instructions of torch's kernels; native: not set."""

EXCHANGES = ("causal", "causal-training")
"""Contracts that exchange every token, whose time grows at least with the square of the length."""

EXCHANGE_LENGTH = 160


class CheckedRecipe(NamedTuple):
    """One recipe, checked with one seed: the number of contracts that passed, and those that failed with sentences."""

    recipe: str
    seed: int
    passed: int
    failed: list[str]


def check_recipes(recipes: Sequence[str], seeds: int) -> Iterator[CheckedRecipe]:
    """Check recipes in this process, all but the contract of compilation, which is no matter of rounding."""
    import manyformer as mf
    from manyformer.analysis.own_models import build_tiny
    from manyformer.recipes.parts.model_summary import is_content_based

    for recipe in recipes or mf.recipes():
        model = build_tiny(recipe, {}, 0)
        length = min(EXCHANGE_LENGTH, model.max_length or EXCHANGE_LENGTH)
        for seed in range(seeds if is_content_based(model) else 1):
            rows = [
                *mf.check(recipe, seed=seed, skip=("compile", *EXCHANGES)).rows,
                *mf.check(recipe, seed=seed, only=EXCHANGES, length=length).rows,
            ]
            failed = [f"{row.contract}: {row.sentence}" for row in rows if row.verdict == "failed"]
            yield CheckedRecipe(recipe, seed, sum(row.verdict == "passed" for row in rows), failed)


def run_in_process(capability: str, threads: int, recipes: Sequence[str], seeds: int) -> Iterator[CheckedRecipe]:
    """Check recipes in a new process with this instruction set and number of threads."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    environment.pop("ATEN_CPU_CAPABILITY", None)
    if capability != "native":
        environment["ATEN_CPU_CAPABILITY"] = capability
    command = [sys.executable, __file__, "--worker", "--seeds", str(seeds), "--recipes", *recipes]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield CheckedRecipe(**json.loads(line))
    if process.returncode:
        raise SystemExit(f"the process with {capability} and {threads} threads ended with {process.returncode}")


def main() -> None:
    """Check all recipes under every setting; exit code 1 if a contract failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="*", default=[], help="all by default")
    parser.add_argument("--capabilities", nargs="+", default=CAPABILITIES, choices=CAPABILITIES)
    parser.add_argument("--threads", nargs="+", type=int, default=(1, 2))
    parser.add_argument("--seeds", type=int, default=6, help="seeds of recipes that compute by content")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        for result in check_recipes(arguments.recipes, arguments.seeds):
            print(json.dumps(result._asdict()), flush=True)
        return
    any_failed = False
    print(f"{'instructions':14}{'threads':>8}{'models':>8}{'passed':>8}{'failed':>8}")
    for threads in arguments.threads:
        for capability in arguments.capabilities:
            results = list(run_in_process(capability, threads, arguments.recipes, arguments.seeds))
            failed = [(result, sentence) for result in results for sentence in result.failed]
            passed = sum(result.passed for result in results)
            print(f"{capability:14}{threads:8}{len(results):8}{passed:8}{len(failed):8}", flush=True)
            for result, sentence in failed:
                print(f"  {result.recipe}, seed {result.seed}, {sentence}", flush=True)
            any_failed = any_failed or bool(failed)
    raise SystemExit(int(any_failed))


if __name__ == "__main__":
    main()
