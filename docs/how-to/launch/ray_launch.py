"""Train on the nodes of a Ray cluster, and go on where nodes are lost. Submitted as a job:

ray job submit --working-dir . -- python ray_launch.py mine.yaml strategy=fsdp out=/shared/runs/mine
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import yaml


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a run on a Ray cluster.")
    parser.add_argument("run", help="run file or recipe, as for `manyformer train`")
    parser.add_argument("settings", nargs="*", help="settings such as out=/shared/runs/mine, which all nodes must see")
    parser.add_argument("--processes", type=int, default=16, help="processes, one for each GPU")
    parser.add_argument("--least", type=int, help="go on with so few where no more are left; default: all of them")
    parser.add_argument("--cpu", action="store_true", help="processes on CPUs instead of GPUs")
    parser.add_argument("--cpus-per-process", type=int, default=1, help="CPUs reserved for each process")
    parser.add_argument("--retries", type=int, default=10, help="lost nodes and crashes that the run survives")
    parser.add_argument("--patience", type=float, default=600, help="seconds to wait for the first processes")
    return parser.parse_intermixed_args()


def end_with_mistake(sentence: str) -> NoReturn:
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)


def checked_run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The run's settings, read here: a mistake in them ends the job before anything of the cluster is reserved."""
    command = [sys.executable, "-m", "manyformer", "train", arguments.run, *arguments.settings, "--print-config"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    run: dict[str, Any] = yaml.safe_load(done.stdout)
    if not Path(run["out"]).is_absolute():
        # Ray runs jobs in a copy of the folder, each node in its own
        end_with_mistake(f"out={run['out']} must be an absolute path, of a folder that all nodes see")
    return run


def wait_for_nodes(resources: dict[str, float], processes: int, seconds: float) -> None:
    """Wait until the cluster can hold all processes, or has started nodes for them; not in silence, not for ever."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([resources] * processes)
    if not group.wait(10):
        print(f"waiting for {processes} x {resources}; the cluster has {ray.cluster_resources()}", flush=True)
        if not group.wait(seconds - 10):
            sys.exit(f"there was no room for {processes} x {resources} in {seconds:g} seconds (--patience)")
    remove_placement_group(group)


def train_in_group(arguments: dict[str, Any]) -> str:
    """One process of the training, which Ray Train has joined with the others; returns the user's mistake, if any."""
    import manyformer as mf
    from manyformer.base.errors import UserError
    from manyformer.training.process_group import ProcessFailed

    # this node's copy of the submitted folder: Ray Train starts its processes elsewhere
    os.chdir(Path(__file__).parent)
    try:
        mf.train(arguments["run"], arguments["settings"])
    except ProcessFailed:
        # another process has failed: Ray Train starts all of them again
        raise
    except UserError as error:
        # all processes would meet it again: not raised, so that Ray Train does not try
        return str(error)
    return ""


def main() -> None:
    arguments = parsed_arguments()
    run = checked_run(arguments)

    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init()
    resources = {"CPU": arguments.cpus_per_process} | ({} if arguments.cpu else {"GPU": 1})
    least = arguments.least or arguments.processes
    wait_for_nodes(resources, least, arguments.patience)
    out = Path(run["out"])
    trainer = TorchTrainer(
        train_in_group,
        train_loop_config={"run": arguments.run, "settings": arguments.settings},
        torch_config=TorchConfig(timeout_s=int(60 * run["process_timeout"])),
        scaling_config=ScalingConfig(
            num_workers=least if least == arguments.processes else (least, arguments.processes),
            use_gpu=not arguments.cpu,
            resources_per_worker=resources,
        ),
        run_config=RunConfig(
            name=f"{out.name}-{ray.get_runtime_context().get_job_id()}",
            # where Ray keeps its own state; checkpoints are in the run's folder
            storage_path=str(out.parent / "ray"),
            failure_config=FailureConfig(max_failures=arguments.retries),
        ),
    )
    if mistake := trainer.fit().return_value:
        end_with_mistake(mistake)


if __name__ == "__main__":
    # by its name, so that processes on other nodes find `train_in_group` in their own copy of this file
    import ray_launch

    ray_launch.main()
