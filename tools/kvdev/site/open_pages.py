"""Open every page of the built site in a browser at two widths; run with the Python of the `browser` environment.

`python open_pages.py SITE CHROMIUM` serves SITE on loopback and prints one JSON object: pages opened, and what was wrong with
which page (wider than the window, a message on the console, a picture that did not load).
"""

from __future__ import annotations

import functools
import http.server
import json
import sys
import threading
from pathlib import Path

from playwright.sync_api import ConsoleMessage, Page, sync_playwright

_WIDTHS = (1280, 390)
_WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
_UNLOADED = "[...document.images].filter(i => !(i.complete && i.naturalWidth)).map(i => i.getAttribute('src'))"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
        """Write no line per request."""


def open_pages(site: Path, program: str) -> dict[str, object]:
    """Open all pages; return how many there were, and their faults."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_address[1]}/"
    places = sorted(str(file.parent.relative_to(site)) + "/" for file in site.rglob("index.html"))
    faults: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for width in _WIDTHS:
            page = browser.new_page(viewport={"width": width, "height": 900})
            said: list[str] = []
            _listen(page, said)
            for place in places:
                page.goto(base + place.removeprefix("./"), wait_until="load")
                faults += [f"{place} at {width}: {fault}" for fault in (*_faults(page), *said)]
                said.clear()
            page.close()
        browser.close()
    server.shutdown()
    return {"pages": len(places), "faults": faults}


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
    print(json.dumps(open_pages(Path(sys.argv[1]), sys.argv[2])))
