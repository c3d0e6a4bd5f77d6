"""`caption`: image files described from the command line; a captioner is evaluated, and refused elsewhere."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import TINY, Cli, train
from PIL import Image

import manyformer as mf
from manyformer.inference.generate import SourceBatch, answer_sources, decoding_from_options


@pytest.fixture(scope="session")
def captions_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A captioner of dark and bright images, hardly trained."""
    folder = tmp_path_factory.mktemp("captions")
    bright = np.arange(40) % 2
    images = (bright[:, None, None] * 155 + np.arange(64).reshape(8, 8)).astype(np.uint8)
    np.savez(
        folder / "images.npz", images=images, texts=np.array(["a dark image", "bright"])[bright], test=np.arange(8)
    )
    return train(folder, "captioner", "data.path=images.npz", "patch=4", "batch.tokens=600", *TINY)


def test_images_of_any_square_size_get_captions(cli: Cli, captions_run: Path, tmp_path: Path) -> None:
    pixels = np.full((8, 8), 200, dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    Image.fromarray(pixels).resize((32, 32)).save(tmp_path / "b.png")
    ended = cli("caption", str(captions_run), str(tmp_path), "--max-new", "5")
    assert ended.code == 0, ended.err
    lines = [line.split("\t") for line in ended.out.splitlines()]
    assert [Path(name).name for name, _ in lines] == ["a.png", "b.png"]
    model = mf.load(captions_run)
    sources = SourceBatch(torch.from_numpy(pixels)[None, ..., None], None)
    decoding = decoding_from_options(beam=4, length_penalty=0.6, max_new=5)
    expected = answer_sources(model, sources, decoding=decoding).text  # type: ignore[arg-type]
    assert [text for _, text in lines] == [expected] * 2
    best = cli(
        "caption", str(captions_run), str(tmp_path / "a.png"), "--n-best", "2", "--max-new", "5"
    ).out.splitlines()
    assert len(best) == 2
    record = json.loads(cli("caption", str(captions_run), str(tmp_path / "a.png"), "--max-new", "5", "--json").out)
    assert record["captions"][0]["text"] == expected


def test_a_captioner_is_evaluated_and_seen(cli: Cli, captions_run: Path) -> None:
    ended = cli("evaluate", str(captions_run), "--json")
    assert ended.code == 0, ended.err
    scores = json.loads(ended.out)["scores"]
    page = captions_run / "page.html"
    assert cli("view", str(captions_run), "--out", str(page)).code == 0
    assert "<html" in page.read_text()
    assert {"BLEU", "chrF", "perplexity"} <= {score["name"] for score in scores}


def test_other_runs_images_and_commands_are_refused(
    cli: Cli, captions_run: Path, pairs_run: Path, tmp_path: Path
) -> None:
    Image.fromarray(np.zeros((8, 9), dtype=np.uint8)).save(tmp_path / "wide.png")
    for words, sentence in (
        (("caption", str(captions_run), str(tmp_path / "wide.png")), "this image is 8 x 9, and the model reads 8 x 8"),
        (("caption", str(captions_run), str(tmp_path / "none.png")), "none.png"),
        (("caption", str(pairs_run), str(tmp_path / "wide.png")), "it is for translation"),
        (("translate", str(captions_run), "x"), "`manyformer caption`"),
        (("generate", str(captions_run), "x"), "`manyformer caption`"),
        (("predict", str(captions_run), str(tmp_path)), "`manyformer caption"),
    ):
        ended = cli(*words)
        assert ended.code == 2, words
        assert sentence in ended.err
