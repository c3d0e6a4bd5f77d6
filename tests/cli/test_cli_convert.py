"""import, export and convert: models of and for other libraries, and as other members of the family."""

import json
from pathlib import Path

import pytest
import torch
from commands import Cli

import manyformer as mf
from manyformer.conversion.hugging_face import export_model
from manyformer.data.tokenizers.saved_tokenizers import TokenizerPair, train_tokenizer
from manyformer.models.model_files import replacement_folder


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
    assert "manyformer train transformer-lm init_from=" in ended.out
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
def test_convert_refuses_in_one_sentence(
    cli: Cli, text_run: Path, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    ended = cli("convert", str(text_run), *words, "--out", str(tmp_path / "new"))
    assert ended.code == 2
    assert message in ended.err
    assert "Traceback" not in ended.err
    assert not (tmp_path / "new").exists()


def test_a_folder_of_transformers_is_converted(cli: Cli, tmp_path: Path) -> None:
    model = mf.build("llama", vocab=30, dim=16, depth=2, heads=2, head_dim=8)
    export_model(model, tmp_path / "gpt2_folder")
    out, tokens = tmp_path / "windows", torch.arange(3, 15)[None]
    ended = cli("convert", str(tmp_path / "gpt2_folder"), "window=16", "sinks=2", "--out", str(out))
    assert ended.code == 0, ended.err
    torch.testing.assert_close(mf.load(out)(tokens).logits, model.eval()(tokens).logits)


@pytest.fixture
def gpt2_folder(tmp_path: Path) -> Path:
    export_model(mf.build("transformer-lm", vocab=40, dim=16, depth=1, heads=2, max_length=16), tmp_path / "gpt2")
    return tmp_path / "gpt2"


def test_import_makes_a_model_of_a_folder_of_transformers(cli: Cli, gpt2_folder: Path, tmp_path: Path) -> None:
    ended = cli("import", str(gpt2_folder), "--out", str(tmp_path / "model"))
    assert ended.code == 0
    assert "GPT-2" in ended.out
    assert "no tokenizer.json there" in ended.err
    assert mf.load(tmp_path / "model").spec == mf.load(gpt2_folder).spec
    report = json.loads(cli("import", str(gpt2_folder), "--out", str(tmp_path / "again"), "--json").out)
    assert (report["recipe"], report["parameters"]) == ("transformer-lm", 4_208)


def test_import_writes_nothing_where_it_fails(cli: Cli, gpt2_folder: Path, tmp_path: Path) -> None:
    for words, sentence in (
        ([str(tmp_path / "nowhere")], "nowhere"),
        ([str(gpt2_folder)], "model.safetensors is damaged"),
    ):
        (gpt2_folder / "model.safetensors").write_bytes(b"no weights")
        ended = cli("import", *words, "--out", str(tmp_path / "model"))
        assert ended.code == 2
        assert sentence in ended.err
        assert not (tmp_path / "model").exists()
    assert cli("import", str(gpt2_folder), "--out", str(gpt2_folder)).code == 2


def test_a_folder_of_transformers_is_itself_a_model(cli: Cli, gpt2_folder: Path) -> None:
    ended = cli("check", str(gpt2_folder), "--only", "causal")
    assert ended.code == 0
    assert "1 passed" in ended.out


@pytest.fixture
def classifier_run(tmp_path: Path) -> Path:
    """A classifier with names of its labels, a tokenizer and a card, as a run leaves it."""
    model = mf.build("transformer-classifier", vocab=20, classes=2, dim=8, depth=1, heads=2)
    tokenizer = train_tokenizer("char", ["the cat sat"])
    with replacement_folder(tmp_path / "run" / "model") as draft:
        TokenizerPair(tokenizer, tokenizer, ("no", "yes")).save(draft)
        (draft / "README.md").write_text("# A run\n\n| loss | 0.25 |\n")
        model.write_files(draft)
    return tmp_path / "run"


def test_export_makes_a_folder_for_transformers_of_a_run(cli: Cli, classifier_run: Path, tmp_path: Path) -> None:
    ended = cli("export", str(classifier_run), "--to", "hf", "--out", str(tmp_path / "out"))
    assert ended.code == 0, ended.err
    assert "AutoModelForSequenceClassification" in ended.out
    assert "because no class of transformers equals the recipe transformer-classifier" in " ".join(ended.err.split())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["id2label"] == {"0": "no", "1": "yes"}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| loss | 0.25 |" in card
    assert "pipeline_tag: text-classification" in card
    assert mf.load(tmp_path / "out").spec == mf.load(classifier_run).spec


def test_export_says_as_json_what_has_no_tokenizer(cli: Cli, tmp_path: Path) -> None:
    mf.build("transformer-lm", vocab=20, dim=8, depth=1, heads=2).save(tmp_path / "model")
    report = json.loads(cli("export", str(tmp_path / "model"), "--out", str(tmp_path / "out"), "--json").out)
    assert (report["architecture"], report["reason"]) == ("GPT2LMHeadModel", None)
    assert report["tokenizer_reason"] == "the model was saved without a tokenizer"
    assert "Radford et al. 2019" in (tmp_path / "out" / "README.md").read_text()
    ended = cli("export", str(tmp_path / "model"), "--out", str(tmp_path / "out"))
    assert ended.code == 2
    assert "exists already" in ended.err


def test_export_writes_nothing_for_other_kinds_of_models(cli: Cli, tmp_path: Path) -> None:
    mf.build("gcn", features=3, classes=2, dim=4, depth=1).save(tmp_path / "model")
    ended = cli("export", str(tmp_path / "model"), "--out", str(tmp_path / "out"))
    assert ended.code == 2
    assert "gcn is for labelling nodes of graphs; what transformers can have are" in " ".join(ended.err.split())
    assert not (tmp_path / "out").exists()
