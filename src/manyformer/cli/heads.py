"""`manyformer heads`: what each attention head of a trained model attends to."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from manyformer.cli.app import USE, command
from manyformer.cli.console import print_heading, print_json, print_note, print_table, status_line
from manyformer.cli.model_arguments import resolve_device
from manyformer.cli.shared_options import DeviceOption, JsonOption, PictureOption

if TYPE_CHECKING:
    from manyformer.heads import HeadReport


@command(
    USE,
    "manyformer heads runs/translate-multi30k --out heads.png",
    "manyformer heads runs/translate-multi30k --trees en_ewt-ud-test.conllu --save",
    "manyformer heads runs/lm-stdlib --sentences 100 --json",
)
def heads(
    run: Annotated[str, Argument(help="The folder of a run.")],
    *,
    trees: Annotated[Path | None, Option(help="A CoNLL-U file with dependency trees, for syntactic heads.")] = None,
    sentences: Annotated[int, Option(min=1, help="Number of held-out sentences, and of sentences with trees.")] = 1000,
    out: PictureOption = None,
    save: Annotated[bool, Option("--save", help="Keep the labels in the run's folder, as heads.json.")] = False,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """What each attention head attends to: confidence, positions, rare tokens, and syntax where trees are given.

    The tables hold the confidence of each head, the mean of its largest weights. A positional head attends to one
    offset in 90 % of the tokens; a syntactic one exceeds the best fixed offset for a relation by 10 points; the head
    that attends most often to the least frequent token of a sentence is a rare-word head."""
    from manyformer.evaluate.eval_data import open_run
    from manyformer.heads import HeadAnalysis, write_head_labels
    from manyformer.heads.analysed_text import held_out_sentences, token_frequencies, treebank_sentences
    from manyformer.view.figures import check_picture

    if out is not None:
        check_picture(out)
    trained = open_run(run)
    model, frequencies = trained.load_model(resolve_device(device)), token_frequencies(trained)
    analysis = HeadAnalysis(model, frequencies)
    with status_line(f"reading sentences with {run}") as status:
        for text in held_out_sentences(trained, sentences):
            analysis.read(text)
            status(f"reading sentences with {run}: {analysis.sentences:,}")
        for text, tree in (
            () if trees is None else treebank_sentences(trained, trees, sentences, max_length=model.max_length)
        ):
            analysis.read_tree(text, tree)
            status(f"reading sentences with {run}: {analysis.sentences:,}, with trees {analysis.trees:,}")
    reports = analysis.reports()
    if frequencies is None:
        print_note(f"{run} has no prepared training data, so the frequencies of tokens are unknown")
    if as_json:
        counts = {"sentences": analysis.sentences, "trees": analysis.trees}
        print_json({"run": run, **counts, "heads": [_record(report) for report in reports]})
    else:
        _print_tables(reports)
    if save:
        print_note(f"wrote {write_head_labels(reports, trained.folder)}")
    if out is not None:
        _draw(reports, out)


def _record(report: "HeadReport") -> dict[str, Any]:
    syntax = [score._asdict() for score in report.syntax[:5]]
    offset, rare = (None if part is None else part._asdict() for part in (report.offset, report.rare))
    return {**report._asdict(), "offset": offset, "rare": rare, "syntax": syntax}


def _print_tables(reports: "list[HeadReport]") -> None:
    """A table for each kind of attention, layers by heads, and a line for each head that has a label."""
    from manyformer.heads.head_grid import grid_rows, head_grids

    confidences, labels = _by_part(reports)
    for grid in head_grids(confidences, labels):
        print_heading(f"confidence: {grid.kind}")
        width = max(map(len, grid.values))
        print_table(("layer", *(f"head {head}" for head in range(width))), grid_rows(grid))
    rows = [(report.part, report.head, *_evidence(report)) for report in reports if report.labels]
    if rows:
        print_heading("evidence")
        print_table(("layer", "head", "offset", "relation", "rare tokens"), rows, right=(1,))


def _by_part(reports: "list[HeadReport]") -> tuple[dict[str, list[float]], dict[str, list[str]]]:
    confidences: dict[str, list[float]] = {}
    labels: dict[str, list[str]] = {}
    for report in reports:
        confidences.setdefault(report.part, []).append(report.confidence)
        labels.setdefault(report.part, []).append(", ".join(report.labels))
    return confidences, labels


def _evidence(report: "HeadReport") -> tuple[str, str, str]:
    """The numbers behind the labels of a head."""
    offset, rare = report.offset, report.rare
    score = report.syntax[0] if report.syntax else None
    return (
        "" if offset is None else f"{offset.offset:+d} in {offset.share:.0%}",
        ""
        if score is None
        else f"{score.relation}, {score.direction}: {score.accuracy:.0%} of {score.edges:,}, "
        f"best offset {score.offset:+d} {score.baseline:.0%}",
        "" if rare is None else f"{rare.least:.0%}, chance {rare.chance:.0%}",
    )


def _draw(reports: "list[HeadReport]", out: Path) -> None:
    from manyformer.heads.head_grid import draw_grids, head_grids

    confidences, labels = _by_part(reports)
    draw_grids(head_grids(confidences, labels), out, measure="confidence")
    print_note(f"wrote {out}")
