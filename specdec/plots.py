"""The picture of a benchmark report."""

from __future__ import annotations

from pathlib import Path

from .bench import PLAIN

# distinguishable without colour vision (Okabe and Ito); plain is grey
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
GREY = "#9A9A9A"
COPY_HEAVY_MARK = " *"


def plot_bench(report: dict, path: str | Path) -> None:
    """Tokens per second and tokens per forward, by kind of prompt, as a PNG or by suffix."""
    # not pyplot: it keeps state, and may want a display
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = report["contenders"]
    groups = _groups(report)
    spare = iter(COLOURS * len(names))
    colours = {name: GREY if name == PLAIN else next(spare) for name in names}
    drafting = [name for name in names if groups[-1][1][name]["mean_accepted"] and name != PLAIN]
    bar = 0.8 / len(names)
    height = 1.8 + len(groups) * max(0.5, 0.22 * len(names))
    figure = Figure(figsize=(11, height), layout="constrained")
    FigureCanvasAgg(figure)
    speed, forward = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for i, name in enumerate(names):
        rows = [y + (i - (len(names) - 1) / 2) * bar for y in range(len(groups))]
        rates = [figures[name]["tokens_per_second"] for _, figures in groups]
        medians = [rate["median"] for rate in rates]
        errors = [
            [rate["median"] - rate["p20"] for rate in rates],
            [rate["p80"] - rate["median"] for rate in rates],
        ]
        speed.barh(
            rows,
            medians,
            bar * 0.92,
            xerr=errors,
            color=colours[name],
            label=name,
            error_kw={"elinewidth": 1, "capsize": 1.5, "ecolor": "#333333"},
        )
        for y, rate, (_, figures) in zip(rows, rates, groups, strict=True):
            ratio = figures[name]["speedup"]
            if name != PLAIN and ratio is not None:
                speed.annotate(
                    f"{ratio:.2f}×",
                    (rate["p80"], y),
                    (4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=7.5,
                )
        if name in drafting:
            values = [figures[name]["tokens_per_forward"] for _, figures in groups]
            bars = forward.barh(rows, values, bar * 0.92, color=colours[name])
            forward.bar_label(bars, fmt="%.2f", padding=4, fontsize=7.5)
    speed.set_yticks(range(len(groups)), [label for label, _ in groups])
    speed.set_ylim(len(groups) - 0.5, -0.5)
    speed.margins(x=0.12)
    speed.set_xlabel("speed (new tokens per second; bar: median, whisker: p20 to p80)")
    forward.set_xlabel("new tokens per forward of the target, bonus included")
    forward.axvline(1, color="#333333", linewidth=1, linestyle=":")
    forward.margins(x=0.14)
    forward.set_xlim(left=0)
    if not drafting:
        forward.text(0.5, 0.5, "nobody drafted", transform=forward.transAxes, ha="center")
    for axis in (speed, forward):
        axis.grid(axis="x", color="#DDDDDD", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.axhline(len(report["kinds"]) - 0.5, color="#333333", linewidth=0.8)
    figure.suptitle(_title(report), fontsize=10)
    handles, labels = speed.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(len(names), 5),
        frameon=False,
        title="× is the ratio to plain; * marks copy-heavy prompts",
        title_fontsize=8,
    )
    figure.savefig(path, dpi=150)


def _groups(report: dict) -> list[tuple[str, dict]]:
    """Labels and figures: the kinds, then what sums them up."""
    heavy = {
        kind: all(unit["copy_heavy"] for unit in report["prompts"] if unit["kind"] == kind)
        for kind in report["kinds"]
    }
    groups = [
        (kind + COPY_HEAVY_MARK * heavy[kind], figures) for kind, figures in report["kinds"].items()
    ]
    if report["copy_heavy"] is not None and not all(heavy.values()):
        groups.append(("copy-heavy" + COPY_HEAVY_MARK, report["copy_heavy"]))
    return [*groups, ("all", report["total"])]


def _title(report: dict) -> str:
    options = report["options"]
    how = "greedy"
    if options.get("do_sample"):
        how = ", ".join(
            f"{name} {options[name]:g}"
            for name in ("temperature", "top_k", "top_p", "min_p")
            if options.get(name)
        )
        how = f"sampled ({how})"
    repeats = f"{report['repeats']} repeat{'' if report['repeats'] == 1 else 's'}"
    device = report["device"]
    where = device["name"]
    if device["device"] == "cpu":
        where += f", {report['threads']} threads"
    return (
        f"{report['model']}, {report['dtype']}, on {where}\n"
        f"{how}, at most {options['max_new_tokens']} new tokens, batch size "
        f"{report['batch_size']}, {repeats}"
    )
