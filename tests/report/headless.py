"""A real headless Chromium, for pages of the tests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def chromium(page: Path, home: Path, *words: str) -> str:
    """What the browser prints. It gets a profile of its own and no network."""
    command = [
        str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={home / 'profile'}",
        "--disable-dev-shm-usage", "--virtual-time-budget=2000", "--host-resolver-rules=MAP * ~NOTFOUND", *words,
        page.resolve().as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def dump(page: Path, home: Path, script: str, *words: str) -> str:
    """What `script` leaves in the title of a copy of the page, after the page's own script."""
    copy = home / "probe.html"
    text = page.read_text(encoding="utf-8")
    copy.write_text(text.replace("</body>", f"<script>document.title = String({script})</script></body>"))
    found = chromium(copy, home, "--dump-dom", *words)
    return found.split("<title>", 1)[1].split("</title>", 1)[0]
