"""The batches of rollouts: whole rows, several passes, the same after any interruption."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.base.files.json_records import DamagedFile
from manyformer.base.files.verified_folder import VerifiedFolder, write_manifest
from manyformer.config import EnvironmentData
from manyformer.data.pipeline.kind import OpenRequest
from manyformer.data.pipeline.opened import OpenedData
from manyformer.data.rollouts.rollout_collector import flatten_state
from manyformer.data.trajectories.open_environment import open_environment
from manyformer.nn.batches.episode_batches import RolloutBatch
from manyformer.nn.core import tree_map
from manyformer.recipes import build

DATA: dict[str, Any] = {"options": {"length": 4}, "rows": 6, "steps": 7, "passes": 2, "valid": 5}


def opened(folder: Path, *, seed: int = 3, **settings: Any) -> OpenedData:
    """Rollouts in batches of 4 rows at most."""
    return open_environment(EnvironmentData.model_validate(DATA | settings), "episodes", OpenRequest(30, folder, seed))


def policy() -> Any:
    torch.manual_seed(0)
    return build("gtrxl", observations=3, actions=2, dim=8, depth=1, heads=2, memory_length=3)


def tensors_of(batch: RolloutBatch) -> list[Tensor]:
    collected: list[Tensor] = []
    tree_map(lambda tensor: collected.append(tensor) or tensor, batch)
    return collected


def test_each_pass_has_every_row_once(tmp_path: Path) -> None:
    feed = opened(tmp_path).train
    feed.attach(policy())
    assert feed.batches == 4
    passes = [[next(feed), next(feed)] for _ in range(2)]
    assert (feed.epoch, feed.batch) == (1, 0)
    rows = [torch.cat([batch.observations for batch in batches]) for batches in passes]
    assert [len(batch.observations) for batch in passes[0]] == [3, 3]
    order = rows[0].flatten(1).tolist()
    assert sorted(order) == sorted(rows[1].flatten(1).tolist())
    assert order != rows[1].flatten(1).tolist()
    assert not torch.equal(next(feed).log_probs, passes[0][0].log_probs)


@pytest.mark.parametrize("taken", [0, 1, 4, 6])
def test_a_restored_feed_goes_on_as_if_nothing_had_happened(taken: int, tmp_path: Path) -> None:
    feed = opened(tmp_path).train
    feed.attach(policy())
    for _ in range(taken):
        next(feed)
    folder = tmp_path / "files"
    folder.mkdir()
    feed.write_files(folder)
    write_manifest(folder)
    generator = torch.get_rng_state()
    expected = [tensors_of(next(feed)) for _ in range(6)]
    restored = opened(tmp_path).train
    restored.attach(policy())
    restored.load_state_dict({"epoch": taken // 4, "batch": taken % 4, "seed": 3, "data": feed.state_dict()["data"]})
    restored.read_files(VerifiedFolder.open(folder))
    torch.set_rng_state(generator)
    for tensors in expected:
        for left, right in zip(tensors, tensors_of(next(restored)), strict=True):
            assert torch.equal(left, right)
    assert restored.training_scores() == feed.training_scores()
    assert feed.training_scores()["episode_length"] == 5


def test_files_of_other_runs_are_refused(tmp_path: Path) -> None:
    feed = opened(tmp_path).train
    feed.attach(policy())
    next(feed)
    folder = tmp_path / "files"
    folder.mkdir()
    feed.write_files(folder)
    write_manifest(folder)
    other = opened(tmp_path, rows=4).train
    other.attach(policy())
    with pytest.raises(UserError, match="the environment or its settings differ"):
        other.load_state_dict(feed.state_dict())
    with pytest.raises(UserError, match="started with seed 3, but the seed is 4"):
        opened(tmp_path, seed=4).train.load_state_dict(feed.state_dict())
    with pytest.raises(DamagedFile, match=r"rollout.safetensors is damaged: .*row_seeds is no array of int64"):
        other.read_files(VerifiedFolder.open(folder))


def test_a_model_that_does_not_act_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a Linear does not act in environments"):
        opened(tmp_path).train.attach(torch.nn.Linear(2, 2))


def test_what_an_environment_decides(tmp_path: Path) -> None:
    data = opened(tmp_path)
    assert data.required_keywords == {"observations": 3, "actions": 2, "continuous": False}
    assert data.describe()[0] == (
        "environment: memory-length, length 4; observations are vectors of 3, 2 actions; episodes of at most 5 steps"
    )
    (valid,), (test,) = data.valid, data.test or ()
    assert valid.target_count() == test.target_count() == 5
    assert not set(valid.seeds.tolist()) & set(test.seeds.tolist())
    assert len(flatten_state(policy().init_state(5))) > 0


def test_a_batch_must_hold_a_row(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"batch.tokens is 30, less than the 31 steps of one row \(data.steps\)"):
        opened(tmp_path, steps=31)
    with pytest.raises(UserError, match="a policy is trained by one process: set devices=1"):
        opened(tmp_path).train.shard(0, 2)
