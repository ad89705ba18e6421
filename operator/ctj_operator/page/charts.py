"""The page's curves as inline SVG: no script, no font and no network needed to look at them."""

import io
from collections.abc import Callable, Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ctj_operator.page.gather import AttemptRecord, PageContent, Record

# Okabe and Ito's palette: told apart with every common colour blindness.
STAGE_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
GREY = "#6b7280"
SIZE_INCHES = (9.0, 2.9)
MIB = 2**20


def _svg(draw: Callable[[Axes], None], *, y_label: str, x_label: str = "optimizer step") -> str:
    # Figure without pyplot: no global state, no display, safe in threads.
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    draw(axes)
    axes.set_xlabel(x_label, color=GREY)
    axes.set_ylabel(y_label, color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.7)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, ncols=4, loc="best", fontsize=9)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def colour_of(content: PageContent, stage: str) -> str:
    """One colour per stage, the same in every chart and table."""
    names = [entry.name for entry in content.spec.ladder]
    return STAGE_COLOURS[names.index(stage) % len(STAGE_COLOURS)] if stage in names else GREY


def _points(steps: Iterable[Record], key: str) -> tuple[list[int], list[float]]:
    pairs = [(int(r["step"]), float(r[key])) for r in steps if r.get(key) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _draw_per_attempt(content: PageContent, axes: Axes, key: str) -> None:
    named: set[str] = set()
    for attempt in content.attempts:
        label = attempt.stage if attempt.stage not in named else None
        colour = colour_of(content, attempt.stage)
        steps, values = _points((r for r in attempt.steps if not r.get("replay")), key)
        if steps:
            axes.plot(steps, values, color=colour, linewidth=1.8, label=label)
            named.add(attempt.stage)
        replayed, again = _points((r for r in attempt.steps if r.get("replay")), key)
        axes.plot(replayed, again, linestyle="none", marker="o", markersize=5, markerfacecolor="none", color=colour)


def loss_chart(content: PageContent) -> str:
    """Loss over all stages; circles are steps a stage repeated on the same samples, the dashed line held-out ones."""

    def draw(axes: Axes) -> None:
        _draw_per_attempt(content, axes, "loss")
        # The newest attempt's word counts where a step was evaluated twice.
        evaluated = {r["step"]: r for attempt in content.attempts for r in attempt.steps if r.get("evaluationLoss")}
        steps, values = _points((evaluated[step] for step in sorted(evaluated)), "evaluationLoss")
        if steps:
            axes.plot(steps, values, color=GREY, linestyle="--", marker=".", linewidth=1.2, label="held out")

    return _svg(draw, y_label="loss")


def gradient_chart(content: PageContent) -> str:
    """Global gradient norm before clipping, over all stages."""
    return _svg(lambda axes: _draw_per_attempt(content, axes, "gradNorm"), y_label="gradient norm")


def step_time_chart(content: PageContent) -> str:
    """Seconds of each step; eager steps are marked, so that the timing blocks can be seen."""

    def draw(axes: Axes) -> None:
        _draw_per_attempt(content, axes, "seconds")
        eager = [r for attempt in content.attempts for r in attempt.steps if r.get("mode") == "Eager"]
        steps, seconds = _points(eager, "seconds")
        axes.plot(
            steps,
            seconds,
            linestyle="none",
            marker="x",
            markersize=5,
            color=GREY,
            label="eager step" if steps else None,
        )
        axes.set_yscale("log")

    return _svg(draw, y_label="seconds per step")


def compile_chart(content: PageContent) -> str:
    """Compile seconds and recompiles, each as a running total of its attempt."""

    def draw(axes: Axes) -> None:
        _draw_per_attempt(content, axes, "compileSeconds")
        other = axes.twinx()
        other.spines[["top", "left"]].set_visible(False)
        other.set_ylabel("recompiles (dotted)", color=GREY)
        axes.set_ylim(bottom=0)
        most = 1.0
        for attempt in content.attempts:
            steps, recompiles = _points(attempt.steps, "recompiles")
            most = max([most, *recompiles])
            other.plot(steps, recompiles, linestyle=":", color=colour_of(content, attempt.stage))
        other.set_ylim(0, most * 1.1)
        other.yaxis.set_major_locator(MaxNLocator(integer=True))

    return _svg(draw, y_label="compile seconds")


def measured_peak(attempts: Sequence[AttemptRecord]) -> float | None:
    """Largest memory any step of these attempts used, in bytes per process."""
    used = [float(r["memoryBytes"]) for attempt in attempts for r in attempt.steps if r.get("memoryBytes")]
    return max(used, default=None)


def memory_chart(content: PageContent) -> str:
    """Predicted and measured peak memory of one process, per stage."""

    def draw(axes: Axes) -> None:
        names = [stage.name for stage in content.spec.ladder]
        predicted = {stage.name: stage.predicted_memory_bytes or 0 for stage in content.status.ladder}
        measured = {name: measured_peak(content.of_stage(name)) or 0 for name in names}
        places = range(len(names))
        axes.bar(
            [p - 0.2 for p in places],
            [predicted.get(n, 0) / MIB for n in names],
            width=0.36,
            color="#cbd5e1",
            label="predicted: model, gradients, optimizer, activations",
        )
        axes.bar(
            [p + 0.2 for p in places],
            [measured[n] / MIB for n in names],
            width=0.36,
            color=[colour_of(content, n) for n in names],
            label="measured: whole process",
        )
        axes.set_xticks(list(places), names)
        axes.margins(y=0.25)  # room for the legend

    return _svg(draw, y_label="MiB per process", x_label="stage")
