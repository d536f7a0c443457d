"""Writes the tables: CSV from the frame; Markdown, LaTeX and HTML from the same blocks.

Output is a function of its arguments: two writes give equal bytes. Files are replaced whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

import pandas as pd

from pask.files import write_text
from pask.report.blocks import (
    Block,
    Line,
    accuracy_blocks,
    accuracy_notes,
    error_blocks,
    smoke_line,
)
from pask.report.pairs import pair_blocks, pair_notes
from pask.report.statistics import rounded

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1f; --soft: #5d5d66; --paper: #fff; --rule: #d9d9de;
  --band: #f5f5f7; --warn: #7a4b00; --warn-paper: #fff4dc; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8ec; --soft: #a0a0aa; --paper: #16161a;
  --rule: #37373f; --band: #1f1f25; --warn: #ffd58a; --warn-paper: #3a2c10; } }
body { margin: 0 auto; padding: 1rem; max-width: 72rem; background: var(--paper);
  color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0 0 .6rem; } h2 { font-size: 1rem; margin: 1.8rem 0 .5rem; }
.smoke { background: var(--warn-paper); color: var(--warn); padding: .5rem .8rem;
  border-radius: .3rem; font-weight: 600; }
.wide { overflow-x: auto; }
table { border-collapse: separate; border-spacing: 0; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; text-align: right; vertical-align: top; white-space: nowrap;
  border-top: 1px solid var(--rule); }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--paper); }
thead th { border-top: 0; border-bottom: 2px solid var(--ink); vertical-align: bottom;
  white-space: normal; }
tbody tr:first-child > * { border-top: 0; }
small { display: block; color: var(--soft); font-weight: 400; font-size: .8rem;
  white-space: nowrap; }
small.flag { color: var(--warn); font-weight: 600; }
.muted > *, .muted th:first-child { border-top: 0; color: var(--soft); font-weight: 400;
  background: var(--band); font-style: italic; }
@media (max-width: 40rem) { body { font-size: 13px; padding: .7rem; }
  th, td { padding: .3rem .4rem; } }
ul { color: var(--soft); padding-left: 1.1rem; margin-top: 1.8rem; font-size: .87rem;
  max-width: 48rem; }
""".strip()

_MD_SPECIAL = re.compile(r"[\\|_*<`\[&~$]")


def _md(text: str) -> str:
    return _MD_SPECIAL.sub(r"\\\g<0>", text)


_TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "–": "--", "−": "$-$", "Δ": r"$\Delta$", "<": "$<$", ">": "$>$", "|": "$|$",
}  # fmt: skip


def write_tables(
    frame: pd.DataFrame,
    folder: Path,
    stem: str = "accuracy",
    title: str = "Accuracy",
    notes: Sequence[str] = (),
) -> list[Path]:
    """Write an `accuracy_table` frame as <stem>.csv, .md, .tex and .html; the paths written.

    `notes` are added after those that the frame itself calls for.
    """
    blocks, all_notes = accuracy_blocks(frame), [*accuracy_notes(frame), *notes]
    smoke = smoke_line(frame)
    return _write(
        folder,
        {
            f"{stem}.csv": _csv(frame),
            f"{stem}.md": markdown(title, smoke, blocks, all_notes),
            f"{stem}.tex": latex(title, smoke, blocks, all_notes),
            f"{stem}.html": html(title, smoke, blocks, all_notes),
        },
    )


def write_pairs(
    pairs: pd.DataFrame, accuracy: pd.DataFrame, folder: Path, stem: str = "pairs", title: str = ""
) -> list[Path]:
    """Write a `pair_table` frame as <stem>.csv, .md, .tex and .html; the paths written.

    `accuracy` is the frame that it was made from.
    """
    blocks, notes, smoke = pair_blocks(pairs, accuracy), pair_notes(pairs), smoke_line(accuracy)
    return _write(
        folder,
        {
            f"{stem}.csv": _csv(pairs),
            f"{stem}.md": markdown(title, smoke, blocks, notes),
            f"{stem}.tex": latex(title, smoke, blocks, notes),
            f"{stem}.html": html(title, smoke, blocks, notes),
        },
    )


def write_errors(
    frame: pd.DataFrame,
    folder: Path,
    stem: str = "errors",
    title: str = "Errors by type",
    notes: Sequence[str] = (),
) -> list[Path]:
    """Write an `error_table` frame as <stem>.csv, .md and .html; the paths written."""
    blocks, smoke = error_blocks(frame), smoke_line(frame)
    one = frame.iloc[0]
    all_notes = [f"Model {one['model']}, split {one['split']}. Each column sums to its rows.",
                 *notes]  # fmt: skip
    return _write(
        folder,
        {
            f"{stem}.csv": _csv(frame),
            f"{stem}.md": markdown(title, smoke, blocks, all_notes),
            f"{stem}.html": html(title, smoke, blocks, all_notes),
        },
    )


