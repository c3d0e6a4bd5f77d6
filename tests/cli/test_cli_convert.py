"""convert: a trained model as another member of the family."""

import json
from pathlib import Path

import pytest
import torch
from commands import Cli

import manyformer as mf
from manyformer.interop import export_model


def test_convert_writes_a_model_that_reads_and_writes_text(cli: Cli, text_run: Path, tmp_path: Path) -> None:
    model = mf.load(text_run)
    dim, out = model.spec.keywords["dim"], tmp_path / "same"
    ended = cli("convert", str(text_run), "--to", "collaborative", f"shared_dim={dim}", "--out", str(out), "--json")
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    assert report["difference"] < 1e-5
    assert {origin["how"] for origin in report["origins"] if origin["kind"] == "derived"} == {
        "heads decomposed, relative error of their products 0.0000"
    }
    converted, tokens = mf.load(out), torch.arange(5, 12)[None]
    assert converted.spec.recipe == "collaborative"
    torch.testing.assert_close(converted(tokens).logits, model(tokens).logits, atol=1e-5, rtol=0)
    assert cli("generate", str(out), "the cat", "--greedy", "--max-new", "5").out.startswith("the cat")


def test_convert_says_what_became_of_each_weight(cli: Cli, text_run: Path, tmp_path: Path) -> None:
    ended = cli("convert", str(text_run), "kernel=favor", "--depth", "3", "--out", str(tmp_path / "new"))
    assert ended.code == 0, ended.err
    for expected in (
        "copied",
        "of layers below",
        "0, so that new layers write nothing",
        "tensors of a kernel of another",
    ):
        assert expected in ended.out
    assert "becomes LinearKernel" in ended.err
    assert "logits of random tokens differ by at most" in ended.out
    assert "train it further: recipe=transformer-lm" in ended.out
    assert "model.kernel=favor" in ended.out


def test_convert_transfers_attention_to_a_new_kernel(cli: Cli, text_run: Path, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("the cat sat on the mat. " * 60)
    words = ["convert", str(text_run), "kernel=hedgehog", "--out", str(tmp_path / "new")]
    for missing in (["--transfer", "2"], ["--data", str(tmp_path / "book.txt")]):
        ended = cli(*words, *missing)
        assert (ended.code, ended.err.count("\n")) == (2, 1)
        assert "--transfer STEPS and --data FILE belong together" in ended.err
    assert "--match weights says what --transfer STEPS imitates" in cli(*words, "--match", "weights").err
    words += ["--transfer", "5", "--data", str(tmp_path / "book.txt"), "--match", "weights"]
    ended = cli(*words, "--json")
    assert ended.code == 0, ended.err
    transfers = json.loads(ended.out)["transfers"]
    assert [layer["name"] for layer in transfers] == [f"body.{n}.attention.inner" for n in range(len(transfers))]
    assert all(layer["after"] < layer["before"] for layer in transfers)
    ended = cli(*words[:-4], "--data", str(tmp_path / "book.txt"), "--out", str(tmp_path / "text"))
    assert "divergence" not in ended.out
    assert "squared error of its output, relative to the mean square" in ended.out
    assert "arXiv:2402.04347" in ended.out
    assert cli("generate", str(tmp_path / "text"), "the cat", "--greedy", "--max-new", "5").out.startswith("the cat")


def test_heads_with_fewer_shared_dimensions_have_an_error(cli: Cli, text_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorly")
    words = ("convert", str(text_run), "--to", "collaborative", "shared_dim=3", "--out", str(tmp_path / "few"))
    ended = cli(*words)
    assert ended.code == 0, ended.err
    assert "relative error of their products 0." in ended.out
    assert "Collaborate Instead of Concatenate" in ended.out
    assert cli(*words).err.startswith("error: ")


def test_a_memory_is_given_to_a_saved_model(cli: Cli, tmp_path: Path) -> None:
    old, out = tmp_path / "old", tmp_path / "new"
    mf.build("transformer-xl", vocab=11, dim=8, depth=2, heads=2, memory_length=4).save(old)
    words = ("convert", str(old), "--to", "memorizing-transformer", "knn_memory_size=64", "block=8", "--out", str(out))
    ended = cli(*words)
    assert ended.code == 0, ended.err
    assert "model.position=xl" in ended.out
    assert mf.load(out).spec.keywords["knn_memory_size"] == 64


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--to", "longfrmer"), "longformer"),
        (("--to", "longformer"), "no conversion makes a longformer of a transformer-lm"),
        (("widow=3",), "window"),
        (("heads=3",), "must be a multiple of heads"),
    ],
)
def test_bad_input_is_a_sentence(
    cli: Cli, text_run: Path, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    ended = cli("convert", str(text_run), *words, "--out", str(tmp_path / "new"))
    assert ended.code == 2
    assert message in ended.err
    assert "Traceback" not in ended.err
    assert not (tmp_path / "new").exists()


def test_a_folder_of_transformers_is_converted(cli: Cli, tmp_path: Path) -> None:
    model = mf.build("llama", vocab=30, dim=16, depth=2, heads=2, head_dim=8)
    export_model(model, tmp_path / "foreign")
    out, tokens = tmp_path / "windows", torch.arange(3, 15)[None]
    ended = cli("convert", str(tmp_path / "foreign"), "window=16", "sinks=2", "--out", str(out))
    assert ended.code == 0, ended.err
    torch.testing.assert_close(mf.load(out)(tokens).logits, model.eval()(tokens).logits)
