"""From text to the samples of a step, in one global order that no layout can change."""
