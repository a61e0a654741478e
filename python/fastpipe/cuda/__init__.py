"""Batches in the memory of GPUs, copied while the model computes.

    import fastpipe.cuda

    reader = fastpipe.read_avro("data/*.avro", batch_size=1024, shuffle=True, seed=7)
    for batch in fastpipe.cuda.iterator(reader, device="cuda:0"):
        loss = model(batch["user_embedding"], batch["clicked_items"])

Batches are decoded directly into page-locked memory, from which a GPU copies on its own. Copying runs on a separate
stream, a few batches in advance, and in few pieces. All features of fixed size form one piece. All other features form
another one, or one piece each if a single thread decoded the batch. The stream that is current when a batch is
requested waits for the batch to arrive. The program doesn't wait. Host memory is reused only after it has been copied.

PyTorch allocates the page-locked memory and provides the arrays of batches or, if it isn't installed, CuPy does:

 the reader's array type | with PyTorch, as in `fastpipe.torch` | with CuPy |
|---|---|---|
| `numpy.ndarray` | `torch.Tensor` | `cupy.ndarray` |
| `fastpipe.Ragged` | `Jagged(values, offsets)`, or a nested tensor | `fastpipe.Ragged` of `cupy.ndarray`s |
| `fastpipe.Sparse`, `SparseCSR` | sparse tensor, or `Bag(indices, offsets, values)` | the same of `cupy.ndarray`s |
| `fastpipe.Strings` | `Strings(values, offsets)`, or lists | the same of `cupy.ndarray`s |
| `fastpipe.Masked` | `Masked(values, valid)` | the same of `cupy.ndarray`s |

Both kinds of arrays support `__dlpack__` and `__cuda_array_interface__`. Importing this module imports neither
framework.
"""

from __future__ import annotations

import importlib.util
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self

import numpy as np

from fastpipe._arguments import within
from fastpipe._fastpipe import PassMemory
from fastpipe._private_constructor import private_constructor
from fastpipe._reader.passes import Passes, Position, passes_of, shard_of_this_rank
from fastpipe._reader.reader import Reader
from fastpipe.cuda._fill import Fill, Filled, fill
from fastpipe.cuda._staging import CopyEngine, Drawn, StagingRing

if TYPE_CHECKING:
    from fastpipe._interop.tensors import RaggedAs, SparseAs, StringsAs

__all__ = ["Fill", "Filled", "Prefetcher", "fill", "iterator"]

_MOST_AHEAD = 1024


class _Engine(CopyEngine, Protocol):
    """Copies batches to one device."""

    @property
    def allocate(self) -> Callable[[int], np.ndarray]:
        """Function that allocates page-locked memory."""

    def begin(self) -> None:
        """Prepares for a pass. Called by the consumer's thread."""


def iterator(
    reader: Reader,
    device: Any = "cuda:0",
    *,
    prefetch: int = 2,
    framework: Literal["torch", "cupy"] | None = None,
    distributed: bool = True,
    ragged: RaggedAs = "offsets",
    sparse: SparseAs = "coo",
    strings: StringsAs = "tensors",
) -> Prefetcher:
    """Returns an iterable over the batches of a reader in the memory of a GPU.

    A reader without a rank is divided among the ranks of the program: those of the default process group of
    `torch.distributed` or, if there is none, of the environment variables RANK and WORLD_SIZE (set by torchrun). The
    division is logged (logger `fastpipe`, level INFO). A reader that has a rank is not divided again. The device isn't
    chosen by rank: pass `device=f"cuda:{os.environ['LOCAL_RANK']}"`.

    The page-locked memory holds the batches that the reader prefetches and `prefetch` more batches. PyTorch and CuPy
    round allocations up to powers of two and keep freed memory for later. `memory_limit` doesn't account for that.

    Args:
        reader: Reader of any source. Don't iterate over it elsewhere.
        device: A GPU such as `"cuda:0"`, or a list of GPUs for one process with several. Each GPU of a list gets its
            own shard of `reader` and its own copying thread. The prefetcher then yields tuples with one batch per GPU,
            whose rows are disjoint. Defaults to `"cuda:0"`.
        prefetch: Maximum number of batches for each device that are being copied or are ready on the device, 1 to 1024.
            Defaults to 2.
        framework: `"torch"` or `"cupy"`. Defaults to None, which chooses PyTorch, or CuPy if PyTorch isn't installed.
        distributed: Whether to divide the reader among ranks. Set it to False if each rank must read everything, as in
            an evaluation on all ranks. Defaults to True.
        ragged: "offsets" for values and offsets, or "nested" for nested tensors, which CuPy doesn't support. Defaults
            to "offsets".
        sparse: "coo" for COO tensors, "csr" for CSR tensors, or "bag" for the inputs of `torch.nn.EmbeddingBag`, for
            PyTorch only. For "csr" and "bag", set `layout="csr"` in the reader's `SparseSpec`. Otherwise offsets are
            computed and copied separately. Defaults to "coo".
        strings: "tensors" for the bytes and offsets of strings, or "lists" for lists of Python strings in host memory,
            for PyTorch only. Defaults to "tensors".

    Raises:
        DeviceError: If the GPU or its driver isn't available.
        ImportError: If neither PyTorch nor CuPy is installed, or the chosen framework isn't.
        TypeError: If `reader` isn't a reader.
        ValueError: If an argument is out of range, or the reader can't be divided among devices or ranks.
    """
    passes = passes_of(reader)
    ahead = within("prefetch", prefetch, 1, _MOST_AHEAD)
    chosen = framework or _installed()
    make: Callable[[Any], _Engine]
    if chosen == "torch":
        make = _with_torch(ragged, sparse, strings)
    elif chosen == "cupy":
        if (ragged, sparse, strings) != ("offsets", "coo", "tensors"):
            raise ValueError(
                "ragged, sparse and strings require PyTorch: with CuPy, batches have the reader's array types"
            )
        make = _with_cupy()
    else:
        raise ValueError(f'framework must be "torch" or "cupy"; got {framework!r}')
    passes = shard_of_this_rank(passes, distributed=distributed)
    several = isinstance(device, Sequence) and not isinstance(device, str)
    engines = [make(each) for each in (device if several else [device])]
    if not engines:
        raise ValueError("device must not be an empty list")
    return Prefetcher._of(passes, engines, ahead, several=several)


