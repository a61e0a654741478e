"""A `tf.data.Dataset` in which each iteration is a pass.

It is a scan over numbers that are ignored. The state of the scan is a *ticket*. Its function is an op of fastpipe,
whose kernel is in `rust/fastpipe-tensorflow`. For the first element, the kernel calls Python, which starts a pass, and
returns the ticket of the pass and no rows. That element is skipped. For other elements, the kernel waits for a batch,
and needs neither Python nor the GIL.

Only the iterator holds the ticket, a tensor that keeps the pass alive. So a pass ends when its iterator is dropped,
however that happens. After an error, the iterator still has the same ticket.

A GeneratorDataset isn't used because it has three functions, and a flat_map around it has a fourth one. TensorFlow
takes 3 to 5 ms for each function whenever an iteration begins.
"""

from __future__ import annotations

import atexit
import functools
import secrets
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import tensorflow as tf

from fastpipe._fastpipe import Pass, leave_tensorflow, register_tensorflow
from fastpipe.tf._forms import Coordinates, Masked, Node, Part

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def unconverted(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """Keeps AutoGraph from rewriting code that builds a dataset within a function, as in `interleave`.

    The code adds nothing that AutoGraph must convert, and AutoGraph warns about code that it can't rewrite.
    """
    left: Callable[_Params, _Result] = tf.autograph.experimental.do_not_convert(function)
    return left


class Layout:
    """The columns of the batches: their parts in order, and the structure of the dataset's elements."""

    def __init__(self, columns: dict[str, Node], rows: int | None) -> None:
        self.columns = {name: columns[name] for name in sorted(columns)}
        self.parts: list[Part] = [part for node in self.columns.values() for part in node.parts(rows)]
        self.element_spec = {name: _structure(*node.specs(rows)) for name, node in self.columns.items()}

    def wanted(self) -> list[tuple[str, list[int] | None]]:
        """Returns the columns that the kernel yields, with a shape if nested arrays are converted to coordinates."""
        return [
            (name, [-1 if size is None else size for size in node.shape])
            if isinstance(node, Coordinates) and node.nested
            else (name, None)
            for name, node in self.columns.items()
        ]

    def nothing(self) -> list[int]:
        """Returns the rank and the dimensions of each part of an element without rows."""
        parts = [part for node in self.columns.values() for part in node.parts(0)]
        shapes = [[part.least if size is None else size for size in part.shape] for part in parts]
        return [number for shape in shapes for number in (len(shape), *shape)]

    def build(self, tensors: Sequence[tf.Tensor]) -> dict[str, Any]:
        """Assembles the element in a graph."""
        for part, tensor in zip(self.parts, tensors, strict=True):
            tensor.set_shape(part.shape)
        parts: Iterator[tf.Tensor] = iter(tensors)
        return {name: _structure(*node.build(parts)) for name, node in self.columns.items()}


Told = tuple[Exception, str]


class Source(ABC):
    """Starts the passes of a dataset's iterations.

    Attributes:
        number: Number that identifies the dataset.
        description: Description from which the source can be recreated. Empty if only the object itself can be used.
        layout: Layout of the dataset's elements.
        shapes: Shapes by feature in the notation of tensorflow-io, for its messages about nulls and wrong lengths. None
            uses fastpipe's messages.
        skips: Whether iterations continue after damaged blocks. Their passes then have one epoch.
    """

    description = b""
    shapes: dict[str, str] | None = None
    skips = False

    def __init__(self, layout: Layout, number: int | None = None) -> None:
        self.number = secrets.randbits(62) if number is None else number
        self.layout = layout
        _sources[self.number] = self

    @abstractmethod
    def start(self, *args: Any) -> tuple[Pass | None, list[Told]]:
        """Starts the pass of an iteration.

        An error that this method raises, or that occurs during the pass, fails `next` with `NotFoundError` for a
        `MissingFileError`, with `InvalidArgumentError` for a `ValueError`, and otherwise with `UnknownError`.

        Args:
            args: Values of the dataset's arguments: ints, bools, and lists of bytes for strings.

        Returns:
            The pass, or None if there is nothing to read, and exceptions with messages that fail the first calls of
            `next`.
        """


# Datasets, and the graphs in which they were built, keep the sources alive. The kernel doesn't.
_sources: weakref.WeakValueDictionary[int, Source] = weakref.WeakValueDictionary()

restorers: dict[bytes, Callable[[bytes], Source]] = {}
"""Functions that recreate a source, by the first word of its description."""

_Begun = tuple[Pass | None, list[tuple[str, list[int] | None]], dict[str, str] | None, list[Told], bool]


def _begin(number: int, description: list[bytes], *args: Any) -> _Begun:
    source = _sources.get(number)
    if source is None:
        restore = restorers.get(description[0].partition(b" ")[0])
        if restore is None:
            raise RuntimeError("the dataset no longer exists: keep it, or the function that built it, during iteration")
        source = restore(description[0])
    started, errors = source.start(*args)
    return started, source.layout.wanted(), source.shapes, errors, source.skips


register_tensorflow(_begin)
# Leave TensorFlow before the interpreter exits: a TensorFlow thread that entered Python after that would never return.
atexit.register(leave_tensorflow)


def op(kind: str, inputs: Sequence[tf.Tensor], lists: dict[str, Any], out: Sequence[tf.DType]) -> Any:
    """Adds a node of one of fastpipe's ops to the current graph, and returns its outputs."""
    attrs = {}
    for name, types in lists.items():
        kinds = tf.compat.v1.AttrValue.ListValue(type=[dtype.as_datatype_enum for dtype in types])
        attrs[name] = tf.compat.v1.AttrValue(list=kinds)
    graph = tf.compat.v1.get_default_graph()
    return graph.create_op(kind, list(inputs), list(out), attrs=attrs).outputs


class _Step(NamedTuple):
    """The scan function of datasets with equal columns and argument types."""

    function: Any
    types: list[tf.DType]
    shapes: list[tf.TensorShape]


@functools.lru_cache(maxsize=256)
def _step(columns: tuple[tuple[str, Node], ...], kinds: tuple[tf.DType, ...]) -> _Step:
    """Returns the scan function of datasets with these columns and argument types.

    The function is cached because tracing it takes much longer than everything else in building a dataset.
    """
    # The first element has no rows, so the number of rows isn't static in the function.
    layout = Layout(dict(columns), None)
    number = tf.TensorSpec((), tf.int64)
    # Strings may be scalars or vectors.
    arguments = [tf.TensorSpec(None if kind == tf.string else (), kind) for kind in kinds]
    signature = [number, number, tf.TensorSpec((None,), tf.int64), number, *arguments]

    # Without this attribute, TensorFlow prepares to distribute the function over devices whenever an iteration begins.
    attributes = {"experimental_ints_on_device": True}

    @tf.function(  # type: ignore[untyped-decorator]
        input_signature=signature, autograph=False, experimental_attributes=attributes
    )
    def step(ticket: tf.Tensor, unused: tf.Tensor, *others: tf.Tensor) -> list[tf.Tensor]:
        types = [part.dtype for part in layout.parts]
        lists = {"Targuments": kinds, "Tparts": types}
        kept, *tensors = op("FastpipeNext", [ticket, *others], lists, [tf.int64, *types])
        kept.set_shape(())
        return [kept, *(_component(value) for value in tf.nest.flatten(layout.build(tensors)))]

    function = step.get_concrete_function()
    outputs = function.outputs[1:]
    return _Step(function, [output.dtype for output in outputs], [output.shape for output in outputs])


def from_passes(source: Source, args: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns a dataset of the batches of passes, as a variant tensor.

    Args:
        source: Source that starts the passes. The owner of the dataset must keep it alive.
        args: int64 and bool scalars, and strings, as tensors, which may be symbolic.
    """
    layout = source.layout
    arguments = [tf.constant(source.description), *args]
    with tf.init_scope():
        # Trace outside of the graph that is being built, since other graphs can't share that one.
        step = _step(tuple(layout.columns.items()), tuple(tensor.dtype for tensor in arguments))
    zero, one, numbers = _kept_numbers() if tf.executing_eagerly() else _numbers()
    scan = tf.raw_ops.ScanDataset(
        input_dataset=numbers,
        initial_state=[zero],
        other_arguments=[_int64(layout.nothing()), _int64(source.number), *arguments],
        f=step.function,
        output_types=step.types,
        output_shapes=step.shapes,
    )
    return tf.raw_ops.SkipDataset(input_dataset=scan, count=one, output_types=step.types, output_shapes=step.shapes)


def _numbers() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns 0, 1, and a practically endless dataset of numbers."""
    zero, one, end = _int64(0), _int64(1), _int64(tf.int64.max)
    numbers = tf.raw_ops.RangeDataset(start=zero, stop=end, step=one, output_types=[tf.int64], output_shapes=[()])
    return zero, one, numbers


_kept_numbers = functools.cache(_numbers)
"""A cache for all datasets that aren't built in a graph."""


def _int64(value: int | list[int]) -> tf.Tensor:
    return tf.constant(value, tf.int64)


def keep(dataset: tf.data.Dataset, source: Source) -> None:
    """Keeps the Python source alive as long as the dataset can be iterated."""
    dataset._fastpipe = source
    if tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    # A dataset that is built within a function, such as that of `interleave`, can be iterated while the outermost
    # function exists.
    while getattr(graph, "outer_graph", None) is not None and hasattr(graph.outer_graph, "outer_graph"):
        graph = graph.outer_graph
    kept = getattr(graph, "_fastpipe", None)
    if kept is None:
        kept = graph._fastpipe = []
    kept.append(source)


def _component(value: Any) -> tf.Tensor:
    """Returns a value as the tensor that datasets pass on, without a copy."""
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
