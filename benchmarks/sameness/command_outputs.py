"""What each command says and writes on tiny runs that it trains first, in a folder of its own."""

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from documented_samples import KINDS, SIZES, write_files
from sameness.commands import run_command, without_changes
from sameness.fingerprints import fingerprint

TEXT_SUFFIXES = {".json", ".jsonl", ".yaml", ".txt", ".md", ".csv", ".tsv", ".conllu", ".html", ".svg", ".log"}
LONGEST_TEXT = 3000
"""Characters of a written file that are kept; a longer one is kept as a digest."""

MEASURED_FILES = {"env.json", "run.log", "log.txt", "manifest.json", ".verified.json", ".lock", "metrics.csv"}
"""Files about the machine and the hour, and those with digests of such files; metrics are kept as lines of JSON."""

CALCULATED = ("plan ",)
"""Commands whose times are calculated, not measured."""

# beside the kinds of runs that the pages use
OTHER_KINDS: dict[str, tuple[str, ...]] = {
    "rule": ("rules/copy", *SIZES, "data.length=31", "limits.steps=6"),
    "calm": ("calm", "data.path=[train.en, train.de]", "data.tokenizer=char", *SIZES),
    "reformer": ("reformer", "data.path=book.txt", "data.length=64", "data.tokenizer=char", *SIZES),
}
SENTENCE = "two men are sitting on a bench ."


def command_lines() -> Iterator[str]:
    """The commands in their order; RUN stands for a folder of `runs/` by the kind of its run."""
    yield from LISTING
    for kind in [*KINDS, *OTHER_KINDS]:
        yield f"train-kind {kind}"
    yield from USING


LISTING = (
    "list",
    "list --task translation --json",
    "show transformer",
    "show transformer-lm dim=64 depth=2 --length 128 --json",
    "show longformer-lm --pattern --length 64",
    "runs",
    "runs show lm/stdlib",
    "runs copy lm/stdlib mine2.yaml",
    "runs schema",
    "floors listops --examples 200",
    "floors mqar --examples 200 --json",
    "regress --json",
    "advise --length 4000 --task recall",
    "compare",
    "compare positions/extrapolation --dry-run",
    "plan transformer-lm dim=64 depth=2 heads=2 --tokens 1M --devices a100 --json",
    "plan transformer-lm --params 100M --tokens 1B --devices 8xh100 --price 2.5",
    "plan longformer-lm dim=64 depth=2 heads=2 --length 1024 --devices a100",
    "check transformer-lm --only causal,padding-left,gradients",
    "check longformer-lm --json --only causal,cached",
    "train lm/stdlib --dry-run",
    "train transformer-lm --print-config data.path=book.txt",
)

