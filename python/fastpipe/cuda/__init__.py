"""Batches in the memory of GPUs, copied while the model computes.

    import fastpipe.cuda

    reader = fastpipe.read_avro("data/*.avro", batch_size=1024, shuffle=True, seed=7)
    for batch in fastpipe.cuda.prefetch(reader, device="cuda:0"):
        loss = model(batch["user_embedding"], batch["clicked_items"])

Batches are decoded straight into page-locked memory, from which a GPU copies by itself. That happens on a stream of its
own, a few batches ahead, and in few pieces: one for all features of fixed size, and one, or one a part where a single
thread has decoded the batch, for all others. The stream that is current when a batch is asked for waits for it to
arrive; the program doesn't. Host memory is used again when it has been copied, never before.

Page-locked memory, and what batches become, are PyTorch's or, where that is missing, CuPy's:

| the reader's form | with PyTorch, as in `fastpipe.torch` | with CuPy |
|---|---|---|
| `numpy.ndarray` | `torch.Tensor` | `cupy.ndarray` |
| `fastpipe.Ragged` | `Jagged(values, offsets)`, or a nested tensor | `fastpipe.Ragged` of `cupy.ndarray`s |
| `fastpipe.Sparse`, `SparseCSR` | sparse tensor, or `Bag(indices, offsets, values)` | the same of `cupy.ndarray`s |
| `fastpipe.Strings` | `Strings(values, offsets)`, or lists | the same of `cupy.ndarray`s |
| `fastpipe.Masked` | `Masked(values, valid)` | the same of `cupy.ndarray`s |

Both have `__dlpack__` and `__cuda_array_interface__`. Importing this module imports neither.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self, SupportsIndex

import numpy as np

from fastpipe._fastpipe import PassMemory
from fastpipe._reader.ordering import within
from fastpipe._reader.passes import Passes, Position, passes_of
from fastpipe._reader.reader import Reader
from fastpipe.cuda._fill import Fill, Filled, fill
from fastpipe.cuda._staging import CopyEngine, Drawn, StagingRing

if TYPE_CHECKING:
    from fastpipe._interop.tensors import RaggedAs, SparseAs, StringsAs

__all__ = ["Fill", "Filled", "Prefetcher", "fill", "prefetch"]

_LOG = logging.getLogger("fastpipe")

_MOST_AHEAD = 1024


class _Engine(CopyEngine, Protocol):
    """Copies to one device."""

    @property
    def allocate(self) -> Callable[[int], np.ndarray]:
        """Makes page-locked memory."""

    def begin(self) -> None:
        """Called by the consumer's thread before a pass."""


