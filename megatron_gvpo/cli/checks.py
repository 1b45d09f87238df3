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
def plan(
    config: ConfigFile,
    sets: Sets = None,
    json: Json = False,
    gpu: Annotated[str, typer.Option("--gpu", help="the trainer's and the servers' GPU: a100, h100, h200 or b200")] = "h100",
    efficiency: Annotated[
        float, typer.Option("--efficiency", min=0.01, max=1.0, help="share of the bf16 peak of a layer")
    ] = 0.45,
    fit: Annotated[bool, typer.Option("--fit", help="look for the fastest layout of these GPUs that fits")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="build a rank's real model without memory and check it")] = False,
    rank: Annotated[list[int] | None, typer.Option("--rank", help="with --dry-run: a rank; the last stage's by default")] = None,
) -> int:
    """Say what CONFIG will need: ranks, memory per GPU by part, time, traffic. Needs the model's config.json alone."""
    from dataclasses import replace

    from megatron_gvpo.config.errors import ConfigError
    from megatron_gvpo.launch.fit import fit_plan, fit_text
    from megatron_gvpo.launch.hardware import GPUS, Assumptions
    from megatron_gvpo.launch.plan import make_plan
    from megatron_gvpo.launch.plan_text import plan_text

    if gpu not in GPUS:
        raise ConfigError([f"error: --gpu {gpu}: not known here; there are {', '.join(GPUS)}"])
    checked = checked_config(config, sets, files=False)
    assumed = replace(Assumptions(), gpu=GPUS[gpu], efficiency=efficiency)
    result = make_plan(checked, assumed)
    text = plan_text(result)
    if fit:
        result["fit"] = fit_plan(checked, assumed)
        text += "\n" + fit_text(result["fit"])
    if dry_run:
        from megatron_gvpo.launch.dry_run import dry_run_ranks, dry_run_text

        result["dry_run"] = dry_run_ranks(config, sets or (), checked, rank or ())
        text += "\n" + dry_run_text(result["dry_run"])
    if json:
        print_json(result)
    else:
        print(text)
    return EXIT_FAILED if dry_run and not all(found["ok"] for found in result["dry_run"]) else 0


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
def doctor(
    json: Json = False,
    bandwidth: Annotated[bool, typer.Option("--bandwidth", help="run by every rank of a job: how fast its links are")] = False,
) -> int:
    """Say what this machine has, what is missing, and what that costs."""
    from megatron_gvpo.launch.bandwidth import bandwidth_text, measure
    from megatron_gvpo.launch.doctor import doctor_text, examine

    if bandwidth:
        found = measure()
        if found is not None:
            print_json(found) if json else print(bandwidth_text(found))
        return EXIT_FAILED if found and found["slow"] else 0
    report = examine()
    if json:
        print_json(report)
    else:
        print(doctor_text(report))
    return 0 if report["ready"] else EXIT_FAILED
