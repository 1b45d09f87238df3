"""Commands that look at what a run left: explain, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_gvpo.cli.app import app
from megatron_gvpo.cli.options import Json, print_json


@app.command()
def explain(
    samples: Annotated[Path, typer.Argument(metavar="SAMPLES.jsonl", help="a samples file", show_default=False)],
    objective: Annotated[str, typer.Option("--objective", metavar="NAME", help="built-in name, plug-in name or module:Class")],
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="one of the objective's own keys, such as beta=0.1")
    ] = None,
    json: Json = False,
) -> None:
    """Show what an objective would do with a batch of samples: its loss, and its gradient at every token's log-prob."""
    from megatron_gvpo.config.overrides import objective_options

    options = objective_options(sets or ())
    from megatron_gvpo.data.samples import iter_samples
    from megatron_gvpo.objectives.explain import explain as explain_samples

    numbered = list(iter_samples(samples))
    lines, found = [line for line, _ in numbered], [sample for _, sample in numbered]
    result = explain_samples(found, objective, options, lines)
    if json:
        print_json(result)
        return
    from megatron_gvpo.config.objectives import objective_config
    from megatron_gvpo.report.explain_table import print_explanation

    print_explanation(found, lines, result, objective_config(objective, options).needs())


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="a run's directory", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="write the page there; RUN_DIR/report.html when left out")
    ] = None,
    json: Json = False,
) -> None:
    """Write one HTML page that says what a run did, whether it went well, and where its time went."""
    from megatron_gvpo.report.run_report import write_report

    path = write_report(run_dir, output)
    if json:
        print_json({"report": str(path)})
    else:
        print(path)
