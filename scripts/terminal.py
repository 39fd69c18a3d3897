"""A terminal that draws itself as SVG: what screenshots.py and record.py share."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html import escape

BASIC = ["#1d1f21", "#cc6666", "#8fbf6b", "#e6c07b", "#6ca6d9", "#b48ead", "#6fc3c3", "#c5c8c6"]
BRIGHT = ["#767b80", "#d98080", "#a6d67f", "#f0d294", "#8abbe6", "#c9a7c4", "#8ed8d8", "#ffffff"]
FRONT, BACK = "#c5c8c6", "#16181a"
CELL_W, CELL_H, MARGIN = 8, 17, 10


@dataclass(frozen=True)
class Style:
    front: str = FRONT
    back: str = BACK
    bold: bool = False


@dataclass
class Terminal:
    """Emulates the control sequences that the program uses."""

    columns: int
    rows: int
    at: tuple[int, int] = (0, 0)
    front: str = FRONT
    back: str = BACK
    bold: bool = False
    reverse: bool = False
    rest: str = ""
    cells: dict[tuple[int, int], tuple[str, Style]] = field(default_factory=dict)
    # What the screen showed when a program took it over.
    kept: tuple[dict[tuple[int, int], tuple[str, Style]], tuple[int, int]] = ({}, (0, 0))

    def feed(self, text: str) -> None:
        # A control sequence may be split between two reads.
        text = self.rest + text
        whole = re.sub(r"\x1b(\[[0-9;?]*)?$", "", text)
        self.rest, text = text[len(whole) :], whole
        for piece in re.finditer(r"\x1b\[([0-9;?]*)([a-zA-Z])|\x1b[()=>78].?|[\r\n\b]|.", text,
                                 re.DOTALL):
            whole, arguments, what = piece.group(0), piece.group(1), piece.group(2)
            if what:
                self.control(arguments, what)
            elif whole == "\r":
                self.at = (self.at[0], 0)
            elif whole == "\n":
                self.down()
            elif whole == "\b":
                self.at = (self.at[0], max(self.at[1] - 1, 0))
            elif whole[0] not in "\x1b\x07":
                self.put(whole)

    def down(self) -> None:
        row, column = self.at
        if row + 1 == self.rows:
            moved = {(r - 1, c): cell for (r, c), cell in self.cells.items() if r}
            self.cells = moved
            row -= 1
        self.at = (row + 1, column)

    def control(self, arguments: str, what: str) -> None:
        numbers = [int(n or 0) for n in arguments.split(";")] if "?" not in arguments else []
        if what == "H":
            row, column = [*numbers, 1, 1][:2] if arguments else (1, 1)
            self.at = (max(row, 1) - 1, max(column, 1) - 1)
        elif what == "J":
            self.cells.clear()
        elif what == "K":
            for column in range(self.at[1], self.columns):
                self.cells.pop((self.at[0], column), None)
        elif arguments == "?1049" and what == "h":
            self.kept, self.cells = (self.cells, self.at), {}
        elif arguments == "?1049" and what == "l":
            self.cells, self.at = self.kept
        elif what == "m":
            self.paint(numbers)

    def paint(self, numbers: list[int]) -> None:
        it = iter(numbers or [0])
        for n in it:
            if n == 0:
                self.front, self.back, self.bold, self.reverse = FRONT, BACK, False, False
            elif n in (1, 22):
                self.bold = n == 1
            elif n in (7, 27):
                self.reverse = n == 7
            elif n in (38, 48):
                kind, colour = next(it), next(it)
                assert kind == 5 and colour < 16, f"colour {kind};{colour}"
                value = (BASIC + BRIGHT)[colour]
                self.front, self.back = (value, self.back) if n == 38 else (self.front, value)
            elif n in (39, 49):
                self.front, self.back = (FRONT, self.back) if n == 39 else (self.front, BACK)

    def put(self, letter: str) -> None:
        if self.at[1] == self.columns:
            self.down()
            self.at = (self.at[0], 0)
        row, column = self.at
        colours = (self.back, self.front) if self.reverse else (self.front, self.back)
        if row < self.rows and column < self.columns:
            self.cells[self.at] = (letter, Style(*colours, self.bold))
        self.at = (row, column + 1)

    def svg(self, command: str) -> str:
        width, height = self.columns * CELL_W + 2 * MARGIN, (self.rows + 2) * CELL_H + 2 * MARGIN
        out = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-size="13" '
            'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, '
            'monospace">',
            f'<rect width="{width}" height="{height}" rx="6" fill="{BACK}"/>',
            f'<text x="{MARGIN}" y="{MARGIN + 13}" fill="{BRIGHT[0]}">$ {escape(command)}</text>',
        ]
        for row in range(self.rows):
            out.extend(self.row(row, MARGIN + (row + 2) * CELL_H - 8))
        return "\n".join([*out, "</svg>", ""])

    def row(self, row: int, y: int) -> list[str]:
        """A row of cells, drawn at this height: one text for each run of cells of one style."""
        out = []
        column = 0
        while column < self.columns:
            _, style = self.cells.get((row, column), (" ", Style()))
            text = ""
            while column + len(text) < self.columns:
                letter, other = self.cells.get((row, column + len(text)), (" ", Style()))
                if other != style:
                    break
                text += letter
            out.extend(self.run(y, column, text, style))
            column += len(text)
        return out

    def run(self, y: int, column: int, text: str, style: Style) -> list[str]:
        x = MARGIN + column * CELL_W
        out = []
        if style.back != BACK:
            out.append(
                f'<rect x="{x}" y="{y}" width="{len(text) * CELL_W}" height="{CELL_H}" '
                f'fill="{style.back}"/>'
            )
        if shown := text.rstrip():
            bold = ' font-weight="bold"' if style.bold else ""
            # SVG collapses spaces; textLength keeps every cell in its column with any font.
            shown = escape(shown).replace(" ", "\u00a0")
            length = len(text.rstrip()) * CELL_W
            out.append(
                f'<text x="{x}" y="{y + 13}" fill="{style.front}"{bold} textLength="{length}" '
                f'lengthAdjust="spacingAndGlyphs">{shown}</text>'
            )
        return out
