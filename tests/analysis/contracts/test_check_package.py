"""The package `manyformer-check`: made of this repository, and works where nothing but torch and NumPy is installed."""

import importlib.util
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import manyformer as mf

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "packages" / "manyformer-check"

BLOCKED = """
import importlib.metadata, re, sys

def required(name, found):
    if name not in found:
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            return found
        found.add(name)
        for requirement in requirements:
            required(re.match(r"[\\w.-]+", requirement)[0].lower().replace("_", "-"), found)
    return found

installed = required("torch", set()) | {"numpy", "pytest", "iniconfig", "pluggy", "packaging", "pygments"}
names = {name for name, owners in importlib.metadata.packages_distributions().items()
         if name != "manyformer_check" and not {owner.lower().replace("_", "-") for owner in owners} & installed}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in names:
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

sys.meta_path.insert(0, Blocker())
"""
"""Hides every package but torch, NumPy, pytest and what these need; put before a program."""

STRANGER = """
import pkgutil
import manyformer_check as mc
assert "torch" not in sys.modules
import torch
torch.set_num_threads(1)
for module in pkgutil.walk_packages(mc.__path__, "manyformer_check."):
    __import__(module.name)
torch.manual_seed(0)

class Mixer(torch.nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.causal = causal
        self.embed, self.head = torch.nn.Embedding(17, 8), torch.nn.Linear(8, 17)
    def forward(self, tokens):
        x = self.embed(tokens)
        count = torch.arange(1, x.shape[1] + 1)[:, None]
        return self.head(x.cumsum(1) / count if self.causal else x + x.mean(1, keepdim=True))

honest, leaking = (
    mc.check(mc.Adapter(logits=Mixer(causal), vocab=17), length=24, skip=("compile",)) for causal in (True, False)
)
assert honest.ok, honest
assert {"causal", "causal-training", "causal-gradient"} <= {row.contract for row in leaking.failed}, leaking
try:
    mc.check(torch.nn.Linear(2, 2))
except ValueError as error:
    assert "mf." not in str(error), error
assert not {"manyformer", "jaxtyping", "rich", "typer"} & set(sys.modules)
print(mc.__version__)
"""


def build_hook(package: Path) -> ModuleType:
    """The build hook, which writes the package into the folder `package`."""
    spec = importlib.util.spec_from_file_location("hatch_build", FOLDER / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    hook.PACKAGE = package  # type: ignore[attr-defined]
    return hook


def run_alone(program: str, path: Path) -> str:
    """The output of a program that sees torch, NumPy, pytest and what is in `path`."""
    code = f"import sys\nsys.path.insert(0, {str(path)!r})\n{BLOCKED}\n{program}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_checks_run_where_nothing_but_torch_and_numpy_is_installed(tmp_path: Path) -> None:
    build_hook(tmp_path / "manyformer_check").copy_modules()
    assert run_alone(STRANGER, tmp_path).strip() == mf.__version__


def test_a_module_that_is_not_part_of_the_package_is_missed_when_it_is_built(tmp_path: Path) -> None:
    """The copies import nothing of manyformer, and nothing of the package that is not there."""
    hook = build_hook(tmp_path / "manyformer_check")
    hook.copy_modules()
    texts = {file: file.read_text(encoding="utf-8") for file in tmp_path.rglob("*.py")}
    assert [
        file.name for file, text in texts.items() if "import manyformer." in text or "from manyformer." in text
    ] == []
    names = {".".join(file.relative_to(tmp_path).with_suffix("").parts) for file in texts}
    assert {"manyformer_check.check", "manyformer_check.base.errors"} <= names
    assert not [name for name in names if "own_models" in name]


@pytest.mark.slow
def test_a_wheel_of_the_source_distribution_works_and_shares_no_file_with_manyformer(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(FOLDER)]
    subprocess.run(build, check=True, capture_output=True)
    sdist = next(tmp_path.glob("manyformer_check-*.tar.gz"))
    wheel = next(tmp_path.glob("manyformer_check-*.whl"))
    assert f"-{mf.__version__}" in wheel.name
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("src/manyformer_check/check.py") for name in archive.getnames())
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry_points = next(name for name in names if name.endswith("entry_points.txt"))
        assert "pytest11" in archive.read(entry_points).decode()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"manyformer_check"}
    assert run_alone(STRANGER, wheel).strip() == mf.__version__
