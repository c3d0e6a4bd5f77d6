"""`manyformer play`: draw an episode of a trained policy."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from manyformer.cli.app import USE, command
from manyformer.cli.console import print_result
from manyformer.cli.model_arguments import model_folder, resolve_device
from manyformer.cli.shared_options import DeviceOption
from manyformer.cli.shell_completion import complete_runs


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

    from manyformer.environments import row_seeds
    from manyformer.evaluate.trained_policy import open_policy
    from manyformer.rollouts import likeliest_actions, play_steps, sample_actions
    from manyformer.view.image_sheets import check_animation, write_animation

    check_animation(out)
    model_folder(run)
    policy = open_policy(run, resolve_device(device))
    environment = policy.make_environment(1, drawn=True)
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