def _installed() -> str:
    for name in ("torch", "cupy"):
        if importlib.util.find_spec(name) is not None:
            return name
    raise ImportError(
        "fastpipe.cuda requires PyTorch built with CUDA, or CuPy: pip install 'fastpipe-data[torch]', or cupy-cuda13x"
        " for CUDA 13. Without a GPU, fastpipe.torch and the reader itself need neither"
    )


def _with_torch(ragged: RaggedAs, sparse: SparseAs, strings: StringsAs) -> Callable[[Any], _Engine]:
    try:
        from fastpipe._interop.tensors import Forms
        from fastpipe.cuda._torch import TorchEngine
    except ImportError as error:
        raise ImportError("fastpipe.cuda requires PyTorch for this: pip install 'fastpipe-data[torch]'") from error
    forms = Forms(ragged, sparse, strings)
    return lambda device: TorchEngine(device, forms)


def _with_cupy() -> Callable[[Any], _Engine]:
    try:
        from fastpipe.cuda._cupy import CupyEngine
    except ImportError as error:
        raise ImportError("fastpipe.cuda requires CuPy for this: pip install cupy-cuda13x, for CUDA 13") from error
    return CupyEngine


class Prefetcher:
    """Yields the batches of a reader on its device. Created by `iterator`.

    `iter(prefetcher)` starts a pass. Only one pass is active at a time, so a second pass closes the first. A pass that
    has yielded a batch counts as an epoch, whether it was finished or left. Batches that were only copied in advance
    don't count. Several threads may draw from one pass, and each batch goes to one of them. An error is raised after
    the batches before it, and ends the pass. When a pass is closed or dropped, or when the interpreter exits, its
    threads end after all begun copies are complete. Batches that were yielded stay valid.
    """

    @private_constructor("fastpipe.cuda.iterator(reader)")
    def _of(self, reader: Reader | Passes, engines: Sequence[_Engine], prefetch: int, *, several: bool) -> None:
        passes = passes_of(reader)
        count = len(engines)
        if count > 1 and passes.on_uneven == "allow":
            raise ValueError('on_uneven="allow" is not supported with several devices: use "drop" or "pad"')
        shares = [passes] if count == 1 else [passes.shard(count, i) for i in range(count)]
        for share in shares if count > 1 else ():
            share.share_processors(count * passes.sharers)
        self._lanes = [_Lane(*lane, prefetch) for lane in zip(shares, engines, strict=True)]
        self._several = several
        self._active: weakref.ref[_Pass] | None = None

    @property
    def readers(self) -> tuple[Reader, ...]:
        """The readers of the batches, one for each device. Use their `stats()` and `explain()`."""
        return tuple(lane.passes.origin for lane in self._lanes)

    @property
    def epoch(self) -> int:
        """The epoch of the batch that was yielded last, as in `Reader.epoch`."""
        return self._lanes[0].epoch

    def set_epoch(self, epoch: int) -> None:
        """Starts the next pass at the beginning of this epoch, and closes the active pass.

        Args:
            epoch: Epoch of the next pass, 0 to 2^62.
        """
        number = within("epoch", epoch, 0, 2**62)
        self.close()
        for lane in self._lanes:
            lane.set_epoch(number)

    def __len__(self) -> int:
        """Returns the number of batches of a pass. With several devices, returns the number of tuples.

        Raises:
            TypeError: If passes are infinite.
        """
        return len(self._lanes[0].passes)

    def __iter__(self) -> Iterator[Any]:
        """Starts a pass, as `iter(reader)` does."""
        self.close()
        with ExitStack() as begun:
            rings = [begun.enter_context(closing(lane.start())) for lane in self._lanes]
            begun.pop_all()
        started = _Pass(rings, self._lanes, self._several)
        self._active = weakref.ref(started)
        return started

    def close(self) -> None:
        """Ends the active pass, if any, and waits for its threads and the started copies."""
        active = None if self._active is None else self._active()
        self._active = None
        if active is not None:
            active.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the pass, like `Reader.state_dict`, counting only batches that `next` has returned.

        Another prefetcher or reader of the same dataset can resume exactly there, on any device. Several devices count
        as that many ranks and share one state. With `shuffle=True` or without shuffling, the state can be loaded on
        another number of devices. With `"block"` and `"buffer"`, this requires `shard_by="batch"`.
        """
        return self._lanes[0].state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resumes from a saved state in the next pass, and closes the active pass.

        Raises:
            StateError: If the reader can't resume from the state, as described for `Reader.load_state_dict`. Nothing
                changes in that case.
        """
        for lane in self._lanes:
            lane.load_state_dict(state_dict)
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        devices = ", ".join(str(lane.engine) for lane in self._lanes)
        return f"<fastpipe.cuda.Prefetcher to {devices} of {self._lanes[0].passes!r}>"


