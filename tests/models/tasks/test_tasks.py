"""Every task calls its models, makes batches for them, and judges them."""

import math
from pathlib import Path

import pytest
import torch

import manyformer as mf
from manyformer.analysis.own_models import build_tiny, tiny_keywords
from manyformer.base.errors import UserError
from manyformer.config import EvaluateConfig, PairsData, RunConfig
from manyformer.models import BatchScore, Model
from manyformer.models.tasks import TASKS, Inputs, ScoreSums, Task, ToyDraw, register, task_named, task_of_class
from manyformer.training import train

HEADS = {"sentence-pairs": {"classes": 3}, "answer-spans": {}}


def tiny(recipe: str, **more: object) -> Model:
    return mf.build(recipe, **tiny_keywords(recipe), **more).eval()


def model_of(task: Task) -> Model:
    head = {"head": task.name, **HEADS[task.name]} if task.name in HEADS else {}
    return tiny(RECIPES[task.name], **head)


RECIPES = {
    "language-model": "transformer-lm",
    "image-generation": "image-transformer",
    "translation": "transformer",
    "captioning": "captioner",
    "class-images": "image-transformer-classes",
    "super-resolution": "image-transformer-superresolution",
    "multimodal-classification": "multimodal-transformer",
    "contrast": "clip",
    "masked-lm": "bert",
    "classification": "transformer-classifier",
    "tagging": "structural",
    "image-classification": "vit",
    "policy": "gtrxl",
    "trajectories": "decision-transformer",
    "graph-nodes": "gat",
    "transcription": "conformer",
    "attention-transcription": "speech-transformer",
    "graphs": "graph-transformer-classifier",
    "audio-classification": "audio-transformer-classifier",
    "sentence-pairs": "etc",
    "answer-spans": "longformer",
    "masked-diffusion": "mdlm",
    "block-diffusion": "bd3-lm",
}


@pytest.fixture(params=sorted(RECIPES))
def task(request: pytest.FixtureRequest) -> Task:
    return task_named(request.param)


def random_inputs(task: Task, model: Model, rows: int = 2) -> Inputs:
    length = task.fixed_length(model) or 6
    tokens = torch.randint(5, task.token_ids(model), (rows, length))
    return task.example(model, tokens)


def are_equal(part: object, other_part: object) -> bool:
    both_tensors = isinstance(part, torch.Tensor) and isinstance(other_part, torch.Tensor)
    return torch.equal(part, other_part) if both_tensors else part == other_part  # type: ignore[arg-type]


def test_there_is_a_recipe_for_every_task() -> None:
    assert set(TASKS) == set(RECIPES)


def test_a_task_calls_its_models_and_makes_batches(task: Task) -> None:
    model = model_of(task)
    inputs = random_inputs(task, model)
    with torch.no_grad():
        logits = model(*task.arguments(model, inputs)).logits
        # a policy also has a value, which the task appends
        assert torch.equal(task.call(model, inputs).logits[..., : logits.shape[-1]], logits)
        assert logits.ndim == (3 if task.per_token else 2)
        targets = task.random_targets(model, inputs, torch.Generator().manual_seed(0))
        batch = task.batch(model, inputs, targets)
        scored, loss = model.score(batch), model.loss(batch)
    assert int(scored.targets) == batch.target_count() == int(loss.targets) > 0
    # sums over alignments, over pairs of rows and over hidden tokens alone: tests/models/test_speech_recognizer.py,
    # test_multimodal.py and test_diffusion_bound.py
    if task.name == "answer-spans":
        expected = torch.nn.functional.cross_entropy(logits.mT.flatten(0, 1), targets.flatten(), reduction="sum")
        torch.testing.assert_close(scored.nll.float(), expected, rtol=1e-4, atol=1e-4)
    elif task.name not in ("transcription", "contrast", "masked-diffusion", "block-diffusion"):
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
        torch.testing.assert_close(scored.nll.float(), expected, rtol=1e-4, atol=1e-4)
    assert batch.ignored().target_count() == 0


def test_a_task_that_generates_continues_from_a_state(task: Task) -> None:
    model = model_of(task)
    # what hides tokens fills a canvas
    if not task.generates or task.generates == "canvas":
        return
    inputs = random_inputs(task, model)
    with torch.no_grad():
        expected = task.call(model, inputs).logits
        state = task.init_state(model, inputs)
        first = task.call(model, inputs.columns(0, 4), state)
        second = task.call(model, inputs.columns(4, 6), first.state)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), expected)


