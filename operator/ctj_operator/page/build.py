"""Writes a job's report page: one HTML file that needs nothing else."""

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ctj_operator.page import charts, tables
from ctj_operator.page.gather import PageContent


def render(content: PageContent) -> str:
    """Return the whole page as text. Everything that came from users is escaped; only our own SVG is not."""
    environment = Environment(
        loader=PackageLoader("ctj_operator.page", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    stages = tables.stage_rows(content)
    trained = [row for row in stages if row.first_loss is not None]
    reports = [attempt.report for attempt in content.attempts if attempt.report]
    return environment.get_template("page.html.j2").render(
        content=content,
        stages=stages,
        losses=(trained[0].first_loss, trained[-1].last_loss) if trained else None,
        colours={row.name: charts.colour_of(content, row.name) for row in stages},
        checks=tables.check_rows(content),
        parity=tables.parity_rows(content),
        switches=tables.switch_rows(content),
        duration=tables.duration_seconds(content),
        notices=sorted({notice for report in reports for notice in report.notices}),
        charts={
            "loss": Markup(charts.loss_chart(content)),
            "gradient": Markup(charts.gradient_chart(content)),
            "step_time": Markup(charts.step_time_chart(content)),
            "compile": Markup(charts.compile_chart(content)),
            "memory": Markup(charts.memory_chart(content)),
        },
    )


def write_page(content: PageContent, path: Path) -> Path:
    """Write the page beside the job's other files, whole or not at all."""
    draft = path.with_suffix(".tmp")
    draft.write_text(render(content), encoding="utf-8")
    draft.replace(path)
    return path
