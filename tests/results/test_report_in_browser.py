"""The page in headless Chromium: quiet, alone, sortable, and fit for desktop and phone."""

import pytest
from browser import open_browser
from report_rows import TINY_NEEDLE, run_grid

from dmc.config import build_config
from dmc.results.grid import CompareConfig
from dmc.results.report import read_folders, write_page

pytestmark = pytest.mark.browser
POLICIES = ["full", "h2o", "snapkv", "d2o"]
NEEDLE = {"name": "needle", **TINY_NEEDLE, "lengths": [96]}
COLUMN = "[...document.querySelectorAll('section table')[0].tBodies[0].rows].map(row => row.cells[{0}].textContent)"
COLUMNS = "[...document.querySelectorAll('section table')[0].tHead.rows[0].cells].map(cell => cell.textContent)"
NUMBERS = COLUMN.replace("textContent", "textContent.replaceAll(',', '')")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture(scope="module")
def real(tmp_path_factory, folders):
    folder = tmp_path_factory.mktemp("real")
    text = {
        "source": {"_target_": "dmc.data.TextSource", "name": str(folders.text)},
        "cache_folder": str(folder / "cache"),
    }
    analysis = {"name": "analysis", "like": "cache_analysis", "num_samples": 2, "length": 64, **text}
    values = {
        "models": {"base": str(folders.stock), "retrofit": str(folders.compressed)},
        **{"policies": POLICIES, "budgets": [4], "tasks": [NEEDLE, analysis]},
    }
    run_grid(build_config(CompareConfig, values | {"output": str(folder)}))
    return write_page(read_folders([folder]), folder / "report")


def problems(page):
    """What the console said, what failed, and what was asked for beside the page itself."""
    loud = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded", "Network.loadingFailed")
    found = [event for event in page.events if event["method"] in loud]
    requests = [event["params"]["request"] for event in page.events if event["method"] == "Network.requestWillBeSent"]
    urls = {request["url"] for request in requests}
    return found, urls


@pytest.mark.parametrize("which", ["grid_page", "real"])
def test_page_is_quiet_alone_and_fits_every_width(page, which, request, tmp_path):
    path = request.getfixturevalue(which)
    page.events.clear()
    page.open(path.as_uri())
    for width in (1280, 390):
        for scheme in ("light", "dark"):
            page.show(width, scheme)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
            page.screenshot(tmp_path / f"{width}_{scheme}.png")
            luminance = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
            assert (luminance > 128) == (scheme == "light")
    assert page.evaluate("[...document.querySelectorAll('.scroll')].some(box => box.scrollWidth > box.clientWidth)")
    assert problems(page) == ([], {path.as_uri()})
    assert page.evaluate("document.querySelectorAll('figure svg').length") >= 3


def test_a_click_sorts_numbers_and_a_second_reverses_them(page, grid_page):
    page.open(grid_page.as_uri())
    header = "document.querySelectorAll('section table')[0].tHead.rows[0].cells[{0}]"
    names = page.evaluate(COLUMNS)
    for column in map(names.index, ("value", "cache bytes/token")):
        click = f"{header.format(column)}.querySelector('button').click()"
        before = [float(number) for number in page.evaluate(NUMBERS.format(column))]
        page.evaluate(click)
        ascending = [float(number) for number in page.evaluate(NUMBERS.format(column))]
        assert ascending == sorted(before) != before
        assert page.evaluate(f"{header.format(column)}.getAttribute('aria-sort')") == "ascending"
        page.evaluate(click)
        assert [float(number) for number in page.evaluate(NUMBERS.format(column))] == ascending[::-1]
        assert page.evaluate(f"{header.format(column)}.getAttribute('aria-sort')") == "descending"
        assert page.evaluate("document.querySelectorAll('th:not([aria-sort=none])').length") == 1


def test_the_keyboard_sorts_words_and_empty_cells_stay_last(page, grid_page):
    page.open(grid_page.as_uri())
    names = page.evaluate(COLUMNS)
    lost = names.index("against base, full")
    for column, reverse in ((0, False), (0, True), (lost, False), (lost, True)):
        page.evaluate(f"document.querySelectorAll('section table')[0].querySelectorAll('th button')[{column}].focus()")
        page.press("Enter")
        texts = page.evaluate(COLUMN.format(column))
        if column == 0:
            assert texts == sorted(texts, reverse=reverse)
        else:
            assert texts[-2:] == ["-", "-"] and "-" not in texts[:-2]


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
    page.evaluate("document.getElementById('theme').click()")
    page.show(1280, "light")
    assert page.evaluate(ink) == light


def test_figures_stay_in_one_line_on_paper_and_every_head_of_a_table_is_painted(page, grid_page):
    page.open(grid_page.as_uri())
    page.show(700, "light", media="print")
    assert page.evaluate("getComputedStyle(document.querySelector('td.number')).whiteSpace") == "nowrap"
    assert page.evaluate("getComputedStyle(document.querySelector('th button')).display") == "contents"


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
