"""Pictures of what objectives do to a token or a response, for the docs; every curve is asked of the objective itself.

python -m megatron_gvpo.report.objective_plots docs/img
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_gvpo.data.samples import Sample
from megatron_gvpo.objectives.explain import explain
from megatron_gvpo.report.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, RED

_STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e9ee",
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "megatron-gvpo",
}
_POINTS = 121


def distillation_weights(shape: str, deltas: Sequence[float], **options: Any) -> list[float]:
    """A(Delta): the push on a token's log-prob (minus its gradient, times the tokens) for each log-ratio to the teacher."""
    samples = [_sample("g", logprobs=[-2.0], teacher_logprobs=[-2.0 + d]) for d in deltas]
    found = explain(samples, "opd", {"shape": shape, **options})
    return [-s["token_grads"][0] * len(deltas) for s in found["samples"]]


def response_weights(name: str, reward: float, ratios: Sequence[float], options: Mapping[str, Any]) -> list[float]:
    """The push on a whole response's log-prob, for each log-ratio of policy to reference, in a group of 8 with mean reward 1/2.

    The other seven are at ratio 0, four of the eight have reward 1, and every response is one token long.
    """
    others = [1.0] * (4 - int(reward)) + [0.0] * (3 + int(reward))
    pushes = []
    for ratio in ratios:
        group = [_sample("g", reward, logprobs=[-2.0 + ratio], old_logprobs=[-2.0])]
        group += [_sample("g", r, logprobs=[-2.0], old_logprobs=[-2.0]) for r in others]
        pushes.append(-explain(group, name, options)["samples"][0]["coefficient"])
    return pushes


def distillation_figure() -> Figure:
    """The advantage of each distillation shape over the log-ratio."""
    deltas = [-4 + 8 * i / (_POINTS - 1) for i in range(_POINTS)]
    curves = (("raw", BLUE, {}), ("clip", GREEN, {"clip": 2.0}), ("tanh", PURPLE, {}), ("sign", ORANGE, {}))
    names = {"raw": "raw: Δ", "clip": "clip: Δ within ±2", "tanh": "tanh(Δ/2)", "sign": "sign(Δ), and TV-OPD at c = 1"}

    def draw(axes: Axes) -> None:
        for shape, colour, options in curves:
            axes.plot(deltas, distillation_weights(shape, deltas, **options), color=colour, lw=1.8, label=names[shape])
        signs = distillation_weights("sign", deltas)
        axes.plot(deltas, [0.4 * a for a in signs], color=ORANGE, lw=1.4, ls="--", label="TV-OPD at c = 0.4")
        axes.set_xlabel("Δ = log p(teacher) − log q(student), nats")
        axes.set_ylabel("push on the token, A(Δ)")

    return _figure([draw], "upper left")


def response_figure() -> Figure:
    """GVPO's weight over the log-ratio for several beta, beside GRPO's clipped one."""
    ratios = [-1.5 + 3 * i / (_POINTS - 1) for i in range(_POINTS)]

    def gvpo(axes: Axes) -> None:
        for beta, style in ((0.1, "-"), (0.3, "--"), (1.0, ":")):
            for reward, colour in ((1.0, BLUE), (0.0, RED)):
                push = [p / beta for p in response_weights("gvpo", reward, ratios, {"beta": beta})]
                axes.plot(ratios, push, color=colour, ls=style, lw=1.8, label=f"reward {reward:.0f}, β = {beta}")
        axes.set_title("GVPO: push / β")
        axes.set_ylabel("push on the response")

    def grpo(axes: Axes) -> None:
        for reward, colour in ((1.0, BLUE), (0.0, RED)):
            axes.plot(ratios, response_weights("grpo", reward, ratios, {}), color=colour, lw=1.8, label=f"reward {reward:.0f}")
        axes.set_title("GRPO: ratio, cut by the clip")

    return _figure([gvpo, grpo], "lower left", "log-ratio of the response to its reference, nats")


def write_figures(folder: Path) -> list[Path]:
    """Draw all pictures into `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in (("distillation_weights", distillation_figure()), ("response_weights", response_figure())):
        path = folder / f"{name}.svg"
        with matplotlib.rc_context(_STYLE):
            figure.savefig(path, metadata={"Date": None})
        paths.append(path)
    return paths


def _figure(panels: Sequence[Callable[[Axes], None]], legend: str, xlabel: str = "") -> Figure:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5.2 * len(panels), 3.4), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            panel(axes)
            axes.axhline(0, color=GREY, lw=0.8)
            axes.axvline(0, color=GREY, lw=0.8)
            if xlabel:
                axes.set_xlabel(xlabel)
            axes.legend(fontsize=8, loc=legend)
        return figure


def _sample(group: str, reward: float = 0.0, **signals: list[float]) -> Sample:
    """A response of one token."""
    sample = Sample(group=group, prompt_ids=[0], response_ids=[0], mask=[1], reward=reward)
    return replace(sample, **signals)


if __name__ == "__main__":
    for written in write_figures(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/img")):
        print(written)