class _Seen(NamedTuple):
    """The last batch of a pass that the consumer received.

    Attributes:
        number: Ordinal of the batch, counted from 1. 0 before the first batch, infinite after the end.
        epoch: Epoch of the batch. Epoch of the next batch before the first one and after the end.
        progress: Progress of the pass after the batch.
    """

    number: float
    epoch: int
    progress: dict[str, Any]


class _Lane:
    """A reader's passes, the device that receives their batches, and the progress that the consumer has seen."""

    def __init__(self, passes: Passes, engine: _Engine, depth: int) -> None:
        self.passes = passes
        self.engine = engine
        self._depth = depth
        self._memory: PassMemory | None = None
        self._position: Position | None = None
        self._seen: _Seen | None = None
        self._lock = threading.Lock()

    def start(self) -> StagingRing:
        seen = self._seen
        # The reader itself may have read further.
        if seen is not None and seen.number == 0:
            self.passes.go_back(seen.progress)
        elif seen is not None:
            self.passes.set_epoch(seen.epoch if seen.number == math.inf else seen.epoch + 1)
        if self._memory is None:
            self._memory = self.passes.memory(self.engine.allocate, self._depth)
        self.engine.begin()
        started = self.passes.start(self._memory)
        self._position = started.position
        self._seen = _Seen(0, started.position.epoch, started.position.progress())
        return StagingRing(
            _Source(started.batches, started.position),
            self.engine,
            self._depth,
            stop=started.close,
            name=f"fastpipe-copy-{self.engine}",
        )

    @property
    def epoch(self) -> int:
        return self.passes.epoch if self._seen is None else self._seen.epoch

    def set_epoch(self, epoch: int) -> None:
        self.passes.set_epoch(epoch)
        self._seen = None

    def see(self, seen: _Seen) -> None:
        """Records that the consumer received a batch."""
        with self._lock:
            # One drawing thread may overtake another between receiving a batch and recording it.
            if self._seen is None or seen.number > self._seen.number:
                self._seen = seen

    def see_end(self) -> None:
        """Records that the consumer reached the end of the pass."""
        if self._position is not None:
            self.see(_Seen(math.inf, self._position.epoch, self._position.progress()))

    def state_dict(self) -> dict[str, Any]:
        if self._seen is None:
            return self.passes.state_dict()
        return self.passes.state_at(self._seen.progress, ended=self._seen.number == math.inf)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.passes.load_state_dict(state)
        self._seen = None


class _Source(Iterator[Drawn]):
    """The batches of a pass, each with the progress to record after the consumer received it."""

    def __init__(self, batches: Iterator[dict[str, Any]], position: Position) -> None:
        self._batches = batches
        self._position = position

    def __next__(self) -> Drawn:
        batch = next(self._batches)
        position = self._position
        return Drawn(batch, _Seen(position.delivered, position.epoch, position.progress()))


class _Pass(Iterator[Any]):
    """A pass over the rings of all devices."""

    def __init__(self, rings: list[StagingRing], lanes: list[_Lane], several: bool) -> None:
        self._rings = rings
        self._lanes = lanes
        self._several = several
        # The batches of several devices form one tuple, so one thread at a time draws from the rings.
        self._lock = threading.Lock()

    def __next__(self) -> Any:
        with self._lock:
            taken = [next(ring, None) for ring in self._rings]
        batches = []
        for lane, found in zip(self._lanes, taken, strict=True):
            if found is None:
                break
            batch, seen = found
            lane.see(seen)
            batches.append(batch)
        else:
            return tuple(batches) if self._several else batches[0]
        for lane in self._lanes:
            lane.see_end()
        raise StopIteration

    def close(self) -> None:
        for ring in self._rings:
            ring.close()
