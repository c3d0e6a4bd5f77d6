"""One of two processes with shards of a model: `python sharded_muon.py RANK FILE` fails if a step of Muon is wrong."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from manyformer.training.muon import Muon


class Matrices(nn.Module):
    """Rows that two processes cannot divide evenly, of which the second may have none, and experts."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"fused": (33, 7), "wide": (3, 8), "narrow": (1, 5), "experts": (3, 6, 4)}
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, factors: dict[str, Tensor]) -> Tensor:
        return sum(((weight * factors[name]).sum() for name, weight in self.named_parameters()), torch.zeros(()))


def trained(model: Matrices, **settings: object) -> Muon:
    weights = dict(model.named_parameters())
    muon = Muon(list(weights.values()), lr=0.1, row_beta=0.9, row_parts={weights["fused"]: (20, 13)}, **settings)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    shapes = {name: weight.shape for name, weight in weights.items()}
    for _ in range(3):
        model({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}).backward()
        muon.step()
        muon.zero_grad()
    return muon


def main(rank: int, file: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    whole = Matrices()
    trained(whole)
    sharded = Matrices()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    muon = trained(sharded)
    expected = dict(whole.named_parameters())
    for name, weight in sharded.named_parameters():
        assert hasattr(weight, "full_tensor")
        torch.testing.assert_close(weight.full_tensor(), expected[name], atol=1e-6, rtol=1e-6)
        assert muon.state[weight]["momentum_buffer"].placements == weight.placements
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
