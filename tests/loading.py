"""Loaders with workers, and ranks of `torch.distributed`: programs that test_torch_loading.py runs.

Each runs in a separate process, as a user's program would, because a program that forks must not have threads of other
frameworks. Most are forked from a program that has imported torch (`apart.py`). Programs that are interrupted or killed
are started as new processes.
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.utils.data import DataLoader, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from tqdm.auto import tqdm

import fastpipe
import fastpipe.torch as adapter
from killed_worker import EndsInMap
from samples import FEATURES, ids_by_batch

OPTIONS: dict[str, Any] = {"batch_size": 7, "shuffle_buffer": 21, "shuffle": True, "seed": 11, "features": FEATURES}


def dataset(paths: list[str], **more: Any) -> adapter.IterableDataset:
    return adapter.dataset(fastpipe.read_avro(paths, **OPTIONS | more))


def ids(batch: Any) -> Any:
    """Returns ids as NumPy arrays, for passes that are abandoned.

    torch workers may abort if they end while they send tensors.
    """
    return {"id": batch["id"].numpy()}


def passes(paths: list[str], count: int, workers: int, method: str) -> Any:
    """Returns the rows of several passes, with new and with persistent workers."""
    found = []
    # Users of a fork server typically preload modules that are slow to import.
    multiprocessing.set_forkserver_preload(["fastpipe.torch"])
    for kept in (False, True):
        loader = DataLoader(
            dataset(paths),
            batch_size=None,
            num_workers=workers,
            multiprocessing_context=method,
            persistent_workers=kept,
        )
        found.append([ids_by_batch(loader) for _ in range(count)])
    # The last loader has workers already.
    left = iter(loader)
    next(left)
    try:
        loader.dataset.state_dict()
        refused = ""
    except fastpipe.errors.StateError as error:
        refused = str(error)
    del left
    return {"passes": found, "again": ids_by_batch(loader), "refused": refused}


def left(paths: list[str], method: str, kept: bool, by: str) -> Any:
    """Abandons passes by `break`, and in the way of Lightning.

    Lightning creates the next iterator before it drops the last one.
    """
    data = dataset(paths)
    options: dict[str, Any] = {
        "batch_size": None,
        "num_workers": 2,
        "multiprocessing_context": method,
        "collate_fn": ids,
    }
    kinds: dict[str, Any] = {"torch": DataLoader, "torchdata": StatefulDataLoader, "fastpipe": adapter.DataLoader}
    loader = kinds[by](data, **options, persistent_workers=kept)
    # When the loop has received more than four batches, each worker of torchdata has been asked for its third.
    first = 5 if by == "torchdata" else 1
    found = [ids_by_batch(itertools.islice(loader, steps)) for steps in (first, 5, 5)]
    data.set_epoch(2)
    # tqdm calls `iter` twice and reads only the second iterator. (Workers that aren't forked may begin the first pass
    # after the second one was counted, and so begin the next epoch.)
    again = ids_by_batch(itertools.islice(tqdm(loader, disable=True) if method == "fork" else loader, 5))
    batches = iter(loader)
    whole = ids_by_batch(batches)
    return {"left": found, "set": again, "whole": whole, "next": ids_by_batch(iter(loader))}


def late(worker: int) -> None:
    """Delays the start of each worker by its index."""
    time.sleep(0.2 * worker)


def meanwhile(paths: list[str], ways: list[str], method: str, kept: bool) -> Any:
    """Sets the epoch, or reads the dataset here, while workers begin their passes."""
    found = {}
    for what in ways:
        data = dataset(paths)
        loader = DataLoader(
            data,
            batch_size=None,
            num_workers=2,
            worker_init_fn=late,
            multiprocessing_context=method,
            persistent_workers=kept,
        )
        batches = iter(loader)
        first = ids_by_batch([next(batches)]) if what == "set in the loop" else []
        here = ids_by_batch(data) if what == "read" else data.set_epoch(4)
        first += ids_by_batch(batches)
        found[what] = [first, here, *(ids_by_batch(loader) for _ in range(2)), data.state_dict()["progress"]["epoch"]]
    return found


def alike(paths: list[str]) -> Any:
    """Runs loaders with equal seeds and abandons one of them."""
    data = dataset(paths)
    found = []
    for number in range(4):
        torch.manual_seed(0)
        loader = DataLoader(data, batch_size=None, num_workers=3, multiprocessing_context="fork")
        if number == 1:
            next(iter(loader))
            torch.manual_seed(0)
        found.append(ids_by_batch(loader))
    return found


def beside(paths: list[str]) -> Any:
    """Runs two loaders over one dataset.

    The second starts after the first has delivered some batches, and ends before it.
    """
    data = dataset(paths)
    slow = iter(DataLoader(data, batch_size=None, num_workers=2, worker_init_fn=late, multiprocessing_context="fork"))
    first = ids_by_batch(next(slow) for _ in range(5))
    quick = ids_by_batch(DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork"))
    return [first + ids_by_batch(slow), quick, ids_by_batch(data)]


def shares(paths: list[str], workers: int, more: dict[str, Any]) -> Any:
    """Returns each rank's length and the number of valid rows of each batch, with and without workers."""
    found = []
    warnings.simplefilter("ignore", fastpipe.errors.RowsLeftOutWarning)
    os.environ["WORLD_SIZE"] = "2"
    for rank in range(2):
        os.environ["RANK"] = str(rank)
        data = dataset(paths, **more)
        loader = DataLoader(data, batch_size=None, num_workers=workers, multiprocessing_context="fork")
        each = [batch["id"][batch["valid"]].tolist() if "valid" in batch else batch["id"].tolist() for batch in loader]
        found.append([len(loader), each, ids_by_batch(DataLoader(dataset(paths, **more), batch_size=None))])
    return found


