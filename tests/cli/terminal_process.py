"""`python -m cupyllm ...` as a process, through pipes or on a terminal of its own."""

from __future__ import annotations

import codecs
import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "cupyllm")
INTERRUPTED = (sys.executable, "-m", "tests.cli.interrupted")
SMALL = ["--device", "reference", "--kv_cache_gib", "0.05"]
SECONDS = 60


def environment(**more: str) -> dict[str, str]:
    """A terminal without colours, whatever the machine has set."""
    return {**os.environ, "TERM": "dumb", "NO_COLOR": "1", "CUPYLLM_API_KEY": "", **more}


def run(
    *arguments: str, stdin: str = "", command: tuple[str, ...] = COMMAND, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run to the end, with pipes for a terminal."""
    return subprocess.run(
        [*command, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(**variables),
        timeout=SECONDS,
    )


class Terminal:
    """The other end of the terminal that a process runs on."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process = process
        self.text = ""  # all that was shown
        self._fd = fd
        self._read_to = 0
        # Of a character, or of a line's end, one read may bring the first half only.
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder = io.IncrementalNewlineDecoder(utf8, translate=True)

    def wait_for(self, pattern: str) -> str:
        """Read until what was not waited for before holds the pattern; returns all up to its end."""
        deadline = time.monotonic() + SECONDS
        while True:
            found = re.search(pattern, self.text[self._read_to :])
            if found is not None:
                start, self._read_to = self._read_to, self._read_to + found.end()
                return self.text[start : self._read_to]
            assert time.monotonic() < deadline, f"waited in vain for {pattern!r}; there is: {self.text!r}"
            if select.select([self._fd], [], [], 1.0)[0]:
                try:
                    new = os.read(self._fd, 65536)
                except OSError:  # the process has ended
                    new = b""
                assert new, f"it ended without {pattern!r}; there is: {self.text!r}"
                self.text += self._decoder.decode(new)

    def type(self, line: str) -> None:
        """A line and the return key."""
        os.write(self._fd, line.encode() + b"\n")

    def press(self, key: bytes) -> None:
        os.write(self._fd, key)

    def end(self) -> int:
        """The exit code, once it has ended by itself."""
        return self.process.wait(SECONDS)


@contextmanager
def terminal(*arguments: str, command: tuple[str, ...] = COMMAND, **variables: str) -> Iterator[Terminal]:
    """Run on a terminal."""
    own, theirs = pty.openpty()
    process = subprocess.Popen(
        [*command, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env=environment(**variables),
        preexec_fn=lambda: _take_terminal(theirs),
    )
    os.close(theirs)
    try:
        yield Terminal(process, own)
    finally:
        process.kill()
        process.wait()
        os.close(own)


def _take_terminal(fd: int) -> None:
    """Make it the controlling terminal, so that Ctrl-C reaches the process."""
    os.setsid()
    import fcntl
    import termios

    fcntl.ioctl(fd, termios.TIOCSCTTY, 0)
