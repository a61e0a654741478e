"""A `tf.data.Dataset` each iteration of which is a pass.

`Dataset.from_generator` takes a fifth of a millisecond or more for each thousand-row batch in looking at what it was
given, and complains when a program ends. So this puts the same kernels together itself. TensorFlow's GeneratorDataset
calls one function at the start of an iteration and one for each element; both call into Python once, by EagerPyFunc,
and get tensors that lie over the batch's own memory.

What the first function returns, the *ticket*, is kept by the iterator and by nobody else. It is a tensor over memory of
Python's that keeps the pass alive; so a pass ends when its iterator is dropped, whichever way that happens, without a
call into an interpreter that may be gone by then.
"""

from __future__ import annotations

import atexit
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import script_ops

from fastpipe._memory import aligned
from fastpipe.errors import MissingFileError
from fastpipe.tf._forms import Masked, Node, Part

__all__ = ["Layout", "from_passes"]

Start = Callable[..., Iterator[dict[str, Any]]]


class Layout:
    """The columns of the batches: their parts in order, and the structure that TensorFlow hands out."""

    def __init__(self, columns: dict[str, Node], rows: int | None) -> None:
        self.columns = {name: columns[name] for name in sorted(columns)}
        self.rows = rows
        self.parts: list[Part] = [part for node in self.columns.values() for part in node.parts(rows)]
        self.element_spec = {name: _structure(*node.specs(rows)) for name, node in self.columns.items()}

    def take(self, batch: dict[str, Any]) -> list[tf.Tensor]:
        """The batch's parts as tensors."""
        arrays = [array for name, node in self.columns.items() for array in node.take(batch[name])]
        return [part.convert(array) for part, array in zip(self.parts, arrays, strict=True)]

    def build(self, tensors: Sequence[tf.Tensor]) -> dict[str, Any]:
        """The element, in a graph."""
        received = iter([part.receive(tensor) for part, tensor in zip(self.parts, tensors, strict=True)])
        return {name: _structure(*node.build(received)) for name, node in self.columns.items()}


class _Iteration:
    """A pass under way. NumPy takes it for the scalar that is its number, and so keeps it alive."""

    def __init__(self, number: int, batches: Iterator[dict[str, Any]]) -> None:
        self.number = number
        self._batches = batches
        self._lock = threading.Lock()
        self._closed = False
        self._memory = aligned((), np.int64)
        self._memory[...] = number
        self.__array_interface__ = self._memory.__array_interface__

    def ticket(self) -> tf.Tensor:
        """The tensor that keeps this alive."""
        return tf.experimental.dlpack.from_dlpack(np.asarray(self).__dlpack__())

    def next(self) -> dict[str, Any]:
        with self._lock:
            if self._closed:
                raise StopIteration
            return next(self._batches)

    def close(self) -> None:
        """Ends the pass, and waits for whoever draws from it."""
        self._closed = True
        if (close := getattr(self._batches, "close", None)) is not None and self._lock.acquire(timeout=0.1):
            try:
                close()
            finally:
                self._lock.release()


