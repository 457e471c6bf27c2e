#!/usr/bin/env python3
# scripts/plot.py - one or several runs as curves (PNG) and as a table.
#
#   python3 scripts/plot.py log_gpt2_124M
#   python3 scripts/plot.py out/stage*/log.jsonl -o stages.png --x tokens
#
# Reads the log.jsonl that the trainer writes into its output folder, also while it runs (a torn
# last line is left out) and after resumes. null, a value that was not finite, is a gap in the
# curve.

import argparse
import json
import statistics
import sys
from pathlib import Path

GIB = 2.0**30
NAN = float("nan")


class Run:
    """The events of one log, by kind."""

    def __init__(self, path):
        self.path = path / "log.jsonl" if path.is_dir() else path
        self.name = str(self.path.parent) if self.path.name == "log.jsonl" else str(self.path)
        self.events = {}
        lines = self.path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                event = json.loads(line)
                self.events.setdefault(event["event"], []).append(event)
            except (ValueError, KeyError, TypeError):
                if number < len(lines):  # a whole line: not one that is still being written
                    raise ValueError(f"{self.path}:{number}: not an event of a log") from None
        if not self.of("start"):
            raise ValueError(f"{self.path}: no start event, so not the log of a run")

    def of(self, kind):
        return self.events.get(kind, [])

    def values(self, kind, key):
        """The values of a field, NaN where it is null or absent."""
        return [NAN if event.get(key) is None else event[key] for event in self.of(kind)]

    def last(self, kind, key):
        return self.of(kind)[-1].get(key) if self.of(kind) else None

    def positions(self, kind, axis):
        """Where the events of a kind stand on the x axis: at their step, or at the tokens seen."""
        steps = [event["step"] for event in self.of(kind)]
        per_step = self.last("start", "total_batch_tokens")
        return [step * per_step for step in steps] if axis == "tokens" else steps

    def plan(self):
        return self.last("start", "plan_bytes") or {}


# ---- table ---------------------------------------------------------------------------------------


def shown(value, form="{}"):
    return "-" if value is None or value != value else form.format(value)


def median(values):
    values = [value for value in values if value == value]
    return statistics.median(values) if values else None


def row(run):
    start = run.of("start")[-1]
    losses = [value for value in run.values("val", "loss") if value == value]
    peak = run.last("end", "peak_bytes") or sum(run.plan().values())
    return {
        "run": run.name,
        "params": shown(start.get("num_parameters"), "{:,}"),
        "ranks": shown(start.get("ranks")),
        "stage": shown(start.get("zero_stage")),
        "prec": shown(start.get("precision")),
        "step": shown(run.last("step", "step"), "{:,}"),
        "tokens": shown(run.last("step", "tokens"), "{:.3g}"),
        "loss": shown(run.last("step", "loss"), "{:.4f}"),
        "val": shown(losses[-1] if losses else None, "{:.4f}"),
        "best val": shown(min(losses, default=None), "{:.4f}"),
        "HellaSwag": shown(run.last("eval", "accuracy"), "{:.2%}"),
        "ms/step": shown(median(run.values("step", "ms")), "{:.1f}"),
        "tok/s": shown(median(run.values("step", "tokens_per_s")), "{:,.0f}"),
        "mfu": shown(median(run.values("step", "mfu")), "{:.1%}"),
        "wait": shown(wait_share(run), "{:.1%}"),
        "GiB/rank": shown(peak / GIB, "{:.2f}"),
        "hours": shown(sum(run.values("step", "ms")) / 3.6e6, "{:.2f}"),
        "skipped": str(sum("skipped" in event for event in run.of("step"))),
        "end": shown(run.last("end", "reason")),
    }


def wait_share(run):
    """The share of a step that ranks spend waiting for communication."""
    pairs = zip(run.values("step", "comm_wait_ms"), run.values("step", "ms"), strict=True)
    return median([wait / ms for wait, ms in pairs if ms > 0])


def print_table(runs):
    rows = [row(run) for run in runs]
    widths = {key: max(len(key), *(len(line[key]) for line in rows)) for key in rows[0]}
    for line in [{key: key for key in widths}, *rows]:
        cells = [
            line[key].ljust(width) if key == "run" else line[key].rjust(width)
            for key, width in widths.items()
        ]
        print("  ".join(cells).rstrip())


# ---- curves --------------------------------------------------------------------------------------


