"""A training run that test_kill.py kills. It reads batches, saves checkpoints, and logs the batches.

Run as a program, it is a server that forks runs, because importing fastpipe for each run would dominate the test. It
reads a request and answers with the process id. It then reads another line, waits for the process and answers with its
exit code.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import fastpipe
import samples

EVERY = 5  # Number of batches between checkpoints.


class Run:
    """One process of the run. Its folder outlives the process.

    `log` contains a line with the digest of each batch. `checkpoint` contains the reader's state and the matching
    number of log lines.
    """

    def __init__(self, folder: Path, events: int) -> None:
        self._folder = folder
        self._events = events
        self._log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def read(self, reader: fastpipe.Reader) -> None:
        """Resumes from the last checkpoint and reads to the end."""
        lines = 0
        checkpoint = self._folder / "checkpoint"
        if checkpoint.exists():
            saved = json.loads(checkpoint.read_text())
            reader.load_state_dict(saved["state"])
            lines = saved["lines"]
        os.ftruncate(self._log, lines * 33)
        self._happened()
        for batch in reader:
            os.write(self._log, samples.digest(batch).encode() + b"\n")
            lines += 1
            self._happened()
            if lines % EVERY == 0:
                self._save({"state": reader.state_dict(), "lines": lines})
            time.sleep(0.0005)  # Gives the reader time to decode some, but not all, batches in advance.
        self._happened()

    def _save(self, checkpoint: dict[str, Any]) -> None:
        unfinished = self._folder / "unfinished"
        text = json.dumps(checkpoint)
        with unfinished.open("w") as file:
            file.write(text[: len(text) // 2])
            file.flush()  # A kill leaves a partial file here, which must not be read as a checkpoint.
            self._happened()
            file.write(text[len(text) // 2 :])
        self._happened()
        unfinished.replace(self._folder / "checkpoint")
        self._happened()

    def _happened(self) -> None:
        """Sends an event to the test, which counts events to decide when to kill."""
        os.write(self._events, b".")


def shaped(shape: str, paths: list[str], order: dict[str, Any], running: dict[str, Any]) -> Any:
    """Returns a reader of the files, a mixture of readers of each file, or a mixture of their packs."""
    data, ends = samples.Data(paths, {}), {"epochs": 2, **running}
    if shape == "reader":
        return data.read(**order, **ends)
    each = [samples.Data([path], {}).read(columns=["id", "items"], **order) for path in paths]
    readers: list[Any] = [reader.pack("items", 12) for reader in each] if shape == "mixed packs" else each
    return fastpipe.mix(readers, [2, 1], stop="all_exhausted", batch_size=5, **ends)


def serve() -> None:
    """Forks a run for each request until stdin ends."""
    while line := sys.stdin.readline():
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                events = os.open(request["events"], os.O_WRONLY)
                Run(Path(request["folder"]), events).read(shaped(**request["reader"]))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        print(child, flush=True)
        # The process isn't reaped before, so its id can't be reused.
        sys.stdin.readline()
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
