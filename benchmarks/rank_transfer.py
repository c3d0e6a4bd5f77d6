"""Do small tests mislead? How far two results of suites put the same cases in the same order, for each task.

    python benchmarks/rank_transfer.py                                       the shipped results against those of Muon
    python benchmarks/rank_transfer.py comparisons/suite-better-training comparisons/suite-better-training-larger

Spearman's and Kendall's rank correlation over the cases that both have with all of their seeds, on the trained length:
1 where the order is the same, 0 where one says nothing about the other. A dozen cases are few: the p-value says how
often an order at random would agree as well. Needs SciPy.
"""

import argparse
import math
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from scipy.stats import kendalltau, rankdata, spearmanr

from manyformer.analysis.comparisons.scoring import score_kind
from manyformer.analysis.comparisons.suite_results import EQUAL_STEPS, SuiteRecord, TaskRecord, read_results
from manyformer.base.errors import UserError
from manyformer.base.files.text_tables import markdown_table
from manyformer.config.shipped import SUITE_RESULTS

LEAST = 3
"""Fewer cases have no order worth a correlation."""


class RankTransfer(NamedTuple):
    """How the orders of `cases` cases agree on a task, and the case whose place changes most, from and to which."""

    task: str
    cases: int
    spearman: float
    spearman_p: float
    kendall: float
    moved: str
    place: float
    new_place: float


def means(task: TaskRecord) -> dict[str, float]:
    """The mean of each case over its seeds at the trained length; higher is better."""
    scores: dict[str, list[float]] = {}
    for measured in task.results[EQUAL_STEPS].measured:
        score = measured.scores[0][task.score]
        if score is not None:
            scores.setdefault(measured.case, []).append(score)
    seeds = max(map(len, scores.values()), default=0)
    sign = -1 if score_kind(task.score).lower_is_better else 1
    return {case: sign * fmean(values) for case, values in scores.items() if len(values) == seeds}


def rank_transfers(first: SuiteRecord, second: SuiteRecord) -> list[RankTransfer]:
    """The agreement of two results on each task that both have. Raises UserError where there is none."""
    others = {task.task: task for task in second.tasks}
    transfers = []
    for task in first.tasks:
        if task.task not in others:
            continue
        here, there = means(task), means(others[task.task])
        cases = [case for case in here if case in there]
        if len(cases) < LEAST:
            continue
        values, new_values = [here[case] for case in cases], [there[case] for case in cases]
        # the best has the first place, equal ones share the middle of theirs
        places, new_places = rankdata([-value for value in values]), rankdata([-value for value in new_values])
        most = max(range(len(cases)), key=lambda index: abs(places[index] - new_places[index]))
        spearman, p_value, kendall = math.nan, math.nan, math.nan
        # where all cases are equal, such as solved, there is no order to compare
        if len(set(values)) > 1 and len(set(new_values)) > 1:
            spearman, p_value = map(float, spearmanr(values, new_values))
            kendall = float(kendalltau(values, new_values).statistic)
        moved = (cases[most], float(places[most]), float(new_places[most]))
        transfers.append(RankTransfer(task.task, len(cases), spearman, p_value, kendall, *moved))
    if not transfers:
        raise UserError(f"{first.name} and {second.name} share no task with at least {LEAST} measured cases")
    return transfers


def table_of(transfers: list[RankTransfer]) -> list[str]:
    """The agreement as lines of Markdown, with the mean over the tasks below."""

    def shown(value: float, digits: int = 2) -> str:
        return "–" if math.isnan(value) else f"{value:.{digits}f}"

    header = ["task", "cases", "Spearman", "p", "Kendall", "moves most", "place", "then"]
    rows = [
        [
            *(row.task, str(row.cases), shown(row.spearman), shown(row.spearman_p, 3), shown(row.kendall)),
            *(f"`{row.moved}`", f"{row.place:g}", f"{row.new_place:g}"),
        ]
        for row in transfers
    ]
    ordered = [row for row in transfers if not math.isnan(row.spearman)]
    if ordered:
        spearman, kendall = fmean(row.spearman for row in ordered), fmean(row.kendall for row in ordered)
        rows.append(["mean", "", shown(spearman), "", shown(kendall), "", "", ""])
    return list(markdown_table(header, rows, right=header[1:5] + header[6:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", nargs="?", type=Path, default=SUITE_RESULTS, help="a folder of results, or their file")
    parser.add_argument("second", nargs="?", type=Path, default=Path("comparisons/suite-better-training"))
    arguments = parser.parse_args()
    first, second = read_results(arguments.first), read_results(arguments.second)
    print(f"{first.title} ({arguments.first}), then {second.title} ({arguments.second})\n")
    print("\n".join(table_of(rank_transfers(first, second))))


if __name__ == "__main__":
    main()
