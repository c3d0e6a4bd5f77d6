"""Dashed paths between two disks (Pathfinder), drawn anew."""

import math
from collections.abc import Hashable, Mapping, Sequence
from random import Random
from typing import NamedTuple, final

import numpy as np

from manyformer.config.data_sections import PathfinderData
from manyformer.data.synthetic.synthetic_rule import NOT_SCORED, SyntheticRows, SyntheticRule, register_rule
from manyformer.type_aliases import FloatArray, IntArray

DASH, GAP, THICKNESS, RADIUS, MARGIN = 2.0, 1.2, 0.7, 1.8, 2.0
"""Length of a dash, distance to the next one, thickness, radius of a disk, distance between paths; all in pixels."""

BEND = 0.45
"""The most that a path turns between dashes, in radians."""

TRIES_PER_DASH, TRIES_PER_DISTRACTOR = 8, 12

Point = tuple[float, float]


class _Dash(NamedTuple):
    start: Point
    stop: Point

    @property
    def middle(self) -> Point:
        """The point between both ends."""
        return (self.start[0] + self.stop[0]) / 2, (self.start[1] + self.stop[1]) / 2


@register_rule(PathfinderData)
@final
class PathfinderRule(SyntheticRule[PathfinderData]):
    """Images of two disks, two long dashed paths and shorter ones (Linsley et al. 2018, section 2; Tay et al. 2021).

    A disk is at the first end of one path; the other is at the second end of the same path (answer 1) or of the other
    path (answer 0), each in half of the images. Redrawn with lines of our own, in the image's own resolution:
    accuracies are comparable with each other, not with published ones."""

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        source = Random(int(random.integers(1 << 62)))
        symbols = np.empty((count, self.length), np.int64)
        targets = np.full_like(symbols, NOT_SCORED)
        for row in range(count):
            answer = source.randrange(2)
            symbols[row] = self._image(source, answer)
            targets[row, -1] = answer
        return SyntheticRows(symbols, targets)

    def _image(self, source: Random, answer: int) -> IntArray:
        paths: list[list[_Dash]] = []
        while len(paths) < 2:
            path = self._path(source, self.data.dashes, [dash for earlier in paths for dash in earlier])
            # a path that finds no place may be in the way of the other
            paths = [*paths, path] if path else []
        dashes = [dash for path in paths for dash in path]
        for _ in range(self.data.distractors):
            for _ in range(TRIES_PER_DISTRACTOR):
                if path := self._path(source, max(1, self.data.dashes // 3), dashes):
                    dashes += path
                    break
        first = source.randrange(2)
        second = first if answer else 1 - first
        return self._draw(dashes, (paths[first][0].start, paths[second][-1].stop))

    def _path(self, source: Random, length: int, obstacles: list[_Dash]) -> list[_Dash]:
        """Dashes that keep away from obstacles, from each other and from the border; empty if they find no place."""
        size, path = self.data.size, list[_Dash]()
        point = (source.uniform(3, size - 3), source.uniform(3, size - 3))
        angle = source.uniform(0, 2 * math.pi)
        # dashes next to each other are closer than the margin
        occupied = [point for dash in obstacles for point in (dash.start, dash.middle, dash.stop)]
        for _ in range(length):
            own = [point for dash in path[:-1] for point in (dash.start, dash.middle, dash.stop)]
            for _ in range(TRIES_PER_DASH):
                turned = angle + source.uniform(-BEND, BEND)
                direction = math.cos(turned), math.sin(turned)
                stop = point[0] + DASH * direction[0], point[1] + DASH * direction[1]
                dash = _Dash(point, stop)
                if self._is_inside(stop) and _is_clear(dash, occupied) and _is_clear(dash, own):
                    break
            else:
                return []
            path.append(dash)
            angle = turned
            point = stop[0] + GAP * direction[0], stop[1] + GAP * direction[1]
        return path

    def _is_inside(self, point: Point) -> bool:
        return all(2.0 <= coordinate <= self.data.size - 3.0 for coordinate in point)

    def _draw(self, dashes: list[_Dash], disks: tuple[Point, Point]) -> IntArray:
        """The brightness level of each pixel, row by row."""
        size = self.data.size
        rows, columns = np.divmod(np.arange(size * size), size)
        pixels = np.stack([rows, columns], axis=1).astype(float)
        starts, stops = (np.array([dash[end] for dash in dashes]) for end in (0, 1))
        along = stops - starts
        # the nearest point of each dash to each pixel (pixels, dashes)
        share = ((pixels[:, None] - starts) * along).sum(-1) / (along**2).sum(-1)
        nearest = starts + share.clip(0, 1)[..., None] * along
        lines = _coverage(np.linalg.norm(pixels[:, None] - nearest, axis=-1).min(1), THICKNESS)
        to_disk = np.linalg.norm(pixels[:, None] - np.array(disks), axis=-1).min(1)
        brightness = np.maximum(lines, _coverage(to_disk, RADIUS))
        levels: IntArray = np.rint(brightness * (self.data.levels - 1)).astype(np.int64)
        return levels

    def shortcuts(self, rows: SyntheticRows) -> Mapping[str, Sequence[Hashable]]:
        """What the mean brightness of an image tells, in twenty classes."""
        means = rows.symbols.mean(axis=1)
        edges = np.quantile(means, np.linspace(0, 1, 21)[1:-1])
        return {"mean brightness": np.searchsorted(edges, means).tolist()}

    def describe(self) -> str:
        data = self.data
        return f"images of {data.size} x {data.size} with two paths of {data.dashes} dashes; does one join the disks?"


def _is_clear(dash: _Dash, occupied: list[Point]) -> bool:
    """Whether no point of the dash is within the margin of an occupied one."""
    return all(
        (point[0] - taken[0]) ** 2 + (point[1] - taken[1]) ** 2 >= MARGIN**2
        for point in (dash.middle, dash.stop)
        for taken in occupied
    )


def _coverage(distance: FloatArray, radius: float) -> FloatArray:
    """How much of a pixel lies within `radius` of a line or point, by the distance of its centre, roughly."""
    return (radius + 0.5 - distance).clip(0, 1)
