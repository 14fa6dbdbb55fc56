"""Draws times per shape against the reader of the same bytes, their roof.

    python -m bench.roofline docs/data/peers_h200.json docs/roofline_h200.png

draws a result of `bench.peers`; `eval.py benchmark --plot` draws its own. Needs the extra `plot`.
"""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.console import run_tool
from bench.options import require_picture

ROOF = {"color": "black", "linestyle": "-", "linewidth": 1.5, "marker": "_"}  # a case alone has no line
# In the order of the legend; the two readers are the roofs.
PEERS: dict[str, dict[str, Any]] = {
    "reader fp8": ROOF,
    "reader bf16": {**ROOF, "linestyle": ":"},
    "ours": {"color": "tab:red", "marker": "o", "linewidth": 2},
    "FlashAttention-3": {"color": "tab:blue", "marker": "s"},
    "triton_fp8": {"color": "tab:orange", "marker": "^"},
    "Triton grouped bf16": {"color": "tab:green", "marker": "v"},
    "Triton grouped fp8": {"color": "tab:olive", "marker": "v"},
    "torch_bmm": {"color": "tab:gray", "marker": "x"},
}


def picture_formats() -> tuple[str, ...]:
    """Endings of the files that matplotlib can write."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    return tuple(FigureCanvasAgg.get_supported_filetypes())


def draw(
    picture: Path,
    times_us: dict[str, dict[str, float]],
    styles: dict[str, dict[str, Any]],
    environment: dict[str, str],
    top: float | None = None,
) -> None:
    """Plot microseconds, and the same over the roof, of each case from left to right by the roof's own.

    times_us: by case and name; a name that lacks a case has a gap there. styles: matplotlib's by name, in the order of
    the legend, the first being the roof. top: the largest ratio to show; all if None.
    """
    from matplotlib.figure import Figure

    roof = next(iter(styles))
    cases = sorted(times_us, key=lambda case: times_us[case][roof])
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    absolute, relative = figure.subplots(1, 2)
    for name, style in styles.items():
        series = [times_us[case].get(name, math.nan) for case in cases]
        absolute.plot(cases, series, label=name, **style)
        relative.plot(cases, [t / times_us[case][roof] for t, case in zip(series, cases, strict=True)], **style)
    absolute.set(yscale="log", ylabel="median time, microseconds", title="Time of one call, cold cache")
    relative.set(ylabel=f"times the {roof}", title="Against the roof", ylim=(0.8, top))
    for axes in (absolute, relative):
        axes.set_xlabel("batch x cached tokens")
        axes.tick_params(axis="x", rotation=30)
        axes.grid(alpha=0.3)
    absolute.legend(fontsize=8)
    figure.suptitle(
        f"{environment['device']}, torch {environment['torch']}, Triton {environment['triton']}", fontsize=9
    )
    figure.savefig(picture, dpi=110)


def main(
    result: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSON written by bench.peers.")],
    picture: Annotated[
        Path, typer.Argument(callback=require_picture, help="Picture to write; its ending says the format.")
    ],
) -> None:
    """Plot a peers result, shapes from left to right by the bytes of their fp8 cache."""
    try:
        document = json.loads(result.read_text())
        environment = {name: document["environment"][name] for name in ("device", "torch", "triton")}
        times_us = {
            case: {entry["name"]: entry["median_us"] for entry in rows} for case, rows in document["cases"].items()
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise typer.BadParameter(f"expected a result of bench.peers, got {error!r}", param_hint="RESULT") from error
    if not times_us:
        raise typer.BadParameter(f"expected at least one case, got none in {result}", param_hint="RESULT")
    present = {name for by_name in times_us.values() for name in by_name}
    styles = {name: style for name, style in PEERS.items() if name in present}
    draw(picture, times_us, styles, environment, top=5.2)


if __name__ == "__main__":
    run_tool(main)