def prefetch(
    reader: Reader,
    device: Any = "cuda:0",
    depth: SupportsIndex = 2,
    *,
    framework: Literal["torch", "cupy"] | None = None,
    distributed: bool = True,
    ragged: RaggedAs = "offsets",
    sparse: SparseAs = "coo",
    strings: StringsAs = "tensors",
) -> Prefetcher:
    """The batches of a reader, in the memory of a GPU.

    In `torch.distributed` a reader of one rank is divided among the ranks of the default process group or, before there
    is one, as RANK and WORLD_SIZE of the environment (torchrun's) say. That is logged (logger `fastpipe`, INFO). A
    reader that has a rank already is left as it is. The device isn't chosen by rank: give
    `device=f"cuda:{os.environ['LOCAL_RANK']}"`.

    The page-locked memory is what the reader decodes ahead, and `depth` batches more. PyTorch and CuPy take powers of
    two of it, and keep for later what is given back; `memory_limit` doesn't know of that.

    Args:
        reader: of any source. The prefetcher has it to itself.
        device: a GPU, `"cuda:0"`; or a list of GPUs, for one process with several. Each of these has a reader of its
            own, an equal share of what `reader` yields, and a copying thread; what is yielded are tuples of as many
            batches, whose rows are disjoint.
        depth: batches at most that are being copied, or wait on the device to be asked for, at least 1; for each
            device.
        framework: `"torch"` or `"cupy"`; None for PyTorch, or CuPy where that isn't installed.
        distributed: False leaves the reader whole in each rank, as when all of them evaluate the same. Without PyTorch
            it is whole in any case.
        ragged: as in `fastpipe.torch.tensors`; CuPy has but `"offsets"`.
        sparse: as in `fastpipe.torch.tensors`, for PyTorch. With `"csr"` and `"bag"` let the reader's `SparseSpec` have
            `layout="csr"`, or offsets are computed and copied by themselves.
        strings: as in `fastpipe.torch.tensors`, for PyTorch. Lists stay where they are.

    Raises:
        DeviceError: if there is no such GPU, or no driver for it.
        ImportError: if neither PyTorch nor CuPy is installed, or not the one that is asked for.
        TypeError: if it isn't a reader.
        ValueError: if an argument is out of range, or the reader can't be shared out among devices or ranks.
    """
    passes = passes_of(reader)
    ahead = within("depth", depth, 1, _MOST_AHEAD)
    chosen = framework or _installed()
    make: Callable[[Any], _Engine]
    if chosen == "torch":
        passes, make = _with_torch(passes, distributed, ragged, sparse, strings)
    elif chosen == "cupy":
        if (ragged, sparse, strings) != ("offsets", "coo", "tensors"):
            raise ValueError(
                "ragged, sparse and strings are PyTorch's forms: CuPy's arrays come in those of the reader"
            )
        make = _with_cupy()
    else:
        raise ValueError(f'framework must be "torch" or "cupy", not {framework!r}')
    several = isinstance(device, Sequence) and not isinstance(device, str)
    engines = [make(each) for each in (device if several else [device])]
    if not engines:
        raise ValueError("device is an empty list")
    return Prefetcher(passes, engines, ahead, several=several)


def _installed() -> str:
    for name in ("torch", "cupy"):
        if importlib.util.find_spec(name) is not None:
            return name
    raise ImportError(
        "fastpipe.cuda needs PyTorch built with CUDA, or CuPy: pip install 'fastpipe-data[torch]', or cupy-cuda13x for"
        " CUDA 13. Without a GPU, fastpipe.torch and the reader itself need neither"
    )


def _with_torch(
    passes: Passes, distributed: bool, ragged: RaggedAs, sparse: SparseAs, strings: StringsAs
) -> tuple[Passes, Callable[[Any], _Engine]]:
    try:
        from fastpipe._interop.distributed import local_ranks, world
        from fastpipe._interop.tensors import Forms
        from fastpipe.cuda._torch import TorchEngine
    except ImportError as error:
        raise ImportError("fastpipe.cuda needs PyTorch for this: pip install 'fastpipe-data[torch]'") from error
    if distributed and passes.world_size == 1:
        rank, ranks, origin = world()
        if ranks > 1:
            passes = passes.share(ranks, rank)
            passes.share_processors(local_ranks())
            _LOG.info("rank %d of %d reads its share (by %s)", rank, ranks, origin)
    forms = Forms(ragged, sparse, strings)
    return passes, lambda device: TorchEngine(device, forms)


def _with_cupy() -> Callable[[Any], _Engine]:
    try:
        from fastpipe.cuda._cupy import CupyEngine
    except ImportError as error:
        raise ImportError("fastpipe.cuda needs CuPy for this: pip install cupy-cuda13x, for CUDA 13") from error
    return CupyEngine


