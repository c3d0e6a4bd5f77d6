"""What every model says to tokens that are none, and to batches without a token."""

from typing import Any

import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.analysis.own_models import build_tiny
from manyformer.base.errors import UserError
from manyformer.models import GenerativeModel, Model
from manyformer.models.tasks import Task
from manyformer.recipes import RECIPES

OF_TOKENS = sorted(name for name, recipe in RECIPES.items() if recipe.card.task.name != "image-classification")
WITHOUT_TOKENS = {
    *("policy", "trajectories", "graph-nodes", "graphs", "audio-classification", "transcription"),
    *("multimodal-classification", "contrast"),
}
OTHER_SOURCES = {"attention-transcription", "captioning", "class-images", "super-resolution"}


def task_name(recipe: str) -> str:
    return RECIPES[recipe].card.task.name


CALLED_WITH_TOKENS = [name for name in OF_TOKENS if task_name(name) not in WITHOUT_TOKENS]
DECODING = [name for name in CALLED_WITH_TOKENS if "incremental_decoding" in RECIPES[name].card.promises]
LENGTH = 16


def tiny(name: str) -> tuple[Model, Task[Any], int]:
    """The tiny model of the contracts, its task, and a length that it allows."""
    model, task = build_tiny(name, {}, 0).eval(), RECIPES[name].card.task
    return model, task, task.fixed_length(model) or LENGTH


def logits(model: Model, task: Task[Any], tokens: Tensor) -> Tensor:
    return task.call(model, task.example(model, tokens)).logits


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", CALLED_WITH_TOKENS)
def test_tokens_outside_the_vocabulary_are_named(name: str) -> None:
    model, task, length = tiny(name)
    vocab = task.token_ids(model)
    for token in (-1, vocab, 2**40):
        tokens = torch.ones(2, length, dtype=torch.long)
        tokens[1, 3] = token
        with pytest.raises(UserError, match=f"token {token} in row 1, column 3.*0 to {vocab - 1}"):
            logits(model, task, tokens)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", [name for name in CALLED_WITH_TOKENS if task_name(name) not in OTHER_SOURCES])
def test_tokens_that_are_no_rows_of_whole_numbers_are_refused(name: str) -> None:
    model, task, length = tiny(name)
    for tokens in (torch.ones(2, length), torch.ones(length, dtype=torch.long), torch.ones(2, length) > 0):
        with pytest.raises(UserError, match="whole numbers of shape"):
            model(*[tokens] * (2 if task.takes_source else 1))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", OF_TOKENS)
@pytest.mark.parametrize("training", [False, True])
def test_batches_without_tokens_have_empty_logits(name: str, training: bool) -> None:
    model, task, length = tiny(name)
    model.train(training)
    expected = logits(model, task, torch.ones(2, length, dtype=torch.long)).shape
    for rows, columns in ((0, length), (2, 0), (0, 0)):
        empty = logits(model, task, torch.ones(rows, columns, dtype=torch.long))
        assert empty.shape == ((rows, columns, expected[2]) if task.per_token else (rows, expected[1]))
        assert not empty.numel() or empty.isfinite().all()


@pytest.mark.parametrize("name", DECODING)
def test_decoding_steps_accept_no_tokens_and_refuse_unknown_ones(name: str) -> None:
    model, task, _ = tiny(name)
    assert isinstance(model, GenerativeModel)
    vocab = task.token_ids(model)
    with torch.no_grad():
        for rows in (0, 2):
            tokens = torch.ones(rows, 1, dtype=torch.long)
            memory = task.init_state(model, task.example(model, tokens))[0] if task.takes_source else None
            step, state = model.next_token(), model.init_state(rows)
            first, state = step(tokens, state, memory)
            unchanged, state = step(tokens[:, :0], state, memory)
            second, _ = step(tokens, state, memory)
            assert first.shape == second.shape == (rows, 1, unchanged.shape[2])
            assert unchanged.shape[:2] == (rows, 0)
        for token in (-1, vocab):
            with pytest.raises(UserError, match=f"token {token} in row 0, column 0"):
                step(torch.full((2, 1), token), model.init_state(2), memory)


def test_a_batch_without_tokens_does_not_change_what_follows() -> None:
    model = build_tiny("transformer-lm", {}, 0).eval()
    tokens = torch.randint(5, 9, (2, 6))
    state = model.init_state(2)
    first = model(tokens[:, :3], None, state)
    empty = model(tokens[:, :0], None, first.state)
    last = model(tokens[:, 3:], None, empty.state)
    torch.testing.assert_close(torch.cat([first.logits, last.logits], 1), model(tokens).logits)


def test_a_source_without_tokens_is_refused_for_a_target_with_tokens() -> None:
    model, _, _ = tiny("transformer")
    tokens = torch.ones(2, 3, dtype=torch.long)
    with pytest.raises(UserError, match="the source has no tokens"):
        model(tokens[:, :0], tokens)


@pytest.mark.parametrize("name", ["vit", "compose-images"])
def test_no_images_have_no_logits(name: str) -> None:
    """An empty batch has no row of the logits of a full one, whose other sizes it keeps."""
    model, _, _ = tiny(name)
    images = torch.zeros(2, *model.embed.shape, dtype=torch.uint8)
    assert torch.equal(model(images[:0]).logits, model(images).logits[:0])


def test_a_token_of_another_table_is_refused() -> None:
    """Each channel has a table of its own, and token `vocab` would be the first token of the next one."""
    model = mf.build("image-transformer", vocab=20, dim=16, depth=1, heads=2, height=2, width=2, channels=3)
    with pytest.raises(UserError, match="token 20 in row 0"):
        model(torch.full((1, 4), 20))
