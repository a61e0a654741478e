"""Ctrl-C in a program with a loader. As in a terminal, it is sent to all processes of the program at once.

The program gets a KeyboardInterrupt and decides how to handle it. Its workers print nothing and exit with the program.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import processes
from apart import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers use shared memory of Linux")

HERE = Path(__file__).parent

# Seconds that a program may take to end. Its items would take longer.
MOST = 100.0

PROGRAM = """
import colorsys, json, multiprocessing, os, signal, sys, time, warnings

# A background shell makes its commands ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
warnings.simplefilter("error")
warnings.filterwarnings("ignore", message="This DataLoader will create")
# The prefix distinguishes its semaphores from those of other programs.
multiprocessing.current_process()._config["semprefix"] = f"/fastpipe-test-{os.getpid()}"
request = json.loads(sys.argv[1])
import loader_data
from fastpipe.torch import DataLoader

def begin(number):
    if request["begins"]:
        if number == 0:
            print("slow", flush=True)
        time.sleep(request["seconds"])

class Lingers:
    def __del__(self, sleep=time.sleep):
        sleep(4)

if request["lingers"]:
    # Python deletes it at exit.
    colorsys.lingers = Lingers()

class Says(loader_data.Numbers):
    def __getitem__(self, index):
        if index == request["slow"]:
            print("slow", flush=True)
            if request["go"] is None:
                time.sleep(request["seconds"])
            while request["go"] is not None and not os.path.exists(request["go"]):
                time.sleep(0.01)
        return super().__getitem__(index)

def main():
    way = getattr(loader_data, request["way"]) | request["more"]
    if request["collates"]:
        way |= {"collate_fn": loader_data.listed, "num_batch_workers": 1}
    loader = DataLoader(Says(40), 2, worker_init_fn=begin, **way)
    if request["begins"]:
        print("[]", flush=True)
    batches = iter(loader)
    print(json.dumps([getattr(worker, "pid", 0) for worker in batches._workers_of_pass.all]), flush=True)
    found = []
    while True:
        try:
            batch = next(batches)
            found.append(int(batch[0]))
            if len(found) == request["busy"]:
                print("slow", flush=True)
                time.sleep(600)
        except KeyboardInterrupt:
            if not request["goes_on"]:
                raise
            print("interrupted", flush=True)
        except StopIteration:
            break
    print(json.dumps(found), flush=True)

if __name__ == "__main__":
    main()
