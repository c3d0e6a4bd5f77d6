"""The costs of calls that were measured on a machine, in a file of the user's cache folder."""

import os
import platform
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from annotated_types import Ge, Le

from manyformer.errors import UserError
from manyformer.files.json_records import FileRecord

FOLDER_VARIABLE = "MANYFORMER_CACHE"
"""The environment variable with another cache folder than ~/.cache/manyformer."""

Pairs = Annotated[int, Ge(0), Le(1 << 30)]
Rate = Annotated[float, Ge(0.01), Le(100)]


class TunedCosts(FileRecord):
    """What calls cost on a machine, in the fields of `CostModel` with the same names."""

    title = "the costs of a machine"
    max_bytes = 1 << 16
    machine: str
    date: str
    attention_call: Pairs
    sparse_call: Pairs
    pair_rates: tuple[tuple[Annotated[int, Ge(1), Le(1 << 16)], Rate], ...]
    masked_pair: Annotated[float, Ge(0), Le(100)]
    merged_token: Pairs
    gathered_key: Pairs

    @property
    def values(self) -> dict[str, Any]:
        """The costs by the names of their fields."""
        return {name: value for name, value in dict(self).items() if name not in ("machine", "date")}


class CostsInUse(NamedTuple):
    """Costs that replace those of the library, with a note for `explain()`; `problem` is why a file is not used."""

    values: dict[str, Any]
    note: str = ""
    problem: str = ""


def costs_file() -> Path:
    """The file that `manyformer doctor --tune` writes. Raises UserError for a user without a home folder."""
    folder = os.environ.get(FOLDER_VARIABLE)
    try:
        return (Path(folder) if folder else Path.home() / ".cache" / "manyformer") / "costs.json"
    except RuntimeError:
        raise UserError(f"this user has no home folder for the costs of the machine: set {FOLDER_VARIABLE}") from None


def machine_name() -> str:
    """The processor, by which a file in a home folder that machines share is known to be of another one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(models, platform.processor() or platform.machine())}, {os.cpu_count()} cores"


def read_tuned_costs(block_sizes: tuple[int, ...]) -> CostsInUse:
    """The costs in the file, if it is one of this machine and has these block sizes; a damaged file is not used."""
    try:
        path = costs_file()
    except UserError:
        # nothing was measured by a user without a home folder
        return CostsInUse({})
    try:
        if not path.exists():
            return CostsInUse({})
        tuned = TunedCosts.read(path)
    except UserError as damage:
        return CostsInUse({}, problem=f"{damage}; `manyformer doctor --tune` measures again")
    except OSError as error:
        # a home folder that may not be entered, an endless link, a name that is too long
        return CostsInUse({}, problem=f"{path} cannot be read ({error.strerror}): the costs of the library are used")
    if tuned.machine != machine_name():
        return CostsInUse({}, problem=f"{path} is of another machine ({tuned.machine:.80}): its costs are not used")
    if tuple(size for size, _ in tuned.pair_rates) != block_sizes:
        return CostsInUse({}, problem=f"{path} has other block sizes; `manyformer doctor --tune` measures again")
    return CostsInUse(tuned.values, f"; costs measured on this machine on {tuned.date}")
