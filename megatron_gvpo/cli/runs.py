"""Commands that run models: train, eval, convert."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from megatron_gvpo.cli.app import app
from megatron_gvpo.cli.options import ConfigFile, Json, Sets, checked_config, print_json
from megatron_gvpo.config import ConfigError


@app.command()
def train(
    config: ConfigFile,
    sets: Sets = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on from the run directory's newest checkpoint")] = False,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="resume although the data, the tokenizer or the objective is another one")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="delete what the run directory holds, and start anew")] = False,
    replay: Annotated[
        Path | None,
        typer.Option("--replay", metavar="FILE_OR_DIR", help="train on these recorded samples; no server is started"),
    ] = None,
    stop_after: Annotated[int | None, typer.Option("--stop-after", min=1, help="save and leave with 85 after this step")] = None,
) -> int:
    """Train CONFIG. Starts its ranks on this machine; under srun or torchrun this process is one of them."""
    from megatron_gvpo.launch.local import is_rank
    from megatron_gvpo.train.main import train as run

    one_of_many = is_rank(os.environ)
    # Every rank reads the config again; what there is to warn of has been said by then.
    checked = checked_config(config, sets, quiet=one_of_many)
    if replay is not None and not replay.exists():
        raise ConfigError([f"--replay: {replay}: no such file or directory"])
    if checked.parallel.nodes > 1 and not one_of_many:
        raise ConfigError(
            [f"{config}: parallel.nodes: {checked.parallel.nodes} machines are started by srun (see `sbatch`) or torchrun"]
        )
    return run(
        checked,
        config,
        overrides=sets or (),
        resume=resume,
        fresh=fresh,
        replay=replay,
        stop_after=stop_after,
        accept_changes=accept_changes,
    )


@app.command("eval")
def evaluate(
    config: ConfigFile,
    sets: Sets = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="FOLDER", help="a Hugging Face folder in place of model.path")
    ] = None,
    logs: Annotated[Path, typer.Option("--logs", help="folder of the servers' logs")] = Path("runs/eval"),
    samples: Annotated[
        Path | None, typer.Option("--samples", metavar="FILE.jsonl", help="write the sampled responses there")
    ] = None,
    json: Json = False,
) -> None:
    """Accuracy of a model on CONFIG's held-out prompts, greedy and sampled, on servers that are started for it."""
    overrides = [*(sets or ()), *([f"model.path={model}"] if model else [])]
    checked = checked_config(config, overrides, quiet=False)
    from megatron_gvpo.train.evaluate import evaluate as run

    metrics = run(checked, logs, samples)
    if json:
        print_json(metrics)
        return
    for name in ("greedy", "sampled"):
        print(f"{name}: {100 * metrics[f'eval/{name}']:.1f} ± {100 * metrics[f'eval/{name}_se']:.1f} %")


@app.command()
def convert(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="a run's directory", show_default=False)],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="the Hugging Face folder to write", show_default=False)],
    json: Json = False,
) -> None:
    """Write a run's newest checkpoint as a Hugging Face folder, whatever layout trained it."""
    from megatron_gvpo.train.convert import convert as run

    step = run(run_dir, output)
    if json:
        print_json({"path": str(output), "step": step})
    else:
        print(f"{output}: the weights after step {step}")
