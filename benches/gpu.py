"""Measures `fastpipe.cuda` on a GPU: data sets (a) and (b), batches of 1,024 and 8,192 rows.

- `rate`: what the copying of batches to the device takes there, from the first piece of a batch to its last, and what
  it takes when many are copied one after the other by a staging ring; beside a copy of as many bytes from page-locked
  memory in one piece. In turns. Decoding isn't in it: batches are decoded before.
- `hidden`: the same ring while the device computes, matrix products that take half as long again as the copies. What
  both together take less than one after the other, as a share of copying.
- `records`: records a second from the file to device memory, with 1, 2, 4, ... threads.
- `idle`: a small recommender is trained on (a). The device is idle from the end of a step to the beginning of the next
  one; beside Torch's `DataLoader` with `pin_memory=True` over fastavro, of which a small part of the file is read.

Run it where PyTorch, built with CUDA, and fastpipe are installed, and fastavro for the loader (without it that is left
out). `--write` keeps the figures for RESULTS.md, which `benches/report.py` writes. (Not `cuda.py`: PyTorch and CuPy
import a package `cuda`, which a file of that name here would hide from them.)
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import fastpipe
import generate
import kept
import loads

if TYPE_CHECKING:
    import torch

    from fastpipe._cuda_torch import TorchEngine

PARTS = ("rate", "hidden", "records", "idle")
COMMANDS = """\
.venv/bin/python benches/gpu.py --write && .venv/bin/python benches/report.py
.venv/bin/python -m pytest -m cuda
TORCH_CUDA_SANITIZER=1 .venv/bin/python -m pytest -m cuda -k "race or training"
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
compute-sanitizer --tool memcheck .venv/bin/python -m pytest -m cuda -k race --timeout 3600
compute-sanitizer --tool initcheck .venv/bin/python -m pytest -m cuda -k race --timeout 3600
compute-sanitizer --tool racecheck .venv/bin/python -m pytest -m cuda -k race --timeout 3600"""
NOT_RUN = """\
There was no machine with a GPU, so none of this has been measured or run:

- the copy rate beside a plain copy of page-locked memory (wanted: at least 90 %);
- the share of copying that is hidden behind compute (at least 80 %);
- records/s into device memory, and 16 decoding threads beside one (at least 12 times);
- how long the GPU is idle while a small recommender is trained (under 5 % where decoding can keep up), and a
  `DataLoader` with `pin_memory=True` over fastavro beside it;
- the tests marked `cuda`, with PyTorch, with CuPy and on two GPUs; also under PyTorch's sanitizer of streams and
  compute-sanitizer.

