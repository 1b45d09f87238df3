"""Commands that take no GPU: validate, plan, sbatch, doctor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from megatron_gvpo.cli.app import EXIT_FAILED, EXIT_INPUT, app
from megatron_gvpo.cli.options import ConfigFile, Json, NoFiles, Sets, checked_config, print_json


@app.command()
def validate(config: ConfigFile, sets: Sets = None, json: Json = False, no_files: NoFiles = False) -> int:
    """Read CONFIG and look for mistakes and contradictions, in a fraction of a second."""
    from megatron_gvpo.config.check import check_config
    from megatron_gvpo.config.errors import ConfigError
    from megatron_gvpo.config.load import read_config

    errors: list[str] = []
    warnings: list[str] = []
    summary = ""
    try:
        checked, source = read_config(config, sets or ())
    except ConfigError as error:
        errors = error.lines
    else:
        findings = check_config(checked, source, files=not no_files)
        errors = [finding.line for finding in findings if finding.severity == "error"]
        warnings = [finding.line for finding in findings if finding.severity == "warning"]
        parallel = checked.parallel
        summary = f"{checked.objective.name}, {checked.train.steps} steps on {parallel.world_size} rank(s)"
    for line in errors + warnings:
        print(line, file=sys.stderr)
    if json:
        print_json({"ok": not errors, "errors": errors, "warnings": warnings})
    elif not errors:
        print(f"{config}: ok: {summary}")
    return EXIT_INPUT if errors else 0


@app.command()
def plan(config: ConfigFile, sets: Sets = None, json: Json = False) -> None:
    """Say what CONFIG will need: parameters, ranks, and memory per GPU by part. Needs the model's config.json alone."""
    from megatron_gvpo.launch.plan import make_plan
    from megatron_gvpo.launch.plan_text import plan_text

    result = make_plan(checked_config(config, sets, files=False))
    if json:
        print_json(result)
    else:
        print(plan_text(result))


@app.command()
def sbatch(
    config: ConfigFile,
    sets: Sets = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write the script there, not to stdout")] = None,
    no_files: NoFiles = False,
) -> None:
    """Write the SLURM script that trains CONFIG: one task a rank, saved and requeued on a signal."""
    from megatron_gvpo.launch.sbatch import render_sbatch

    script = render_sbatch(checked_config(config, sets, files=not no_files), config, sets or ())
    if output is None:
        print(script, end="")
        return
    output.write_text(script, encoding="utf-8")


@app.command()
def doctor(json: Json = False) -> int:
    """Say what this machine has, what is missing, and what that costs."""
    from megatron_gvpo.launch.doctor import doctor_text, examine

    report = examine()
    if json:
        print_json(report)
    else:
        print(doctor_text(report))
    return 0 if report["ready"] else EXIT_FAILED
