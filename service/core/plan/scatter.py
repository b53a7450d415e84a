"""A picture of the evaluation: each run's predicted step time over its measured one, by source. SVG as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from service.core.plan.evaluate import Judged

WIDTH, HEIGHT, LEFT, TOP, KEY = 900, 560, 60, 20, 310
SIDE = WIDTH - LEFT - KEY
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999", "#f0e442")  # Okabe and Ito's
SHAPES = ("circle", "square", "diamond")
BAND = 0.1


def drawn(judged: Sequence[Judged]) -> str:
    """Those in scope, blind; the grey band is a tenth to both sides."""
    points = [(each.case.source, each.case.measured_s or 0.0, each.estimate.step_s) for each in judged]
    values = [value for _, *pair in points for value in pair]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def place(value: float) -> float:
        return (math.log10(value) - low) / (high - low) * SIDE

    def x(value: float) -> float:
        return round(LEFT + place(value), 1)

    def y(value: float) -> float:
        return round(TOP + SIDE - place(value), 1)

    sources = list(dict.fromkeys(source for source, *_ in points))
    ends = (10.0**low, 10.0**high)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<clipPath id="plot"><rect x="{LEFT}" y="{TOP}" width="{SIDE}" height="{SIDE}"/></clipPath>',
        '<polygon clip-path="url(#plot)" fill="#eeeeee" points="'
        + " ".join(
            f"{x(at)},{y(at * (1 + side))}" for at, side in [(e, BAND) for e in ends] + [(e, -BAND) for e in ends[::-1]]
        )
        + '"/>',
        f'<line x1="{x(ends[0])}" y1="{y(ends[0])}" x2="{x(ends[1])}" y2="{y(ends[1])}" stroke="#888888"/>',
        f'<rect x="{LEFT}" y="{TOP}" width="{SIDE}" height="{SIDE}" fill="none" stroke="#444444"/>',
    ]
    for power in range(low, high + 1):
        tick = 10.0**power
        parts.append(f'<text x="{x(tick)}" y="{TOP + SIDE + 16}" text-anchor="middle">{tick:g}</text>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4}" text-anchor="end">{tick:g}</text>')
    middle = LEFT + SIDE / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">measured seconds of a step</text>')
    parts.append(
        f'<text transform="translate(14 {TOP + SIDE / 2}) rotate(-90)" text-anchor="middle">predicted, unseen</text>'
    )
    parts += [_mark(sources.index(source), x(measured), y(said)) for source, measured, said in points]
    for number, source in enumerate(sources):
        at = TOP + 14 + 18 * number
        parts.append(_mark(number, LEFT + SIDE + 20, at - 4))
        parts.append(f'<text x="{LEFT + SIDE + 32}" y="{at}">{escape(source[:44])}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _mark(number: int, x: float, y: float) -> str:
    colour, shape = COLOURS[number % len(COLOURS)], SHAPES[number // len(COLOURS) % len(SHAPES)]
    paint = f'fill="{colour}" fill-opacity="0.75"'
    if shape == "circle":
        return f'<circle cx="{x}" cy="{y}" r="4" {paint}/>'
    turn = f' transform="rotate(45 {x} {y})"' if shape == "diamond" else ""
    return f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7" {paint}{turn}/>'
