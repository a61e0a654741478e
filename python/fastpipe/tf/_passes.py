"""A `tf.data.Dataset` each iteration of which is a pass.

It is a scan, whose state is a *ticket*, over numbers that nobody looks at. Its function is an op of fastpipe's own,
whose kernel is in `rust/fastpipe-tensorflow`: for the first element it calls into Python, which makes a
pass, and returns the ticket of that and no rows, which are skipped; for others it waits for a batch, and needs neither
Python nor its lock.

The ticket is kept by the iterator and by nobody else. It is a tensor that keeps the pass alive; so a pass ends when its
iterator is dropped, whichever way that happens. Behind an error the iterator has the same ticket.

Not a GeneratorDataset, which has three functions, and a flat_map around it has a fourth: TensorFlow takes 3 to 5 ms for
each of them, whenever an iteration begins.
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
    """Keeps AutoGraph from rewriting what makes a dataset within a function, such as that of `interleave`.

    Nothing in there is for the graph, and AutoGraph warns of what it can't rewrite.
    """
    left: Callable[_Params, _Result] = tf.autograph.experimental.do_not_convert(function)
    return left


class Layout:
    """The columns of the batches: their parts in order, and the structure that TensorFlow hands out."""

    def __init__(self, columns: dict[str, Node], rows: int | None) -> None:
        self.columns = {name: columns[name] for name in sorted(columns)}
        self.parts: list[Part] = [part for node in self.columns.values() for part in node.parts(rows)]
        self.element_spec = {name: _structure(*node.specs(rows)) for name, node in self.columns.items()}

    def wanted(self) -> list[tuple[str, list[int] | None]]:
        """What the kernel yields: the columns, and for those whose nested arrays become coordinates the shape."""
        return [
            (name, [-1 if size is None else size for size in node.shape])
            if isinstance(node, Coordinates) and node.nested
            else (name, None)
            for name, node in self.columns.items()
        ]

    def nothing(self) -> list[int]:
        """For each part of an element without rows its rank and its dimensions."""
        parts = [part for node in self.columns.values() for part in node.parts(0)]
        shapes = [[part.least if size is None else size for size in part.shape] for part in parts]
        return [number for shape in shapes for number in (len(shape), *shape)]

    def build(self, tensors: Sequence[tf.Tensor]) -> dict[str, Any]:
        """The element, in a graph."""
        for part, tensor in zip(self.parts, tensors, strict=True):
            tensor.set_shape(part.shape)
        parts: Iterator[tf.Tensor] = iter(tensors)
        return {name: _structure(*node.build(parts)) for name, node in self.columns.items()}


Told = tuple[Exception, str]


class Source(ABC):
    """What an iteration over a dataset begins with.

    Attributes:
        number: of the dataset.
        description: all that it takes to make this again; empty where nothing but the object itself will do.
        layout: of its elements.
        shapes: by feature, as tensorflow-io writes them, to tell of nulls and lengths that don't fit in its words;
            None: in fastpipe's own.
        skips: whether iterations go on behind damaged blocks. Their passes are then of one epoch.
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
        """The pass of an iteration.

        None if there is nothing to be read. Besides, exceptions that fail the first `next`s, with their messages. What
        it raises, and what the pass meets, fails the `next`: with `NotFoundError` for a `MissingFileError`,
        `InvalidArgumentError` for a `ValueError`, else `UnknownError`.

        Args:
            args: values of the dataset's arguments: ints, bools, and lists of bytes for strings.
        """


# Datasets, and graphs that they were built in, keep them; the kernel doesn't.
_sources: weakref.WeakValueDictionary[int, Source] = weakref.WeakValueDictionary()

restorers: dict[bytes, Callable[[bytes], Source]] = {}
"""What makes a source again, by the first word of its description."""

_Begun = tuple[Pass | None, list[tuple[str, list[int] | None]], dict[str, str] | None, list[Told], bool]


def _begin(number: int, description: list[bytes], *args: Any) -> _Begun:
    source = _sources.get(number)
    if source is None:
        restore = restorers.get(description[0].partition(b" ")[0])
        if restore is None:
            raise RuntimeError("the dataset is gone: keep it, or the function that built it, while it is iterated")
        source = restore(description[0])
    started, errors = source.start(*args)
    return started, source.layout.wanted(), source.shapes, errors, source.skips


register_tensorflow(_begin)
# Before the interpreter ends: a thread of TensorFlow's that entered it then would never come back.
atexit.register(leave_tensorflow)


def op(kind: str, inputs: Sequence[tf.Tensor], lists: dict[str, Any], out: Sequence[tf.DType]) -> Any:
    """The outputs of a node of one of fastpipe's ops, in the graph that is being built."""
    attrs = {}
    for name, types in lists.items():
        kinds = tf.compat.v1.AttrValue.ListValue(type=[dtype.as_datatype_enum for dtype in types])
        attrs[name] = tf.compat.v1.AttrValue(list=kinds)
    graph = tf.compat.v1.get_default_graph()
    return graph.create_op(kind, list(inputs), list(out), attrs=attrs).outputs


class _Step(NamedTuple):
    """The function of datasets that are alike."""

    function: Any
    types: list[tf.DType]
    shapes: list[tf.TensorShape]


@functools.lru_cache(maxsize=256)
def _step(columns: tuple[tuple[str, Node], ...], kinds: tuple[tf.DType, ...]) -> _Step:
    """The function of datasets with these columns and these types of arguments.

    Tracing it takes much longer than all else that is done to build a dataset.
    """
    # The first element has no rows, so their number isn't known in there.
    layout = Layout(dict(columns), None)
    number = tf.TensorSpec((), tf.int64)
    # Strings may be scalars or vectors.
    arguments = [tf.TensorSpec(None if kind == tf.string else (), kind) for kind in kinds]
    signature = [number, number, tf.TensorSpec((None,), tf.int64), number, *arguments]

    # Without this attribute TensorFlow makes ready to spread the function over devices, whenever an iteration begins.
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
    """A dataset of the batches of passes, as a variant tensor.

    Args:
        source: of its passes. Whoever has the dataset keeps it.
        args: tensors of int64 and bool scalars, and of strings; symbolic ones, too.
    """
    layout = source.layout
    arguments = [tf.constant(source.description), *args]
    with tf.init_scope():
        # Not in the graph that is being built, which others don't share.
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
    """0 and 1, and a dataset of numbers without end."""
    zero, one, end = _int64(0), _int64(1), _int64(tf.int64.max)
    numbers = tf.raw_ops.RangeDataset(start=zero, stop=end, step=one, output_types=[tf.int64], output_shapes=[()])
    return zero, one, numbers


_kept_numbers = functools.cache(_numbers)
"""The same for all datasets that aren't built in a graph."""


def _int64(value: int | list[int]) -> tf.Tensor:
    return tf.constant(value, tf.int64)


def keep(dataset: tf.data.Dataset, source: Source) -> None:
    """Keeps Python's side as long as the dataset can be iterated."""
    dataset._fastpipe = source
    if tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    # Built within a function, such as that of `interleave`, it is iterated as long as there is the outermost function.
    while getattr(graph, "outer_graph", None) is not None and hasattr(graph.outer_graph, "outer_graph"):
        graph = graph.outer_graph
    kept = getattr(graph, "_fastpipe", None)
    if kept is None:
        kept = graph._fastpipe = []
    kept.append(source)


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
