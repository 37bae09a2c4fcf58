"""report.html: a run on one page, readable without a network: curves, samples, configuration."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from ..batch import Batch
from .console import spread

CURVES = {  # title -> metrics drawn together
    "Reward of rollouts": ["reward/mean"],
    "Validation": ["val/reward", "val/pass@1", "val/loss", "val/accuracy"],
    "Loss": ["actor/loss", "critic/loss", "reward_model/loss"],
    "Accuracy on pairs": ["reward_model/accuracy"],
    "Entropy": ["actor/entropy"],
    "KL to the reference": ["actor/kl_ref", "kl/sequence"],
    "Clipped tokens (share)": ["actor/clip_fraction"],
    "Gradient norm": ["actor/grad_norm"],
    "Response length (tokens)": ["rollout/length_mean", "rollout/length_max"],
    "Truncated rollouts (share)": ["rollout/truncated"],
    "Groups without variance": ["groups/without_variance"],
    "Seconds per step": ["time/step"],
}
SAMPLES = 8
PAGE = Template("""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>$title</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #1c2430; }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(22rem, 1fr)); gap: 1rem; }
.curves svg { width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; }
td, th { border: 1px solid #d5dae1; padding: .35rem .6rem; text-align: left; vertical-align: top; }
td { white-space: pre-wrap; overflow-wrap: anywhere; }
pre { background: #f5f6f8; padding: 1rem; overflow-x: auto; }
</style>
<h1>$title</h1>
<p>$summary</p>
<h2>Curves</h2><div class="curves">$curves</div>
<h2>Samples of the last step</h2>$samples
<h2>Configuration</h2><pre>$config</pre>
</html>
""")


def write_report(
    folder: Path, recipe: str, config: str, metrics: Sequence[Mapping[str, float]], rows: Batch | None
) -> Path:
    """Write the page into a run's folder. metrics: of metrics.jsonl. rows: rollouts, of which some are shown."""
    drawn = [_curve(name, names, metrics) for name, names in CURVES.items()]
    page = PAGE.substitute(
        title=html.escape(f"{recipe}: {folder.name}"),
        summary=html.escape(_summary(metrics)),
        curves="\n".join(svg for svg in drawn if svg),
        samples=_table(spread(rows, SAMPLES)) if rows is not None else "<p>None.</p>",
        config=html.escape(config),
    )
    path = folder / "report.html"
    path.write_text(page)
    return path


def _summary(metrics: Sequence[Mapping[str, float]]) -> str:
    if not metrics:
        return "No step yet."
    first = next((row for row in metrics if "reward/mean" in row), {})
    last = metrics[-1]
    reward = f", reward {first['reward/mean']:.3f} to {last['reward/mean']:.3f}" if "reward/mean" in last else ""
    return f"{int(last['step'])} steps{reward}"


def _curve(title: str, names: Sequence[str], metrics: Sequence[Mapping[str, float]]) -> str:
    from matplotlib.figure import Figure

    series = {name: [(row["step"], row[name]) for row in metrics if row.get(name) is not None] for name in names}
    series = {name: points for name, points in series.items() if points}
    if not series:
        return ""
    figure = Figure(figsize=(4.6, 2.8), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="step")
    for name, points in series.items():
        axes.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 30 else None)
    axes.grid(alpha=0.3)
    if len(series) > 1:
        axes.legend(fontsize="small")
    out = io.StringIO()
    figure.savefig(out, format="svg")
    svg = out.getvalue()
    return svg[svg.index("<svg") :]


def _table(samples: Batch) -> str:
    samples = samples.fetch(*(name for name in ("prompt", "response", "answer", "reward") if name in samples))
    columns = samples.names
    head = "".join(f"<th>{name}</th>" for name in columns)
    rows = [
        "<tr>" + "".join(f"<td>{html.escape(str(samples.array(name)[i]))}</td>" for name in columns) + "</tr>"
        for i in range(len(samples))
    ]
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"
