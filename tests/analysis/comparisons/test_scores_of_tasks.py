"""`compare` knows every score that `evaluate` computes."""

from pathlib import Path

import pytest

import manyformer as mf
from manyformer.analysis.comparisons.scoring import LIKELIHOOD_SCORES, check_score, score_kind
from manyformer.base.errors import UserError
from manyformer.config import RunConfig, TreesData
from manyformer.data import open_data, open_held_out
from manyformer.data.pipeline.kind import OpenRequest
from manyformer.inference.evaluate.evaluate import score_model
from manyformer.models.tasks import TASKS

SENTENCE = "1\tshe\t_\t_\t_\t_\t2\tnsubj\t_\t_\n2\truns\t_\t_\t_\t_\t0\troot\t_\t_\n\n"


def run_of(recipe: str, **data: object) -> RunConfig:
    return RunConfig.model_validate({"recipe": recipe, "data": data, "batch": {"tokens": 16}})


def test_the_scores_of_a_tagger_can_be_compared(tmp_path: Path) -> None:
    (tmp_path / "a.conllu").write_text(SENTENCE * 20)
    path = str(tmp_path / "a.conllu")
    run = run_of("structural", kind="trees", path=path, valid=path)
    assert isinstance(run.data, TreesData)
    opened = open_data(run.data, "tagged", batch_tokens=16, cache=tmp_path / "data", seed=0)
    model = mf.build("structural", dim=8, depth=1, heads=2, **opened.required_keywords).eval()
    data = open_held_out(run.data, "tagged", OpenRequest(16, tmp_path / "data"), None)
    scores = score_model(model, run, opened.tokenizers, data).scores
    assert {score.name.lower().replace(" ", "_") for score in scores} == {"accuracy", "macro_f1"}
    check_score("macro_f1", run)
    assert score_kind("macro_f1").unit == "%"


def test_images_are_scored_by_dimension() -> None:
    run = run_of("image-transformer", kind="images", path="a.npz")
    check_score("bits_per_dimension", run)
    with pytest.raises(UserError, match=r"\(image-generation\) has no score 'bits_per_character'; it has loss, "):
        check_score("bits_per_character", run)


def test_every_score_of_a_task_has_a_kind() -> None:
    assert all(score_kind(score) for task in TASKS.values() for score in [*task.score_kinds, *LIKELIHOOD_SCORES])
    with pytest.raises(UserError, match="there is no score 'macro_f2'; did you mean macro_f1"):
        score_kind("macro_f2")
