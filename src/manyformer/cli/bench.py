"""`manyformer bench`: time, memory and FLOPs as a function of length."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from typer import Argument, Option

from manyformer.base.errors import UserError, UserErrors, suggest_names
from manyformer.cli.app import JUDGE, command
from manyformer.cli.console import print_note, print_result, status_line
from manyformer.cli.model_arguments import read_keywords, resolve_device
from manyformer.cli.options import DeviceOption, RoundsOption, complete_models, split_commas

if TYPE_CHECKING:
    from manyformer.analysis.benchmarks import BenchCandidate, BenchReport


@command(
    JUDGE,
    "manyformer bench compose --lengths 256:4096",
    "manyformer bench transformer-lm bert dim=512 --what forward --lengths 128,256,1024 --json",
    "manyformer bench compose:norm_order=pre compose:norm_order=post,feedforward=swiglu --against none",
    accepts_settings=True,
)
def bench(
    arguments: Annotated[
        list[str],
        Argument(
            metavar="NAME[:KEY=VALUE,...]... [KEY=VALUE]...",
            help="Recipes, each with optional keywords; then keywords for all, such as dim=512.",
            autocompletion=complete_models,
        ),
    ],
    *,
    lengths: Annotated[str, Option(help="Lengths: A:B doubles from A to B; commas separate values.")] = "256:2048",
    kinds: Annotated[str, Option("--what", help="Any of forward, step (training) and decode.")] = "forward,step,decode",
    against: Annotated[str, Option(help="The baseline recipe of the ratios; none for no ratios.")] = "transformer-lm",
    batch: Annotated[int, Option(min=1, max=1_000_000, help="Sequences in a batch.")] = 1,
    rounds: RoundsOption = 7,
    max_seconds: Annotated[
        float, Option(help="Longer lengths are skipped for a recipe once a run takes more seconds than this.")
    ] = 60,
    threads: Annotated[int | None, Option(min=1, help="Torch threads; 1 gives the most stable times.")] = None,
    device: DeviceOption = None,
    precision: Annotated[str, Option(help="auto, float32 or bfloat16.")] = "auto",
    out: Annotated[
        str | None, Option(help="FILE.png, .svg, .pdf, .csv or .json; without a suffix .png and .csv. [default: bench]")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print everything as JSON; writes files only with --out.")] = False,
) -> int:
    """Measure forward pass, training step and decoding of recipes at several lengths: time, memory and FLOPs.

    All are built with the same sizes (dim 256, 4 layers, 4 heads, vocabulary 256) and measured in turns, so that other
    load affects all equally. Reports how each grows with length, and from which length on it is faster than the
    baseline."""
    from manyformer.analysis.benchmarks import BENCH_KINDS, BenchPrecision
    from manyformer.analysis.benchmarks import bench as measure

    if threads is not None:
        import torch

        # before models are built, which measure on these threads from the first pass on
        torch.set_num_threads(threads)
    candidates, keywords = _read_candidates(arguments)
    with status_line("measuring") as status:
        report = measure(
            candidates,
            _read_lengths(lengths),
            what=_read_choices(kinds, "what", BENCH_KINDS),
            against=None if against == "none" else against,
            keywords=keywords,
            batch=batch,
            rounds=rounds,
            max_seconds=max_seconds,
            device=resolve_device(device),
            precision=_read_choices(precision, "precision", get_args(BenchPrecision))[0],
            on_progress=lambda text: status(f"measuring: {text}"),
        )
    print_result(report.to_json() if as_json else "\n".join(report.lines()))
    if out is not None or not as_json:
        _write_files(report, Path(out or "bench"))
    return 1 if report.failed else 0


def _write_files(report: "BenchReport", path: Path) -> None:
    """Write the report to `path`, or as a picture and a table if it has no suffix."""
    from manyformer.analysis.benchmarks import write_report

    for file in [path] if path.suffix else [path.with_suffix(".png"), path.with_suffix(".csv")]:
        write_report(report, file)
        print_note(f"wrote {file}")


def _read_candidates(arguments: list[str]) -> "tuple[list[BenchCandidate], dict[str, Any]]":
    """The candidates, and the keywords for all of them. Raises UserErrors."""
    names: list[str] = []
    keyword_arguments: list[str] = []
    for argument in arguments:
        # the value of `--key` is not a recipe's name
        previous = keyword_arguments[-1] if keyword_arguments else ""
        is_value = previous.startswith("--") and "=" not in previous
        # a recipe's name may have keywords of its own behind a colon, as in compose:norm_order=pre
        is_setting = "=" in argument and ":" not in argument.partition("=")[0]
        if argument.startswith("--") or is_value or is_setting:
            keyword_arguments.append(argument)
        else:
            names.append(argument)
    candidates = [_candidate(name) for name in names]
    return candidates, _shared_keywords(keyword_arguments, candidates)


def _candidate(argument: str) -> "BenchCandidate":
    from manyformer.analysis.benchmarks import BenchCandidate
    from manyformer.recipes import get_recipe

    name, _, keywords = argument.partition(":")
    return BenchCandidate(argument, name, read_keywords(get_recipe(name), split_commas(keywords)))


def _shared_keywords(arguments: list[str], candidates: "list[BenchCandidate]") -> dict[str, Any]:
    """The keywords for all candidates. Raises UserErrors for those that none has: they would be ignored silently."""
    from manyformer.config.overrides import parse_overrides
    from manyformer.recipes import get_recipe

    overrides, mistakes = parse_overrides(arguments)
    if mistakes:
        raise UserErrors(map(str, mistakes))
    keywords = {override.key.removeprefix("model."): override.value for override in overrides}
    valid_names = {name for candidate in candidates for name in get_recipe(candidate.recipe).signature.parameters}
    unknown = [name for name in keywords if name not in valid_names]
    if unknown:
        raise UserErrors(f"--{name}: no such keyword; {suggest_names(name, valid_names)}" for name in unknown)
    return keywords


def _read_lengths(text: str) -> list[int]:
    """The lengths in a text such as `256:2048,3000`: a range doubles, commas separate. Raises UserError."""
    lengths: list[int] = []
    for part in text.split(","):
        first, colon, last = part.partition(":")
        if not first.strip().isdecimal() or (colon and not last.strip().isdecimal()):
            raise UserError(f"--lengths '{text}': '{part}' is neither a number nor a range such as 256:2048")
        length = int(first)
        end = int(last) if colon else int(first)
        if not 1 <= length <= end:
            raise UserError(f"--lengths '{text}': the range '{part}' is empty; write the smaller number first")
        while length <= end:
            lengths.append(length)
            length *= 2
    return lengths


def _read_choices(text: str, option: str, valid: Sequence[str]) -> list[Any]:
    """The comma-separated choices of an option. Raises UserError with the nearest valid one."""
    choices = split_commas(text)
    for choice in choices:
        if choice not in valid:
            raise UserError(f"--{option} '{choice}' does not exist; {suggest_names(choice, valid)}")
    if not choices:
        raise UserError(f"--{option} is empty; choose among {', '.join(valid)}")
    return choices
