"""The page in headless Chromium: quiet, alone, sortable, and fit for desktop and phone."""

import pytest
from browser import open_browser

pytestmark = [pytest.mark.browser, pytest.mark.slow]
COLUMN = "[...document.querySelectorAll('section table')[0].tBodies[0].rows].map(row => row.cells[{0}].textContent)"
COLUMNS = "[...document.querySelectorAll('section table')[0].tHead.rows[0].cells].map(cell => cell.textContent)"
NUMBERS = COLUMN.replace("textContent", "textContent.replaceAll(',', '')")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


def test_page_is_quiet_alone_and_fits_every_width(page, grid_page, tmp_path):
    page.events.clear()
    page.open(grid_page.as_uri())
    for width in (1280, 390):
        for scheme in ("light", "dark"):
            page.show(width, scheme)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
            page.screenshot(tmp_path / f"{width}_{scheme}.png")
            luminance = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
            assert (luminance > 128) == (scheme == "light")
    assert page.evaluate("[...document.querySelectorAll('.scroll')].some(box => box.scrollWidth > box.clientWidth)")
    assert page.evaluate("document.querySelectorAll('figure svg').length") >= 3
    loud = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded", "Network.loadingFailed"}
    assert not [event for event in page.events if event["method"] in loud]
    requests = [event["params"]["request"] for event in page.events if event["method"] == "Network.requestWillBeSent"]
    assert {request["url"] for request in requests} == {grid_page.as_uri()}


def test_a_click_or_the_keyboard_sorts_numbers_and_words_and_empty_cells_stay_last(page, grid_page):
    page.open(grid_page.as_uri())
    button = "document.querySelectorAll('section table')[0].querySelectorAll('th button')[{0}]"
    sorted_by = "document.querySelector('section table').tHead.querySelector('th:not([aria-sort=none])')"
    names = page.evaluate(COLUMNS)
    for column in map(names.index, ("value", "cache bytes/token")):
        before = [float(number) for number in page.evaluate(NUMBERS.format(column))]
        for direction in ("ascending", "descending"):
            page.evaluate(f"{button.format(column)}.click()")
            found = [float(number) for number in page.evaluate(NUMBERS.format(column))]
            assert found == sorted(before, reverse=direction == "descending") != before
            assert page.evaluate(f"{sorted_by}.getAttribute('aria-sort')") == direction
            assert page.evaluate("document.querySelectorAll('th:not([aria-sort=none])').length") == 1
    for column, reverse in ((0, False), (0, True), *[(names.index("against base, full"), None)] * 2):
        page.evaluate(f"{button.format(column)}.focus()")
        page.press("Enter")
        texts = page.evaluate(COLUMN.format(column))
        if reverse is None:
            assert texts[-2:] == ["-", "-"] and "-" not in texts[:-2]
        else:
            assert texts == sorted(texts, reverse=reverse)


def test_the_theme_changes_without_storage_and_prints_light(page, grid_page, tmp_path):
    page.open(grid_page.as_uri())
    page.show(1280, "light")
    page.evaluate("void Object.defineProperty(window, 'localStorage', { get() { throw new Error('refused'); } })")
    ink = "getComputedStyle(document.body).color"
    light = page.evaluate(ink)
    page.evaluate("document.getElementById('theme').click()")
    dark = page.evaluate(ink)
    assert light != dark
    page.show(1280, "dark", media="print")
    assert page.evaluate(ink) == light
    assert page.evaluate(
        "[...document.querySelectorAll('.scroll')].every(box => box.scrollWidth <= box.clientWidth + 1)"
    )
    page.show(700, "light", media="print")  # figures stay in one line, and every head of a table is painted
    assert page.evaluate("getComputedStyle(document.querySelector('td.number')).whiteSpace") == "nowrap"
    assert page.evaluate("getComputedStyle(document.querySelector('th button')).display") == "contents"
    page.evaluate("document.getElementById('theme').click()")
    page.show(1280, "light")
    assert page.evaluate(ink) == light


def test_a_pointed_mark_speaks_and_its_method_lights_up_everywhere(page, grid_page):
    page.open(grid_page.as_uri())
    page.evaluate("document.querySelector('.mark[data-method=\"base, h2o\"][data-tip]').focus()")
    assert "h2o at CR" in page.evaluate("document.getElementById('tip').textContent")
    assert page.evaluate("[...document.querySelectorAll('.on')].every(each => each.dataset.method === 'base, h2o')")
    assert page.evaluate("document.querySelector('table').querySelectorAll('tr.on').length") == 6
    page.evaluate("document.activeElement.blur()")
    assert page.evaluate("document.getElementById('tip').hidden && !document.querySelector('.on')")


def test_the_filter_shows_rows_with_a_word(page, grid_page):
    page.open(grid_page.as_uri())
    page.evaluate(
        "{ const i = document.querySelector('.filter'); i.value = 'SnapKV'; i.dispatchEvent(new Event('input')); }"
    )
    shown = "[...document.querySelectorAll('section table')[0].tBodies[0].rows].filter(row => row.offsetHeight > 0)"
    names = page.evaluate(f"{shown}.map(row => row.cells[0].textContent)")
    assert len(names) == 12 and all("snapkv" in name for name in names)
