"""Open every page of the built site in a browser at two widths, and ask its search.

`python open_pages.py SITE CHROMIUM [QUERY ...]`, with the Python of the `browser` environment, serves SITE on loopback and prints
one JSON object: pages opened, what was wrong with which page (wider than the window, a message on the console, a picture that did
not load), and the pages that the site's own search box lists for each query, in its order.
"""

from __future__ import annotations

import functools
import http.server
import json
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from playwright.sync_api import ConsoleMessage, Page, sync_playwright

if TYPE_CHECKING:
    from collections.abc import Sequence

_WIDTHS, _HEIGHT = (1280, 390), 900
_WITHIN_MS = 120_000
"""For one step of the browser: a machine that is short of cores takes long."""
_NO_INDEX = (
    b'{"config": {"lang": ["en"], "separator": " ", "pipeline": [], '
    b'"fields": {"title": {"boost": 1}, "text": {"boost": 1}, "tags": {"boost": 1}}}, "docs": []}'
)
_AT_ONCE = "* { transition: none !important; animation: none !important }"
_WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
_BOX, _RESULTS, _ENDED = (
    ".md-search__input",
    ".md-search-result__item > a.md-search-result__link",
    ".md-search-result__meta",
)
_UNLOADED = "[...document.images].filter(i => !(i.complete && i.naturalWidth)).map(i => i.getAttribute('src'))"


class _Site(http.server.SimpleHTTPRequestHandler):
    """Serves the site; its search index only once it is asked for, since each page that opens would compute with all of it."""

    has_index = False

    def do_GET(self) -> None:
        """Answer with a file, or with an index of nothing."""
        if self.path.endswith("/search_index.json") and not _Site.has_index:
            self.send_response(200)
            self.send_header("Content-Length", str(len(_NO_INDEX)))
            self.end_headers()
            self.wfile.write(_NO_INDEX)
        else:
            super().do_GET()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
        """Write no line per request."""


def open_pages(site: Path, program: str, queries: Sequence[str] = ()) -> dict[str, object]:
    """Open all pages and ask the search; return how many pages there were, their faults, and what each query found."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Site, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_address[1]}/"
    places = sorted(str(file.parent.relative_to(site)) + "/" for file in site.rglob("index.html"))
    faults: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page, said = browser.new_page(viewport={"width": _WIDTHS[0], "height": _HEIGHT}), list[str]()
        page.set_default_timeout(_WITHIN_MS)
        _listen(page, said)
        for number, place in enumerate(places):
            # Every second page is opened in the narrow window and widened, the others the other way round.
            for turn, width in enumerate(_WIDTHS[:: -1 if number % 2 else 1]):
                page.set_viewport_size({"width": width, "height": _HEIGHT})
                if turn == 0:
                    page.goto(base + place.removeprefix("./"), wait_until="load")
                    page.add_style_tag(content=_AT_ONCE)
                faults += [f"{place} at {width}: {fault}" for fault in (*_faults(page), *said)]
                said.clear()
        page.close()
        _Site.has_index = True
        found = _search(browser.new_page(), base, queries) if queries else {}
        browser.close()
    server.shutdown()
    return {"pages": len(places), "faults": faults, "found": found}


def _search(page: Page, base: str, queries: Sequence[str]) -> dict[str, list[str]]:
    """Type each query into the search box of the first page, as a reader does; return the pages listed, from the site's top."""
    found: dict[str, list[str]] = {}
    page.set_default_timeout(_WITHIN_MS)
    page.goto(base, wait_until="load")
    page.click(_BOX)
    page.wait_for_function("box => document.querySelector(box).placeholder !== ''", arg=_BOX)
    for query in queries:
        _type(page, "")
        page.wait_for_function("place => document.querySelectorAll(place).length === 0", arg=_RESULTS)
        _type(page, query)
        page.wait_for_function("([place, end]) => document.querySelectorAll(place).length > 0 || /No match/.test("
            "document.querySelector(end).textContent)", arg=[_RESULTS, _ENDED])  # fmt: skip
        links = page.eval_on_selector_all(_RESULTS, "found => found.map(one => one.href)")
        found[query] = [link.removeprefix(base).partition("?")[0].partition("#")[0] for link in links]
    return found


def _type(page: Page, words: str) -> None:
    """Put words into the search box; the site looks at it whenever a key goes up."""
    page.fill(_BOX, words)
    page.press(_BOX, "End")


def _listen(page: Page, said: list[str]) -> None:
    """Append every error that the page writes on the console or throws to `said`."""

    def on_console(message: ConsoleMessage) -> None:
        if message.type == "error":
            said.append(message.text)

    def on_error(error: Exception) -> None:
        said.append(str(error))

    page.on("console", on_console)
    page.on("pageerror", on_error)


def _faults(page: Page) -> list[str]:
    wider = page.evaluate(_WIDER)
    return [f"{wider} pixels too wide"] * (wider > 0) + [f"not loaded: {one}" for one in page.evaluate(_UNLOADED)]


if __name__ == "__main__":
    print(json.dumps(open_pages(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])))