def markdown(title: str, smoke: str, blocks: Sequence[Block], notes: Sequence[str]) -> str:
    """GitHub-flavoured Markdown; the lines of a cell are joined by <br>."""
    parts = [f"### {_md(title)}", ""]
    if smoke:
        parts += [f"> **{smoke}**", ""]
    for block in blocks:
        parts += [f"**{block.title}**", ""]
        shown = [_md_row(line) for line in (Line(block.header), *block.lines)]
        parts += [shown[0], "|---" + "|--:" * (len(block.header) - 1) + "|", *shown[1:], ""]
    parts += [f"- {note}" for note in notes]
    return "\n".join(parts) + "\n"


def _md_row(line: Line) -> str:
    mark = "*" if line.muted else ""
    cells = ("<br>".join(mark + _md(text) + mark for text in cell) for cell in line.cells)
    return f"| {' | '.join(cells)} |"


def latex(title: str, smoke: str, blocks: Sequence[Block], notes: Sequence[str]) -> str:
    """One `table*` a block, for \\input; needs the package booktabs only."""
    parts = ["% needs \\usepackage{booktabs}"]
    if not blocks:
        parts += [*(_tex(note) for note in notes), ""]
    for i, block in enumerate(blocks):
        caption = ". ".join(_tex(text.rstrip(".")) for text in (title, block.title, smoke) if text)
        parts += [
            r"\begin{table*}[t]",
            r"\centering\footnotesize\setlength{\tabcolsep}{4pt}",
            rf"\caption{{{caption}.}}",
            rf"\begin{{tabular}}{{l{'r' * (len(block.header) - 1)}}}",
            r"\toprule",
            _tex_row(block.header),
            r"\midrule",
            *(_tex_row(line.cells, muted=line.muted) for line in block.lines),
            r"\bottomrule",
            r"\end{tabular}",
        ]
        if i == len(blocks) - 1:
            parts += [r"\par\smallskip\begin{minipage}{\textwidth}\scriptsize",
                      *(_tex(note) for note in notes), r"\end{minipage}"]  # fmt: skip
        parts += [r"\end{table*}", ""]
    return "\n".join(parts)


def _tex(text: str) -> str:
    return "".join(_TEX.get(character, character) for character in text)


def _tex_row(cells: Sequence[Sequence[str]], *, muted: bool = False) -> str:
    row = " & ".join(_tex_cell(cell, i == 0, muted) for i, cell in enumerate(cells)) + r" \\"
    return row if muted else r"\addlinespace[2pt] " + row


def _tex_cell(cell: Sequence[str], first: bool, muted: bool) -> str:
    """Lines stacked inside one cell by a nested tabular that hangs from its first line."""
    style = r"\itshape " if muted else ""
    lines = [style + _tex(cell[0]), *(rf"{style}\scriptsize {_tex(text)}" for text in cell[1:])]
    if len(lines) == 1:
        return f"{{{lines[0]}}}"
    side = "l" if first else "r"
    return rf"\begin{{tabular}}[t]{{@{{}}{side}@{{}}}}" + r"\\".join(lines) + r"\end{tabular}"


def html(title: str, smoke: str, blocks: Sequence[Block], notes: Sequence[str]) -> str:
    """One page that needs nothing else: it scrolls sideways on a phone and follows dark mode."""
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>",
        f"<h1>{escape(title)}</h1>",
    ]
    if smoke:
        parts.append(f'<p class="smoke">{escape(smoke)}</p>')
    for block in blocks:
        parts += [
            f'<h2>{escape(block.title)}</h2>\n<div class="wide"><table>\n<thead>',
            _html_row(Line(block.header), head=True),
            "</thead>\n<tbody>",
            *(_html_row(line) for line in block.lines),
            "</tbody>\n</table></div>",
        ]
    parts += ["<ul>", *(f"<li>{escape(note)}</li>" for note in notes), "</ul>\n</body>\n</html>"]
    return "\n".join(parts) + "\n"


def _html_row(line: Line, *, head: bool = False) -> str:
    cells = []
    for i, (first, *more) in enumerate(line.cells):
        scope = ' scope="col"' if head else ' scope="row"'
        tag, attribute = ("th", scope) if head or i == 0 else ("td", "")
        small = "".join(f"<small{_flag_class(text)}>{escape(text)}</small>" for text in more)
        cells.append(f"<{tag}{attribute}>{escape(first)}{small}</{tag}>")
    muted = ' class="muted"' if line.muted else ""
    return f"<tr{muted}>{''.join(cells)}</tr>"


def _flag_class(text: str) -> str:
    return ' class="flag"' if text.startswith("off budget") else ""


def _csv(frame: pd.DataFrame) -> str:
    """The frame as CSV: percentages to 2 decimals, shares to 6, counts whole, gaps empty."""
    shown = frame.copy()
    for name in frame.select_dtypes("float64").columns.drop("budget", errors="ignore"):
        shown[name] = ["" if pd.isna(x) else _csv_number(name, x) for x in frame[name]]
    return str(shown.to_csv(index=False, lineterminator="\n"))


def _csv_number(column: str, value: float) -> str:
    if column.endswith("_p"):
        return f"{value:.6g}"  # significant digits: p-values span many magnitudes
    return rounded(value, 6 if "b_" in column else 2)


def _write(folder: Path, texts: dict[str, str]) -> list[Path]:
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]
