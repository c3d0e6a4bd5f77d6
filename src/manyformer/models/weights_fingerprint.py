"""A hash of all weights of a model, by which files that belong to a model recognize it."""

import hashlib

import torch

from manyformer.models.model import Model


def weights_fingerprint(model: Model) -> str:
    """A hash of the names, types, shapes and values of all weights."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        digest.update(weight.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
