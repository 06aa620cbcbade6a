"""A real browser without a window, driven through Chromium's DevTools protocol over pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LIMIT = 60.0
LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 64) for each in sys.argv[1:3]]
for end, wanted in zip(ends, (3, 4)):
    os.dup2(end, wanted)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One page of one browser, which ends with the block."""

    def __init__(self, folder: Path, *, dark: bool = False) -> None:
        assert CHROMIUM is not None
        take, self._write = os.pipe()
        self._read, give = os.pipe()
        # The protocol's two ends are descriptors 3 and 4 there.
        words = [
            sys.executable, "-c", LAUNCH, str(take), str(give), CHROMIUM, "--headless=new", "--no-sandbox",
            "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
            "--remote-debugging-pipe", f"--user-data-dir={folder}", "--window-size=1280,900",
            *(["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []), "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            words,
            pass_fds=(take, give),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(take)
        os.close(give)
        self._number = 0
        self._heard = b""
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **words: Any) -> Any:
        """Ask the browser for something."""
        self._number += 1
        asked: dict[str, Any] = {"id": self._number, "method": method, "params": words}
        if self._session is not None:
            asked["sessionId"] = self._session
        os.write(self._write, json.dumps(asked).encode() + b"\0")
        while True:
            said = self._next()
            if said.get("id") == self._number:
                assert "error" not in said, said
                return said["result"]

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + LIMIT
        while b"\0" not in self._heard:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser says nothing"
            more = os.read(self._read, 1 << 20)
            assert more, "the browser has ended"
            self._heard += more
        said, _, self._heard = self._heard.partition(b"\0")
        found: dict[str, Any] = json.loads(said)
        return found

    def open(self, url: str) -> None:
        """Go to a page."""
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str) -> None:
        """Wait for an expression to be true, which the page says when it has drawn."""
        # What is not there yet is not true yet.
        met = f"(() => {{ try {{ return !!({script}); }} catch {{ return false; }} }})()"
        look = f"const look = () => {met} ? done(true) : setTimeout(look, 20); look();"
        watch = f"new Promise(done => {{ {look} }})"
        assert self.run(watch)

    def press(self, key: str) -> None:
        """Press a key."""
        code = key if len(key) > 1 else f"Key{key.upper()}"
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=code, **(text if kind == "keyDown" else {})
            )

    def picture(self, path: Path) -> None:
        """Leave a picture of the page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=False)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        """End it, with all that it has started."""
        os.close(self._write)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
        os.close(self._read)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
