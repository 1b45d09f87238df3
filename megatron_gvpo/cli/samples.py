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
    result = explain_samples([sample for _, sample in numbered], objective, options, [line for line, _ in numbered])
    if json:
        print_json(result)
        return
    from megatron_gvpo.report.explain_table import print_explanation

    print_explanation(result)
