"""A second device without hardware: tensors that compute on the CPU, and behave as if they were on `cuda:0`.

    with pretended_device() as waits:
        model.to("cuda")
        ...
    waits.total()

Inside, the branches that CUDA takes are taken, tensors of both devices refuse to mix where CUDA refuses it
(`WrongDeviceError`), and every moment at which Python would have to wait for a GPU is counted with the place in the
package that caused it. Speed, memory and the rounding of a GPU are not pretended, nor is anything compiled.
"""

from pretended_device.cuda_functions import pretended_device
from pretended_device.operators import WrongDeviceError
from pretended_device.tensor import DEVICE, PretendedTensor, numbers_of
from pretended_device.waits import Waits

__all__ = ["DEVICE", "PretendedTensor", "Waits", "WrongDeviceError", "numbers_of", "pretended_device"]
