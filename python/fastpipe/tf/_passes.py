"""A `tf.data.Dataset` each iteration of which is a pass.

TensorFlow's GeneratorDataset calls one function at the start of an iteration and one for each element. Both consist of
an op of fastpipe's own, whose kernels are in `rust/fastpipe-python/src/tensorflow`: the first calls into Python, which
makes a pass; the second waits for a batch, and needs neither Python nor its lock.

What the first function returns, the *ticket*, is kept by the iterator and by nobody else. It is a tensor that keeps the
pass alive; so a pass ends when its iterator is dropped, whichever way that happens.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import tensorflow as tf

from fastpipe import _fastpipe
from fastpipe.tf._forms import Coordinates, Masked, Node, Part

__all__ = ["Layout", "from_passes", "unconverted"]

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")

Start = Callable[..., _fastpipe.Pass]


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

    def build(self, tensors: Sequence[tf.Tensor]) -> dict[str, Any]:
        """The element, in a graph."""
        for part, tensor in zip(self.parts, tensors, strict=True):
            tensor.set_shape(part.shape)
        parts: Iterator[tf.Tensor] = iter(tensors)
        return {name: _structure(*node.build(parts)) for name, node in self.columns.items()}


class _Source:
    """What the first function of a dataset needs of Python."""

    def __init__(self, start: Start, layout: Layout, shapes: dict[str, str] | None) -> None:
        self.number = next(_numbers)
        self.start = start
        self.wanted = layout.wanted()
        self.shapes = shapes
        _sources[self.number] = self


_numbers = itertools.count()
# Datasets, and graphs that they were built in, keep them; the kernels don't.
_sources: weakref.WeakValueDictionary[int, _Source] = weakref.WeakValueDictionary()


def _begin(number: int, *args: Any) -> tuple[_fastpipe.Pass, list[tuple[str, list[int] | None]], dict[str, str] | None]:
    source = _sources.get(number)
    if source is None:
        raise RuntimeError("the dataset is gone: keep it, or the function that it was built in, while it is iterated")
    return source.start(*args), source.wanted, source.shapes


def _libraries() -> list[str]:
    folder, version = tf.sysconfig.get_lib(), tf.__version__.partition(".")[0]
    ending = f"{version}.dylib" if sys.platform == "darwin" else f"so.{version}"
    return [os.path.join(folder, f"libtensorflow_{name}.{ending}") for name in ("framework", "cc")]


_fastpipe.register_tensorflow(_libraries(), _begin)
# Before the interpreter ends: a thread of TensorFlow's that entered it then would never come back.
atexit.register(_fastpipe.leave_tensorflow)


def _op(kind: str, inputs: Sequence[tf.Tensor], listed: str, types: Sequence[tf.DType], out: Sequence[tf.DType]) -> Any:
    """A node of one of the ops, in the graph that is being built."""
    kinds = tf.compat.v1.AttrValue.ListValue(type=[dtype.as_datatype_enum for dtype in types])
    attrs = {listed: tf.compat.v1.AttrValue(list=kinds)}
    return tf.compat.v1.get_default_graph().create_op(kind, list(inputs), list(out), attrs=attrs).outputs


def from_passes(
    start: Start, args: Sequence[tf.Tensor], layout: Layout, shapes: dict[str, str] | None = None
) -> tf.data.Dataset:
    """A dataset of the batches of passes.

    Args:
        start: makes the pass of an iteration, of the values of `args`: ints, bools, and lists of bytes for strings.
            What it raises, and what the pass meets, fails the `next`: with `NotFoundError` for a `MissingFileError`,
            `InvalidArgumentError` for a `ValueError`, else `UnknownError`.
        args: tensors of int64 and bool scalars, and of strings; symbolic ones, too.
        layout: of the batches.
        shapes: by feature, as tensorflow-io writes them, to tell of nulls and lengths that don't fit in its words;
            in fastpipe's own by default.
    """
    source = _Source(start, layout, shapes)
    signature = [tf.TensorSpec(arg.shape, arg.dtype) for arg in args]

    @tf.function(input_signature=signature, autograph=False)  # type: ignore[untyped-decorator]
    def begin(*args: tf.Tensor) -> tf.Tensor:
        types = [arg.dtype for arg in args]
        (ticket,) = _op("FastpipeBegin", [tf.constant(source.number, tf.int64), *args], "Targuments", types, [tf.int64])
        ticket.set_shape(())
        return ticket

    @tf.function(input_signature=[tf.TensorSpec((), tf.int64)], autograph=False)  # type: ignore[untyped-decorator]
    def advance(ticket: tf.Tensor) -> list[tf.Tensor]:
        types = [part.dtype for part in layout.parts]
        tensors = _op("FastpipeNext", [ticket], "Tparts", types, types)
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
    _keep(dataset, (source, functions))
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
