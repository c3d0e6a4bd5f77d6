"""`manyformer datastore`, and writing with one: what people and scripts are told, and mistakes in one sentence."""

import json
import random
from pathlib import Path

import pytest
from commands import TEXT, Cli


@pytest.fixture(scope="module")
def store(text_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A datastore of the words of the run's text in pieces of five, so that no passage of the text is in it."""
    from manyformer.inference.datastore import build, datastore_job

    folder, words = tmp_path_factory.mktemp("stores"), TEXT.split()
    starts = random.Random(0).choices(range(20), k=60)
    (folder / "pieces.txt").write_text(" ".join(" ".join(words[start : start + 5]) for start in starts))
    return build(datastore_job(text_run, data=str(folder / "pieces.txt")), folder / "pieces").folder


def test_a_built_datastore_is_described_with_its_size(cli: Cli, text_run: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "store")
    build = ("datastore", "build", str(text_run), "--split", "valid", "--out", out)
    planned = json.loads(cli(*build, "--dry-run", "--json").out)
    assert not Path(out).exists()
    done = cli(*build)
    assert done.code == 0
    assert f"{planned['entries']:,} entries of 32 numbers in float16" in done.err
    assert f"next: manyformer datastore tune {text_run} {out}" in done.out
    again = json.loads(cli(*build, "--json").out)
    assert again == planned | {"done": True}


def test_tuned_scored_and_shown(cli: Cli, text_run: Path, store: Path) -> None:
    words = (str(text_run), str(store))
    grid = ("--neighbours", "4,16", "--weights", "0,0.5", "--temperatures", "1,10", "--max-tokens", "100")
    tuned = json.loads(cli("datastore", "tune", *words, *grid, "--json").out)
    assert len(tuned["all"]) == 8
    assert tuned["best"] == min(tuned["all"], key=lambda row: row["perplexity"])
    scored = json.loads(cli("datastore", "evaluate", *words, "--split", "valid", "--json").out)
    assert {name: scored[name] for name in ("neighbours", "weight", "temperature")} == {
        name: tuned["best"][name] for name in ("neighbours", "weight", "temperature")
    }
    assert scored["datastore"]["perplexity"] < scored["alone"]["perplexity"]
    shown = cli("datastore", "look", *words, "the cat s", "-n", "3", "--weight", "0.5")
    assert shown.code == 0
    assert "followed by" in shown.out
    looked = json.loads(cli("datastore", "look", *words, "the cat s", "-n", "3", "--json").out)
    assert [len(looked[name]) for name in ("guesses", "neighbours")] == [5, 3]
    table = cli("datastore", "evaluate", *words, "--split", "valid")
    assert "with datastore" in table.out


def test_writing_looks_into_it(cli: Cli, text_run: Path, store: Path) -> None:
    words = ("generate", str(text_run), "the cat sat", "--greedy", "--max-new", "12", "--datastore", str(store))
    sure = cli(*words, "--weight", "1.0")
    assert sure.code == 0
    assert sure.out.startswith("the cat sat")
    assert cli(*words, "--weight", "1.0", "--no-cache").out == sure.out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("tune", "{run}", "nowhere"), "there is no datastore nowhere; `manyformer datastore build RUN --out nowhere`"),
        (
            ("tune", "{run}", "{store}", "--weights", "much"),
            "--weights 'much' must be numbers with commas between them",
        ),
        (("look", "{run}", "{store}", "x", "--weight", "2"), "weight (2.0) must lie between 0 and 1"),
        (("look", "{pairs}", "{store}", "x"), "a EncoderDecoder predicts no next tokens"),
        (("build", "{pairs}"), "is not a language model of text, which a datastore needs"),
        (("build", "{run}", "--keys", "middle"), "keys ('middle') must be one of feed-forward, final"),
        (("build", "{run}", "--split", "tset"), "has no split 'tset'; known: train, valid"),
        (("build", "{run}", "--data", "nowhere.txt"), "nowhere.txt"),
        (("build", "nowhere"), "nowhere is not the folder of a run: run.yaml"),
        (("index", "{store}", "--kind", "tree"), "there is no index 'tree'; known: flat, ivfpq"),
        (("look", "{run}", "{store}", "x", "--probe", "3"), "probe (3) is for an index, and "),
    ],
)
def test_datastore_commands_refuse_in_one_sentence(
    cli: Cli, text_run: Path, pairs_run: Path, store: Path, words: tuple[str, ...], sentence: str
) -> None:
    names = {"run": text_run, "pairs": pairs_run, "store": store}
    ended = cli("datastore", *(word.format(**names) for word in words))
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: ")
    assert sentence in ended.err
    assert len(ended.err.splitlines()) == 1


def test_an_index_is_built_and_removed(cli: Cli, text_run: Path, store: Path) -> None:
    pytest.importorskip("faiss")
    indexed = cli("datastore", "index", str(store), "--kind", "flat")
    assert indexed.code == 0
    assert "index.faiss: flat" in indexed.out
    same = [cli("datastore", "look", str(text_run), str(store), "the", *more).out for more in ((), ("--exact",))]
    assert same[0] == same[1]
    assert "removed the index" in cli("datastore", "index", str(store), "--remove").out
    few = cli("datastore", "index", str(store))
    assert (few.code, "quantization is trained on 9,984 keys or more" in few.err) == (2, True)


def test_neighbours_are_found_for_a_model_that_learns_from_them(
    cli: Cli, text_run: Path, store: Path, tmp_path: Path
) -> None:
    out = str(tmp_path / "neighbours")
    words = ("datastore", "neighbours", str(text_run), str(store), "--out", out, "-k", "2", "--min-distance", "3")
    assert json.loads(cli(*words, "--json").out) == {"neighbours": out, "k": 2, "splits": ["train", "valid"]}
    again = cli(*words)
    assert f"next: manyformer train spalm data.neighbours={out}" in again.out
    other = cli(*words[:-1], "9")
    assert (other.code, "holds neighbours from another search" in other.err) == (2, True)
    alone = cli("generate", str(text_run), "the", "--retriever", str(text_run))
    assert (alone.code, alone.err) == (2, "error: --retriever needs a datastore; name one with --datastore\n")
    plain = cli("generate", str(text_run), "the", "--datastore", str(store), "--retriever", str(text_run))
    assert (plain.code, "this model does not use retrieved tokens" in plain.err) == (2, True)
