"""A real browser, without a window: Chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["chromium_program", "running_browser"]

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# No sandbox: the tests may run as root, in a container, where there may be no /dev/shm to speak of, either.
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]


def chromium_program() -> str | None:
    """That of the variable CHROMIUM, or the first on the path."""
    named = os.environ.get("CHROMIUM")
    if named:
        return named
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


@contextmanager
def running_browser(program: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS, headless=True)
        try:
            yield browser
        finally:
            browser.close()