def test_a_toy_problem_depends_on_its_draw_alone(task: Task) -> None:
    model = model_of(task)
    first, second, other = (
        task.toy(model, ToyDraw.make(torch.Generator().manual_seed(seed), torch.device("cpu"), 24))
        for seed in (0, 0, 1)
    )
    assert all(map(are_equal, first.batch, second.batch))
    assert not all(map(are_equal, first.batch, other.batch))
    with torch.no_grad():
        assert math.isfinite(float(model.loss(first.batch).total))
    assert first.guessing_loss in (
        math.log(2),
        math.log(8),
        math.log(32),
        math.log(3) * (1 - 1 / 24),
        math.log(8) * 4 / 5,
    )


def test_the_task_of_a_class_is_the_one_for_most_kinds_of_data() -> None:
    assert task_of_class(tiny("image-transformer")).name == "language-model"
    assert task_of_class(tiny("bert")).name == "masked-lm"
    assert task_named("language-model").variant("images").name == "image-generation"
    assert task_named("language-model").variant("text").name == "language-model"


def test_an_encoder_decoder_without_a_recipe_reads_text() -> None:
    assert task_of_class(tiny("transformer")).name == "translation"


def test_validation_is_the_mean_over_targets() -> None:
    scores = task_named("language-model").validation(ScoreSums(8 * math.log(2), 8, 2), None)
    assert scores == {"loss": math.log(2), "accuracy": 0.25, "perplexity": pytest.approx(2.0)}
    assert task_named("language-model").validation(ScoreSums(1e9, 1, 0), None)["perplexity"] == math.inf


def test_sums_of_a_task_are_added_up() -> None:
    scores = [BatchScore(*map(torch.tensor, (2.0, 3, 1)), others={"squares": torch.tensor(4.0)}) for _ in range(2)]
    sums = ScoreSums().plus(scores[0]).plus(scores[1])
    assert (sums.nats, sums.targets, sums.correct, sums.others) == (4.0, 6, 2, {"squares": 8.0})
    assert sums.others["cubes"] == 0


def test_a_run_made_by_hand_must_fit_its_recipe(tmp_path: Path) -> None:
    run = RunConfig(recipe="bert", data=PairsData(), evaluate=EvaluateConfig(metric="f1"), out=str(tmp_path))
    with pytest.raises(UserError) as caught:
        train(run)
    kinds = "text or questions or labels or synthetic or sentence-pairs or trees"
    assert str(caught.value).splitlines() == [
        f"data.kind: bert (masked-lm) learns from {kinds}, not from pairs",
        "evaluate.metric: bert (masked-lm) is ranked by loss or accuracy, not by 'f1'",
    ]


def test_unknown_and_repeated_names_are_refused() -> None:
    with pytest.raises(UserError, match="there is no task 'taging'; did you mean tagging"):
        task_named("taging")
    with pytest.raises(UserError, match=r"the task .tagging. of .* exists already"):
        register(type(task_named("tagging"))())
    with pytest.raises(UserError, match="no task is known for a Linear"):
        task_of_class(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_packed_episodes_are_numbered_from_their_beginning() -> None:
    """Two episodes of tokens in one row are two rows with one each, for actions of classes and of vectors alike."""
    for keywords in ({}, {"continuous": True, "actions": 2, "action_low": (-1.0, -1.0), "action_high": (1.0, 1.0)}):
        task = task_named("trajectories")
        model = build_tiny("decision-transformer", keywords, 0).eval()
        tokens = torch.randint(task.token_ids(model), (1, 7), generator=torch.Generator().manual_seed(1))
        segments = torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
        targets = task.random_targets(model, Inputs(tokens), torch.Generator())
        batch = task.batch(model, Inputs(tokens, segments), targets)
        assert batch.timesteps.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
        with torch.no_grad():
            packed = model.score(batch)
            alone = [
                model.score(task.batch(model, Inputs(tokens[:, part]), targets[:, part]))
                for part in (slice(0, 4), slice(4, 7))
            ]
        assert float(packed.nll) == pytest.approx(sum(float(score.nll) for score in alone), rel=1e-5)
