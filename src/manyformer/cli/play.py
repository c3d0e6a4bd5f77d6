"""The commands that act with trained policies: `play` draws an episode, `record` writes many as data."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from manyformer.base.errors import UserError
from manyformer.cli.app import USE, command
from manyformer.cli.console import print_result
from manyformer.cli.model_arguments import model_folder, resolve_device
from manyformer.cli.options import DeviceOption, complete_runs

if TYPE_CHECKING:
    from manyformer.base.environments import Trajectories, VectorEnvironment


@command(
    USE,
    "manyformer play runs/rl-memory-length",
    "manyformer play runs/cartpole --out cartpole.gif --seed 3 --sample",
)
def play(
    run: Annotated[str, Argument(help="The folder of a run of a policy.", autocompletion=complete_runs)],
    *,
    out: Annotated[Path, Option(help="The animation to write: .gif.")] = Path("episode.gif"),
    seed: Annotated[int, Option(min=0, help="Decides the episode.")] = 0,
    sample: Annotated[bool, Option("--sample", help="Draw actions at random instead of taking the likeliest.")] = False,
    milliseconds: Annotated[int, Option(min=20, help="How long each step is shown.")] = 50,
    device: DeviceOption = None,
) -> None:
    """Play an episode with a trained policy and draw it as an animation.

    Environments of gymnasium draw themselves, our own tasks are drawn simply.
    """
    import torch

    from manyformer.analysis.figures.image_sheets import check_animation, write_animation
    from manyformer.base.environments import row_seeds
    from manyformer.data.rollouts import likeliest_actions, play_steps, sample_actions
    from manyformer.inference.evaluate.eval_data import open_policy

    # before the episode is played, so that a wrong suffix costs nothing
    check_animation(out)
    model_folder(run)
    policy = open_policy(run, resolve_device(device))
    environment = policy.make_environment(1, drawn=True)
    # actions are drawn by torch, episodes by their own seeds
    torch.manual_seed(seed)
    select = sample_actions if sample else likeliest_actions
    frames = []
    steps = play_steps(
        environment,
        policy.model,
        row_seeds(seed, 1),
        select,
        before_step=lambda: frames.append(environment.frame()),
    )
    total = sum(float(step.result.rewards[0]) for step, _ in steps)
    environment.close()
    write_animation(frames, out, milliseconds=milliseconds)
    print_result(f"{out}: {policy.environment}, {len(frames):,} steps, return {total:.4g}")


@command(
    USE,
    "manyformer record runs/early runs/late --out episodes.npz",
    "manyformer record runs/cartpole/checkpoints/* --out stages.npz",
    "manyformer record runs/cartpole --random --episodes 200 --out mixed.npz",
    "manyformer record --environment Pendulum-v1 --random --out random.npz",
    "manyformer record runs/cartpole --minari local/cartpole-v0",
)
def record(
    runs: Annotated[
        list[str] | None,
        Argument(
            metavar="[RUN]...",
            help="Folders of runs in one environment, or of checkpoints.",
            autocompletion=complete_runs,
        ),
    ] = None,
    *,
    out: Annotated[Path | None, Option(help="The NumPy archive to write: .npz.")] = None,
    minari: Annotated[str | None, Option(help="The local data set of Minari to write, such as local/pole-v0.")] = None,
    random: Annotated[bool, Option("--random", help="Also record episodes of random actions.")] = False,
    environment: Annotated[str | None, Option(help="The environment of random actions, without a run.")] = None,
    episodes: Annotated[int, Option(min=1, max=100_000, help="Episodes of each run, and of random actions.")] = 100,
    seed: Annotated[int, Option(min=0, help="Decides the episodes and the actions.")] = 0,
    likeliest: Annotated[bool, Option("--likeliest", help="Take the likeliest actions, not random ones.")] = False,
    device: DeviceOption = None,
) -> None:
    """Record episodes of trained policies, or of random actions, as data to learn from without an environment.

    The archive, or the data set of Minari, holds observations, actions, rewards, terminations and truncations of all
    steps, and the length and the source of each episode.
    """
    import torch

    from manyformer.base.environments import make_environment, row_seeds, write_data_set, write_trajectories
    from manyformer.data.rollouts import likeliest_actions, sample_actions
    from manyformer.data.rollouts.episode_recording import RandomPolicy, join_trajectories, record_episodes
    from manyformer.inference.evaluate.eval_data import open_policy

    _check_targets(out, minari)
    for run in runs or ():
        model_folder(run)
    policies = {run: open_policy(run, resolve_device(device)) for run in runs or ()}
    # options are part of what an environment is: they change its length, rewards or observations
    names = {(policy.environment, str(dict(policy.options))) for policy in policies.values()}
    if len(names) > 1 or (policies and environment is not None):
        raise UserError("the episodes of one file are of one environment; give runs of the same, and no --environment")
    if not policies and (environment is None or not random):
        raise UserError("there is nothing to record: give a run, or --environment NAME --random")
    torch.manual_seed(seed)
    first = next(iter(policies.values()), None)
    name = environment if first is None else first.environment
    assert name is not None
    # one row for each episode: all are played side by side
    played_environment = make_environment(name, episodes, None if first is None else first.options)
    actors = {
        run: (policy.model, likeliest_actions if likeliest else sample_actions) for run, policy in policies.items()
    }
    parts = [
        # other seeds for each source, so that no two play the same episodes
        record_episodes(played_environment, model, row_seeds(seed + number, episodes), select, source=source)
        for number, (source, (model, select)) in enumerate(actors.items())
    ]
    if random:
        seeds = row_seeds(seed + len(parts), episodes)
        parts.append(
            record_episodes(
                played_environment, RandomPolicy(played_environment.actions), seeds, sample_actions, source="random"
            )
        )
    recorded = join_trajectories(parts)
    print_result(*(_describe(part, played_environment) for part in parts))
    if out is not None:
        write_trajectories(out, recorded, environment=name, actions=played_environment.actions)
        print_result(f"wrote {out}")
    if minari is not None:
        write_data_set(minari, recorded, played_environment)
        print_result(f"wrote the local data set {minari}")


def _check_targets(out: Path | None, minari: str | None) -> None:
    """Refuse what cannot be written to before any episode is played. Raises UserError."""
    from manyformer.base.environments import check_data_set_name

    if out is None and minari is None:
        raise UserError("there is nowhere to write the episodes to: give --out FILE.npz or --minari NAME")
    if minari is not None:
        check_data_set_name(minari)
    if out is not None and out.suffix != ".npz":
        raise UserError(f"--out {out}: episodes are written as .npz, not as '{out.suffix}'")


def _describe(part: "Trajectories", environment: "VectorEnvironment") -> str:
    returns = part.episode_returns
    return (
        f"{part.source[0]}: {len(part.lengths):,} episodes of {environment.name}, {len(part.rewards):,} steps, "
        f"mean return {returns.mean():.4g} ({returns.min():.4g} to {returns.max():.4g})"
    )
