"""The live page in a real headless Chromium, before a real server with real traffic."""

import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from server_apps import save_tiny
from server_processes import SLOW, Server, get, post, served

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--window-size=1440,900",
)
# Between two steps, and so where a look may come: stand still while the file is there.
HOLD = """
import os
from pagedserve.engine.async_engine import AsyncEngine
take = AsyncEngine._step
def held(self):
    while os.path.exists({path!r}):
        time.sleep(0.005)
    take(self)
AsyncEngine._step = held
"""
SECRET = "zebra crossing the river"
WAIT_S = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chrome]:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no Chromium here: install the packages chromium and chromium-driver")
    options = ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=ChromeService(executable_path=DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


class Page:
    """What the page shows."""

    def __init__(self, browser: Chrome, url: str) -> None:
        self.browser = browser
        browser.get(url)

    def until(self, what: Callable[[], Any]) -> Any:
        """Wait until ``what()`` holds; its value."""
        end = time.monotonic() + WAIT_S
        while not (found := what()):
            assert time.monotonic() < end, f"{self.text('status')}: {self.browser.get_log('browser')}"
            time.sleep(0.05)
        return found

    def text(self, name: str) -> str:
        """An element's text."""
        return self.browser.find_element(By.ID, name).text

    def chart(self, name: str) -> str:
        """The number in a chart's card."""
        return self.browser.find_element(By.CSS_SELECTOR, f"#chart-{name} .value").text

    def pool(self) -> dict[str, int]:
        """The legend's counts; read at once, so that they are of one frame."""
        script = (
            "return Object.fromEntries([...document.querySelectorAll('#legend dd')]"
            ".map(each => [each.id, +each.dataset.value]))"
        )
        return self.browser.execute_script(script)

    def rows(self) -> list[tuple[str, str, str]]:
        """Sequence, phase and tenant of each row."""
        script = (
            "return [...document.querySelectorAll('#rows tr')]"
            ".map(r => [r.dataset.id, r.dataset.phase, r.querySelector('.tenant').textContent])"
        )
        return [tuple(row) for row in self.browser.execute_script(script)]

    def colours(self, selector: str) -> set[str]:
        """The colours that a canvas has in cell-sized areas: those of many pixels."""
        script = """
            const c = document.querySelector(arguments[0]), n = new Map();
            // Chromium warns of readers of a canvas that is drawn on; this is a copy.
            const copy = new OffscreenCanvas(c.width, c.height).getContext("2d", { willReadFrequently: true });
            copy.drawImage(c, 0, 0);
            const d = new Uint32Array(copy.getImageData(0, 0, c.width, c.height).data.buffer);
            for (const p of d) n.set(p, (n.get(p) ?? 0) + 1);
            return [...n].filter(([p, k]) => k > 40 && p).map(([p]) => p.toString(16));
        """
        return set(self.browser.execute_script(script, selector))


def _metrics(server: Server) -> dict[str, float]:
    families = text_string_to_metric_families(get(server.url, "/metrics").text)
    return {sample.name: sample.value for family in families for sample in family.samples}


def _blocks(metrics: dict[str, float]) -> dict[str, float]:
    return {kind: metrics[f"pagedserve:kv_blocks_{kind}"] for kind in ("used", "cached", "free")}


def _standing(server: Server) -> dict[str, float]:
    """The metrics once the step that was under way is over: ten scrapes see none end."""
    seen: list[dict[str, float]] = []
    while len(seen) < 10:
        metrics = _metrics(server)
        if seen and metrics["pagedserve:engine_steps_total"] != seen[0]["pagedserve:engine_steps_total"]:
            seen.clear()
        seen.append(metrics)
        time.sleep(0.02)
    return seen[-1]


class Events(threading.Thread):
    """A second listener that keeps all it hears, as text."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.text, self.ended_well = url, "", False
        self.start()

    def run(self) -> None:
        address = f"{self.url}/live/events"
        with (
            suppress(httpx2.HTTPError),
            httpx2.stream("GET", address, timeout=60, trust_env=False) as response,
        ):
            for text in response.iter_text():
                self.text += text
            self.ended_well = True


def _traffic(server: Server, count: int) -> tuple[list[threading.Thread], list[str]]:
    """Requests in threads of their own, and the texts that come back."""
    texts: list[str] = []

    def one(index: int) -> None:
        body = {"prompt": f"{SECRET} {index % 3} " * 3, "max_tokens": 60 + 10 * index, "ignore_eos": True}
        answer = post(server.url, {**body, "user": f"tenant-{index % 2}", "n": 1 + index % 2}).json()
        texts.extend(choice["text"] for choice in answer["choices"])

    threads = [threading.Thread(target=one, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    return threads, texts


def _compare_standing(page: Page, server: Server, idle: set[str]) -> None:
    """While the engine stands still, all that the page shows is what /metrics says."""
    metrics = _standing(server)
    told = _blocks(metrics)
    page.until(lambda: page.pool()["owned"] + page.pool()["quarantined"] == told["used"])
    pool = page.pool()
    assert (pool["cached"], pool["free"]) == (told["cached"], told["free"])
    assert pool["owned"] + pool["quarantined"] + pool["cached"] + pool["free"] == 60
    running, waiting = metrics["vllm:num_requests_running"], metrics["vllm:num_requests_waiting"]
    rows = page.until(lambda: len(rows := page.rows()) == running + waiting and rows)
    assert len([row for row in rows if row[1] in ("prefill", "decode", "recompute")]) == running
    assert {row[2] for row in rows} == {"tenant-0", "tenant-1"}
    assert page.chart("sequences") == f"{running:.0f} running"
    assert len(page.colours("#map") - idle) >= min(3, running), "each sequence has a colour"
    assert page.colours("#chart-sequences canvas")


def _nothing_is_said(page: Page, events: Events, texts: list[str]) -> None:
    """No text is anywhere, nothing comes from elsewhere, and the browser has nothing to complain of."""
    shown = page.browser.execute_script("return document.documentElement.outerHTML")
    for text in (SECRET, SECRET.split()[0], *(text[:6] for text in texts)):
        assert text not in shown
        assert text not in events.text
    assert "event: frame" in events.text
    loaded = page.browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert loaded
    assert all(name.startswith(events.url) for name in loaded)
    assert page.browser.get_log("browser") == []


def test_the_page_shows_the_pool_and_the_sequences_of_real_traffic(
    browser: Chrome, model: Path, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    limits = ("--num-blocks", 60, "--max-num-seqs", 6)
    with served(model, *limits, before=SLOW + HOLD.format(path=str(hold))) as server:
        server.wait()
        page, events = Page(browser, server.url), Events(server.url)
        page.until(lambda: page.text("status") == "Live" and page.pool()["free"] == 60)
        assert page.text("policy") == "policy vllm_v1"
        assert (page.rows(), page.chart("ttft")) == ([], "–")
        assert "Nothing runs" in page.text("nothing")
        idle = page.colours("#map")
        threads, texts = _traffic(server, 8)
        page.until(lambda: [row for row in page.rows() if row[1] == "decode"] and page.pool()["shared"])
        hold.touch()
        _compare_standing(page, server, idle)

        drawn = "return document.querySelector('#chart-tps canvas').toDataURL()"
        before = browser.execute_script(drawn)
        hold.unlink()
        page.until(lambda: page.chart("itl").endswith("ms") and page.chart("ttft") != "–")
        page.until(lambda: browser.execute_script(drawn) != before)
        for thread in threads:
            thread.join(WAIT_S)
        page.until(lambda: page.rows() == [] and page.pool()["owned"] == 0)
        page.until(lambda: page.pool()["cached"] == _metrics(server)["pagedserve:kv_blocks_cached"])
        assert "8 length" in page.text("totals")
        assert len(texts) == 12
        _nothing_is_said(page, events, texts)

        # A page that watches does not hold the server up.
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
        events.join(10)
        assert events.ended_well
        page.until(lambda: browser.find_element(By.TAG_NAME, "body").get_attribute("class") == "lost")
    assert "no request is open; going down" in server.said
    assert "graceful" not in server.said
    assert "Traceback" not in server.said


def test_a_lost_connection_is_told_and_taken_up_again(browser: Chrome, model: Path) -> None:
    with served(model, "--num-blocks", 60) as server:
        server.wait()
        page = Page(browser, server.url)
        page.until(lambda: page.text("status") == "Live")
        server.process.kill()
        page.until(lambda: page.text("status") == "Connection lost")
        page.until(lambda: "next try in" in page.text("countdown"))
    port = server.url.rpartition(":")[2]
    with served(model, "--num-blocks", 30, "--port", port) as server:
        server.wait()
        browser.find_element(By.ID, "retry").click()
        page.until(lambda: page.text("status") == "Live")
        page.until(lambda: page.pool()["free"] == 30)
        assert not browser.find_element(By.ID, "retry").is_displayed()
        assert page.text("countdown") == ""


def test_with_keys_a_password_opens_the_page_and_its_feed(browser: Chrome, model: Path) -> None:
    with served(model, "--num-blocks", 60, PAGEDSERVE_API_KEYS="open-sesame") as server:
        server.wait()
        assert get(server.url, "/").status_code == 401
        page = Page(browser, server.url.replace("://", "://me:open-sesame@"))
        page.until(lambda: page.text("status") == "Live")
        page.until(lambda: page.pool()["free"] == 60)
        assert browser.get_log("browser") == []