def smoothed(values, window):
    """The mean of the last `window` finite values, NaN where there is none."""
    result, total, count = [], 0.0, 0
    for index, value in enumerate(values):
        if value == value:
            total, count = total + value, count + 1
        if index >= window and values[index - window] == values[index - window]:
            total, count = total - values[index - window], count - 1
        result.append(total / count if count else NAN)
    return result


def labels(runs):
    """The ends of the runs' paths, as short as tells them apart."""
    paths = [Path(run.name).parts for run in runs]
    length = 1
    while len({path[-length:] for path in paths}) < len(set(paths)):
        length += 1
    return ["/".join(path[-length:]) for path in paths]


def draw_memory(axes, runs, colors):
    """One bar a run, cut into what the plan names; the black mark is the measured peak."""
    names = sorted(
        {name for run in runs for name in run.plan()},
        key=lambda name: -max(run.plan().get(name, 0) for run in runs),
    )
    for place, run in enumerate(runs):
        bottom = 0.0
        for index, name in enumerate(names):
            height = run.plan().get(name, 0) / GIB
            label = (
                name if place == 0 and index < 8 else None
            )  # the largest ones; more hide the bars
            axes.bar(place, height, bottom=bottom, color=colors(index % 20), label=label)
            bottom += height
        if run.last("end", "peak_bytes"):
            axes.plot(place, run.last("end", "peak_bytes") / GIB, "k_", markersize=24)
    axes.set_xticks(range(len(runs)), labels(runs), rotation=20)
    axes.set_ylabel("GiB per rank, planned")
    axes.legend(fontsize="x-small")


def draw(runs, path, axis, window):
    try:
        import matplotlib
    except ModuleNotFoundError:
        advice = "python3 -m venv build/venv && build/venv/bin/pip install matplotlib"
        raise ValueError(f"no matplotlib: --table-only, or {advice}") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, places = pyplot.subplots(2, 3, figsize=(18, 9), layout="constrained")
    loss, norm, rate, throughput, accuracy, memory = places.flat
    for number, (run, label) in enumerate(zip(runs, labels(runs), strict=True)):
        color = f"C{number % 10}"
        x = run.positions("step", axis)
        loss.plot(
            x, smoothed(run.values("step", "loss"), window), color=color, label=label, alpha=0.7
        )
        loss.plot(
            run.positions("val", axis),
            run.values("val", "loss"),
            "o-",
            color=color,
            markersize=3,
            label=f"{label}, validation" if run.of("val") else None,
        )
        norm.plot(x, smoothed(run.values("step", "grad_norm"), window), color=color)
        rate.plot(x, run.values("step", "lr"), color=color)
        throughput.plot(x, smoothed(run.values("step", "tokens_per_s"), window), color=color)
        accuracy.plot(
            run.positions("eval", axis),
            run.values("eval", "accuracy"),
            "o-",
            color=color,
            markersize=3,
        )
    draw_memory(memory, runs, matplotlib.colormaps["tab20"])

    titles = ("loss", "gradient norm", "learning rate", "tokens per second", "HellaSwag accuracy")
    for axes, title in zip(places.flat, titles, strict=False):
        axes.set_title(title)
        axes.set_xlabel(axis)
        axes.grid(alpha=0.3)
    accuracy.set_visible(any(run.of("eval") for run in runs))
    memory.set_title("memory")
    loss.legend(fontsize="small")
    throughput.set_ylim(bottom=0)
    figure.savefig(path, dpi=100)
    print(f"{path}: {len(runs)} run{'s' if len(runs) != 1 else ''}")


def main():
    parser = argparse.ArgumentParser(description="Curves and a table from the trainer's logs.")
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="output folder or log.jsonl"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        default=Path("training.png"),
        help="(training.png)",
    )
    parser.add_argument("--x", choices=("step", "tokens"), default="step", help="(step)")
    parser.add_argument(
        "--smooth", type=int, default=1, metavar="N", help="mean over the last N steps (1)"
    )
    parser.add_argument(
        "--table-only", action="store_true", help="draw nothing, so need no matplotlib"
    )
    options = parser.parse_args()
    if options.smooth < 1:
        parser.error(f"--smooth {options.smooth}: at least 1")
    try:
        runs = [Run(path) for path in options.runs]
        print_table(runs)
        if not options.table_only:
            draw(runs, options.output, options.x, options.smooth)
    except (OSError, ValueError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


if __name__ == "__main__":
    main()
