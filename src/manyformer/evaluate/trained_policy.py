"""A trained policy with the environment that it was trained in."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from manyformer.config import EnvironmentData
from manyformer.environments import VectorEnvironment, make_environment
from manyformer.errors import UserError
from manyformer.evaluate.eval_data import open_run, task_of_run
from manyformer.models import PolicyModel


class TrainedPolicy(NamedTuple):
    """The final model of a run, and the name and the options of its environment."""

    model: PolicyModel
    environment: str
    options: Mapping[str, Any]

    def make_environment(self, rows: int, *, drawn: bool = False) -> VectorEnvironment:
        """The environment with so many rows; with `drawn`, one that renders pictures where it can."""
        return make_environment(self.environment, rows, self.options, drawn=drawn)


def open_policy(run: str | Path, device: str | None) -> TrainedPolicy:
    """The policy that the run in a folder has trained, or that of one of its checkpoints.

    Raises UserError for a run of another task."""
    folder = Path(run).resolve()
    is_checkpoint = folder.parent.name == "checkpoints"
    trained = open_run(folder.parent.parent if is_checkpoint else run)
    data = trained.config.data
    if not isinstance(data, EnvironmentData):
        command = task_of_run(trained.config).command
        problem = f"{run} was trained on {data.kind}, not in an environment"
        raise UserError(f"{problem}; `manyformer {command}` uses its model")
    if is_checkpoint:
        trained = trained._replace(folder=folder)
    # what is trained in an environment is a policy
    model: Any = trained.load_model(device)
    return TrainedPolicy(model, data.environment, data.options)
