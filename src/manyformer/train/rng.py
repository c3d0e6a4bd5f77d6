"""The random generators of a process: seed all of them, save and restore their states."""

import base64
import random
from typing import Self

import numpy as np
import torch
from pydantic import Base64Bytes, Field

from manyformer.files.json_records import FileRecord
from manyformer.system.devices import generator_states, restore_generator


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, including those of all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class GeneratorStates(FileRecord):
    """The states of all generators of a process."""

    title = "the states of random generators"
    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, tuple[int, ...], int, int, float]
    torch: Base64Bytes
    devices: dict[str, Base64Bytes] = Field(default_factory=dict)
    """The state of the current device of each type that draws by a generator of its own."""
    cuda: Base64Bytes | None = Field(default=None, exclude=True)
    """Where version 0.3.0 and older ones have written the only such state."""

    @classmethod
    def of_process(cls) -> Self:
        """The states of the generators of this process."""
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        return cls(
            python=random.getstate(),
            numpy=(str(kind), tuple(np.asarray(keys).tolist()), int(position), int(has_gauss), float(cached)),
            torch=_encode_state(torch.get_rng_state()),
            devices={device_type: _encode_state(state) for device_type, state in generator_states().items()},
        )

    def restore(self) -> None:
        """Restore the generators of this process. Raises ValueError or TypeError for states of no generator."""
        random.setstate(self.python)
        kind, keys, position, has_gauss, cached = self.numpy
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(_decode_state(self.torch))
        older = {} if self.cuda is None else {"cuda": self.cuda}
        for device_type, state in {**older, **self.devices}.items():
            restore_generator(device_type, _decode_state(state))


def _encode_state(state: torch.Tensor) -> bytes:
    return base64.b64encode(state.numpy().tobytes())


def _decode_state(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8).clone()
