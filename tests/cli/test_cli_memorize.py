"""memorize: a trained model given a memory."""

from pathlib import Path

from commands import Cli

import manyformer as mf


def test_memorize_writes_a_model_and_tells_its_keywords(cli: Cli, tmp_path: Path) -> None:
    old, out = tmp_path / "old", tmp_path / "new"
    mf.build("transformer-xl", vocab=11, dim=8, depth=2, heads=2, memory_length=4).save(old)
    words = ("memorize", str(old), "--memory", "64", "--block", "8", "--out", str(out))
    told = cli(*words)
    assert told.code == 0, told.err
    assert "memorizing-transformer: model.dim=8 model.depth=2" in told.out
    assert "model.position=xl" in told.out
    assert mf.load(out).spec.keywords["knn_memory_size"] == 64
    assert "exists already" in cli(*words).err
