"""generate, translate, evaluate, bench: using and judging what was trained."""

import io
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from commands import Cli, sentences

import manyformer as mf
from manyformer.cli import import_commands
from manyformer.cli.app import app
from manyformer.inference.decoding_options import DecodingOptions
from manyformer.inference.evaluate import EvaluationSettings, evaluate
from manyformer.models.scores import bleu


class Piped:
    """Standard input that comes from a pipe."""

    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)

    def isatty(self) -> bool:
        return False


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    return lambda data: monkeypatch.setattr(sys, "stdin", Piped(data))


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody pipes anything in unless a test does."""
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)


def test_generate_writes_what_the_library_does(cli: Cli, text_run: Path) -> None:
    model = mf.load(text_run)
    ended = cli("generate", str(text_run), "the cat", "--greedy", "--max-new", "12")
    assert ended.code == 0, ended.err
    assert ended.out == "the cat" + mf.generate(model, "the cat", max_new=12).text + "\n"
    drawn = cli(
        "generate", str(text_run), "the", "--seed", "3", "--max-new", "9", "--top-k", "5", "--temperature", "1.2"
    )
    assert drawn.out == "the" + mf.generate(model, "the", max_new=9, seed=3, top_k=5, temperature=1.2).text + "\n"
    again = cli(
        "generate", str(text_run), "the", "--seed", "3", "--length", "9", "--top-k", "5", "--temperature", "1.2"
    )
    assert again.out == drawn.out


@pytest.mark.parametrize(
    ("words", "options", "note"),
    [
        ((), {}, "the most probable token each time (--greedy)"),
        (("--greedy",), {"greedy": True}, ""),
        (("--no-greedy", "--seed", "3"), {"greedy": False, "seed": 3}, "sampled at temperature 1"),
        (("--top-k", "5", "--seed", "3"), {"top_k": 5, "seed": 3}, "sampled at temperature 1"),
        (("--temperature", "0.8", "--seed", "3"), {"temperature": 0.8, "seed": 3}, ""),
        (("--temperature", "0"), {"temperature": 0}, ""),
        (("--beam", "3"), {"beam": 3}, ""),
        (("--beam", "3", "--no-repeat-ngram", "2"), {"beam": 3, "no_repeat_ngram": 2}, ""),
        (("--stop-ids", "7", "--stop-ids", "8"), {"stop_ids": (7, 8)}, "the most probable token each time"),
    ],
)
def test_generate_writes_what_the_function_writes_with_the_same_options(
    cli: Cli, text_run: Path, words: tuple[str, ...], options: dict[str, Any], note: str
) -> None:
    ended = cli("generate", str(text_run), "the", "--max-new", "12", *words)
    assert ended.out == "the" + mf.generate(mf.load(text_run), "the", max_new=12, **options).text + "\n"
    assert note in ended.err
    assert bool(ended.err) == bool(note)


def test_generate_has_the_options_of_decoding_with_their_meanings() -> None:
    import_commands()
    helps = {option.name: option.help for option in typer.main.get_command(app).commands["generate"].params}
    for name, annotation in DecodingOptions.__annotations__.items():
        assert (name in helps) == (name != "use_cache")
        assert helps.get(name, annotation.__metadata__[-1]).startswith(annotation.__metadata__[-1])


def test_generate_is_the_same_without_its_cache(cli: Cli, text_run: Path) -> None:
    words = ("generate", str(text_run), "the cat", "--greedy", "--max-new", "12", "--stats")
    ended, bare = cli(*words), cli(*words, "--no-cache")
    assert ended.out == bare.out
    assert "12 tokens" in ended.err
    assert "without cache" in bare.err


def test_generate_reads_a_pipe(cli: Cli, text_run: Path, pipe: Callable[[bytes], None]) -> None:
    words = ("--greedy", "--max-new", "5")
    expected = cli("generate", str(text_run), "the cat", *words).out
    for given in ((), ("-",)):
        pipe(b"the cat\n")
        assert cli("generate", str(text_run), *given, *words).out == expected
    pipe(b"the cat\nthe dog\n\n")
    records = [
        json.loads(line) for line in cli("generate", str(text_run), "--lines", "--json", *words).out.splitlines()
    ]
    assert [record["prompt"] for record in records] == ["the cat", "the dog"]
    assert records[0]["prompt"] + records[0]["text"] + "\n" == expected
    # lines end as those of files do, and an empty one that is left out is told
    pipe("the\u2028cat\r\n\nthe\x0cdog\x85\n".encode())
    ended = cli("generate", str(text_run), "--lines", "--json", *words)
    prompts = [json.loads(line)["prompt"] for line in ended.out.split("\n") if line]
    assert prompts == ["the\u2028cat", "the\x0cdog\x85"]
    assert "1 empty line of standard input (first: line 2) left out" in ended.err
    pipe(b"\xff\xfe")
    ended = cli("generate", str(text_run))
    assert ended.code == 2
    assert "byte 0" in ended.err


def test_generate_several_texts(cli: Cli, text_run: Path) -> None:
    out = cli("generate", str(text_run), "the", "--samples", "2", "--seed", "5", "--max-new", "4").out
    assert out.count("--- text") == 2
    assert "seed 5" in out
    assert "seed 6" in out
    beams = cli(
        "generate", str(text_run), "the", "--beam", "3", "--samples", "2", "--max-new", "4", "--json"
    ).out.splitlines()
    scores = [json.loads(line)["score"] for line in beams]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--greedy", "--top-k", "3"), "--top-k is for sampling"),
        (("--beam", "3", "--temperature", "0.5"), "--temperature is for sampling, and --beam does not sample"),
        (("--greedy", "--temperature", "0.5"), "--temperature is for sampling, and --greedy does not sample"),
        (("--greedy", "--samples", "2"), "--samples is for sampling"),
        (("--no-greedy", "--beam", "2"), "beam search does not sample: leave out greedy"),
        (("--beam", "2", "--best", "2", "--samples", "2"), "--samples and --best both say how many"),
        (("--best", "2"), "best is for beam search: give beam as well"),
        (("--greedy", "--beam", "2"), "--greedy and --beam choose tokens in two ways"),
        (("--beam", "2", "--top-p", "0.5"), "--top-p is for sampling"),
        (("--top-p", "7"), "7"),
        (("--max-new", "1000"), "the model allows 64"),
        (("--temperature", "-1"), "temperature"),
        (("--device", "tpu"), "--device tpu is not available; available: cpu"),
    ],
)
def test_generate_refuses_what_makes_no_sense(cli: Cli, text_run: Path, words: tuple[str, ...], said: str) -> None:
    ended = cli("generate", str(text_run), "the", *words)
    assert ended.code == 2
    assert said in ended.err
    assert ended.out == ""


def test_a_prompt_that_is_too_long_is_cropped_on_request(cli: Cli, text_run: Path) -> None:
    prompt = "the cat sat on the mat " * 40
    refused = cli("generate", str(text_run), prompt, "--greedy", "--max-new", "4")
    assert refused.code == 2
    assert "leave out its beginning with crop" in refused.err
    cropped = cli("generate", str(text_run), prompt, "--greedy", "--max-new", "4", "--crop")
    assert cropped.code == 0, cropped.err
    assert cropped.out.startswith(prompt)


def test_models_are_used_for_what_they_can_do(cli: Cli, text_run: Path, pairs_run: Path, labels_run: Path) -> None:
    assert "`manyformer generate`" in cli("translate", str(text_run), "x").err
    assert "does not generate text" in cli("generate", str(labels_run), "x").err
    assert cli("generate", str(pairs_run), "red tan", "--greedy").code == 0


def test_translate_a_text_a_file_and_a_pipe(
    cli: Cli, pairs_run: Path, tmp_path: Path, pipe: Callable[[bytes], None]
) -> None:
    model = mf.load(pairs_run)
    texts = ["red tan sun", "", "box"]
    wanted = [answers.text for answers in _translated(model, texts)]
    assert cli("translate", str(pairs_run), texts[0]).out == f"{wanted[0]}\n"
    file = tmp_path / "in.txt"
    file.write_text("\n".join(texts) + "\n")
    assert cli("translate", str(pairs_run), "--input", str(file)).out.splitlines() == wanted
    pipe(file.read_bytes())
    assert cli("translate", str(pairs_run)).out.splitlines() == wanted
    ended = cli("translate", str(pairs_run), "box", "--n-best", "2", "--stats")
    assert [line.split("\t")[0] for line in ended.out.splitlines()] == ["1", "1"]
    assert "tokens/s" in ended.err
    record = json.loads(cli("translate", str(pairs_run), "box", "--json").out)
    assert record["answers"][0]["text"] == wanted[2]
    ended = cli("translate", str(pairs_run), texts[0], "--step-path", "static", "--stats")
    assert ended.out == f"{wanted[0]}\n"
    assert "static" in ended.err
    ended = cli("translate", str(pairs_run), texts[0], "--step-path", "graph")
    assert (ended.code, "CUDA graphs need a CUDA device" in ended.err) == (2, True)
    assert cli("translate", str(pairs_run), "box", "--input", str(file)).code == 2
    assert "no-file" in cli("translate", str(pairs_run), "--input", "no-file").err


def _translated(model: object, texts: list[str]) -> list[object]:
    from manyformer.inference.generate import Translator, decoding_from_options

    decoding = decoding_from_options(beam=4, length_penalty=0.6)
    return [answers[0] for answers in Translator(model, tokenizer=model.tokenizer, decoding=decoding)(texts)]


def test_translate_asks_a_person(cli: Cli, pairs_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter(["box"])

    def asked(mark: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", asked)
    ended = cli("translate", str(pairs_run))
    assert ended.code == 0
    assert ended.out == cli("translate", str(pairs_run), "box").out


def test_text_is_scored_as_by_hand(cli: Cli, text_run: Path, tmp_path: Path) -> None:
    """One short document in one row: the loss of the model itself says what the scores must be."""
    text = "the dog sat by the tree"
    (tmp_path / "other.txt").write_text(text)
    record = json.loads(cli("evaluate", str(text_run), "--data", str(tmp_path / "other.txt"), "--json").out)
    model = mf.load(text_run)
    words = model.tokenizer
    ids = torch.tensor([[words.bos, *words.encode(text), words.eos]])
    logits = model(ids[:, :-1]).logits.detach().log_softmax(-1)
    nats = -float(logits.gather(2, ids[:, 1:, None]).sum())
    actual = {score["name"]: score["value"] for score in record["scores"]}
    count = ids.shape[1] - 1
    assert actual["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-4)
    assert actual["bits per character"] == pytest.approx(nats / math.log(2) / len(text), rel=1e-4)
    right = float((logits.argmax(-1) == ids[:, 1:]).float().mean())
    assert actual["token accuracy"] == pytest.approx(100 * right, abs=1e-3)


def test_the_validation_score_is_that_of_training(cli: Cli, text_run: Path) -> None:
    record = json.loads(cli("evaluate", str(text_run), "--split", "valid", "--json").out)
    scores = json.loads((text_run / "result.json").read_text())["scores"]
    actual = {score["name"]: score["value"] for score in record["scores"]}
    assert actual["perplexity"] == pytest.approx(scores["perplexity"], rel=1e-4)
    assert actual["bits per byte"] == pytest.approx(scores["bits_per_byte"], rel=1e-4)


def test_translations_are_scored_against_their_references(cli: Cli, pairs_run: Path, tmp_path: Path) -> None:
    rows = [("red tan sun", "nus nat der"), ("box cup fig", "gif puc xob")]
    (tmp_path / "a.txt").write_text("".join(f"{x}\n" for x, _ in rows))
    (tmp_path / "b.txt").write_text("".join(f"{y}\n" for _, y in rows))
    words = ("--data", str(tmp_path / "a.txt"), "--data", str(tmp_path / "b.txt"), "--tokenize", "char")
    ended = cli("evaluate", str(pairs_run), *words)
    assert ended.code == 0, ended.err
    texts = [answer.text for answer in _translated(mf.load(pairs_run), [x for x, _ in rows])]
    wanted = bleu(texts, [y for _, y in rows], tokenize="char")
    assert f"{wanted.value:.2f}" in ended.out
    assert wanted.signature in ended.out
    assert "beam 4, length penalty 0.6" in ended.out
    actual = evaluate(pairs_run, split="valid", settings=EvaluationSettings(beam=1))
    assert {score.name for score in actual.scores} >= {"BLEU", "chrF", "TER", "exact", "perplexity"}
    assert "beam 1" in actual.how


def test_labels_are_scored_and_unknown_ones_count_as_missed(cli: Cli, labels_run: Path, tmp_path: Path) -> None:
    model = mf.load(labels_run)
    texts = ["red tan sun", "box", "oak oak oak"]
    names = json.loads((labels_run / "model" / "labels.json").read_text())
    actual = []
    for text in texts:
        ids = torch.tensor([[1, *model.tokenizer.encode(text), 2]])
        actual.append(names[int(model(ids).logits.argmax())])
    (tmp_path / "x.tsv").write_text("".join(f"{x}\t{y}\n" for x, y in zip(texts, [actual[0], "never seen", actual[2]])))
    record = json.loads(cli("evaluate", str(labels_run), "--data", str(tmp_path / "x.tsv"), "--json").out)
    scores = {score["name"]: score["value"] for score in record["scores"]}
    assert scores["accuracy"] == pytest.approx(200 / 3)


def test_words_are_labelled_and_scored_as_by_hand(
    cli: Cli, trees_run: Path, tmp_path: Path, pipe: Callable[[bytes], None]
) -> None:
    text = sentences(7).replace("2\tsee\t_\tVERB", "2-3\tsee cats\t_\t_\t_\t_\t_\t_\t_\t_\n2\tsee\t_\tVERB")
    (tmp_path / "new.conllu").write_text(text)
    ended = cli("predict", str(trees_run), str(tmp_path / "new.conllu"))
    assert ended.code == 0, ended.err
    given, predicted = ([line.split("\t") for line in one.rstrip("\n").split("\n")] for one in (text, ended.out))
    assert [row[:7] + row[8:] for row in predicted] == [row[:7] + row[8:] for row in given]
    words = [(old[7], new[7]) for old, new in zip(given, predicted) if old[0].isdecimal()]
    assert {new for _, new in words} <= {"nsubj", "obj", "root"}
    # what stands in the column is not looked at, and need not even be there
    pipe(text.replace("nsubj", "_").replace("obj", "x").encode())
    assert cli("predict", str(trees_run), "-").out == ended.out
    right = 100 * sum(old == new for old, new in words) / len(words)
    scored = json.loads(cli("evaluate", str(trees_run), "--data", str(tmp_path / "new.conllu"), "--json").out)
    assert scored["task"] == "tagging"
    assert scored["scores"][0]["value"] == pytest.approx(right)
    assert "21 words, each told the tree of its sentence" in scored["how"]


def test_tag_and_evaluate_say_what_is_wrong_with_trees(
    cli: Cli, trees_run: Path, labels_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "odd.conllu").write_text(sentences(2).replace("obj", "iobj"))
    (tmp_path / "ring.conllu").write_text(sentences(1).replace("\t0\troot", "\t1\troot"))
    for words, said in (
        (
            ("evaluate", str(trees_run), "--data", str(tmp_path / "odd.conllu")),
            "label 'iobj' does not occur in the training data; did you mean",
        ),
        (
            ("predict", str(trees_run), str(tmp_path / "ring.conllu")),
            "(sentence s0): the heads of the words 1, 2 form a cycle",
        ),
        (("tag", str(trees_run), str(tmp_path / "odd.conllu")), "`manyformer tag` is now `manyformer predict`"),
    ):
        ended = cli(*words)
        assert ended.code == 2
        assert said in ended.err


def test_bleu_by_source_length_is_that_of_each_range(cli: Cli, pairs_run: Path, tmp_path: Path) -> None:
    rows = [("red tan", "nat der"), ("box", "xob"), ("cup fig box", "xob gif puc"), ("tan red", "der nat")]
    (tmp_path / "a.txt").write_text("".join(f"{x}\n" for x, _ in rows))
    (tmp_path / "b.txt").write_text("".join(f"{y}\n" for _, y in rows))
    words = ("--data", str(tmp_path / "a.txt"), "--data", str(tmp_path / "b.txt"), "--tokenize", "char")
    picture, other = tmp_path / "lengths.svg", tmp_path / "other"
    shutil.copytree(pairs_run, other)
    ended = cli(
        *("evaluate", str(pairs_run), *words, "--lengths", "1,2,9", "--json"),
        *("--beside", str(other), "--out", str(picture)),
    )
    assert ended.code == 0, ended.err
    record = json.loads(ended.out)
    texts = [answer.text for answer in _translated(mf.load(pairs_run), [x for x, _ in rows])]
    by_name = {score["name"]: score for score in record["scores"]}
    for name, chosen in (("1 to 1", [1]), ("2 to 2", [0, 3]), ("3 to 9", [2])):
        expected = bleu([texts[n] for n in chosen], [rows[n][1] for n in chosen], tokenize="char")
        assert by_name[f"BLEU, {name} words"]["value"] == expected.value
        assert by_name[f"BLEU, {name} words"]["signature"].endswith(f"|sources:{name} words|texts:{len(chosen)}")
    assert [other["scores"] for other in record["beside"]] == [record["scores"]]
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--lengths", "5,3"), "--lengths (5,3) must be ascending whole numbers"),
        (("--lengths", "a"), "--lengths (a) must be ascending whole numbers"),
        (("--out", "x.png"), "give its ranges"),
    ],
)
def test_ranges_of_lengths_that_cannot_be(cli: Cli, pairs_run: Path, words: tuple[str, ...], problem: str) -> None:
    ended = cli("evaluate", str(pairs_run), *words)
    assert ended.code == 2
    assert problem in ended.err


def test_evaluate_says_what_is_missing(cli: Cli, text_run: Path, tmp_path: Path) -> None:
    assert "no test data" in cli("evaluate", str(text_run), "--split", "test").err
    assert "for models that write a text for a text" in cli("evaluate", str(text_run), "--lengths", "3").err
    assert "either a split or data" in cli("evaluate", str(text_run), "--split", "valid", "--data", "x").err
    mf.load(text_run).save(tmp_path / "bare")
    assert "has no tokenizer" in cli("evaluate", str(tmp_path / "bare")).err
    assert "without a tokenizer" in cli("generate", str(tmp_path / "bare"), "x").err
    (tmp_path / "bare" / "model.safetensors").write_bytes(b"damaged")
    assert "is damaged" in cli("generate", str(tmp_path / "bare"), "x").err


def test_bench_is_tables_files_and_json(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = (
        "bench",
        "compose:norm_order=post",
        "dim=16",
        "--depth",
        "1",
        "heads=2",
        "--lengths",
        "8:16",
        "--rounds",
        "1",
    )
    ended = cli(*words, "--what", "forward")
    assert ended.code == 0, ended.err
    assert "growth over the longer half" in ended.out
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "bench.csv").read_text().count("\n") == 5
    record = json.loads(cli(*words, "--what", "forward", "--json", "--against", "none").out)
    assert [cell["length"] for cell in record["cells"]] == [8, 16]
    assert record["candidates"] == [
        {"label": "compose:norm_order=post", "recipe": "compose", "keywords": {"norm_order": "post"}}
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("compse",), "did you mean compose or compose-images?"),
        (("compose", "--lengths", "9:3"), "is empty"),
        (("compose", "--lengths", "many"), "neither a number nor a range"),
        (("compose", "--what", "fwd"), "did you mean forward?"),
        (("compose", "dimm=3"), "did you mean dim"),
        (("compose", "--lengts", "8"), "(or the option --lengths?)"),
        (("compose:norm_order=psot",), "did you mean pre"),
    ],
)
def test_bench_refuses_with_the_nearest_right_word(cli: Cli, words: tuple[str, ...], said: str) -> None:
    ended = cli("bench", *words)
    assert ended.code == 2
    assert said in ended.err or "did you mean post?" in ended.err
