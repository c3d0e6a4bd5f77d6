"""Environments: many episodes side by side, of our own memory tasks or of gymnasium, and recorded episodes."""

from manyformer.base.environments.environment_names import OWN_ENVIRONMENTS, make_environment
from manyformer.base.environments.graph_tasks import GraphTask
from manyformer.base.environments.recorded_episodes import (
    Trajectories,
    check_data_set_name,
    write_data_set,
    write_trajectories,
)
from manyformer.base.environments.vector_environment import EnvironmentStep, VectorEnvironment, row_seeds

__all__ = [
    "OWN_ENVIRONMENTS",
    "EnvironmentStep",
    "GraphTask",
    "Trajectories",
    "VectorEnvironment",
    "check_data_set_name",
    "make_environment",
    "row_seeds",
    "write_data_set",
    "write_trajectories",
]
