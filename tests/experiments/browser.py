"""A headless Chromium for tests, spoken to over its DevTools pipe: NUL-ended JSON messages, no
package needed.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-extensions",
    ),
    # a mouse, which a headless browser does not say it has
    "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4",
    "--remote-debugging-pipe",
)
PATIENCE = 60.0
"""Seconds until an answer, or a condition, counts as missing: a hang, not a slow machine."""


def find_chromium() -> str | None:
    """The browser's program, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One browser with one page; a context manager."""

    def __init__(self, program: str, profile: Path) -> None:
        theirs_in, self._out = _pipe()
        self._in, theirs_out = _pipe()
        # the browser reads commands from file descriptor 3 and answers on 4
        ends = [(os.POSIX_SPAWN_DUP2, theirs_in, 3), (os.POSIX_SPAWN_DUP2, theirs_out, 4)]
        quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
        words = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = os.posix_spawn(
            program, words, os.environ, file_actions=[*ends, *quiet], setpgroup=0
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        """What the browser said on its own: requests, console messages, exceptions."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        os.close(self._out)
        os.close(self._in)
        os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol and its result."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._in], [], [], PATIENCE)[0], "The browser does not answer."
            got = os.read(self._in, 1 << 20)
            assert got, "The browser has ended."
            self._buffer += got
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def show(
        self, *, width: int, height: int = 900, dark: bool = False, touch: bool = False
    ) -> None:
        """Take the size of a window or a phone, and light or dark mode."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=touch,
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, page: Path) -> None:
        """Load a file and wait until all of it is there."""
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.wait_for("location.href.startsWith('file:') && document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Until a JavaScript expression holds."""
        end = time.monotonic() + PATIENCE
        while not self.evaluate(script):
            assert time.monotonic() < end, f"Waited {PATIENCE:g} s for {script}."
            time.sleep(0.02)

    def mouse(self, what: str, x: float, y: float, count: int = 1) -> None:
        """The mouse moves ("mouseMoved"), or its button goes down or up ("mousePressed",
        "mouseReleased").
        """
        self.call("Input.dispatchMouseEvent", type=what, x=x, y=y, button="left", clickCount=count)

    def click(self, selector: str, times: int = 1) -> None:
        """Bring the element into view and click in its middle."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{element}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        left, top, width, height = self.evaluate(
            f"(({{x, y, width, height}}) => [x, y, width, "
            f"height])({element}.getBoundingClientRect())"
        )
        for count in range(1, times + 1):
            for what in ("mousePressed", "mouseReleased"):
                self.mouse(what, left + width / 2, top + height / 2, count)

    def screenshot(self, out: Path) -> None:
        """What the window shows, as PNG."""
        out.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


def _pipe() -> tuple[int, int]:
    """A pipe whose ends keep clear of the numbers that the browser wants."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
