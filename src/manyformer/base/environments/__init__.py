"""Environments by name: many episodes side by side, of our own tasks or of gymnasium, and recorded episodes."""

import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from manyformer.base.environments.memory_tasks import (
    GraphTask,
    GraphWalk,
    HiddenVelocityCartPole,
    MemoryLengthTask,
    RepeatPrevious,
    StitchMaze,
    TMazeActive,
    TMazePassive,
)
from manyformer.base.environments.recorded_episodes import (
    Trajectories,
    check_data_set_name,
    write_data_set,
    write_trajectories,
)
from manyformer.base.environments.vector_environment import (
    ArrayEnvironment,
    EnvironmentStep,
    VectorEnvironment,
    row_seeds,
)
from manyformer.base.errors import UserError, suggest_names

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


OWN_ENVIRONMENTS: dict[str, type[ArrayEnvironment]] = {
    kind.name: kind
    for kind in (
        MemoryLengthTask,
        TMazePassive,
        TMazeActive,
        RepeatPrevious,
        HiddenVelocityCartPole,
        GraphWalk,
        StitchMaze,
    )
}
"""The tasks that need no other package, by name."""

MAX_OPTION = 1_000_000
"""The largest value of an option of our own tasks."""


def make_environment(
    name: str, rows: int, options: Mapping[str, Any] | None = None, *, drawn: bool = False
) -> VectorEnvironment:
    """An environment of `rows` rows: one of our own tasks, or the environment of gymnasium with this id.

    `options` are keywords of the task or of `gymnasium.make`; `drawn` asks gymnasium for pictures. Raises UserError
    for unknown names and options, for a package that is missing, and for spaces that no policy here can have.
    """
    if name in OWN_ENVIRONMENTS:
        kind = OWN_ENVIRONMENTS[name]
        return kind(rows, **_checked_options(kind, dict(options or {})))
    # gymnasium would import the module itself, which only --import and `import:` may do
    if ":" in name:
        module, _, plain_name = name.partition(":")
        raise UserError(f"the environment '{name}' names a module; write {plain_name}, and import: {module}")
    return _make_gymnasium(name, rows, dict(options or {}), drawn=drawn)


def _checked_options(kind: type[ArrayEnvironment], options: dict[str, Any]) -> dict[str, Any]:
    keywords = [name for name in inspect.signature(kind).parameters if name != "rows"]
    for name, value in options.items():
        if name not in keywords:
            raise UserError(f"{kind.name} has no option '{name}'; {suggest_names(name, keywords)}")
        # bool is an int, too, and no option here is a switch
        if type(value) is not int or not 1 <= value <= MAX_OPTION:
            raise UserError(f"{kind.name}: {name} is {value!r}, but it is a whole number from 1 to {MAX_OPTION:,}")
    return options


def _make_gymnasium(name: str, rows: int, options: dict[str, Any], *, drawn: bool) -> VectorEnvironment:
    try:
        import gymnasium
    except ImportError as error:
        install = 'pip install "manyformer[rl]" installs gymnasium, which has many others'
        names = suggest_names(name, OWN_ENVIRONMENTS)
        raise UserError(f"there is no environment '{name}' of our own ({names}); {install}") from error
    from manyformer.base.environments.gymnasium_environment import GymnasiumEnvironment

    if drawn:
        options["render_mode"] = "rgb_array"
    try:
        gymnasium.spec(name)
    except gymnasium.error.Error as error:
        suggestion = _suggest_close(name, [*OWN_ENVIRONMENTS, *gymnasium.registry])
        raise UserError(f"there is no environment '{name}'; {suggestion}") from error
    # its checker would warn about each copy again
    make = partial(gymnasium.make, name, disable_env_checker=True, **options)
    return GymnasiumEnvironment(name, make, rows)


def _suggest_close(name: str, valid_names: Iterable[str]) -> str:
    """The nearest names, or our own tasks if none is near: gymnasium knows too many to list them."""
    suggestion = suggest_names(name, valid_names)
    if suggestion.startswith("did"):
        return suggestion
    return suggest_names("", OWN_ENVIRONMENTS)
