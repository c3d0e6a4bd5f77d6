"""The figure of a kernel regression: its fits by several bandwidths, and the error over all bandwidths."""

from collections.abc import Sequence
from pathlib import Path

import torch

from manyformer.kernels.kernel_regression import (
    INTERVAL_END,
    BandwidthChoice,
    KernelRegression,
    bandwidth_grid,
    textbook_function,
)
from manyformer.view.figures import add_legend, curve_color, panels, write_picture


def draw_regression(regression: KernelRegression, choices: Sequence[BandwidthChoice], path: Path) -> None:
    """Write the figure: left the points, the function and the fit of each choice, right the leave-one-out error."""
    figure, (fits, errors) = panels(1, 2)
    query = torch.linspace(0, INTERVAL_END, 200, dtype=torch.float64)[:, None]
    x, y = (values[:, 0].tolist() for values in regression.sample)
    fits.plot(x, y, "o", color="#999999", markersize=3, label="points")
    fits.plot(query[:, 0].tolist(), textbook_function(query)[:, 0].tolist(), color="#000000", label="function")
    grid = bandwidth_grid()
    errors.plot(grid, [regression.leave_one_out(bandwidth) for bandwidth in grid], color="#000000")
    for index, choice in enumerate(choices):
        label = f"{choice.method}: {choice.bandwidth:.3g}"
        color = curve_color(index)
        fits.plot(
            query[:, 0].tolist(), regression.predict(choice.bandwidth, query)[:, 0].tolist(), color=color, label=label
        )
        errors.plot([choice.bandwidth], [choice.leave_one_out], "o", color=color)
    errors.set_xscale("log")
    fits.set(xlabel="x", ylabel="y", title=f"Nadaraya-Watson, {regression.kernel} kernel")
    errors.set(xlabel="bandwidth", ylabel="leave-one-out error", title="Choice of the bandwidth")
    add_legend(fits)
    write_picture(figure, path)
