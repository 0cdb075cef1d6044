"""Draw the pictures of `docs/concepts`: `python tools/kvdev/site/drawings.py` writes them, a test compares them.

Coordinates are pixels from the upper left. Colours suit a light and a dark page: boxes have their own ground.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

__all__ = ["FOLDER", "PICTURES"]

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "concepts"
_INK, _PALE, _BLUE, _GREEN, _RED, _GREY = "#1f2933", "#ffffff", "#cfe3f7", "#d3efd8", "#f8d5d2", "#e6e9ee"
_WIDTH = 860


def _text(x: int, y: int, words: str, *, size: int = 14, anchor: str = "middle", bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'


def _box(x: int, y: int, width: int, height: int, fill: str, *lines: str) -> str:
    first = y + height // 2 + 5 - 9 * (len(lines) - 1)
    words = [_text(x + width // 2, first + 18 * i, line, bold=i == 0) for i, line in enumerate(lines)]
    ground = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" stroke="{_INK}"/>'
    return "\n".join([ground, *words])


def _arrow(start: tuple[int, int], end: tuple[int, int], words: str = "", *, dy: int = -6, heavy: bool = False) -> str:
    (x1, y1), (x2, y2) = start, end
    width = 4 if heavy else 1.6
    line = (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{_INK}" stroke-width="{width}" marker-end="url(#tip)"/>'
    )
    return line + ("\n" + _text((x1 + x2) // 2, (y1 + y2) // 2 + dy, words, size=13) if words else "")


def _picture(title: str, height: int, *parts: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" fill="{_INK}" role="img">\n<title>{escape(title)}</title>\n'
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="9" markerHeight="9" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 10 5 0 10z" fill="{_INK}"/></marker></defs>\n'
    )
    ground = f'<rect width="{_WIDTH}" height="{height}" rx="8" fill="{_PALE}"/>'
    return head + "\n".join([ground, *parts]) + "\n</svg>\n"


def _one_request() -> str:
    return _picture(
        "One request from router to prefill to decode",
        330,
        _box(340, 20, 180, 50, _GREY, "router"),
        _box(30, 170, 220, 130, _BLUE, "prefill engine", "computes the prompt,", "keeps its blocks", "under a lease"),
        _box(610, 170, 220, 130, _GREEN, "decode engine", "checks the ticket,", "reads, verifies,", "generates"),
        _arrow((340, 55), (110, 168), "1 prompt", dy=-16),
        _arrow((190, 168), (372, 72)),
        _text(330, 130, "2 ticket", size=13),
        _arrow((488, 72), (690, 168)),
        _text(650, 100, "3 prompt + ticket", size=13),
        _arrow((608, 190), (252, 190), "4 handshake over the side channel, first time only"),
        _arrow((252, 222), (608, 222), "5 READ of the pages, one-sided, through NIXL", heavy=True, dy=-8),
        _arrow((252, 254), (608, 254), "6 READ of the fence word: does the lease still hold?"),
        _arrow((608, 286), (252, 286), "7 read complete: blocks may go"),
    )


def _fence() -> str:
    parts = (
        _text(120, 46, "on the producer", bold=True),
        _text(120, 110, "blocks 5, 6", anchor="end"),
        _text(120, 178, "fence word 3", anchor="end"),
        _box(140, 84, 360, 42, _BLUE, "prompt A, leased"),
        _box(500, 84, 330, 42, _RED, "free, then prompt B"),
        _box(140, 152, 330, 42, _BLUE, "generation 7"),
        _box(470, 152, 360, 42, _RED, "void"),
        _text(470, 216, "the word changes first, then the blocks are free", size=12, anchor="start"),
        _text(120, 268, "in time", anchor="end"),
        _box(180, 246, 130, 36, _GREEN, "read pages"),
        _box(320, 246, 110, 36, _GREEN, "word is 7"),
        _text(450, 269, "the pages count", anchor="start", bold=True),
        _text(120, 324, "late", anchor="end"),
        _box(410, 302, 150, 36, _RED, "read pages"),
        _box(570, 302, 110, 36, _RED, "word is void"),
        _text(694, 325, "nothing counts", anchor="start", bold=True),
    )
    return _picture("A fence word: a read in time, and a late one", 360, *parts)


def _heads(x: int, y: int, first: int, count: int, fill: str) -> str:
    return "\n".join(_box(x + 52 * i, y, 50, 40, fill, f"h{first + i}") for i in range(count))


def _layout() -> str:
    return _picture(
        "Key pages of block 5, from two ranks to one",
        430,
        _text(30, 34, "Key of block 5, HND: a head is 16 tokens x 64 channels x 2 bytes = 2048 bytes", anchor="start", bold=True),
        _text(30, 70, "producer rank 0: (blocks, 4 heads, 16, 64)", anchor="start"),
        _text(450, 70, "producer rank 1: (blocks, 4 heads, 16, 64)", anchor="start"),
        _heads(30, 82, 0, 4, _BLUE),
        _heads(450, 82, 4, 4, _GREEN),
        _arrow((134, 126), (290, 196), "8192 bytes", dy=22),
        _arrow((554, 126), (540, 196), ""),
        _text(566, 172, "8192 bytes", size=13, anchor="start"),
        _heads(210, 200, 0, 4, _BLUE),
        _heads(418, 200, 4, 4, _GREEN),
        _text(210, 262, "consumer, TP 1: (blocks, 8 heads, 16, 64); two slices fill its key page", anchor="start"),
        _text(30, 306, "The same page as NHD: each token holds all heads, so a slice is one token of one head, 128 bytes",
              anchor="start", bold=True),
        *(
            _box(30 + 200 * token, 322, 190, 40, _GREY if token == 3 else _BLUE, "... t15" if token == 3 else
                 f"t{token}: h0 h1 h2 h3")
            for token in range(4)
        ),
        _text(30, 392, "producer rank 0: (blocks, 16 tokens, 4 heads, 64). 16 x 4 = 64 slices for this page: reading it whole,",
              anchor="start"),
        _text(30, 412, "then putting it in order, may be cheaper; the plan says which.", anchor="start"),
    )  # fmt: skip


PICTURES = {"one-request.svg": _one_request, "fence.svg": _fence, "layout.svg": _layout}
"""File name -> the function that draws it."""

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())
