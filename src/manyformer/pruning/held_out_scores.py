"""The scores of a model on the validation data of its run, as training computes them."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from manyformer.batches import Batch, to_device
from manyformer.config import EvaluateConfig, RunConfig
from manyformer.data.epochs import HeldOutBatches
from manyformer.data.kind import no_log
from manyformer.evaluate.eval_data import TrainedRun
from manyformer.models import BatchScore, Model
from manyformer.models.model import CarriedState
from manyformer.recipes import get_recipe
from manyformer.train.process_group import SINGLE_PROCESS_GROUP
from manyformer.train.run_training import open_run_data
from manyformer.train.validation import Validator
from manyformer.training_hooks import eval_mode


class HeldOutScores(NamedTuple):
    """The validation data of a run, whose scores `of` a model are computed on."""

    run: RunConfig
    batches: HeldOutBatches

    def of(self, model: Model) -> dict[str, float]:
        """The scores of a model, without dropout."""

        def begin_pass(*, rows_continue: bool) -> Callable[[Batch], BatchScore]:
            carried_state = CarriedState(model, rows_continue=rows_continue)

            def score(batch: Batch) -> BatchScore:
                batch_score = model.score(to_device(batch, model.device), state=carried_state.state_for(batch))
                carried_state.update(batch_score)
                return batch_score

            return score

        task = get_recipe(self.run.recipe).card.task.variant(self.run.data.kind)
        config = EvaluateConfig(metric=self.run.evaluate.metric, batches=self.run.evaluate.batches)
        validator = Validator(begin_pass, self.batches, config, SINGLE_PROCESS_GROUP, task=task)
        with torch.no_grad(), eval_mode(model):
            scores = validator()
        assert scores is not None
        return scores


def held_out_scores(trained: TrainedRun) -> HeldOutScores:
    """The validation data of a trained run, from its prepared files where they suffice."""
    batches = trained.load_split("valid").batches
    if batches is None:
        batches = open_run_data(trained.config, trained.folder, no_log).valid
    return HeldOutScores(trained.config, batches)
