"""A simulation as a picture: an SVG of slots over time, what the job did, and the figures beneath. No plotting library.

Slots are means over the time that a column stands for. In the band beneath a span shorter than a point is drawn one
point wide: where a long run broke stays visible, how long it took is in the figures.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from xml.sax.saxutils import escape

from service.sim import clock
from service.sim.ledger import Span, Use
from service.sim.simulate import Result

WIDTH, HEIGHT = 1000, 180  # of the plot
LEFT, TOP, BAND = 70, 34, 16
COLUMNS = 500  # of means
ALIVE = "#4a6fa5"
COLOURS = {
    Use.USEFUL: "#2e8b57",
    Use.DETECTION: "#b22222",
    Use.RESTART: "#e07b00",
    Use.REDONE: "#c9a400",
    Use.WAITING: "#7a7a7a",
}
NAMES = {Use.USEFUL: "training", Use.DETECTION: "detection", Use.RESTART: "restart", Use.WAITING: "waiting"}


def drawn(result: Result, title: str, caption: Sequence[str] = ()) -> str:
    spans = result.ledger.spans
    end, top = max(result.end, 1), max(result.ledger.total, 1)
    height, ground = TOP + HEIGHT + BAND + 64 + 16 * len(caption), TOP + HEIGHT
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 30}" height="{height}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="white"/><text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
        *_axis(end, top),
        f'<polygon points="{LEFT},{ground} {_points(_means(spans, end, _used), top)} {LEFT + WIDTH},{ground}" '
        f'fill="{COLOURS[Use.USEFUL]}" fill-opacity="0.35"/>',
        f'<polyline points="{_points(_means(spans, end, _alive), top)}" fill="none" stroke="{ALIVE}"/>',
        *_band(spans, end),
        *_legend(),
        *(f'<text x="{LEFT}" y="{TOP + HEIGHT + BAND + 62 + 16 * row}">{escape(text)}</text>'
          for row, text in enumerate(caption)),
        "</svg>",
        "",
    ])  # fmt: skip


def _alive(span: Span) -> int:
    return span.alive


def _used(span: Span) -> int:
    return span.ranks if span.use is Use.USEFUL else 0


def _x(at: int, end: int) -> float:
    return LEFT + WIDTH * at / end


def _means(spans: Sequence[Span], end: int, value: Callable[[Span], int]) -> list[float]:
    """Of a value over the time of each column of the picture."""
    sums = [0.0] * COLUMNS
    for span in spans:
        first, last = span.start * COLUMNS // end, min(span.end * COLUMNS // end, COLUMNS - 1)
        for column in range(first, last + 1):
            inside = min(span.end, (column + 1) * end / COLUMNS) - max(span.start, column * end / COLUMNS)
            sums[column] += value(span) * max(0.0, inside)
    return [total * COLUMNS / end for total in sums]


def _points(values: Sequence[float], top: int) -> str:
    edges = ((column + side, value) for column, value in enumerate(values) for side in (0, 1))
    return " ".join(f"{LEFT + WIDTH * x / COLUMNS:g},{TOP + HEIGHT * (1 - value / top):.1f}" for x, value in edges)


def _band(spans: Sequence[Span], end: int) -> Iterator[str]:
    """What the job did; training is the ground that the rest is drawn on."""
    y = TOP + HEIGHT + 6
    yield f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{BAND}" fill="{COLOURS[Use.USEFUL]}"/>'
    for use, group in itertools.groupby(spans, key=lambda span: span.use):
        joined = list(group)
        if use is not Use.USEFUL:
            x, right = _x(joined[0].start, end), _x(joined[-1].end, end)
            wide = f'width="{max(1.0, right - x):.1f}" height="{BAND}"'
            yield f'<rect x="{x:.1f}" y="{y}" {wide} fill="{COLOURS[use]}"/>'


def _axis(end: int, top: int) -> Iterator[str]:
    unit, name = (clock.DAY, "days") if end >= 2 * clock.DAY else (clock.HOUR, "hours")
    for tenth in range(11):
        x = LEFT + WIDTH * tenth / 10
        yield f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{TOP + HEIGHT}" stroke="#e4e4e4"/>'
        label = f"{end * tenth / 10 / unit:.3g}{' ' + name if tenth == 10 else ''}"
        yield f'<text x="{x}" y="{TOP + HEIGHT + BAND + 22}" text-anchor="middle">{label}</text>'
    for quarter in range(5):
        y = TOP + HEIGHT * (1 - quarter / 4)
        yield f'<line x1="{LEFT}" y1="{y}" x2="{LEFT + WIDTH}" y2="{y}" stroke="#e4e4e4"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{round(top * quarter / 4):,}</text>'


def _legend() -> Iterator[str]:
    x, y = LEFT, TOP + HEIGHT + BAND + 40
    for colour, name in [(ALIVE, "slots alive"), *((COLOURS[use], name) for use, name in NAMES.items())]:
        yield f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>'
        yield f'<text x="{x + 14}" y="{y}">{name}</text>'
        x += 24 + 8 * len(name)