On such a machine:"""
BATCH_SIZES = (1024, 8192)
HELD = 8
"""Decoded batches that are copied again and again."""


class Hosts:
    """Batches in page-locked memory, and the engine that copies them."""

    def __init__(self, dataset: str, batch_size: int, rows: int, num_threads: int | None) -> None:
        from fastpipe import _fastpipe
        from fastpipe._cuda_torch import TorchEngine
        from fastpipe._tensors import Forms

        self.engine: TorchEngine = TorchEngine("cuda:0", Forms(sparse="coo"))
        path, _ = generate.generate(dataset, rows)
        options: dict[str, Any] = {"features": loads.features(dataset), "num_threads": num_threads or "auto"}
        self._reader = fastpipe.read_avro(path, batch_size=batch_size, drop_last=True, **options)
        memory = _fastpipe.PassMemory(self._reader._data.handle, self.engine.allocate, HELD)
        started = self._reader._start(memory)
        batches = self._reader._shown(started)
        self.batches = list(itertools.islice(batches, HELD))
        started.close()
        pieces = [self.pieces(batch) for batch in self.batches]
        self.nbytes = statistics.mean(sum(pieces) for pieces in pieces)
        self.count = statistics.mean(len(pieces) for pieces in pieces)

    def pieces(self, batch: dict[str, Any]) -> list[int]:
        """Bytes of the pieces in which a batch is copied."""
        from fastpipe._packing import PackedBatch

        return [piece.nbytes for piece, _ in PackedBatch(batch, self.engine.allocate).pieces]

    def ring(self, count: int, depth: int = 2) -> Any:
        """A ring that yields this many of them."""
        from fastpipe._staging import Drawn, StagingRing

        source = (Drawn(self.batches[i % len(self.batches)], None) for i in range(count))
        return StagingRing(source, self.engine, depth, stop=lambda: None, name="copies")


def seconds(stream: torch.cuda.Stream, work: Callable[[], object]) -> float:
    """Seconds from the beginning to the end of what is put on a stream, as the device measures it."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record(stream)
    work()
    end.record(stream)
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def medians(rounds: int, ways: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Medians of several ways, which take turns; the first turn warms up."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            value = way()
            if turn:
                found[name].append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def rate(hosts: Hosts, rounds: int) -> dict[str, float]:
    """GB/s of a plain copy, of the pieces of batches, and of a ring; and bytes and pieces of a batch."""
    import torch

    engine, stream = hosts.engine, hosts.engine._stream
    size = int(hosts.nbytes)
    locked = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device=engine.device)
    many = 200

    def plain() -> float:
        def copy() -> None:
            with torch.cuda.stream(stream):
                for _ in range(many):
                    device.copy_(locked, non_blocking=True)

        return many * size / seconds(stream, copy) / 1e9

    def pieces() -> float:
        from fastpipe._packing import PackedBatch

        took, copied = 0.0, 0
        for batch in hosts.batches:
            packed = PackedBatch(batch, engine.allocate)
            memory = torch.empty(packed.nbytes, dtype=torch.uint8, device=engine.device)

            def copy(packed: PackedBatch = packed, memory: torch.Tensor = memory) -> None:
                # As fast as the program can issue them: a queue that is never empty, as when a device is behind.
                with torch.cuda.stream(stream):
                    for _ in range(20):
                        for piece, start in packed.pieces:
                            engine._transfer(torch.from_numpy(piece), memory[start : start + piece.nbytes])

            took += seconds(stream, copy)
            copied += 20 * sum(piece.nbytes for piece, _ in packed.pieces)
        return copied / took / 1e9

    def ring() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in hosts.ring(many):
            pass
        torch.cuda.synchronize()
        return many * hosts.nbytes / (time.perf_counter() - start) / 1e9

    found = medians(rounds, {"plain": plain, "pieces": pieces, "ring": ring})
    return {**found, "bytes": hosts.nbytes, "pieces_a_batch": hosts.count}


