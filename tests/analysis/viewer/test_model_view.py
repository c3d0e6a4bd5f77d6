"""What a page shows of each recipe, and what it says of those that have nothing to show."""

import base64
import json
import re
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pages import ALPHABET, trained

import manyformer as mf
from manyformer.analysis.own_models import build_tiny
from manyformer.analysis.viewer.model_view import shows_rows_of_data, view_image, view_row, view_text
from manyformer.base.errors import UserError
from manyformer.data.tokenizers.pixel_tokenizer import ImageShape, PixelTokenizer
from manyformer.data.tokenizers.saved_tokenizers import train_tokenizer
from manyformer.models.tasks import Task
from manyformer.models.tasks.task import Inputs
from manyformer.nn.batches import GraphBatch
from manyformer.recipes.parts.registry import task_of

WITHOUT_ATTENTION = {name for name, recipe in mf.recipes().items() if "attention_maps" in recipe.card.reasons}


def tiny(name: str) -> Any:
    tokenizer = train_tokenizer("char", [ALPHABET])
    keywords = {"vocab": tokenizer.vocab} if "vocab" in mf.recipes()[name].signature.parameters else {}
    model = build_tiny(name, keywords, 0)
    model.tokenizer = tokenizer
    return model


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", sorted(mf.recipes()))
def test_every_recipe_gives_a_page_or_one_sentence(name: str) -> None:
    model = tiny(name)
    answer = "ba" if task_of(model).takes_source else None
    reads_text = type(task_of(model)).text_passes is not Task.text_passes
    if name in WITHOUT_ATTENTION or not reads_text:
        with pytest.raises(UserError, match="nothing to show" if reads_text else "reads no plain text"):
            view_text(model, "abc")
        return
    view = view_text(model, "abcd abc", answer)
    record = json.loads(json.dumps(view.as_json()))
    assert record["maps"]
    for recorded, attention_map in zip(record["maps"], view.maps, strict=True):
        lengths = [len(record["sequences"][recorded[side]]) for side in ("rows", "columns")]
        assert attention_map.weights.shape == (recorded["heads"], *lengths)


def test_a_map_says_how_its_weights_are_computed_otherwise() -> None:
    causal = view_text(trained("transformer-lm"), "abc").notes["body.0.attention"]
    assert causal.startswith("62% of all pairs have a weight. Computed by sdpa: causal")
    assert "implied" in view_text(trained("linear-transformer"), "abc").notes["body.0.attention"]


def test_the_columns_of_a_linformer_are_slots_also_if_there_are_as_many_as_tokens() -> None:
    model = trained("linformer", projected_length=5, top_projected_length=5, max_length=16)
    view = view_text(model, "abc")
    assert [attention_map.keys for attention_map in view.maps] == ["slots", "slots"]
    assert view.maps[0].columns == tuple(f"slot {number}" for number in range(5))


def test_labels_are_complete_and_visible() -> None:
    view = view_text(trained("transformer-lm"), "a \nb")
    assert view.maps[0].rows == ("<bos>", "a", " ", "↵", "b")


def test_a_text_that_is_too_long_is_refused() -> None:
    with pytest.raises(UserError, match="the input has 2050 tokens, but a page shows at most 2048"):
        view_text(trained("transformer-lm"), "a" * 2049)


