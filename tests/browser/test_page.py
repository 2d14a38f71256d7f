"""The page in a real browser: no errors, no network, cursor and sliders change the picture, hover shows values."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sim.report.page.data import MOST_KERNELS, MOST_STORAGES
from sim.report.page.write import write_page
from tests.unit.scenarios import PIPELINE, TINY, write

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium and chromedriver on this machine")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=1280,1100",
)  # fmt: skip


SET_CURSOR = "const c = document.getElementById('cursor'); c.value = arguments[0]; c.dispatchEvent(new Event('input'))"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.chrome.options.Options()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.chrome.service.Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module", params=["tiny", "pipeline"])
def page(browser: Any, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("page")
    text = {"tiny": TINY, "pipeline": PIPELINE}[request.param]
    browser.get_log("performance")
    browser.get(f"file://{write_page(write(folder, text), folder)}")
    wait(browser, "return document.documentElement.dataset.ready === 'yes'")
    return browser


MANY = """
model: {preset: gpt-tiny, implementation: nanogpt, layers: 24}
cluster: {gpu: h100, gpus_per_node: 1}
batch: {micro_batch: 1, seq_len: 256, accumulation: 370}
precision: {parameters: bf16, compute: bf16}
strategies: {many: {}}
"""
KERNELS, LARGEST_PAGE_BYTES = 370_000, 8_000_000


def test_a_step_of_370_000_kernels_is_a_small_page_that_opens_and_says_what_it_leaves_out(
    browser: Any, tmp_path: Path
) -> None:
    path = write_page(write(tmp_path, MANY), tmp_path)
    assert path.stat().st_size < LARGEST_PAGE_BYTES
    browser.get_log("browser")
    browser.get(f"file://{path}")
    wait(browser, "return document.documentElement.dataset.ready === 'yes'")
    shown, kernels, runs = re.findall(
        r"([\d,]+) of ([\d,]+) kernels are shown, joined to ([\d,]+)", text(browser, "detail")
    )[0]
    count = {name: int(value.replace(",", "")) for name, value in zip("skr", (shown, kernels, runs))}
    assert count["k"] > KERNELS and count["k"] > count["s"] > count["r"] == MOST_KERNELS
    listed, storages = re.findall(r"lists the ([\d,]+) largest of ([\d,]+)", text(browser, "detail"))[0]
    assert int(listed.replace(",", "")) == MOST_STORAGES < int(storages.replace(",", ""))
    assert "small ones" in text(browser, "alive") and browser.get_log("browser") == []


def wait(browser: Any, script: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 30).until(lambda driver: driver.execute_script(script))


def text(browser: Any, name: str) -> str:
    found: str = browser.find_element("id", name).text
    return found


def test_it_loads_without_errors_and_without_network(page: Any) -> None:
    assert page.get_log("browser") == []
    messages = [entry["message"] for entry in page.get_log("performance")]
    asked = [text for text in messages if "requestWillBeSent" in text and f'"documentURL":"{page.current_url}"' in text]
    assert asked
    assert all(re.search(r'"url":"(file|data|blob):', message) for message in asked)


def test_the_cursor_changes_the_stack_and_what_runs(page: Any) -> None:
    seen = []
    for place in (0, 500, 1000):
        page.execute_script(SET_CURSOR, place)
        line = page.find_element("css selector", "#memory .cursor").get_attribute("style")
        picture = page.execute_script("return document.getElementById('stack').toDataURL()")
        seen.append((text(page, "now"), text(page, "alive"), text(page, "running"), line, hash(picture)))
    assert len({now for now, *_ in seen}) == 3
    assert len({picture for *_, picture in seen}) > 1 and len({line for *_, line, _ in seen}) == 3


def test_play_moves_the_cursor(page: Any) -> None:
    page.execute_script(SET_CURSOR, 0)
    before = text(page, "now")
    page.find_element("id", "play").click()
    wait(page, f"return document.getElementById('now').textContent !== {before!r}")
    page.find_element("id", "play").click()
    assert text(page, "play") == "play"


def test_dragging_on_the_curve_moves_the_cursor(page: Any) -> None:
    from selenium.webdriver import ActionChains

    chart = page.find_element("id", "memory")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    before = text(page, "now")
    ActionChains(page).move_to_element_with_offset(chart, -120, 0).click_and_hold().move_by_offset(
        60, 0
    ).release().perform()
    assert text(page, "now") != before


def test_hover_shows_values(page: Any) -> None:
    from selenium.webdriver import ActionChains

    chart = page.find_element("id", "memory")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    ActionChains(page).move_to_element_with_offset(chart, 40, 10).perform()
    wait(page, "return document.querySelectorAll('#memory .hoverlayer text').length > 0")
    shown = page.execute_script("return document.querySelector('#memory .hoverlayer').textContent")
    assert "MiB" in shown or "GiB" in shown


def test_choosing_a_strategy_shows_it(page: Any) -> None:
    names = [
        row.find_element("css selector", "td").text
        for row in page.find_elements("css selector", "#strategies tbody tr")
    ]
    for number in (1, 0):
        page.execute_script("document.querySelectorAll('#strategies tbody tr')[arguments[0]].click()", number)
        assert text(page, "chosen") == names[number]


@pytest.mark.parametrize("name", ["checkpoint", "offload", "pipeline", "segments"])
def test_a_slider_changes_its_explorer(page: Any, name: str) -> None:
    said = "return [...document.querySelectorAll('.explorer')].map((box) => box.lastChild.textContent).join('|')"
    before = page.execute_script(said)
    page.execute_script(
        f"const s = document.querySelector('input[data-explorer={name}]');"
        "s.value = (Number(s.value) + 1) % (Number(s.max) + 1); s.dispatchEvent(new Event('input'))"
    )
    assert page.execute_script(said) != before


def test_light_and_dark_differ(page: Any) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    before = page.execute_script(ground)
    page.find_element("id", "theme").click()
    assert page.execute_script(ground) != before
    assert page.get_log("browser") == []


def test_the_page_is_wide_enough_for_1280_and_1920(page: Any) -> None:
    for width in (1280, 1920):
        page.set_window_size(width, 1100)
        wait(page, "return document.documentElement.scrollWidth <= window.innerWidth")


def test_the_file_is_what_was_opened(page: Any) -> None:
    assert Path(page.current_url.removeprefix("file://")).is_file()