def hidden(hosts: Hosts, rounds: int) -> dict[str, float]:
    """Seconds of copying alone, computing alone and both, and the share of copying that is hidden."""
    import torch

    many = 100
    matrix = torch.randn(4096, 4096, device=hosts.engine.device)
    stream = torch.cuda.current_stream(hosts.engine.device)

    def wall(batches: Iterable[Any], products: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in batches:
            for _ in range(products):
                torch.mm(matrix, matrix)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    one = min(seconds(stream, lambda: torch.mm(matrix, matrix)) for _ in range(10))
    copying = min(wall(hosts.ring(many), 0) for _ in range(3)) / many
    products = max(1, round(1.5 * copying / one))
    found = medians(
        rounds,
        {
            "copying": lambda: wall(hosts.ring(many), 0),
            "computing": lambda: wall(range(many), products),
            "both": lambda: wall(hosts.ring(many), products),
        },
    )
    share = (found["copying"] + found["computing"] - found["both"]) / found["copying"]
    return {**found, "hidden": share}


def records(dataset: str, batch_size: int, rows: int, num_threads: int, rounds: int) -> float:
    """Records a second from the file to device memory."""
    import torch

    import fastpipe.cuda

    path, _ = generate.generate(dataset, rows)
    features = loads.features(dataset)
    reader = fastpipe.read_avro(path, features=features, batch_size=batch_size, num_threads=num_threads)
    batches = fastpipe.cuda.prefetch(reader, "cuda:0")

    def once() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in batches:
            pass
        torch.cuda.synchronize()
        return rows / (time.perf_counter() - start)

    return medians(rounds, {"records": once})["records"]


def recommender() -> tuple[torch.nn.Module, list[str], list[str]]:
    """A small model of (a), and the features that it takes: vectors, and sparse ones to embed."""
    import torch

    columns = generate.DATASETS["a"]
    dense = [column for column in columns if column.kind == "dense" and column.avro == "float"]
    sparse = [column.name for column in columns if column.kind == "sparse"]

    class Recommender(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = torch.nn.ModuleList(
                torch.nn.EmbeddingBag(generate.SPARSE_SIZE, 64, mode="sum", include_last_offset=True) for _ in sparse
            )
            width = sum(column.size for column in dense) + 64 * len(sparse)
            layers = [torch.nn.Linear(width, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512), torch.nn.ReLU()]
            self.top = torch.nn.Sequential(*layers, torch.nn.Linear(512, 1))

        def forward(self, batch: dict[str, Any]) -> torch.Tensor:
            vectors = [batch[column.name] for column in dense]
            for name, bag in zip(sparse, self.bags, strict=True):
                terms = batch[name]
                weights = terms.values.to(torch.float32)
                vectors.append(bag(terms.indices, terms.offsets, per_sample_weights=weights))
            found: torch.Tensor = self.top(torch.cat(vectors, dim=1))
            return found

    return Recommender().to("cuda:0"), [column.name for column in dense], sparse


def idle(batches: Iterable[dict[str, Any]], batch_size: int) -> dict[str, float]:
    """Trains on all batches: the share of the time in which the device is idle, and records a second."""
    import torch

    model, _, _ = recommender()
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def step(batch: dict[str, Any]) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        end.record()
        events.append((begin, end))

    for batch in batches:
        step(batch)
    torch.cuda.synchronize()
    events = events[len(events) // 10 :]  # The first steps fill pools and caches.
    whole = events[0][0].elapsed_time(events[-1][1])
    busy = sum(begin.elapsed_time(end) for begin, end in events)
    return {"idle": 1 - busy / whole, "records": len(events) * batch_size / whole * 1e3}


def training(batch_size: int, rows: int, num_threads: int) -> Iterator[dict[str, Any]]:
    """Batches of (a) for the recommender."""
    import fastpipe.cuda

    _, dense, sparse = recommender()
    path, _ = generate.generate("a", rows)
    features: dict[str, Any] = {name: loads.features("a")[name] for name in dense}
    for name in sparse:
        features[name] = fastpipe.SparseSpec((generate.SPARSE_SIZE,), loads.features("a")[name].dtype, layout="csr")
    reader = fastpipe.read_avro(path, features=features, batch_size=batch_size, drop_last=True, num_threads=num_threads)
    yield from fastpipe.cuda.prefetch(reader, "cuda:0", sparse="bag")


def loaded(batch_size: int, rows: int) -> Iterator[dict[str, Any]]:
    """The same from a `DataLoader` over fastavro, with page-locked memory."""
    import torch
    from torch.utils.data import DataLoader

    from collated import Collate, Records
    from fastpipe._tensors import Bag

    _, dense, sparse = recommender()
    path, _ = generate.generate("a", rows)
    collate = Collate(fastpipe.Features({name: loads.features("a")[name] for name in (*dense, *sparse)}))

    def bags(records: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = collate(records)
        for name in sparse:
            matrix = batch[name]
            offsets = torch.searchsorted(matrix._indices()[0], torch.arange(len(records) + 1))
            batch[name] = Bag(matrix._indices()[1].contiguous(), offsets, matrix._values())
        return batch

    records = Records(str(path), rows)
    for batch in DataLoader(records, batch_size=batch_size, collate_fn=bags, pin_memory=True, drop_last=True):
        there = {name: batch[name].to("cuda:0", non_blocking=True) for name in dense}
        for name in sparse:
            there[name] = Bag(*(part.to("cuda:0", non_blocking=True) for part in batch[name]))
        yield there


def threads() -> list[int]:
    """1, 2, 4, ... up to the processors that may be used, and 16 at most."""
    available = min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return sorted({available, *(2**k for k in range(5) if 2**k <= available)})


def table(part: dict[str, Any]) -> list[str]:
    """The section of RESULTS.md: what was measured, or what could not be."""
    entries = part["entries"]
    commands = ["", "```sh", *COMMANDS.splitlines(), "```"]
    if not entries:
        return [*NOT_RUN.splitlines(), *commands]
    lines = [f"{part['date']}, revision {part['revision']}, {part['machine']}, {entries['gpu']}"]
    lines += ["", "| batches | MB | pieces | plain copy, GB/s | pieces | ring | pieces / plain | copying hidden |"]
    lines += ["|---|--:|--:|--:|--:|--:|--:|--:|"]
    for name, found in entries.items():
        if name.startswith("rate "):
            share = entries.get(name.replace("rate", "hidden"), {}).get("hidden")
            lines.append(
                f"| {name[5:]} | {found['bytes'] / 1e6:.1f} | {found['pieces_a_batch']:.0f} | {found['plain']:.1f} |"
                f" {found['pieces']:.1f} | {found['ring']:.1f} | {found['pieces'] / found['plain']:.0%} |"
                f" {'' if share is None else f'{share:.0%}'} |"
            )
    rates = {name[8:]: found for name, found in entries.items() if name.startswith("records ")}
    if rates:
        counts = list(next(iter(rates.values())))
        lines += ["", f"| records/s to the device, threads | {' | '.join(counts)} | most / one |"]
        lines += [f"|---|{'--:|' * (len(counts) + 1)}"]
        for name, found in rates.items():
            numbers = [f"{found[count]:,.0f}" for count in counts]
            lines.append(f"| {name} | {' | '.join(numbers)} | {found[counts[-1]] / found[counts[0]]:.1f} |")
    trained = {name[5:]: found for name, found in entries.items() if name.startswith("idle ")}
    if trained:
        lines += ["", "| a small recommender on (a) | GPU idle | records/s |", "|---|--:|--:|"]
        lines += [f"| {name} | {found['idle']:.1%} | {found['records']:,.0f} |" for name, found in trained.items()]
    return [*lines, *commands]


def measure(arguments: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Measures part after part."""
    import torch

    yield "gpu", f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    rounds, rows = arguments.rounds, arguments.rows
    for dataset, batch_size in itertools.product("ab", BATCH_SIZES):
        # One thread makes batches of many pieces, several threads batches of two.
        for num_threads in (1, 2) if {"rate", "hidden"} & set(arguments.parts) else ():
            name = f"({dataset}), {batch_size:,} rows, {num_threads} thread{'s' * (num_threads > 1)}"
            hosts = Hosts(dataset, batch_size, rows, num_threads)
            if "rate" in arguments.parts:
                yield f"rate {name}", rate(hosts, rounds)
            if "hidden" in arguments.parts:
                yield f"hidden {name}", hidden(hosts, rounds)
        if "records" in arguments.parts:
            by_threads = {str(n): records(dataset, batch_size, rows, n, rounds) for n in threads()}
            yield f"records ({dataset}), {batch_size:,} rows", by_threads
    if "idle" in arguments.parts:
        for batch_size in BATCH_SIZES:
            for num_threads in threads():
                found = idle(training(batch_size, rows, num_threads), batch_size)
                yield f"idle fastpipe.cuda, {batch_size:,} rows, {num_threads} threads", found
        if importlib.util.find_spec("fastavro") is None:
            print("fastavro isn't installed: its loader is left out", file=sys.stderr)
        else:
            few = 16 * BATCH_SIZES[0]
            yield f"idle DataLoader over fastavro, {BATCH_SIZES[0]:,} rows", idle(loaded(BATCH_SIZES[0], few), 1024)


def main() -> int:
    """Runs the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=131_072)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--write", action="store_true", help="keep the figures for RESULTS.md")
    arguments = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("This measures a GPU by way of PyTorch, which isn't installed here.", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print(f"This needs a GPU, and PyTorch {torch.__version__} finds none here.", file=sys.stderr)
        return 2
    entries = {}
    for name, found in measure(arguments):
        entries[name] = found
        print(name, found if isinstance(found, str) else {key: float(f"{n:.4g}") for key, n in found.items()})
    if arguments.write:
        kept.save("cuda", entries, {"torch": torch.__version__}, quick=False)
    print()
    print("\n".join(table({"entries": entries, "date": "now", "revision": kept.revision(), "machine": kept.machine()})))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
