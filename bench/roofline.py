"""Draws a result of `bench.peers`: time per shape of each kernel, against the reader of the same bytes.

python -m bench.roofline docs/data/peers_h200.json docs/roofline_h200.png
"""

import json
from pathlib import Path
from typing import Annotated, Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import typer

# In the order of the legend; the two readers are the roofs.
STYLES: dict[str, dict[str, Any]] = {
    "reader fp8": {"color": "black", "linestyle": "-", "linewidth": 1.5},
    "reader bf16": {"color": "black", "linestyle": ":", "linewidth": 1.5},
    "ours": {"color": "tab:red", "marker": "o", "linewidth": 2},
    "FlashAttention-3": {"color": "tab:blue", "marker": "s"},
    "triton_fp8": {"color": "tab:orange", "marker": "^"},
    "Triton grouped bf16": {"color": "tab:green", "marker": "v"},
    "Triton grouped fp8": {"color": "tab:olive", "marker": "v"},
    "torch_bmm": {"color": "tab:gray", "marker": "x"},
}


def roofline(
    result: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSON written by bench.peers.")],
    picture: Annotated[Path, typer.Argument(help="Picture to write; its ending says the format.")],
) -> None:
    """Plot a peers result, shapes from left to right by the bytes of their fp8 cache."""
    document = json.loads(result.read_text())
    times_us = {case: {entry["name"]: entry["median_us"] for entry in rows} for case, rows in document["cases"].items()}
    if not times_us:
        raise typer.BadParameter(f"expected at least one case, got none in {result}", param_hint="RESULT")
    cases = sorted(times_us, key=lambda case: times_us[case]["reader fp8"])
    figure, (absolute, relative) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for name, style in STYLES.items():
        if not all(name in times_us[case] for case in cases):
            continue
        absolute.plot(cases, [times_us[case][name] for case in cases], label=name, **style)
        ratios = [times_us[case][name] / times_us[case]["reader fp8"] for case in cases]
        relative.plot(cases, ratios, label=name, **style)
    absolute.set(yscale="log", ylabel="median time, microseconds", title="Time of one call, cold cache")
    relative.set(ylabel="times the fp8 reader", title="Against a reader of the fp8 cache", ylim=(0.8, 5.2))
    for axes in (absolute, relative):
        axes.set_xlabel("batch x cached tokens")
        axes.tick_params(axis="x", rotation=30)
        axes.grid(alpha=0.3)
    absolute.legend(fontsize=8)
    environment = document["environment"]
    figure.suptitle(
        f"{environment['device']}, torch {environment['torch']}, Triton {environment['triton']}", fontsize=9
    )
    figure.savefig(picture, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    typer.run(roofline)
