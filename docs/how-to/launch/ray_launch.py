"""Start torchrun on several nodes of a Ray cluster: `ray job submit --working-dir . -- python ray_launch.py`."""

import subprocess

NODES, GPUS, PORT = 2, 8, 29500


def torchrun(endpoint: str) -> list[str]:
    """The command of every node; `endpoint` is the address of the first one."""
    return [
        *("torchrun", f"--nnodes={NODES}", f"--nproc-per-node={GPUS}", "--max-restarts=3"),
        *("--rdzv-id=manyformer", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"),
        *("-m", "manyformer", "train", "mine.yaml", "strategy=fsdp", "out=runs/mine"),
    ]


def main() -> None:
    """One task on each node, which holds its GPUs until the training ends."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.init()
    group = placement_group([{"CPU": 1, "GPU": GPUS}] * NODES, strategy="STRICT_SPREAD")
    ray.get(group.ready())

    def on_node(function, number):
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        return ray.remote(function).options(num_cpus=1, num_gpus=GPUS, scheduling_strategy=place)

    first = ray.get(on_node(ray.util.get_node_ip_address, 0).remote())
    command = torchrun(f"{first}:{PORT}")
    runs = [on_node(lambda: subprocess.run(command, check=True).returncode, number).remote() for number in range(NODES)]
    ray.get(runs)


if __name__ == "__main__":
    main()
