"""Headless Chromium, driven over its DevTools protocol: what a page says, asks for and looks like."""

import asyncio
import base64
import contextlib
import shutil
import subprocess
import time

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-port=0"),
)
SECONDS = 60


class Page:
    """A tab; every event since it was opened is in `events`."""

    def __init__(self, loop, socket):
        self._loop, self._socket, self._calls = loop, socket, 0
        self.events = []

    def call(self, method, **params):
        """Call a method of the protocol and wait for its answer."""
        return self._loop.run_until_complete(asyncio.wait_for(self._call(method, params), SECONDS))

    async def _call(self, method, params):
        self._calls += 1
        await self._socket.send_json({"id": self._calls, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json()
            if message.get("id") == self._calls:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self.events.append(message)

    def open(self, url):
        """Load a page and wait until it has loaded."""
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + SECONDS
        while not (self.evaluate("location.href") == url and self.evaluate("document.readyState") == "complete"):
            assert time.monotonic() < deadline, f"{url} does not load"
            time.sleep(0.02)

    def evaluate(self, expression):
        """Run JavaScript and return its value."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key):
        """Press Enter or Tab."""
        texts = {"Enter": ("\r", 13), "Tab": ("\t", 9)}
        text, code = texts[key]
        options = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **options)
        self.call("Input.dispatchKeyEvent", type="keyUp", **options)

    def show(self, width, scheme, media=""):
        """Give the window a width, and the system a color scheme."""
        window = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **window)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def screenshot(self, path):
        """Write the whole page as a PNG."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))


@contextlib.contextmanager
def open_browser(profile):
    """Start Chromium with an empty profile and open an empty tab; it ends with the block."""
    assert CHROMIUM is not None
    profile.mkdir(parents=True, exist_ok=True)
    command = [CHROMIUM, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    loop = asyncio.new_event_loop()
    session = loop.run_until_complete(_session())
    try:
        port = _port(profile / "DevToolsActivePort", process)
        socket = loop.run_until_complete(_connect(session, port))
        yield Page(loop, socket)
    finally:
        loop.run_until_complete(session.close())
        process.terminate()
        process.wait(timeout=SECONDS)
        loop.close()


async def _session():
    return aiohttp.ClientSession()


def _port(file, process):
    deadline = time.monotonic() + SECONDS
    while not (file.is_file() and file.read_text().strip()):
        assert process.poll() is None and time.monotonic() < deadline, "Chromium does not start"
        time.sleep(0.05)
    return int(file.read_text().splitlines()[0])


async def _connect(session, port):
    async with session.get(f"http://127.0.0.1:{port}/json") as answer:
        tabs = await answer.json(content_type=None)
    (address,) = [tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"]
    return await session.ws_connect(address, max_msg_size=0)
