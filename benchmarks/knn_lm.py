"""The gain of a datastore for a language model that is not trained any further (Khandelwal et al. 2020).

In its own domain: a model of WikiText-2, alone and with a datastore of its training text. In another one: the same
model on Shakespeare, alone and with a datastore of the first nine tenths of Shakespeare. Weights and temperatures are
tuned on text that is in neither the datastore nor the scores. About 15 minutes of one thread; a run that was stopped
goes on.

    OMP_NUM_THREADS=1 python benchmarks/knn_lm.py --wikitext ../shared/data/wikitext2 --other \
        ../shared/data/tinyshakespeare/input.txt
"""

import argparse
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from frame import argument_parser, set_threads

import manyformer as mf
from manyformer.inference.datastore import Datastore, IVFPQIndex, build, datastore_job, make_index
from manyformer.inference.datastore.datastore import INDEX
from manyformer.inference.datastore.tuning import score_datastore, tune
from manyformer.training import silent

DatastoreRow = dict[str, Any]
NEIGHBOURS = (16, 64, 256)


def main() -> None:
    arguments = parse_arguments()
    set_threads(1)
    out = Path(arguments.out)
    texts = write_texts(arguments, out / "texts")
    run = trained(arguments, out / "run")
    rows = [
        *contest(run, "WikiText-2", texts["wiki-train"], texts["wiki-tune"], texts["wiki-test"], arguments),
        *contest(run, "other text", texts["other-train"], texts["other-tune"], texts["other-test"], arguments),
    ]
    print(f"\n{'text':<12}{'with':<12}{'perplexity':>11}{'bits/byte':>11}{'tokens/s':>10}  settings")
    for row in rows:
        print(format_row(row))
    (out / "knn_lm.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(f"\nwrote {out / 'knn_lm.json'}")


def write_texts(arguments: argparse.Namespace, folder: Path) -> dict[str, str]:
    """The files of the datastore, for tuning and for scores, of both texts; they share no characters."""
    folder.mkdir(parents=True, exist_ok=True)
    wiki = {name: _read(Path(arguments.wikitext) / f"{name}.txt.gz") for name in ("train", "valid", "test")}
    other_text = _read(Path(arguments.other))
    cut = [round(share * len(other_text)) for share in (0.9, 0.95)]
    parts = {
        "wiki-train": wiki["train"][: arguments.characters],
        "wiki-tune": wiki["valid"][: arguments.scored],
        "wiki-test": wiki["test"][: arguments.scored],
        "other-train": other_text[: cut[0]][: arguments.characters],
        "other-tune": other_text[cut[0] : cut[1]][: arguments.scored],
        "other-test": other_text[cut[1] :][: arguments.scored],
    }
    for name, text in parts.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return {name: str(folder / f"{name}.txt") for name in parts}


def trained(arguments: argparse.Namespace, folder: Path) -> Path:
    """The model: four layers, 128 wide, 4000 byte pairs."""
    texts = folder.parent / "texts"
    settings = [
        *(f"data.path={texts}/wiki-train.txt", f"data.valid={texts}/wiki-tune.txt", "data.packing=concat"),
        *("data.tokenizer=bpe", f"data.vocab={arguments.vocab}", "data.length=128"),
        *(f"dim={arguments.dim}", "depth=4", "heads=4", "dropout=0.0", "batch.tokens=4096"),
        *("optim.lr=0.002", "schedule.name=cosine", "schedule.warmup=100", "limits.epochs=null"),
        *(f"limits.cpu_minutes={arguments.minutes}", "evaluate.every=null", f"out={folder}"),
    ]
    mf.train("transformer-lm", settings, on_event=silent)
    return folder


def contest(
    run: Path, title: str, datastore_text: str, tuning_text: str, scored_text: str, arguments: argparse.Namespace
) -> Iterator[DatastoreRow]:
    """The model alone, and with a datastore of `datastore_text`, tuned and scored on two other texts."""
    folder = run.parent / "stores" / Path(datastore_text).stem
    store = build(datastore_job(run, data=datastore_text), folder)
    print(f"{folder}: {len(store):,} entries, {store.bytes / 1e6:,.0f} MB", flush=True)
    if len(store) > arguments.exact and store.index is None:
        make_index(store.keys, folder / INDEX, IVFPQIndex(codes=32, train_keys=100_000))
    store = Datastore(folder)
    best = tune(datastore_job(run), store, data=tuning_text, neighbours=NEIGHBOURS, max_tokens=arguments.tuned)
    store.save_settings(best.best)
    print(f"{title}: {best.best}", flush=True)
    scored = score_datastore(run, store, best.best, data=scored_text)
    facts = {"entries": len(store), "bytes": store.bytes, "search": "all keys" if store.index is None else "IVF-PQ"}
    for name, scores, tokens_per_second in (
        ("alone", scored.model_scores, scored.model_speed),
        ("datastore", scored.combined_scores, scored.combined_speed),
    ):
        row: DatastoreRow = {"text": title, "with": name, "tokens a second": tokens_per_second}
        row |= {score.name: score.value for score in scores.scores}
        yield row if name == "alone" else row | facts | best.best._asdict()


def format_row(row: DatastoreRow) -> str:
    text = f"{row['text']:<12}{row['with']:<12}{row['perplexity']:11.2f}{row['bits per byte']:11.4f}"
    text += f"{row['tokens a second']:10,.0f}"
    if "entries" in row:
        text += f"  lambda {row['weight']:g}, temperature {row['temperature']:g}, {row['neighbours']} neighbours of "
        text += f"{row['entries']:,} ({row['bytes'] / 1e6:,.0f} MB, {row['search']})"
    return text


def _read(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--wikitext", required=True, help="folder with train.txt.gz, valid.txt.gz and test.txt.gz")
    parser.add_argument("--other", required=True, help="a text of another kind")
    parser.add_argument("--out", default="knn-lm", help="the folder of the run, the datastores and the table [knn-lm]")
    parser.add_argument("--minutes", type=float, default=6.0, help="processor minutes of training [6]")
    parser.add_argument("--vocab", type=int, default=4000, help="byte pairs [4000]")
    parser.add_argument("--dim", type=int, default=128, help="width of the model [128]")
    parser.add_argument("--characters", type=int, default=5_000_000, help="characters to learn and to look into [5 M]")
    parser.add_argument("--scored", type=int, default=60_000, help="characters to score [60,000]")
    parser.add_argument("--tuned", type=int, default=5_000, help="tokens to tune on [5,000]")
    parser.add_argument("--exact", type=int, default=400_000, help="entries from which on there is an index [400,000]")
    return parser.parse_args()


if __name__ == "__main__":
    main()
