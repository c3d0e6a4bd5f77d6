"""The commands about attention heads: `heads` says what each attends to and how much a model depends on it.

`prune` removes those of a trained run that it depends on least."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from typer import Option

from manyformer.base.errors import UserError
from manyformer.cli.app import USE, command
from manyformer.cli.console import Block, Heading, Output, PageTable, json_form, print_note, status_line
from manyformer.cli.model_arguments import data_paths, resolve_device
from manyformer.cli.options import DeviceOption, JsonOption, NewFolderOption, PictureOption, RunFolderArgument

if TYPE_CHECKING:
    from manyformer.analysis.heads import HeadAnalysis, HeadReport
    from manyformer.analysis.heads.head_analysis import HeadGrid
    from manyformer.analysis.pruning import HeadRanking
    from manyformer.inference.evaluate.eval_data import TrainedRun
    from manyformer.models import Model
    from manyformer.training.events import EventListener


T = TypeVar("T")


@command(
    USE,
    "manyformer heads runs/translate-multi30k --out heads.png",
    "manyformer heads runs/translate-multi30k --trees en_ewt-ud-test.conllu --save",
    "manyformer heads runs/translate-multi30k --importance --relevance 50",
    "manyformer heads runs/images-digits --importance --ablate accuracy --out heads.svg",
    "manyformer heads runs/lm-stdlib --sentences 100 --json",
    "manyformer heads runs/lm-stdlib --data other.txt",
)
def heads(
    run: RunFolderArgument,
    *,
    trees: Annotated[Path | None, Option(help="A CoNLL-U file with dependency trees, for syntactic heads.")] = None,
    importance: Annotated[bool, Option("--importance", help="Also: gradients of the loss for gates of heads.")] = False,
    ablate: Annotated[
        str | None,
        Option(metavar="SCORE", help="Also: the change of loss, or of a score such as bleu, without a head."),
    ] = None,
    spectrum: Annotated[
        bool, Option("--spectrum", help="Also: the share of the largest quarter of each head's singular values.")
    ] = False,
    relevance: Annotated[int, Option(metavar="N", min=0, help="Also: relevance by layers, of N sentences.")] = 0,
    data: Annotated[list[str] | None, Option(help="A file to read instead; two parallel files, source first.")] = None,
    sentences: Annotated[int, Option(min=1, help="Number of held-out sentences or rows, and of trees.")] = 1000,
    out: PictureOption = None,
    save: Annotated[bool, Option("--save", help="Keep the labels in the run's folder, as heads.json.")] = False,
    device: DeviceOption = None,
) -> Output:
    """What each attention head attends to, and how much the model depends on it, as tables of layers by heads.

    The confidence of a head is the mean of its largest weights. A positional head attends to one offset in 90 % of the
    tokens; a syntactic one exceeds the best fixed offset for a relation by 10 points; the head that attends most often
    to the least frequent token of a sentence is a rare-word head. Importance (Michel et al. 2019) is divided by its
    norm in each layer, relevance (Voita et al. 2019) by its maximum. A spectrum near 1 means that attention has nearly
    low rank (Wang et al. 2020)."""
    from manyformer.analysis.heads import write_head_labels
    from manyformer.analysis.heads.head_analysis import draw_grids
    from manyformer.base.files.figures import check_picture
    from manyformer.inference.evaluate.eval_data import open_run

    if out is not None:
        check_picture(out)
    file = data_paths(data)
    if file is not None and (importance or ablate is not None or relevance):
        raise UserError("--data is for what heads attend to; --importance, --ablate and --relevance read held-out data")
    trained = open_run(run)
    model = trained.load_model(resolve_device(device))
    measures = _measures(trained, model, ablate, relevance, sentences, importance=importance)
    with status_line(f"reading sentences with {run}") as status:
        try:
            analysis = _analyze(trained, model, trees, sentences, status, file)
            refusal = None
        except UserError as error:
            # the heads of a model that reads no text can be measured all the same
            if not measures or trees is not None or save:
                raise
            analysis = None
            refusal = str(error)
    values: dict[str, dict[str, list[float]]] = {name: json_form(measure()) for name, measure in measures.items()}
    reports = [] if analysis is None else analysis.reports()
    if refusal is not None:
        print_note(refusal)
    if save:
        print_note(f"wrote {write_head_labels(reports, trained.folder)}")
    if analysis is None:
        counts = {}
    else:
        counts = {"sentences": analysis.sentences, "trees": analysis.trees}
    # five relations of each head are enough to see how far the best one is ahead
    heads_found = [{**report._asdict(), "syntax": report.syntax[:5]} for report in reports]
    value = {"run": run, **counts, "heads": heads_found, **values}
    # the JSON form has the spectrum of each head in its report
    grid_values = dict(values)
    if spectrum:
        grid_values["spectrum"] = _by_layer(reports, lambda report: report.spectrum)
    grids = _grids(reports, grid_values)
    return Output(value, _heads_page(grids, reports), out, partial(draw_grids, grids))


def _analyze(
    trained: "TrainedRun",
    model: "Model",
    trees: Path | None,
    sentences: int,
    status: Callable[[str], None],
    file: str | list[str] | None,
) -> "HeadAnalysis":
    """Read the held-out sentences, or those of a file, and those with trees."""
    from manyformer.analysis.heads import HeadAnalysis
    from manyformer.analysis.heads.run_measures import held_out_sentences, token_frequencies, treebank_sentences

    frequencies = token_frequencies(trained)
    analysis = HeadAnalysis(model, frequencies)
    for text in held_out_sentences(trained, sentences, file):
        analysis.read(text)
        status(f"{analysis.sentences:,} sentences")
    if trees is not None:
        for text, tree in treebank_sentences(trained, trees, sentences, max_length=model.max_length):
            analysis.read_tree(text, tree)
            status(f"{analysis.sentences:,} sentences, {analysis.trees:,} with trees")
        if not analysis.trees:
            longest = ""
            if model.max_length is not None:
                longest = f" of at most {model.max_length:,} tokens"
            raise UserError(f"{trees}: there is no sentence{longest} with a tree in it")
    if frequencies is None:
        print_note(f"{trained.folder} has no prepared training data, so the frequencies of tokens are unknown")
    return analysis


def _measures(
    trained: "TrainedRun", model: "Model", ablate: str | None, relevance: int, rows: int, *, importance: bool
) -> "dict[str, Callable[[], Any]]":
    """The requested measures besides the analysis of attention weights, by name."""
    from manyformer.analysis.heads.run_measures import ablation_in_run, importance_in_run, relevance_in_run

    # functions, because each takes a pass or more over the data, and the status line names the one that runs
    measures: dict[str, Callable[[], Any]] = {}
    if importance:
        measures["importance"] = lambda: importance_in_run(trained, model, rows)
    if ablate is not None:
        measures[f"change of {ablate} without the head"] = lambda: ablation_in_run(trained, model, ablate, rows)
    if relevance:
        measures["relevance"] = lambda: relevance_in_run(trained, model, relevance)
    return measures


def _by_layer(reports: "Sequence[HeadReport]", value: "Callable[[HeadReport], T]") -> dict[str, list[T]]:
    """A value of each head, in lists of the heads of each layer."""
    layers: dict[str, list[T]] = {}
    for report in reports:
        layers.setdefault(report.part, []).append(value(report))
    return layers


def _grids(
    reports: "Sequence[HeadReport]", values: Mapping[str, Mapping[str, Sequence[float]]]
) -> "dict[str, list[HeadGrid]]":
    """The grids of each measure, those of confidence with labels."""
    from manyformer.analysis.heads.head_analysis import head_grids

    confidences = _by_layer(reports, lambda report: report.confidence)
    labels = _by_layer(reports, lambda report: ", ".join(report.labels))
    grids: dict[str, list[HeadGrid]] = {}
    if reports:
        grids["confidence"] = head_grids(confidences, labels)
    for name, layers in values.items():
        # labels stand in the grid of confidence alone
        grids[name] = head_grids(layers, {part: [""] * len(layer) for part, layer in layers.items()})
    return grids


def _heads_page(grids: "Mapping[str, Sequence[HeadGrid]]", reports: "Sequence[HeadReport]") -> Iterator[Block]:
    """A table for each measure and kind of attention, layers by heads, and a line for each head that has a label."""
    from manyformer.analysis.heads.head_analysis import grid_rows

    for measure, measure_grids in grids.items():
        for grid in measure_grids:
            yield Heading(f"{measure}: {grid.kind}")
            # layers may have different numbers of heads after pruning
            width = max(map(len, grid.values))
            yield PageTable(("layer", *(f"head {head}" for head in range(width))), grid_rows(grid))
    rows = [(report.part, report.head, *_evidence(report)) for report in reports if report.labels]
    if rows:
        yield Heading("evidence")
        yield PageTable(("layer", "head", "offset", "relation", "rare tokens"), rows, right=(1,))


def _evidence(report: "HeadReport") -> tuple[str, str, str]:
    """The numbers behind the labels of a head."""
    offset = ""
    if report.offset is not None:
        offset = f"{report.offset.offset:+d} in {report.offset.share:.0%}"
    relation = ""
    if report.syntax:
        score = report.syntax[0]
        # a relation is evidence only as far as no fixed offset does as well
        best_offset = f"best offset {score.offset:+d} {score.baseline:.0%}"
        relation = f"{score.relation}, {score.direction}: {score.accuracy:.0%} of {score.edges:,}, {best_offset}"
    rare = ""
    if report.rare is not None:
        rare = f"{report.rare.least:.0%}, chance {report.rare.chance:.0%}"
    return offset, relation, rare


@command(
    USE,
    "manyformer prune runs/translate-multi30k --keep 12 --part encoder --how gates --out runs/twelve-heads",
    "manyformer prune runs/lm-stdlib --keep 6 --how importance --out runs/six-heads",
    "manyformer evaluate runs/six-heads",
    "manyformer train runs/six-heads/run.yaml limits.steps=200",
)
def prune(
    run: RunFolderArgument,
    *,
    keep: Annotated[int, Option(min=0, help="Number of heads that remain, in all layers or those of --part.")],
    how: Annotated[
        Literal["gates", "importance"],
        Option(help="Rank heads by gradients of gates (Michel et al. 2019), or train gates (Voita et al. 2019)."),
    ] = "importance",
    out: NewFolderOption,
    part: Annotated[str | None, Option(help="Layers whose names begin so, such as encoder; all unless given.")] = None,
    penalty: Annotated[float | None, Option(help="--how gates: the penalty lambda on open gates, 0.1.")] = None,
    steps: Annotated[int | None, Option(min=1, help="--how gates: training steps; a fifth of the run's.")] = None,
    learning_rate: Annotated[float | None, Option(help="--how gates: the peak learning rate, 3e-4.")] = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> Output:
    """Remove attention heads of a trained run, with their weights, and write the model that remains as a new run.

    The least important tenth of the heads goes at a time, and the model is scored on the validation data after each
    step: the scores are printed and, with a picture, in the new folder. What remains is a run like any other: it can be
    scored, checked, used and, with its run file, trained on. The same command continues an interrupted training of
    gates."""
    from manyformer.analysis.pruning import prune_run
    from manyformer.training import silent

    ranking = _ranking(how, penalty, steps, learning_rate, silent if as_json else None)
    with status_line(f"pruning {run}") as status:
        result = prune_run(
            run,
            ranking,
            keep=keep,
            out=out,
            part=part,
            device=resolve_device(device),
            on_point=lambda point: status(f"pruning {run}: {point.heads} heads"),
            log=print_note,
        )
    names = list(result.curve.points[0].scores)
    rows = [(str(point.heads), *(f"{point.scores[name]:.4f}" for name in names)) for point in result.curve.points]
    table = PageTable(("heads", *(name.replace("_", " ") for name in names)), rows, right=range(len(names) + 1))
    value = {"out": out, "removed": result.removed, **result.curve.model_dump(mode="json")}
    return Output(value, [table, f"removed {result.curve.points[-1].removed}", f"wrote {out}"])


def _ranking(
    how: str,
    penalty: float | None,
    steps: int | None,
    learning_rate: float | None,
    on_event: "EventListener | None",
) -> "HeadRanking":
    """The ranking that the options describe. Raises UserError for options of the other one."""
    from manyformer.analysis.pruning import GateRanking, ImportanceRanking

    options = {"--penalty": penalty, "--steps": steps, "--learning-rate": learning_rate}
    if how == "importance":
        if ignored := [name for name, value in options.items() if value is not None]:
            raise UserError(f"{ignored[0]} ({options[ignored[0]]}) is for --how gates; importance trains nothing")
        return ImportanceRanking()
    for name in ("--penalty", "--learning-rate"):
        if (value := options[name]) is not None and not 0 < value < float("inf"):
            raise UserError(f"{name} ({value}) must be above 0")
    return GateRanking(penalty or 0.1, learning_rate or 3e-4, steps, on_event)
