"""The loss of a job over its steps, kept small however many these are, and drawn as SVG. Knows no API."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

MOST = 400  # points, up to twice as many between thinnings
WIDTH, HEIGHT, LEFT, BOTTOM = 560, 160, 56, 20  # of the picture; of it for the numbers
LOSS, EVALUATION, INCIDENT = "#1f77b4", "#ff7f0e", "#d62728"

Point = tuple[int, float]  # step, loss


class Curve:
    def __init__(self) -> None:
        self.losses: list[Point] = []
        self.evaluations: list[Point] = []
        self.incidents: tuple[int, ...] = ()  # steps

    def add(self, losses: Iterable[Point], evaluations: Iterable[Point] = ()) -> None:
        """In the order of steps."""
        self.losses = _thinned([*self.losses, *losses])
        self.evaluations = _thinned([*self.evaluations, *evaluations])

    def svg(self, steps: int) -> str:
        """Up to the last of `steps`; nothing to see, no picture."""
        if not self.losses:
            return ""
        values = [loss for _, loss in (*self.losses, *self.evaluations)]
        low, high = min(values), max(values)
        span = (high - low) or 1.0

        def x(step: int) -> float:
            return LEFT + (WIDTH - LEFT - 4) * step / max(steps, 1)

        def y(loss: float) -> float:
            return 4 + (HEIGHT - BOTTOM - 8) * (high - loss) / span

        def line(points: Sequence[Point], colour: str) -> str:
            path = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in points)
            return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'

        faults = (
            f'<line x1="{x(step):.1f}" x2="{x(step):.1f}" y1="4" y2="{HEIGHT - BOTTOM}" stroke="{INCIDENT}" '
            f'stroke-dasharray="2 3"><title>incident after step {step}</title></line>'
            for step in self.incidents
        )
        return "".join(
            (
                f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
                'font-family="sans-serif" font-size="11" fill="currentColor"><title>loss</title>',
                *faults,
                line(self.losses, LOSS),
                line(self.evaluations, EVALUATION) if self.evaluations else "",
                _text(0, 14, f"{high:.4g}"),
                _text(0, HEIGHT - BOTTOM, f"{low:.4g}"),
                _text(LEFT, HEIGHT - 4, "0"),
                _text(WIDTH - 4, HEIGHT - 4, f"{steps:,} steps", "end"),
                "</svg>",
            )
        )


def _thinned(points: list[Point]) -> list[Point]:
    """Every other one, and the last, until they are few enough."""
    while len(points) > 2 * MOST:
        points = [*points[:-1:2], points[-1]]
    return points


def _text(x: int, y: int, text: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{html.escape(text)}</text>'
