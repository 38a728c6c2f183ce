"""Takes the picture of the live page for the README: python scripts/screenshot.py docs/live.png

Starts a server over the demo model, asks it something in a headless Chromium, lets it share a prompt, and stops the
replay where four answers hold the same pages. Needs `pip install playwright` and a Chromium: the one of
`playwright install chromium`, or `chromium` on the PATH.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).parents[1]
CACHE_GIB = 0.02  # few pages, so that each is large
MOST_BYTES = 300_000
SECONDS = 120_000  # milliseconds that anything may take


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--width", type=int, default=1440)
    parser.add_argument("--height", type=int, default=1000)
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    arguments = parser.parse_args()
    with run_server() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        size = {"width": arguments.width, "height": arguments.height}
        page = browser.new_page(viewport=size, color_scheme=arguments.theme)
        page.goto(url)
        show_sharing(page)
        page.screenshot(path=arguments.picture)
        browser.close()
    num_bytes = arguments.picture.stat().st_size
    if num_bytes > MOST_BYTES:
        sys.exit(f"{arguments.picture} has {num_bytes} bytes; at most {MOST_BYTES} are wanted")


def show_sharing(page: Page) -> None:
    """An answer with the alternatives of one token, and the pages while four answers share a prompt."""
    page.get_by_label("Message", exact=True).fill("What is paged attention?")
    page.keyboard.press("Enter")
    tokens = page.get_by_role("button", name="Tokens", exact=True)
    tokens.click(timeout=SECONDS)
    share = page.get_by_role("button", name="Watch it share")
    if not share.is_visible():  # a narrow page shows one view at a time
        page.get_by_role("button", name="Engine", exact=True).click()
    share.click()
    expect(page.locator("#caption")).to_contain_text("Once more", timeout=SECONDS)
    page.get_by_role("button", name="Pause").click()
    page.locator("#seek").fill("0")
    forward = page.get_by_role("button", name="One step forward")
    while "copied" not in page.locator("#step-note").inner_text():
        forward.click()
    for _ in range(14):
        forward.click()
    unsure = page.locator(".token").evaluate_all(
        "all => all.map(one => Number(one.style.getPropertyValue('--doubt'))).reduce((best, doubt, place, doubts) =>"
        " doubt > doubts[best] ? place : best, 0)"
    )
    if page.locator(".token").nth(unsure).is_visible():
        page.locator(".token").nth(unsure).click()


@contextmanager
def run_server() -> Iterator[str]:
    """The address of a server that ends with the block."""
    command = [sys.executable, "server.py", "--config", "configs/default.json", "--port", "0"]
    command += ["--kv_cache_gib", str(CACHE_GIB), "--api_key_env", "NO_KEY_FOR_THE_PICTURE"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield next(line.split()[1] for line in server.stdout if line.startswith("url"))
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


if __name__ == "__main__":
    main()
