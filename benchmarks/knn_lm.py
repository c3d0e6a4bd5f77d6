"""What a datastore is worth to a language model that is not trained any further (Khandelwal et al. 2020).

In its own domain: a model of WikiText-2, alone and with all that it was trained on to look into. In another one: the
same model on Shakespeare, alone and with the first nine tenths of Shakespeare. Weights and temperatures are tuned on
text that is neither looked into nor scored. About 15 minutes of one thread; a run that was stopped goes on.

    OMP_NUM_THREADS=1 python benchmarks/knn_lm.py --wikitext ../shared/data/wikitext2 --other \
        ../shared/data/tinyshakespeare/input.txt
"""

import argparse
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from frame import parser_of, settle

import manyformer as mf
from manyformer.datastore import Datastore, IVFPQIndex, build, datastore_job, make_index
from manyformer.datastore.facts import INDEX
from manyformer.datastore.score_datastore import score_datastore
from manyformer.datastore.tuning import tune
from manyformer.train import silent

Row = dict[str, Any]
NEIGHBOURS = (16, 64, 256)


def main() -> None:
    words = arguments()
    settle(1)
    room = Path(words.room)
    texts = write_texts(words, room / "texts")
    run = trained(words, room / "run")
    rows = [
        *contest(run, "WikiText-2", texts["wiki-train"], texts["wiki-tune"], texts["wiki-test"], words),
        *contest(run, "other text", texts["other-train"], texts["other-tune"], texts["other-test"], words),
    ]
    print(f"\n{'text':<12}{'with':<12}{'perplexity':>11}{'bits/byte':>11}{'tokens/s':>10}  settings")
    for row in rows:
        print(line(row))
    (room / "knn_lm.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(f"\nwrote {room / 'knn_lm.json'}")


def write_texts(words: argparse.Namespace, folder: Path) -> dict[str, str]:
    """What is looked into, what is tuned on and what is scored, of both texts; no text is in two of them."""
    folder.mkdir(parents=True, exist_ok=True)
    wiki = {name: _read(Path(words.wikitext) / f"{name}.txt.gz") for name in ("train", "valid", "test")}
    other = _read(Path(words.other))
    cut = [round(share * len(other)) for share in (0.9, 0.95)]
    found = {
        "wiki-train": wiki["train"][: words.characters],
        "wiki-tune": wiki["valid"][: words.scored],
        "wiki-test": wiki["test"][: words.scored],
        "other-train": other[: cut[0]][: words.characters],
        "other-tune": other[cut[0] : cut[1]][: words.scored],
        "other-test": other[cut[1] :][: words.scored],
    }
    for name, text in found.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return {name: str(folder / f"{name}.txt") for name in found}


def trained(words: argparse.Namespace, folder: Path) -> Path:
    """The model: four layers, 128 wide, 4000 byte pairs."""
    texts = folder.parent / "texts"
    settings = [
        *(f"data.path={texts}/wiki-train.txt", f"data.valid={texts}/wiki-tune.txt", "data.packing=concat"),
        *("data.tokenizer=bpe", f"data.vocab={words.vocab}", "data.length=128"),
        *(f"dim={words.dim}", "depth=4", "heads=4", "dropout=0.0", "batch.tokens=4096"),
        *("optim.lr=0.002", "schedule.name=cosine", "schedule.warmup=100", "limits.epochs=null"),
        *(f"limits.cpu_minutes={words.minutes}", "evaluate.every=null", f"out={folder}"),
    ]
    mf.train("transformer-lm", settings, on_event=silent)
    return folder


def contest(run: Path, what: str, known: str, tuned: str, scored: str, words: argparse.Namespace) -> Iterator[Row]:
    """The model alone, and with a datastore of the text `known`."""
    folder = run.parent / "stores" / Path(known).stem
    store = build(datastore_job(run, data=known), folder)
    print(f"{folder}: {len(store):,} entries, {store.bytes / 1e6:,.0f} MB", flush=True)
    if len(store) > words.exact and store.index is None:
        make_index(store.keys, folder / INDEX, IVFPQIndex(codes=32, train_keys=100_000))
    store = Datastore(folder)
    best = tune(datastore_job(run), store, data=tuned, neighbours=NEIGHBOURS, max_tokens=words.tuned)
    store.save_settings(best.best)
    print(f"{what}: {best.best}", flush=True)
    found = score_datastore(run, store, best.best, data=scored)
    facts = {"entries": len(store), "bytes": store.bytes, "search": "all keys" if store.index is None else "IVF-PQ"}
    for name, one, speed in (
        ("alone", found.model_scores, found.model_speed),
        ("datastore", found.combined_scores, found.combined_speed),
    ):
        row: Row = {"text": what, "with": name, "tokens a second": speed}
        row |= {score.name: score.value for score in one.scores}
        yield row if name == "alone" else row | facts | best.best._asdict()


def line(row: Row) -> str:
    told = f"{row['text']:<12}{row['with']:<12}{row['perplexity']:11.2f}{row['bits per byte']:11.4f}"
    told += f"{row['tokens a second']:10,.0f}"
    if "entries" in row:
        told += f"  lambda {row['weight']:g}, temperature {row['temperature']:g}, {row['neighbours']} neighbours of "
        told += f"{row['entries']:,} ({row['bytes'] / 1e6:,.0f} MB, {row['search']})"
    return told


def _read(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--wikitext", required=True, help="folder with train.txt.gz, valid.txt.gz and test.txt.gz")
    parser.add_argument("--other", required=True, help="a text of another kind")
    parser.add_argument("--room", default="knn-lm", help="where everything goes [knn-lm]")
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
