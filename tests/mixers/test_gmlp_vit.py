"""gMLP for images against its formulas."""

from typing import Any

import torch
from torch.nn import functional as F

import manyformer as mf
from perturbing import perturb


def test_a_layer_by_its_formula() -> None:
    """Liu et al. 2021, section 2: Z1 * (W norm(Z2) + b) of GELU(norm(X) U), projected and added."""
    model: Any = perturb(mf.build("gmlp-vit", classes=3, height=8, width=12, channels=2, patch=4, dim=8, depth=1), 0.3)
    model = model.double().eval()
    images = torch.randint(0, 256, (2, 8, 12, 2), dtype=torch.uint8)
    w = dict(model.named_parameters())
    patches = images.double().view(2, 2, 4, 3, 4, 2).permute(0, 1, 3, 2, 4, 5).reshape(2, 6, 32)
    scaled = (patches / 255 - 0.5) / 0.5
    x = scaled @ w["embed.project.weight"].T + w["embed.project.bias"]
    part = "body.0.mixer.inner."
    normed = F.layer_norm(x, (8,), w["body.0.mixer.pre_norm.weight"], w["body.0.mixer.pre_norm.bias"], 1e-6)
    z1, z2 = F.gelu(normed @ w[f"{part}up.weight"].T + w[f"{part}up.bias"]).chunk(2, -1)
    z2 = F.layer_norm(z2, (24,), w[f"{part}norm.weight"], w[f"{part}norm.bias"], 1e-5)
    gate = torch.einsum("ij,bjc->bic", w[f"{part}weights.weight"][0], z2) + w[f"{part}bias"][:, None]
    x = x + (z1 * gate) @ w[f"{part}down.weight"].T + w[f"{part}down.bias"]
    x = F.layer_norm(x, (8,), w["body.norm.inner.weight"], w["body.norm.inner.bias"], 1e-6).mean(1)
    expected = x @ w["head.weight"].T + w["head.bias"]
    torch.testing.assert_close(model(images).logits, expected, atol=1e-8, rtol=0)
