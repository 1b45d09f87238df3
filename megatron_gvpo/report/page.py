"""Pieces of the report's HTML. Everything that comes from a run is escaped: a response is a model's text, and may be a script."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template

from matplotlib.figure import Figure

from megatron_gvpo.report.plots import as_svg


def page(title: str, facts: Sequence[str], body: Sequence[str]) -> str:
    """The whole document: one file, which needs nothing from elsewhere."""
    template = Template(files("megatron_gvpo.report").joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(title=escape(title), facts=escape(" · ".join(facts)), body="\n".join(body))


def heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def cards(entries: Sequence[tuple[str, str, str, bool]]) -> str:
    """Big numbers: (name, value, more, whether it is good news)."""
    parts = [
        f'<div class="card{" good" if good else ""}"><div class="name">{escape(name)}</div>'
        f'<div class="value">{escape(value)}</div><div class="more">{escape(more)}</div></div>'
        for name, value, more, good in entries
    ]
    return f'<div class="cards">{"".join(parts)}</div>'


def notices(lines: Sequence[str], *, fine: bool) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="notices{" fine" if fine else ""}">{items}</ul>'


def image(figure: Figure, alt: str) -> str:
    """A picture of its own, so that the names inside one SVG cannot clash with another's."""
    data = base64.b64encode(as_svg(figure).encode()).decode()
    return f'<img alt="{escape(alt)}" src="data:image/svg+xml;base64,{data}">'


def panel(title: str, explanation: str, figure: Figure | None, more: str = "") -> str:
    """A curve with what to look for in it; nothing where there is no curve."""
    if figure is None:
        return ""
    return f'<section class="panel"><h3>{escape(title)}</h3><p>{escape(explanation)}</p>{image(figure, title)}{more}</section>'


def panels(parts: Sequence[str]) -> str:
    return f'<div class="panels">{"".join(parts)}</div>' if any(parts) else ""


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, text: Sequence[int] = ()) -> str:
    """A table; the first `left` columns are flush left, and the columns in `text` hold text as it was written."""

    def kind(column: int) -> str:
        names = [*(["l"] if column < left or column in text else []), *(["text"] if column in text else [])]
        return f' class="{" ".join(names)}"' if names else ""

    head = "".join(f"<th{kind(i).replace(' text', '')}>{escape(h)}</th>" for i, h in enumerate(headings))
    body = "".join("<tr>" + "".join(f"<td{kind(i)}>{escape(cell)}</td>" for i, cell in enumerate(row)) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def time_table(rows: Sequence[tuple[str, str, str, str]]) -> str:
    """Parts of the time: (colour, name, seconds, share)."""
    body = "".join(
        f'<tr><td class="l"><span class="swatch" style="background:{colour}"></span>{escape(name)}</td>'
        f"<td>{escape(seconds)}</td><td>{escape(share)}</td></tr>"
        for colour, name, seconds, share in rows
    )
    return f'<table><tr><th class="l">part</th><th>total</th><th>share</th></tr>{body}</table>'


def scrolling(inner: str) -> str:
    return f'<div class="scroll">{inner}</div>'


def folded(summary: str, inner: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{inner}</details>"


def preformatted(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'
