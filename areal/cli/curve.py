"""Draws a training curve twice: in the terminal as braille dots, and as a PNG file.

In: the reward of every step and, where measured, the greedy accuracy. Out: text, or a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

# Bit of a dot inside one braille cell, by row (top to bottom) and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Trailing mean over `window` values, so that the first points are honest too."""
    out, total = [], 0.0
    for i, value in enumerate(values):
        total += value
        if i >= window:
            total -= values[i - window]
        out.append(total / min(i + 1, window))
    return out


def draw_terminal(values: Sequence[float], *, title: str, width: int = 60, height: int = 10) -> str:
    """`values` as a braille plot of `width` x `height` characters with its scale at the left."""
    if not values:
        return f"{title}: no points yet"
    low, high = min(0.0, min(values)), max(1.0, max(values))
    columns, rows = 2 * width, 4 * height
    cells = [[0] * width for _ in range(height)]
    for x in range(columns):
        value = values[min(x * len(values) // columns, len(values) - 1)]
        y = round((1 - (value - low) / (high - low)) * (rows - 1))
        cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    lines = [f"{'':>6}{title}"]
    for row, line in enumerate(cells):
        level = high - (high - low) * row / (height - 1)
        label = f"{level:5.2f} " if row % 3 == 0 or row == height - 1 else " " * 6
        lines.append(label + "│" + "".join(chr(0x2800 + cell) for cell in line))
    lines.append(" " * 6 + "└" + "─" * width)
    lines.append(f"{'':>7}step 1{f'step {len(values)}':>{max(width - 6, 1)}}")
    return "\n".join(lines)


def save_png(
    path: Path, rewards: Sequence[float], evaluations: Sequence[tuple[int, float]], *, title: str
) -> None:
    """The reward of every step, its running mean, and the evaluated (step, accuracy) points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    steps = range(1, len(rewards) + 1)
    axes.plot(steps, rewards, color="tab:blue", alpha=0.25, linewidth=1)
    axes.plot(
        steps, smooth(rewards, 20), color="tab:blue", label="sampled reward, mean of 20 steps"
    )
    if evaluations:
        axes.plot(*zip(*evaluations, strict=True), "o-", color="tab:green", label="greedy accuracy")
    axes.set(xlabel="step", ylabel="reward", title=title, ylim=(-0.02, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