USING = (
    "train transformer-lm data.path=book.txt data.length=64 max_length=256 {sizes} limits.steps=6 "
    "out=runs/text device=cpu --quiet",
    "evaluate runs/text",
    "evaluate runs/text --json --data other.txt",
    "evaluate runs/text --context 32 --stride 16 --json",
    "evaluate runs/memory --json",
    "evaluate runs/masked --json",
    "evaluate runs/pairs --json --beam 2 --tokenize none",
    "evaluate runs/labels --json",
    "evaluate runs/trees --json",
    "evaluate runs/images --json",
    "evaluate runs/policy --json",
    "evaluate runs/returns --json",
    "evaluate runs/rule",
    "evaluate runs/calm --json --beam 1 --tokenize none",
    "generate runs/text 'def ' --greedy --max-new 24",
    "generate runs/text 'def ' --max-new 12 --samples 2 --seed 1 --top-p 0.9 --json",
    "generate runs/text 'def ' --beam 3 --max-new 12",
    "generate runs/memory 'def ' --greedy --max-new 24",
    "generate runs/spans 'def ' --greedy --max-new 24",
    "generate runs/reformer 'def ' --greedy --max-new 24",
    "translate runs/pairs '{sentence}' --max-new 12",
    "translate runs/pairs '{sentence}' --beam 3 --n-best 2 --max-new 12 --json",
    "translate runs/steps '{sentence}' --max-new 12 --json",
    "translate runs/calm '{sentence}' --beam 1 --max-new 12 --json",
    "predict runs/labels questions.txt --top 2",
    "predict runs/labels questions.jsonl --json",
    "predict runs/trees parsed.conllu",
    "predict runs/images photos --top 2 --json",
    "play runs/policy --out episode.gif --seed 3",
    "record runs/policy --out episodes.npz --episodes 3 --seed 1",
    "view runs/text 'def add(a' --out page-text.html",
    "view runs/pairs '{sentence}' --answer '. hcneb' --out page-pairs.html",
    "view runs/images --out page-images.html",
    "view runs/trees --out page-trees.html",
    "attention runs/text 'def add(a' --json",
    "attention runs/pairs '{sentence}' --answer '. hcneb' --out look.svg",
    "attention runs/memory 'def add(a' --regions --json",
    "efforts runs/steps '{sentence}' --answer '. hcneb' --json",
    "spans runs/spans --json",
    "heads runs/text --json --sentences 10",
    "heads runs/pairs --importance --relevance 5 --json --sentences 10",
    "prune runs/text --keep 2 --how importance --out runs/pruned",
    "evaluate runs/pruned --json",
    "plot runs/text --out losses.svg",
    "check runs/text --only causal,cached,saving",
    "export runs/text --out exported/text --json",
    "export runs/masked --out exported/masked --json",
    "export runs/pairs --out exported/pairs",
    "import exported/text --out models/text --json",
    "generate models/text 'def ' --greedy --max-new 12",
    "convert runs/text kernel=favor --out models/favor --json",
    "convert runs/masked --to longformer max_length=1024 window=32 --out models/longformer",
    "datastore build runs/text --data book.txt --out stores/book --json",
    "datastore evaluate runs/text stores/book --data other.txt --exclude-own --json",
    "datastore look runs/text stores/book 'def ' --json",
    "thresholds runs/calm --values 0.9 --values 0.5 --rounds 1 --tokenize none --json",
    "calibrate runs/calm --tolerance 0.5 --confidence 0.9 --json",
    "doctor runs/text",
    "show runs/text --length 64",
    "plan transformer-lm dim=64 nosuch=3",
    "train nosuch",
    "train transformer-lm data.path=book.txt deph=3",
    "generate runs/labels 'def '",
    "check nosuch",
)
"""Commands on the trained runs, and mistakes."""


class Written(NamedTuple):
    """A file as it was, to find out what a command has written."""

    time: int
    size: int


def outputs(done: dict[str, Any], keep: Callable[[], None]) -> None:
    """Add what each command said and wrote to `done`, calling `keep` after each."""
    with tempfile.TemporaryDirectory() as place, current_folder(Path(place)) as folder:
        write_files(folder)
        os.environ["MANYFORMER_CACHE"] = str(folder / "cache")
        for line in command_lines():
            done[line] = output_of(line, folder)
            keep()


@contextmanager
def current_folder(folder: Path) -> Iterator[Path]:
    """Work in another folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)


def output_of(line: str, folder: Path) -> dict[str, Any]:
    """The exit code of a command, its text without times, and the files that it has written or changed."""
    before = _files(folder)
    torch.manual_seed(0)
    ended = run_command(_words(line))
    changed = [path for path, state in _files(folder).items() if before.get(path) != state]
    out = ended.out if line.startswith(CALCULATED) else without_changes(ended.out, folder)
    return {
        "code": ended.code,
        "out": out,
        "err": without_changes(ended.err, folder),
        "files": {path: _content(folder / path, folder) for path in sorted(changed)},
    }


def _words(line: str) -> Sequence[str]:
    import shlex

    command, _, kind = line.partition(" ")
    if command == "train-kind":
        words = {**KINDS, **OTHER_KINDS}[kind]
        return ["train", *words, f"out=runs/{kind}", "device=cpu", "--quiet"]
    return shlex.split(line.format(sizes=" ".join(SIZES), sentence=SENTENCE))


def _files(folder: Path) -> dict[str, Written]:
    found = (path for path in folder.rglob("*") if path.is_file() and "cache" not in path.relative_to(folder).parts)
    return {
        str(path.relative_to(folder)): Written(path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(found)
    }


def _content(path: Path, folder: Path) -> Any:
    if path.name in MEASURED_FILES:
        return "about the machine"
    if path.suffix == ".safetensors":
        tensors = dict(sorted(load_file(path).items()))
        values = torch.cat([tensor.reshape(-1).float() for tensor in tensors.values()])
        return {"names": _digest(" ".join(tensors).encode()), "values": fingerprint(values)}
    if path.suffix in TEXT_SUFFIXES:
        text = without_changes(path.read_text(encoding="utf-8", errors="replace"), folder)
        return text if len(text) <= LONGEST_TEXT else f"{len(text)} characters, {_digest(text.encode())}"
    return _digest(path.read_bytes())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:20]