def test_a_notebook_shows_the_page_in_a_frame_that_it_cannot_leave(tmp_path: Path) -> None:
    page = mf.view(trained("transformer-lm"), 'a "b" <c>')
    frame = page._repr_html_()
    assert re.fullmatch(r'<iframe srcdoc="[^"<>]*" sandbox="allow-scripts" [^>]*></iframe>', frame)
    page.save(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page.html
    with pytest.raises(UserError, match=r"page.txt must end in .html"):
        page.save(tmp_path / "page.txt")


def test_several_models_are_shown_by_name() -> None:
    torch.manual_seed(0)
    html = mf.view({"first": trained("transformer-lm"), "second": trained("alibi")}, "abc").html
    data = json.loads(html.split('id="data">')[1].split("</script>")[0])
    assert [run["name"] for run in data["runs"]] == ["first", "second"]
    assert data["runs"][1]["title"].startswith("ALiBi, ")


@pytest.mark.parametrize("name", ["vit", "compose-images"])
def test_the_tokens_of_an_image_are_its_patches(name: str) -> None:
    model: Any = build_tiny(name, {}, 0)
    image = np.random.default_rng(0).integers(0, 256, model.embed.shape, dtype=np.uint8)
    view = view_image(model, image)
    assert view.image is not None
    record = view.image.as_json()
    content = zlib.decompress(base64.b64decode(record["pixels"]))
    assert len(content) == 3 * image.shape[0] * image.shape[1]
    patches = [corner for corner in view.image.corners if corner is not None]
    assert len(view.image.corners) == len(view.maps[0].rows) == model.embed.tokens
    assert patches[:2] == [(0, 0), (0, model.embed.patch)]
    with pytest.raises(UserError, match=r"an image of shape .* must have"):
        view_image(model, image[:-1])


def test_the_tokens_of_a_generated_image_are_its_pixels() -> None:
    tokenizer = PixelTokenizer(8, ImageShape(4, 4, 1), (2, 2))
    sizes = {"height": 4, "width": 4, "channels": 1, "block_height": 2, "block_width": 2}
    model = build_tiny("image-transformer-2d", {"vocab": tokenizer.vocab, **sizes}, 0)
    model.tokenizer = tokenizer
    view = view_image(model, np.arange(16, dtype=np.uint8).reshape(4, 4, 1) * 15)
    assert view.image is not None
    # block by block, and the start token is no pixel
    assert view.image.corners[:6] == (None, (0, 0), (0, 1), (1, 0), (1, 1), (0, 2))
    assert view.maps[0].rows[:3] == ("start", "0, 0", "0, 1")
    assert mf.view(model, np.zeros((4, 4, 1), dtype=np.uint8)).html.startswith("<!doctype html>")


ROWS = {
    "structural": "w3 A",
    "decision-transformer": "return 0",
    "graphormer-classifier": "summary 0",
    "graph-transformer-classifier": "node 0",
    "gat": "node 0",
    "graph-transformer": "node 0",
}


@pytest.mark.parametrize("name", ROWS)
def test_what_reads_no_text_shows_a_row_of_its_data(name: str) -> None:
    model = build_tiny(name, {}, 0).eval()
    task, tokens = task_of(model), torch.tensor([[3, 4, 5, 6, 7]])
    batch = task.batch(model, Inputs(tokens), task.random_targets(model, Inputs(tokens), torch.Generator()))
    tokenizers: Any = SimpleNamespace(labels=("A", "B", "C"), source=SimpleNamespace(token=lambda token: f"w{token}"))
    assert shows_rows_of_data(model)
    view = view_row(model, batch, tokenizers)
    assert view.maps[0].rows[0] == ROWS[name]
    for attention_map in view.maps:
        torch.testing.assert_close(attention_map.weights.sum(-1), torch.ones(attention_map.weights.shape[:2]))


def test_a_graph_shows_the_weights_of_its_edges_alone() -> None:
    """The weights of `gat` by its definition: softmax over a node and those that have an edge to it."""
    model: Any = build_tiny("gat", {}, 0).eval()
    features, edges = torch.randn(1, 4, model.embed.features), torch.tensor([[[0, 1], [2, 1], [3, 2]]])
    batch = GraphBatch(features, edges, torch.zeros(1, 4, dtype=torch.long))
    weights = view_row(model, batch, SimpleNamespace()).maps[0].weights  # type: ignore[arg-type]
    has_edge = torch.eye(4, dtype=torch.bool)
    has_edge[edges[0, :, 1], edges[0, :, 0]] = True
    assert torch.equal(weights[0] > 0, has_edge)


def test_models_without_attention_or_images_say_so() -> None:
    model: Any = build_tiny("mlp-mixer", {}, 0)
    with pytest.raises(UserError, match="nothing to show"):
        view_image(model, np.zeros(model.embed.shape, dtype=np.uint8))
    with pytest.raises(UserError, match="language modelling reads no image"):
        view_image(trained("transformer-lm"), np.zeros((4, 4, 1), dtype=np.uint8))


def test_a_memory_stands_before_the_text() -> None:
    text = "abcd abcd efgh abcd efgh abcd aa"
    model = tiny("transformer-xl")
    view = view_text(model, text)
    full = ("<bos>", *text)
    assert view.maps[0].rows == full[16:]
    assert (view.maps[0].columns, view.maps[0].memory, view.maps[0].keys) == (full, 16, "memory")
    # the same as if everything had been read at once: its memory is longer than the text
    weights = []
    tokens = torch.tensor([[1, *model.tokenizer.encode(text)]])
    with torch.no_grad():
        model(tokens, watch=lambda module, name, value: weights.append(value) if name == "weights" else None)
    torch.testing.assert_close(view.maps[0].weights, weights[0][0, :, 16:], rtol=1e-4, atol=1e-6)


def test_compressed_slots_are_no_tokens() -> None:
    view = view_text(tiny("compressive-transformer"), "abcd abcd efgh abcd efgh abcd aa")
    # 16 tokens before: the last 8 are remembered, and the 8 before them are 4 slots of two each
    assert view.maps[0].memory == 12
    assert view.maps[0].columns[:6] == ("slot 0", "slot 1", "slot 2", "slot 3", "c", "d")


def test_tokens_that_were_looked_up_are_shown_with_their_text() -> None:
    text = "abcd abcd efgh abcd efgh abcd aa"
    [neighbours] = [
        shown for shown in view_text(tiny("memorizing-transformer"), text).maps if shown.keys == "neighbours"
    ]
    assert neighbours.part == "body.0.attention.neighbours"
    assert neighbours.columns[-1] == "d aa"
    # at most three for each query and head, all of earlier blocks of four tokens
    assert ((neighbours.weights > 0).sum(-1) <= 3).all()
    for row, query in zip(neighbours.weights.amax(0), range(16, 33)):
        assert not row[query - query % 4 :].any()
    torch.testing.assert_close(neighbours.weights.sum(-1), torch.ones(2, 17))
