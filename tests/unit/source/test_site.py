"""`make site`: links lead somewhere, no page has an error in the browser's console, the search finds a word."""

import functools
import importlib.util
import queue
import re
import shutil
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.conftest import ROOT, skip_or_fail

pytestmark = pytest.mark.slow
SEARCH_IS_READY = "/search/worker.js"  # whose lines in the console say how far the index is
ALL_PAGES = "onload = () => setTimeout(() => report(frames.length), 1000)"
SEARCH = """setInterval(() => {
    const links = [...frames[0].document.querySelectorAll("#mkdocs-search-results a")]
    if (links.length) report(links.map(link => link.href))
}, 200)"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("mkdocs") is None:
        skip_or_fail("no mkdocs; run make dev")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr  # a link or an anchor that leads nowhere, by name
    return folder


class Handler(SimpleHTTPRequestHandler):
    reports: "queue.Queue[str]"

    def do_POST(self) -> None:
        self.reports.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not printed."""


def open_in_browser(site: Path, pages: list[str], script: str, profile: Path) -> tuple[str, list[str]]:
    """What `script` reports beside frames with these pages, and the lines of the console."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        skip_or_fail("no chromium in PATH")
    frames = "".join(f'<iframe src="{page}"></iframe>' for page in pages)
    post = 'const report = body => fetch("report", {method: "POST", body})'
    (site / "frames.html").write_text(f'<link rel="icon" href="data:,">{frames}<script>{post}\n{script}</script>')
    handler = type("OfSite", (Handler,), {"reports": queue.Queue()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}/browser"]
    command += ["--enable-logging=stderr", "--remote-debugging-port=0"]  # stays until it is ended
    address = f"http://127.0.0.1:{server.server_port}/frames.html"
    with (profile / "log").open("w+") as log, subprocess.Popen([*command, address], stderr=log) as browser:
        try:
            reported = handler.reports.get(timeout=300)
        finally:
            browser.terminate()
            server.shutdown()
            server.server_close()
        browser.wait()
        lines = (profile / "log").read_text().splitlines()
    return reported, [line for line in lines if ":CONSOLE" in line and SEARCH_IS_READY not in line]


def test_no_page_has_an_error_in_the_console(site: Path, tmp_path: Path):
    pages = [path for path in sorted(site.rglob("*.html")) if "<script" in path.read_text(encoding="utf-8")]
    assert len(pages) > 70
    index = site / "search" / "search_index.json"
    whole = index.read_text()
    index.write_text('{"config": {"lang": ["en"], "separator": "[ ]+"}, "docs": []}')  # each page would read it
    names = [str(path.relative_to(site)) for path in pages]
    reported, console = open_in_browser(site, names, ALL_PAGES, tmp_path)
    index.write_text(whole)
    assert reported == str(len(pages)) and console == []


def test_the_search_finds_a_word(site: Path, tmp_path: Path):
    links, console = open_in_browser(site, ["index.html?q=parked"], SEARCH, tmp_path)
    assert "train/asynchronous.html" in links and console == []


def test_every_block_of_code_is_drawn_as_one(site: Path):
    """Python-Markdown leaves the backquotes where it does not know what stands behind them."""
    pages = [path for path in site.rglob("*.html") if "repository" not in path.parts]
    assert not [str(path) for path in pages if re.search(r"<p>[^<]*```|<code>``", path.read_text(encoding="utf-8"))]
