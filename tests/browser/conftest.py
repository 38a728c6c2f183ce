"""The live page in a real browser, without a window.

Needs `pip install playwright`, and a Chromium: one on the PATH (Debian: `apt-get install chromium`), or that of
`playwright install chromium`. Without them the tests are skipped; .ci/run installs both.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.live_server import LiveServer, run_server, write_model_folder
from tests.api.scripted import Actor, ScriptedOps

playwright_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright runs the tests of the page")


class GatedOps(ScriptedOps):
    """Waits before the token at place `closed_at` of an answer until the gate is opened, and fails then if told to."""

    closed_at: int | None = None
    fails = False

    def __init__(self, loaded: Any) -> None:
        super().__init__(loaded)
        self.opened = threading.Event()

    def close_at(self, place: int) -> None:
        self.opened.clear()
        self.closed_at = place

    def sample(self, logits: Any, sampling: Any) -> Any:
        sampled = super().sample(logits, sampling)
        if self._begin is not None and self.closed_at == int(sampling.positions.min()) - self._begin:
            assert self.opened.wait(60), "nobody opened the gate"
            if self.fails:
                raise RuntimeError("told to fail")
        return sampled


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def stage(model_folder: Path) -> Iterator[tuple[Actor, GatedOps]]:
    """A server whose model says what a test tells it to, and stops where it is told to."""
    made: list[GatedOps] = []
    with run_server(model_folder, prepare=lambda loaded: made.append(GatedOps(loaded))) as live:
        yield Actor(live, made[0]), made[0]
        made[0].opened.set()


@pytest.fixture(scope="session")
def server(model_folder: Path) -> Iterator[LiveServer]:
    with run_server(model_folder) as live:
        yield live


@pytest.fixture(scope="module")  # while it is open, the thread has a running event loop: no asyncio.run for others
def browser() -> Iterator[Any]:
    with playwright_api.sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        try:
            browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except playwright_api.Error as error:
            pytest.skip(f"no Chromium can be started (apt-get install chromium): {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page of a server in a fresh profile. In the end no page may have asked another host for anything, or
    have written an error to the console, but for statuses in `expected`.
    """
    contexts, outside, errors = [], [], []

    def open_one(
        live: LiveServer, *, expected: tuple[int, ...] = (), size: tuple[int, int] = (1280, 900), **options: Any
    ) -> Any:
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **options)
        context.set_default_timeout(20_000)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda sent: None if sent.url.startswith(f"{live.url}/") else outside.append(sent.url))
        page.on("pageerror", lambda error: errors.append(str(error)))

        def note(message: Any) -> None:
            if message.type in ("error", "warning") and not any(
                f"status of {code}" in message.text for code in expected
            ):
                errors.append(message.text)

        page.on("console", note)
        page.goto(live.url)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert outside == []
    assert errors == []
