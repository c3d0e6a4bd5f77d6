"""What each command says and writes on tiny runs that it trains first, in a folder of its own."""

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile
import torch
from PIL import Image
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
    "captions": ("captioner", "data.path=captions.npz", "patch=4", *SIZES, "batch.tokens=600"),
    "speech": (
        *("speech-transformer", "decoder_depth=1", "ff_dim=32", "channels=2", "data.path=tones", "data.mels=8"),
        *("data.tokenizer=word", "data.sample_rate=8000", *SIZES),
    ),
    "pixels": (
        *("image-transformer", "data.path=mnist.npz", "ff_dim=32", "model.block=16", "memory_block=16"),
        *(*SIZES, "batch.tokens=128"),
    ),
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
    "show transformer-lm dim=32 depth=1 heads=2 --properties",
    "show transformer-lm dim=32 depth=1 heads=2 --properties --json",
    "show transformer-lm dim=32 depth=1 heads=2 --mixing --length 8",
    "show transformer-lm dim=32 depth=1 heads=2 --mixing --length 8 --json",
    "runs",
    "runs show lm/stdlib",
    "runs copy lm/stdlib mine2.yaml",
    "runs schema",
    "runs list --json",
    "floors",
    "floors --json",
    "floors listops --examples 200",
    "floors mqar --examples 200 --json",
    "regress --out fit.png",
    "regress --json",
    "advise --length 4000 --task recall",
    "advise --length 4000 --task recall --memory 10MB --json",
    "compare",
    "compare --json",
    "compare positions/extrapolation --dry-run",
    "plan transformer-lm dim=64 depth=2 heads=2 --tokens 1M --devices a100 --json",
    "plan transformer-lm --params 100M --tokens 1B --devices 8xh100 --price 2.5",
    "plan longformer-lm dim=64 depth=2 heads=2 --length 1024 --devices a100",
    "check transformer-lm --only causal,padding-left,gradients",
    "check longformer-lm --json --only causal,cached",
    "train lm/stdlib --dry-run",
    "train transformer-lm data.path=book.txt batch.tokens=256 --dry-run --json",
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
    "evaluate runs/pairs --lengths 5,10 --beside runs/steps --out by-length.png",
    "evaluate runs/calm --json --beam 1 --tokenize none",
    "generate runs/text 'def ' --greedy --max-new 24",
    "generate runs/text 'def ' --max-new 12 --samples 2 --seed 1 --top-p 0.9 --json",
    "generate runs/text 'def ' --beam 3 --max-new 12",
    "generate runs/text 'def ' --max-new 12 --samples 2 --seed 1",
    "generate runs/text 'def ' --greedy --beam 2",
    "generate runs/pixels --samples 2 --complete 1 --tries 1 --seed 1 --out painted --stats",
    "generate runs/pixels --top-k 3",
    "generate runs/pairs 'a b' --greedy --max-new 12",
    "generate runs/memory 'def ' --greedy --max-new 24",
    "generate runs/spans 'def ' --greedy --max-new 24",
    "generate runs/reformer 'def ' --greedy --max-new 24",
    "translate runs/pairs '{sentence}' --max-new 12",
    "translate runs/pairs '{sentence}' --beam 3 --n-best 2 --max-new 12 --json",
    "translate runs/pairs '{sentence}' --beam 3 --n-best 2 --max-new 12 --stats",
    "translate runs/pairs --input questions.txt --max-new 12",
    "translate runs/pairs x --input questions.txt",
    "translate runs/text x",
    "caption runs/captions photos --max-new 5",
    "caption runs/captions photos --max-new 5 --n-best 2",
    "caption runs/captions photos --max-new 5 --n-best 2 --json",
    "caption runs/pairs photos",
    "transcribe runs/speech tones/low/1.wav tones/high",
    "transcribe runs/speech tones/low/1.wav --beam 2 --json",
    "transcribe runs/pairs tones",
    "translate runs/steps '{sentence}' --max-new 12 --json",
    "translate runs/calm '{sentence}' --beam 1 --max-new 12 --json",
    "predict runs/labels questions.txt --top 2",
    "predict runs/labels questions.txt --top 2 --json",
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
    "attention runs/pairs '{sentence}' --answer '. hcneb' --heads --compare runs/steps",
    "attention runs/memory 'def add(a' --regions",
    "attention runs/memory 'def add(a' --regions --json",
    "calibrate runs/steps --text '{sentence}' --answer '. hcneb' --out efforts.png",
    "calibrate runs/steps --text '{sentence}' --answer '. hcneb' --json",
    "spans runs/spans --out spans.png",
    "spans runs/spans --json",
    "heads runs/text --sentences 10 --spectrum --save",
    "heads runs/text --json --sentences 10",
    "heads runs/pairs --importance --relevance 5 --json --sentences 10",
    "prune runs/text --keep 2 --how importance --out runs/pruned",
    "prune runs/text --keep 2 --how importance --out runs/pruned-too --json",
    "evaluate runs/pruned --json",
    "plot runs/text --out losses.svg",
    "check runs/text --only causal,cached,saving",
    "export runs/text --out exported/text --json",
    "export runs/masked --out exported/masked",
    "export runs/pairs --out exported/pairs",
    "import exported/text --out models/text --json",
    "import exported/masked --out models/masked",
    "generate models/text 'def ' --greedy --max-new 12",
    "convert runs/text kernel=favor --out models/favor --json",
    "convert runs/masked --to longformer max_length=1024 window=32 --out models/longformer",
    "convert runs/text kernel=hedgehog --transfer 2 --data book.txt --out models/hedgehog",
    "datastore build runs/text --data book.txt --out stores/book --dry-run",
    "datastore build runs/text --data book.txt --out stores/book --json",
    "datastore build runs/text --data book.txt --out stores/book",
    "datastore index runs/none",
    "datastore tune runs/text stores/book --data other.txt --exclude-own --neighbours 4 --weights 0,0.5 --json",
    "datastore tune runs/text stores/book --data other.txt --exclude-own --neighbours 4 --weights 0,0.5",
    "datastore evaluate runs/text stores/book --data other.txt --exclude-own",
    "datastore look runs/text stores/book 'def '",
    "datastore evaluate runs/text stores/book --data other.txt --exclude-own --json",
    "datastore look runs/text stores/book 'def ' --json",
    "calibrate runs/calm --sweep --values 0.9 --values 0.5 --rounds 1 --tokenize none --json",
    "calibrate runs/calm --sweep --values 0.9 --values 0.5 --draws 2",
    "calibrate runs/calm --tolerance 0.9 --confidence 0.5 --data new.en --data new.de --max-new 8 --json",
    "calibrate runs/calm --tolerance 0.9 --confidence 0.5 --data new.en --data new.de --max-new 8",
    "calibrate runs/calm --tolerance 0.5 --confidence 0.9",
    "doctor runs/text",
    "doctor runs/text --json",
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
        _write_more_files(folder)
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


def _write_more_files(folder: Path) -> None:
    """Files that no page names: new sentences, tones in a folder for each word, and images with a text for each."""
    phrases = [f"{count} trees stand on {place} ." for count in ("ten", "twelve") for place in ("hills", "banks")]
    (folder / "new.en").write_text("".join(f"{phrase}\n" for phrase in phrases))
    (folder / "new.de").write_text("".join(f"{phrase[::-1]}\n" for phrase in phrases))
    times = np.arange(2400) / 8000
    for word, frequency in (("low", 300), ("high", 1500)):
        (folder / "tones" / word).mkdir(parents=True)
        for number in range(20):
            tone = np.sin(2 * np.pi * (frequency + number) * times[: 1600 + 40 * number])
            soundfile.write(folder / "tones" / word / f"{number}.wav", 0.5 * tone.astype(np.float32), 8000)
    is_bright = np.arange(40) % 2
    images = (is_bright[:, None, None] * 155 + np.arange(64).reshape(8, 8)).astype(np.uint8)
    texts = np.array(["a dark image", "bright"])[is_bright]
    np.savez(folder / "captions.npz", images=images, texts=texts, test=np.arange(8))
    Image.fromarray(images[1]).save(folder / "photos" / "two.png")


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
