"""The page in headless Chromium: it chats, shows the cache, contacts no other host, and fits desktop and phone."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from browser import open_browser

pytestmark = pytest.mark.browser
ANSWERS = "[...document.querySelectorAll('.assistant')].map(message => message.textContent)"


def wait(page: Any, expression: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        time.sleep(0.05)


def type_and_send(page: Any, text: str) -> None:
    page.evaluate("document.getElementById('prompt').focus()")
    page.call("Input.insertText", text=text)
    page.press("Enter")


def test_the_page_chats_and_shows_what_the_cache_holds(served: Any, tmp_path: Path) -> None:
    folder = Path(os.environ.get("SCREENSHOTS", tmp_path))
    with open_browser(tmp_path / "profile") as page:
        page.open(f"{served.url}/")
        wait(page, "document.getElementById('model').options.length === 5")
        assert page.evaluate("document.getElementById('hint').textContent").startswith("Full cache.")
        for name in ("own", "h2o"):
            page.evaluate(f"document.getElementById('model').value = '{name}'")
            page.evaluate("document.getElementById('model').dispatchEvent(new Event('change'))")
            page.evaluate("document.getElementById('talk').children.length === 0")
            type_and_send(page, "line 3 <b>é")
            wait(page, "document.querySelectorAll('#heads .row').length === 4")  # while it streams
            wait(page, "document.getElementById('send').disabled === false")
            assert len(page.evaluate(ANSWERS)) == 1 and page.evaluate(ANSWERS)[0]
            seen = int(page.evaluate("document.getElementById('seen').textContent").replace(",", ""))
            assert seen > 250
            assert float(page.evaluate("document.getElementById('ratio').textContent")) > 1.05
            held = page.evaluate(
                "[...document.querySelectorAll('#heads .row')].map(row => +row.children[2].textContent)"
            )
            assert sum(held) == int(page.evaluate("document.getElementById('entries').textContent").replace(",", ""))
        for width in (1280, 390):
            for scheme in ("light", "dark"):
                page.show(width, scheme)
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
                page.screenshot(folder / f"{width}_{scheme}.png")
        type_and_send(page, "b" * 900)  # more than the model is made for
        wait(page, "document.querySelectorAll('.error').length === 1")
        assert "at most 512 are served" in page.evaluate("document.querySelector('.error').textContent")
        assert page.evaluate("document.querySelector('.error').getBoundingClientRect().bottom <= innerHeight")
        page.evaluate("document.getElementById('clear').click()")
        type_and_send(page, "line 4")
        wait(page, "document.querySelectorAll('.assistant')[0]?.textContent.length > 3")
        page.evaluate("document.getElementById('stop').click()")
        wait(page, "document.getElementById('send').disabled === false")
        served.wait_until_idle()
        loud = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Network.loadingFailed", "Log.entryAdded")
        problems = [event for event in page.events if event["method"] in loud]
        problems = [event for event in problems if not event["params"].get("canceled")]
        assert all("400 (Bad Request)" in event["params"].get("entry", {}).get("text", "") for event in problems), (
            problems
        )
        urls = {
            event["params"]["request"]["url"] for event in page.events if event["method"] == "Network.requestWillBeSent"
        }
        assert all(url.startswith((served.url, "data:")) for url in urls)