class _Calls:
    """Counts the calls that TensorFlow makes, up to the last that isn't one too many."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.entered = 0
        self.under_way = 0
        self.last = 0

    def __enter__(self) -> None:
        with self._lock:
            self.entered += 1
            self.under_way += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.under_way -= 1


# Seconds without a call behind which none is expected any more, and what is waited for that.
_QUIET = 0.2
_AT_MOST = 5.0
# Calls at the end that are answered in silence.
_MANY = 1000

_calls = _Calls()
_numbers = itertools.count()
_iterations: weakref.WeakValueDictionary[int, _Iteration] = weakref.WeakValueDictionary()
_ending = threading.Event()


@atexit.register
def _end() -> None:
    # A thread of TensorFlow's that enters an interpreter on its way out is ended by force or never comes back, and
    # whoever waits for its kernel waits forever. Iterations that are at their end don't enter it again; but a prefetch
    # may have to be told so for each element that it has room for. So this waits until they have gone quiet.
    _calls.last = _calls.entered + _MANY
    _ending.set()
    iterations = list(_iterations.values())
    for iteration in iterations:
        iteration.close()
    if not iterations and not _calls.entered:
        return
    deadline = time.monotonic() + _AT_MOST
    seen, since = _calls.entered, time.monotonic()
    while (now := time.monotonic()) < min(deadline, since + _QUIET):
        time.sleep(0.01)
        if _calls.under_way or _calls.entered != seen:
            seen, since = _calls.entered, now


class _Call(script_ops.EagerFunc):  # type: ignore[misc]
    """A Python function as a kernel calls it, without the looks at each result that take longer than making them."""

    def __init__(self, function: Callable[..., list[tf.Tensor]]) -> None:
        super().__init__(function, [], False)
        self._function = function

    def __call__(self, device: str, token: str, args: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        with _calls:
            return self._function(*args)


class _Hop:
    """The two functions of a dataset that TensorFlow calls."""

    def __init__(self, start: Start, layout: Layout) -> None:
        self._start = start
        self._layout = layout
        # TensorFlow's registry has weak references only.
        self.begin, self.advance = _Call(self._begin), _Call(self._advance)
        registry = script_ops._py_funcs
        self.begin_token, self.advance_token = registry.insert(self.begin), registry.insert(self.advance)

    def _begin(self, *args: tf.Tensor) -> list[tf.Tensor]:
        missing = ""
        batches: Iterator[dict[str, Any]] = iter(())
        if not _ending.is_set():
            try:
                batches = self._start(*(arg.numpy() for arg in args))
            except MissingFileError as error:
                missing = error.path or str(error)
        elif _calls.entered > _calls.last:
            # What begins passes without end isn't ended by empty ones.
            raise RuntimeError("the program is ending")
        iteration = _Iteration(next(_numbers), batches)
        _iterations[iteration.number] = iteration
        return [iteration.ticket(), tf.constant(missing)]

    def _advance(self, ticket: tf.Tensor) -> list[tf.Tensor]:
        return self._layout.take(_iterations[int(ticket.numpy())].next())


def from_passes(start: Start, args: Sequence[tf.Tensor], layout: Layout) -> tf.data.Dataset:
    """A dataset of what iterators yield.

    Args:
        start: makes the iterator of an iteration, of the NumPy values of `args`. What it and the iterator raise fails
            the `next`: with `NotFoundError` for a `MissingFileError` of `start`, `InvalidArgumentError` for a
            `ValueError`, else `UnknownError`.
        args: tensors; symbolic ones, too.
        layout: of the batches.
    """
    hop = _Hop(start, layout)
    signature = [tf.TensorSpec(arg.shape, arg.dtype) for arg in args]

    @tf.function(input_signature=signature, autograph=False)  # type: ignore[untyped-decorator]
    def begin(*args: tf.Tensor) -> tf.Tensor:
        ticket, missing = tf.raw_ops.EagerPyFunc(input=args, token=hop.begin_token, Tout=[tf.int64, tf.string])
        ticket.set_shape(())
        missing.set_shape(())
        # Python's exceptions can't become a NotFoundError; a kernel that looks for the file raises it.
        found = tf.cond(tf.equal(missing, ""), lambda: missing, lambda: tf.io.read_file(missing))
        with tf.control_dependencies([found]):
            return tf.identity(ticket)

    @tf.function(input_signature=[tf.TensorSpec((), tf.int64)], autograph=False)  # type: ignore[untyped-decorator]
    def advance(ticket: tf.Tensor) -> list[tf.Tensor]:
        dtypes = [part.dtype for part in layout.parts]
        tensors = tf.raw_ops.EagerPyFunc(input=[ticket], token=hop.advance_token, Tout=dtypes)
        return [_component(value) for value in tf.nest.flatten(layout.build(tensors))]

    @tf.function(input_signature=[tf.TensorSpec((), tf.int64)], autograph=False)  # type: ignore[untyped-decorator]
    def finish(ticket: tf.Tensor) -> tf.Tensor:
        # The kernel wants one; what there is to do happens when the ticket dies.
        return tf.zeros((), tf.int64)

    functions = [function.get_concrete_function() for function in (begin, advance, finish)]
    outputs = functions[1].outputs

    def iteration(*args: tf.Tensor) -> tf.data.Dataset:
        variant = tf.raw_ops.GeneratorDataset(
            init_func_other_args=args[: len(signature)],
            next_func_other_args=[],
            finalize_func_other_args=[],
            init_func=functions[0],
            next_func=functions[1],
            finalize_func=functions[2],
            output_types=[output.dtype for output in outputs],
            output_shapes=[output.shape for output in outputs],
        )
        return tf.data.experimental.from_variant(variant, layout.element_spec)

    # GeneratorDataset by itself can't be written as a graph, which TensorFlow wants of what it optimizes, and says so.
    dataset = tf.data.Dataset.from_tensors(tuple(args) or (0,)).flat_map(iteration)
    _keep(dataset, (hop, functions))
    return dataset


def _keep(dataset: tf.data.Dataset, what: Any) -> None:
    """Keeps Python's side as long as the dataset can be iterated."""
    dataset._fastpipe = what
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly():
        return
    # Built within a function, such as that of `interleave`, it is iterated as long as there is the outermost function.
    while getattr(graph, "outer_graph", None) is not None and hasattr(graph.outer_graph, "outer_graph"):
        graph = graph.outer_graph
    kept = getattr(graph, "_fastpipe", None)
    if kept is None:
        kept = graph._fastpipe = []
    kept.append(what)


def _component(value: Any) -> tf.Tensor:
    """A value as datasets pass it on, without a copy."""
    if isinstance(value, tf.SparseTensor):
        return tf.raw_ops.SerializeSparse(
            sparse_indices=value.indices,
            sparse_values=value.values,
            sparse_shape=value.dense_shape,
            out_type=tf.variant,
        )
    if isinstance(value, tf.RaggedTensor):
        return tf.raw_ops.RaggedTensorToVariant(
            rt_nested_splits=value.nested_row_splits, rt_dense_values=value.flat_values, batched_input=False
        )
    return value


def _structure(values: Any, masks: list[Any]) -> Any:
    if not masks:
        return values
    return Masked(values, masks[0] if len(masks) == 1 else tuple(masks))