def warned(paths: list[str], folder: str) -> Any:
    """Returns the warnings of two passes with workers, by what the workers do."""
    warnings.simplefilter("always")
    found: dict[str, Any] = {}
    for name, more, options in (
        ("plain", {}, {"num_workers": 2}),
        ("kept", {}, {"num_workers": 2, "persistent_workers": True}),
        ("map", {"map": dict}, {"num_workers": 2}),
        ("collate_fn", {}, {"num_workers": 2, "collate_fn": dict}),
        ("none", {}, {}),
    ):
        noted = Path(folder, name)

        def note(message: Any, *_: Any, to: Path = noted) -> None:
            with to.open("a") as file:
                file.write(f"{message}\n")

        warnings.showwarning = note
        data = adapter.dataset(fastpipe.read_avro(paths, **OPTIONS), **more)
        loader = DataLoader(data, batch_size=None, multiprocessing_context="fork" if options else None, **options)
        for _ in range(2):
            ids_by_batch(loader)
        lines = noted.read_text().splitlines() if noted.exists() else []
        found[name] = [line for line in lines if "DataLoader" in line]
    return found


def damaged(paths: list[str]) -> Any:
    """Returns the errors that the training process gets."""
    found = []
    for number in (0, 1):
        data = dataset(paths, shuffle=False, shuffle_buffer=None)
        batches = iter(DataLoader(data, batch_size=None, num_workers=number, multiprocessing_context=None))
        errors: list[fastpipe.FastpipeError] = []
        while len(errors) < 2:
            try:
                next(batches)
            except fastpipe.FastpipeError as error:
                errors.append(pickle.loads(pickle.dumps(error)))
        for error in errors:
            what = error.path, error.block, error.offset, error.record, error.feature, error.reason
            found.append([type(error).__name__, isinstance(error, ValueError), str(error), *what])
    return found


def stateful(paths: list[str], workers: int, steps: list[int], shuffle: bool | str, by: str) -> Any:
    """Returns the remaining batches at some steps, in a newly created loader, and the pass after them."""

    def loader() -> Any:
        return (StatefulDataLoader if by == "torchdata" else adapter.DataLoader)(
            dataset(paths, shuffle=shuffle),
            batch_size=None,
            num_workers=workers,
            multiprocessing_context="fork",
            persistent_workers=False,
        )

    whole = loader()
    expected = [ids_by_batch(whole), ids_by_batch(whole)]
    found = []
    for step in [*steps, len(expected[0]) - 1, len(expected[0])]:
        first = loader()
        batches = iter(first)
        seen = ids_by_batch(next(batches) for _ in range(step))
        state = first.state_dict()
        del batches
        second = loader()
        second.load_state_dict(state)
        found.append([seen + ids_by_batch(second), ids_by_batch(second)])
    return {"expected": expected, "found": found}


def ended(paths: list[str], how: str) -> Any:
    """Ends a loop with workers in the given way."""
    ends = EndsInMap(worker=0, batch=1)
    data = adapter.dataset(
        fastpipe.read_avro(paths, **OPTIONS, epochs=None), map=ends if how == "worker killed" else None
    )
    batches = iter(DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork"))
    next(batches)
    workers = [worker.pid for worker in batches._workers]
    print(json.dumps(workers), flush=True)
    if how == "break":
        return None
    if how == "exception":
        raise RuntimeError("the model failed")
    if how == "worker killed":
        ends.go()
    # Continues until Ctrl-C, or until the loader raises the error of a killed worker.
    for _ in batches:
        time.sleep(0.001)
    return None


def rank(paths: list[str], folder: str, stop: int) -> None:
    """Runs one rank, which resumes from a checkpoint in a folder and stops after some steps as if killed."""
    logging.basicConfig(level=logging.INFO)
    torch.distributed.init_process_group("gloo")
    me, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    data = dataset(paths)
    checkpoint = Path(folder) / "checkpoint.json"
    if checkpoint.exists():
        data.load_state_dict(json.loads(checkpoint.read_text()))
    seen = []
    for batch in data:
        seen.append(batch["id"].tolist())
        # All ranks take part in each step. If one ran out of batches, the others would hang.
        torch.distributed.all_reduce(torch.ones(1))
        if len(seen) == stop:
            break
    Path(folder, f"{world}-{me}.json").write_text(json.dumps({"rows": seen, "epoch": data._of_rank().epoch}))
    if me == 0 and stop:
        checkpoint.write_text(json.dumps(data.state_dict()))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    if get_worker_info() is not None:
        raise AssertionError("a rank is not a worker")


def answer(request: dict[str, Any]) -> Any:
    """Runs a program with its arguments and returns its result."""
    warnings.simplefilter("error")
    # torchdata calls a function that torch has deprecated.
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
    # torch also warns about more workers than processors, which doesn't matter here.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    # A separate test covers this warning.
    warnings.filterwarnings("ignore", message="num_workers=")
    # Otherwise torch warns when a sparse tensor arrives from another process.
    torch.sparse.check_sparse_tensor_invariants.disable()
    programs = {"passes": passes, "stateful": stateful, "ended": ended, "rank": rank, "meanwhile": meanwhile}
    programs |= {"alike": alike, "beside": beside, "left": left, "shares": shares, "damaged": damaged}
    programs |= {"warned": warned}
    found = programs[request.pop("program")](**request)
    # torch's exception for a worker's error references itself and the loader.
    gc.collect()
    # torch doesn't join the threads that send to its workers. If such a thread is stopped while it releases its
    # semaphores, multiprocessing's resource tracker reports them as leaked.
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join()
    return found


def main() -> None:
    # A background shell makes its commands ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found = answer(json.loads(sys.argv[1]))
    if found is not None:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