"""


class Program:
    """A program with a loader, in a separate session.

    Args:
        folder: Folder for its script.
        way: Name of loader arguments in loader_data.py.
        slow: Index of a slow item, which prints "slow" when it begins. None for none.
        seconds: Duration of the slow item.
        go: File that the slow item waits for instead of `seconds`, or None.
        begins: Whether workers start slowly; they print "slow".
        busy: Number of batches after which the program is busy and prints "slow". None for never.
        goes_on: Whether the program continues after an interrupt.
        collates: Whether there is a batch worker.
        lingers: Whether Python takes long to exit after the program.
        more: Further arguments of the loader.
    """

    def __init__(
        self,
        folder: Path,
        way: str,
        *,
        slow: int | None = None,
        seconds: float = 600.0,
        go: Path | None = None,
        begins: bool = False,
        busy: int | None = None,
        goes_on: bool = False,
        collates: bool = False,
        lingers: bool = False,
        more: dict[str, Any] | None = None,
    ) -> None:
        request = {"way": way, "slow": slow, "seconds": seconds, "busy": busy, "goes_on": goes_on}
        request |= {"collates": collates, "more": more or {}, "begins": begins, "go": go and str(go)}
        request |= {"lingers": lingers}
        script = folder / "program.py"
        script.write_text(PROGRAM)
        paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        self._before = {path.name for path in Path("/dev/shm").iterdir()}
        self.process = subprocess.Popen(
            [sys.executable, str(script), json.dumps(request)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": paths},
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.workers: list[int] = [pid for pid in json.loads(self.process.stdout.readline() or "[]") if pid]

    def press(self) -> None:
        """Sends Ctrl-C as soon as the program waits for its slow item, or is busy."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "slow\n"
        time.sleep(0.3)
        os.killpg(self.process.pid, signal.SIGINT)

    def ended(self) -> tuple[str, str]:
        """Returns the program's output and errors until it ends, and checks that nothing is left of it."""
        try:
            printed = self.process.communicate(timeout=MOST)
            assert wait_until(lambda: not self._left()), f"processes are left: {self._left()}"
            assert wait_until(lambda: not self._in_shm()), f"left in /dev/shm: {self._in_shm()}"
        finally:
            for process in self._left():
                process.kill()
            self.process.kill()
            self.process.wait()
        return printed

    def _left(self) -> list[psutil.Process]:
        """Returns the other running processes of its session."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found += [process] * (process.pid != self.process.pid)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return found

    def _in_shm(self) -> set[str]:
        """Returns the files that it left in /dev/shm, where other programs have files as well."""
        mine = [str(pid) for pid in (self.process.pid, *self.workers)]
        names = {path.name for path in Path("/dev/shm").iterdir()} - self._before
        return {name for name in names if any(pid in name for pid in mine)}


# Loader arguments, whether there is a batch worker, the number of processes, and further arguments.
WORKERS: dict[str, tuple[str, bool, int, dict[str, Any]]] = {
    "processes": ("FORKED", False, 2, {}),
    "persistent processes": ("FORKED", True, 3, {"persistent_workers": True}),
    "fork server": ("SERVED", False, 1, {"num_workers": 1}),
    "threads": ("THREADS", False, 0, {}),
    "persistent threads": ("THREADS", True, 0, {"persistent_workers": True}),
}
CASES = [
    ("processes", "in the loader"),
    ("persistent processes", "in the loop"),
    ("fork server", "in the loader"),
    ("threads", "in the loop"),
    ("persistent threads", "in the loader"),
    ("persistent processes", "in iter"),
    ("fork server", "in iter"),
    ("threads", "in iter"),
]


@pytest.mark.parametrize(("way", "where"), CASES)
def test_ctrl_c_ends_the_program_and_its_workers_silently(way: str, where: str, tmp_path: Path) -> None:
    name, collates, count, more = WORKERS[way]
    # Threads can't be stopped while they make an item. The program waits for the item, and may then need time to exit.
    threads = name == "THREADS"
    seconds = 2.0 if threads else 600.0
    at: dict[str, Any] = {"in the loader": {"slow": 6}, "in the loop": {"busy": 3}, "in iter": {"begins": True}}[where]
    program = Program(tmp_path, name, seconds=seconds, collates=collates, lingers=threads, more=more, **at)
    # The worker processes aren't known before the loader has started.
    assert len(program.workers) == (0 if where == "in iter" else count)
    program.press()
    printed, errors = program.ended()
    # The default result of an interrupt in Python.
    assert program.process.returncode == -signal.SIGINT
    assert printed == ""
    # The errors are one traceback, of the program's main thread.
    assert processes.ends_by_one_interrupt(errors), errors
    assert re.search(r"line \d+, in main\n", errors)


@pytest.mark.parametrize("way", ["persistent processes", "threads"])
def test_a_program_that_catches_it_continues(way: str, tmp_path: Path) -> None:
    """Workers ignore the interrupt, so no batch is lost."""
    name, collates, _, more = WORKERS[way]
    go = tmp_path / "go"
    program = Program(tmp_path, name, slow=6, go=go, goes_on=True, collates=collates, more=more)
    program.press()
    assert program.process.stdout is not None
    assert program.process.stdout.readline() == "interrupted\n"
    go.touch()
    found, errors = program.ended()
    assert json.loads(found) == list(range(0, 40, 2))
    assert errors == ""
    assert program.process.returncode == 0