class Prefetcher:
    """Yields the batches of a reader on its device. `prefetch` makes one.

    `iter(prefetcher)` starts a pass; it is the one active pass, and a second one closes the first. A pass that has
    yielded a batch counts as an epoch, whether it was finished or left: batches that were only copied ahead don't
    count. Several threads may draw from one pass: each batch goes to one of them. An error comes after the
    batches before it, and ends the pass. A pass that is closed or dropped, or that the interpreter's end finds, ends
    its threads when the copies that were begun are complete. Batches that were yielded stay as they are.
    """

    def __init__(self, reader: Reader | Passes, engines: Sequence[_Engine], depth: int, *, several: bool) -> None:
        passes = passes_of(reader)
        count = len(engines)
        if count > 1 and passes.uneven == "allow":
            raise ValueError(
                'with uneven="allow" some devices would have no batch when others have: use "drop" or "pad"'
            )
        shares = [passes] if count == 1 else [passes.shard(count, i) for i in range(count)]
        for share in shares if count > 1 else ():
            share.share_processors(count * passes.sharers)
        self._lanes = [_Lane(*lane, depth) for lane in zip(shares, engines, strict=True)]
        self._several = several
        self._active: weakref.ref[_Pass] | None = None

    @property
    def readers(self) -> tuple[Reader, ...]:
        """The readers whose batches these are, one for each device: for their `stats()` and `explain()`."""
        return tuple(lane.passes.origin for lane in self._lanes)

    @property
    def epoch(self) -> int:
        """The epoch of the batch that was yielded last, as `Reader.epoch`."""
        return self._lanes[0].epoch

    def set_epoch(self, epoch: SupportsIndex) -> None:
        """Lets the next pass start with this epoch, from its beginning. The active one is closed."""
        number = within("epoch", epoch, 0, 2**62)
        self.close()
        for lane in self._lanes:
            lane.set_epoch(number)

    def __len__(self) -> int:
        """Batches of a pass; tuples of them with several devices.

        Raises:
            TypeError: if passes have no end.
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
        """Ends the active pass, if there is one, and waits for its threads and for the copies that were begun."""
        active = None if self._active is None else self._active()
        self._active = None
        if active is not None:
            active.close()

    def state_dict(self) -> dict[str, Any]:
        """How far the pass has come, as `Reader.state_dict`: only batches that `next` has returned count as seen.

        So another prefetcher or reader of the same data, on this device or none, goes on exactly there. Several devices
        are to it what as many ranks are, and have one state: with `shuffle=True` or without shuffling it may be loaded
        on another number of devices; with `"block"` and `"buffer"` only if `shard_by="batch"`.
        """
        return self._lanes[0].state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Lets the next pass go on where a state was saved; the active one is closed.

        Raises:
            StateError: as `Reader.load_state_dict` does. Nothing changes then.
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
    """The last batch of a pass that the consumer has got.

    Attributes:
        number: of the batch, counted from 1; 0 before the first, infinite after the end.
        epoch: of the batch; of the next one before the first, and after the end.
        progress: of the pass after the batch.
    """

    number: float
    epoch: int
    progress: dict[str, Any]


class _Lane:
    """A reader's passes, the device that their batches go to, and how far the consumer of these has come."""

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
        # The reader itself may have gone further.
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
        """Notes that the consumer has got a batch."""
        with self._lock:
            # Of several threads that draw, one may overtake another between the two steps.
            if self._seen is None or seen.number > self._seen.number:
                self._seen = seen

    def see_end(self) -> None:
        """Notes that the consumer has seen that there are no more."""
        if self._position is not None:
            self.see(_Seen(math.inf, self._position.epoch, self._position.progress()))

    def state_dict(self) -> dict[str, Any]:
        if self._seen is None:
            return self.passes.state_dict()
        return self.passes.state_behind(self._seen.progress, ended=self._seen.number == math.inf)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.passes.load_state_dict(state)
        self._seen = None


class _Source(Iterator[Drawn]):
    """The batches of a pass, each with what is seen of the pass when the consumer has got it."""

    def __init__(self, batches: Iterator[dict[str, Any]], position: Position) -> None:
        self._batches = batches
        self._position = position

    def __next__(self) -> Drawn:
        batch = next(self._batches)
        position = self._position
        return Drawn(batch, _Seen(position.delivered, position.epoch, position.progress()))


class _Pass(Iterator[Any]):
    """A pass: what the rings of all devices yield."""

    def __init__(self, rings: list[StagingRing], lanes: list[_Lane], several: bool) -> None:
        self._rings = rings
        self._lanes = lanes
        self._several = several
        # Batches of several devices belong together.
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
