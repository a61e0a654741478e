"""JAX: arrays share the memory of batches while anything refers to them; sharding over devices; checkpoints."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO, BCSR
from jax.sharding import NamedSharding, PartitionSpec

import fastpipe
import fastpipe.jax
import samples
import wire
from processes import outputs, run
from samples import SHUFFLES, Data, ids_by_batch, order_of, through_json
from servers import free_port

DENSE = {"features": {name: samples.FEATURES[name] for name in ("id", "vector")}}
LAYOUTS = {**samples.FEATURES, "terms": fastpipe.SparseSpec((8,), "float32", layout="csr")}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Returns 101 rows in two files."""
    return samples.write(tmp_path_factory.mktemp("jax"), [samples.blocks_of(60), samples.blocks_of(41, (6, 0, 2))])


@pytest.fixture
def x64() -> Iterator[None]:
    """Enables 64-bit types."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Records the NumPy batches that readers yield."""
    batches: list[dict[str, Any]] = []
    shown = fastpipe.Reader._shown

    def recorded(reader: fastpipe.Reader, started: Any) -> Iterator[dict[str, Any]]:
        for batch in shown(reader, started):
            batches.append(batch)
            yield batch

    monkeypatch.setattr(fastpipe.Reader, "_shown", recorded)
    return batches


def back(node: Any, like: Any) -> Any:
    """Returns a batch or a batch value as NumPy arrays with the dtypes of `like`."""
    if isinstance(like, dict):
        assert list(node) == list(like)
        return {name: back(node[name], like[name]) for name in like}
    match like:
        case fastpipe.Strings():
            assert isinstance(node, fastpipe.jax.Strings)
            parts = back(node.values, like.values), back(node.offsets, like.offsets)
            return fastpipe.Strings(*parts, node.shape, node.binary)
        case fastpipe.Ragged():
            assert isinstance(node, fastpipe.jax.Ragged)
            return fastpipe.Ragged(back(node.values, like.values), back(node.offsets, like.offsets))
        case fastpipe.Masked():
            assert isinstance(node, fastpipe.jax.Masked)
            return fastpipe.Masked(back(node.values, like.values), back(node.valid, like.valid))
        case fastpipe.Sparse():
            assert isinstance(node, BCOO)
            parts = back(node.indices, like.indices), back(node.data, like.values)
            return fastpipe.Sparse(*parts, np.array(node.shape, np.int64))
        case fastpipe.batch.SparseCSR():
            assert isinstance(node, BCSR)
            parts = back(node.indptr, like.offsets), back(node.indices, like.indices), back(node.data, like.values)
            return fastpipe.batch.SparseCSR(*parts, np.array(node.shape, np.int64))
    assert isinstance(node, jax.Array)
    narrow = like.dtype.itemsize == 8 and not jax.config.jax_enable_x64
    assert node.dtype == (f"{like.dtype.kind}4" if narrow else like.dtype)
    return np.asarray(node).astype(like.dtype)


def leaves(node: Any) -> list[np.ndarray]:
    """Returns the arrays of a NumPy batch value in the order of JAX's leaves."""
    if isinstance(node, np.ndarray):
        return [node]
    if isinstance(node, fastpipe.Sparse):
        return [node.values, node.indices]
    if isinstance(node, fastpipe.batch.SparseCSR):
        return [node.values, node.indices, node.offsets]
    return [leaf for part in node for leaf in leaves(part)]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("features", [samples.FEATURES, LAYOUTS], ids=["coo", "csr"])
def test_every_form_has_the_same_values_in_the_same_memory(
    data: Data, drawn: list[dict[str, Any]], features: dict[str, Any]
) -> None:
    count = 0
    for batch in fastpipe.jax.iterator(data.read(features=features, **order_of(True))):
        expected = drawn[-1]
        assert samples.digest(back(batch, expected)) == samples.digest(expected)
        arrays = jax.tree.leaves(list(batch.values()))
        theirs = [array for node in expected.values() for array in leaves(node)]
        for array, other in zip(arrays, theirs, strict=True):
            assert array.size == 0 or array.unsafe_buffer_pointer() == other.ctypes.data
        count += 1
    assert count == 15


def test_without_64_bit_types_values_are_the_same(
    data: Data, drawn: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "fastpipe"):
        for batch in fastpipe.jax.iterator(data.read(columns=["id", "vector", "items", "note", "terms"], batch_size=7)):
            expected = drawn[-1]
            assert samples.digest(back(batch, expected)) == samples.digest(expected)
            vector = batch["vector"].unsafe_buffer_pointer()
            assert (vector == expected["vector"].ctypes.data) == (expected["vector"].dtype == np.float32)
    assert [record.getMessage().count("32-bit") for record in caplog.records] == [1], "said once"


NUMBERS = wire.record("Numbers", long="long", double="double")


def numbers(folder: Path, long: int, double: float) -> fastpipe.Reader:
    path = folder / "numbers.avro"
    path.write_bytes(
        wire.container(NUMBERS, [(2, wire.long(0) + wire.double(0.0) + wire.long(long) + wire.double(double))])
    )
    return fastpipe.read_avro(str(path), batch_size=2)


@pytest.mark.parametrize(
    ("long", "double"), [(2**31 - 1, 0.1), (-(2**31), -3.4e38), (0, float("inf")), (0, float("-inf")), (0, 1e-300)]
)
def test_values_that_fit_are_narrowed(tmp_path: Path, long: int, double: float) -> None:
    batch = next(fastpipe.jax.iterator(numbers(tmp_path, long, double)))
    assert batch["long"].dtype == jnp.int32
    assert batch["long"].tolist() == [0, long]
    assert batch["double"].dtype == jnp.float32
    assert batch["double"].tolist() == [0.0, float(np.float32(double))]


def test_nan_is_narrowed(tmp_path: Path) -> None:
    assert np.isnan(next(fastpipe.jax.iterator(numbers(tmp_path, 0, float("nan"))))["double"][1])


@pytest.mark.parametrize(
    ("long", "double", "column"),
    [(2**31, 0.0, "long"), (-(2**31) - 1, 0.0, "long"), (0, 3.5e38, "double"), (0, -1e300, "double")],
)
def test_values_that_do_not_fit_are_errors(tmp_path: Path, long: int, double: float, column: str) -> None:
    batches = fastpipe.jax.iterator(numbers(tmp_path, long, double))
    before = batches.get_state()
    with pytest.raises(
        fastpipe.errors.ValueRangeError, match=rf"'{column}': .* doesn't fit .*jax_enable_x64"
    ) as caught:
        next(batches)
    assert caught.value.feature == column
    with pytest.raises(fastpipe.errors.ValueRangeError) as again:
        next(batches)
    assert again.value is caught.value, "no batch must be skipped"
    assert batches.get_state() == before


@pytest.mark.usefixtures("x64")
def test_all_values_fit_64_bit_types(tmp_path: Path) -> None:
    batch = next(fastpipe.jax.iterator(numbers(tmp_path, 2**62, 1e300)))
    assert (batch["long"][1], batch["double"][1]) == (2**62, 1e300)


@pytest.mark.usefixtures("x64")
def test_kept_batches_do_not_change(data: Data) -> None:
    """Computations that were dispatched on the batches also stay correct, although the reader reuses memory."""
    options = order_of(True) | {"epochs": 8, "prefetch": 2, "num_threads": 2}
    expected = list(data.read(**options))
    kept, sums = [], []
    # The step uses only features of fixed shape, because others would be recompiled for each batch.
    step = jax.jit(lambda vector, id: (vector @ jnp.ones((3, 50), jnp.float32)).sum() + id.sum())
    for number, batch in enumerate(fastpipe.jax.iterator(data.read(**options))):
        # For two of three batches only the dispatched computation is kept.
        sums.append(step(batch["vector"], batch["id"]))
        if number % 3 == 0:
            kept.append(batch["vector"] if number % 2 else batch)
    gc.collect()
    for batch, wanted in zip(kept, expected[::3], strict=True):
        if isinstance(batch, dict):
            assert samples.digest(back(batch, wanted)) == samples.digest(wanted)
        else:
            assert np.array_equal(batch, wanted["vector"])
    wanted_sums = [50 * batch["vector"].sum(dtype=np.float64) + batch["id"].sum() for batch in expected]
    np.testing.assert_allclose([float(total) for total in sums], wanted_sums, rtol=1e-5)


@pytest.mark.usefixtures("x64")
def test_memory_is_reused_after_arrays_are_freed(data: Data) -> None:
    reader = data.read(batch_size=7, epochs=20, prefetch=1, num_threads=1)
    seen = set()
    for batch in fastpipe.jax.iterator(reader):
        seen.add(jax.block_until_ready(batch["id"]).unsafe_buffer_pointer())
        del batch
    assert len(seen) < 40 < 20 * 15
    assert reader.stats()["memory"]["slabs_recycled"] > 0


def test_a_step_of_fixed_shapes_is_compiled_once(data: Data) -> None:
    traces = 0

    @jax.jit
    def total(batch: dict[str, Any]) -> Any:
        nonlocal traces
        traces += 1
        return batch["vector"].sum() + batch["id"].sum()

    totals = [float(total(batch)) for batch in fastpipe.jax.iterator(data.read(**DENSE, batch_size=7, drop_last=True))]
    assert traces == 1
    assert totals == [sum(0.5 * i - i + 1 + i for i in range(at, at + 7)) for at in range(0, 98, 7)]


@pytest.mark.usefixtures("x64")
def test_forms_pass_through_jit(data: Data) -> None:
    batch = next(fastpipe.jax.iterator(data.read(batch_size=7)))
    plain = next(iter(data.read(batch_size=7)))

    @jax.jit
    def use(batch: dict[str, Any]) -> tuple[Any, ...]:
        items, words = batch["items"], batch["words"]
        sums = jax.ops.segment_sum(items.values, items.segment_ids, num_segments=items.lengths.shape[0])
        return sums, words.segment_ids, words.values.lengths, batch["terms"].sum(), batch

    sums, segments, lengths, total, same = use(batch)
    assert sums.tolist() == [sum(row) for row in plain["items"].to_list()]
    assert segments.tolist() == [row for row, words in enumerate(plain["words"].to_list()) for _ in words]
    assert lengths.tolist() == plain["words"].values.lengths.tolist()
    assert total == plain["terms"].values.sum()
    same = {name: same[name] for name in plain}  # A jit sorts the keys of dicts.
    assert samples.digest(back(same, plain)) == samples.digest(plain)


def nested_rows(folder: Path) -> fastpipe.Reader:
    """Returns a reader of one batch of two rows, each with `a=[[1, 2], []]` and `b=[5, None]`."""
    nested = wire.record("Nested", a=wire.list_of(wire.list_of("int")), b=wire.list_of(["null", "int"]))
    row = wire.array(wire.array(wire.long(1), wire.long(2)), wire.array()) + wire.array(
        wire.long(1) + wire.long(5), wire.long(0)
    )
    (folder / "nested.avro").write_bytes(wire.container(nested, [(2, row * 2)]))
    features = {
        "a": fastpipe.RaggedSpec((None, None), "int32"),
        "b": fastpipe.RaggedSpec((None,), "int32", on_null="mask"),
    }
    return fastpipe.read_avro(str(folder / "nested.avro"), features=features, batch_size=2)


def test_nested_rows_have_segments_of_each_level(tmp_path: Path) -> None:
    batch = next(fastpipe.jax.iterator(nested_rows(tmp_path)))
    assert batch["a"].segment_ids.tolist() == [0, 0, 1, 1]
    assert batch["a"].values.segment_ids.tolist() == [0, 0, 2, 2]
    assert batch["b"].segment_ids.tolist() == [0, 0, 1, 1]
    assert batch["b"].values.valid.tolist() == [True, False, True, False]


RAGGED = {name: samples.FEATURES[name] for name in ("id", "items", "words", "note")}


@pytest.mark.parametrize(
    ("pad_ragged", "sizes"),
    [
        (True, {16, 32, 64, 128, 256, 512}),
        ([40, 300, 1000], {40, 300, 1000}),
        (np.array([1000]), {1000}),
        ({"words": [500, 1000], "items": True, "note": False}, {16, 32, 64, 500, 1000}),
    ],
    ids=["powers of two", "sizes", "one size", "by feature"],
)
def test_padded_ragged_features_have_the_same_rows(data: Data, pad_ragged: Any, sizes: set[int]) -> None:
    options = {"features": RAGGED, **order_of(True)}
    padded = fastpipe.jax.iterator(data.read(**options), pad_ragged=pad_ragged)
    for batch, plain in zip(padded, data.read(**options), strict=True):
        for name, form in plain.items():
            if name != "id":
                assert back(batch[name], form).to_list() == form.to_list()
        items, words = batch["items"], batch["words"]
        count = len(plain["items"].values)
        assert items.values.size in sizes
        assert items.values[count:].tolist() == [0] * (items.values.size - count)
        assert items.mask.tolist() == [True] * count + [False] * (items.values.size - count)
        sums = jax.ops.segment_sum(items.values + 1, items.segment_ids, num_segments=len(plain["id"]))
        assert sums.tolist() == [sum(row) + len(row) for row in plain["items"].to_list()]
        # There are more words and bytes of text, so their sizes are larger.
        assert words.values.shape[0] in sizes
        assert words.values.values.size in sizes
        assert words.lengths.tolist() == plain["words"].lengths.tolist()
        if pad_ragged is True:
            assert batch["note"].values.values.size in sizes


def test_nested_rows_and_masks_are_padded(tmp_path: Path) -> None:
    batch = next(fastpipe.jax.iterator(nested_rows(tmp_path), pad_ragged=[6]))
    assert batch["a"].segment_ids.tolist() == [0, 0, 1, 1, 2, 2]
    assert batch["a"].values.offsets.tolist() == [0, 2, 2, 4, 4, 4, 4]
    assert batch["a"].values.values.tolist() == [1, 2, 1, 2, 0, 0]
    assert batch["a"].values.segment_ids.tolist() == [0, 0, 2, 2, 6, 6]
    assert batch["b"].values.values.tolist() == [5, 0, 5, 0, 0, 0]
    assert batch["b"].values.valid.tolist() == [True, False, True, False, False, False]


@pytest.mark.parametrize("pad_ragged", [False, True, [2048]])
def test_a_step_is_compiled_once_for_each_padded_size(data: Data, pad_ragged: Any) -> None:
    traces = []

    @jax.jit
    def step(batch: dict[str, Any]) -> Any:
        traces.append(jax.tree.structure(batch))
        # Only traces are counted. A larger computation would take longer to compile.
        return jax.tree.leaves(batch)[0].sum()

    reader = data.read(features=RAGGED, drop_last=True, **order_of(True), epochs=3)
    shapes = set()
    batches = 0
    for batch in fastpipe.jax.iterator(reader, pad_ragged=pad_ragged):
        step(batch)
        shapes.add(tuple(array.shape for array in jax.tree.leaves(batch)))
        batches += 1
    assert batches > 30
    assert len(traces) == len(shapes)
    if pad_ragged is False:
        assert len(traces) > batches * 2 // 3
    elif pad_ragged is True:
        assert len(traces) < batches // 3
    else:
        assert len(traces) == 1


@pytest.mark.parametrize(
    ("pad_ragged", "error", "match"),
    [
        ([8], fastpipe.errors.ValueRangeError, r"'items': .* has \d+ items, and the largest size of pad_ragged is 8"),
        ([], ValueError, "ascending"),
        ([0, 4], ValueError, "at least 1"),
        ([9, 4], ValueError, "ascending"),
        ([4, 4], ValueError, "ascending"),
        ([4.5], TypeError, r"pad_ragged must be a bool, sizes such as \[1024, 4096\]"),
        ("pow2", TypeError, "got 'pow2'"),
        (64, TypeError, "got 64"),
        (None, TypeError, "got None"),
        ({"id": True}, ValueError, "names 'id', which isn't a ragged feature or text. These are: items, words, note"),
        ({"items": [3, 2]}, ValueError, "ascending"),
    ],
    ids=str,
)
def test_invalid_sizes(data: Data, pad_ragged: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        list(fastpipe.jax.iterator(data.read(features=RAGGED, batch_size=50), pad_ragged=pad_ragged))


def test_repr_shows_reader_and_progress(data: Data) -> None:
    reader = data.read(**DENSE, batch_size=60)
    batches = fastpipe.jax.iterator(reader)
    assert repr(batches) == f"<fastpipe.jax.DatasetIterator of {reader!r}: 0 batches returned>"
    next(batches)
    assert repr(batches).endswith(": 1 batch returned>")
    list(batches)
    assert repr(batches).endswith(": 2 batches returned, ended>")


def test_sparse_rows_multiply_as_dense_ones_do(data: Data) -> None:
    weights = np.arange(8, dtype=np.float32)
    for layout in ("coo", "csr"):
        features = {"terms": fastpipe.SparseSpec((8,), "float32", layout=layout)}
        for number, batch in enumerate(fastpipe.jax.iterator(data.read(features=features, batch_size=7))):
            rows = [samples.row(i)["terms"] for i in range(7 * number, min(7 * number + 7, data.total))]
            expected = [sum(value * weights[k] for (k,), value in row) for row in rows]
            np.testing.assert_allclose(batch["terms"] @ weights, expected, rtol=1e-6)


def test_a_model_learns(data: Data) -> None:
    """`vector` is `(i / 2, -i, 1)`, and the model learns `i / 100`."""

    def loss(weights: Any, batch: dict[str, Any]) -> Any:
        return jnp.mean((batch["vector"] @ weights - batch["id"] / 100) ** 2)

    step = jax.jit(jax.value_and_grad(loss))
    weights = jnp.zeros(3)
    reader = data.read(**DENSE, **order_of(True), drop_last=True, epochs=4)
    losses = []
    for batch in fastpipe.jax.iterator(reader):
        value, gradient = step(weights, batch)
        weights -= 1e-4 * gradient
        losses.append(float(value))
    assert len(losses) == 56
    assert np.mean(losses[-14:]) < 0.01 * np.mean(losses[:14])


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_every_step_can_be_resumed(data: Data, shuffle: Any) -> None:
    def read() -> fastpipe.jax.DatasetIterator:
        return fastpipe.jax.iterator(data.read(**DENSE, **order_of(shuffle), epochs=2, num_threads=2))

    batches = read()
    states = [batches.get_state()]
    expected = []
    for batch in batches:
        expected.append(batch["id"].tolist())
        states.append(batches.get_state())
    assert len(expected) == 30
    used = read()
    for step, state in enumerate(states):
        again = read()
        again.set_state(through_json(state))
        assert again.get_state() == state
        assert ids_by_batch(again) == expected[step:], step
        # A used iterator can also be set, wherever it is, even at its end.
        used.set_state(state)
        assert next(used, {"id": np.array([])})["id"].tolist() == (expected[step] if step < 30 else [])


def test_a_state_of_another_reader_is_rejected(data: Data) -> None:
    batches = fastpipe.jax.iterator(data.read(**DENSE, batch_size=7))
    other = fastpipe.jax.iterator(data.read(**DENSE, batch_size=8)).get_state()
    first = next(batches)
    with pytest.raises(fastpipe.errors.StateError, match="batch_size"):
        batches.set_state(other)
    assert first["id"].tolist() == list(range(7))
    assert next(batches)["id"].tolist() == list(range(7, 14)), "a rejected state must change nothing"


def pass_of(data: Data, shuffle: Any = True) -> fastpipe.jax.DatasetIterator:
    return fastpipe.jax.iterator(data.read(**DENSE, **order_of(shuffle), epochs=2, num_threads=2))


class Refused(Exception):
    """Raised for a batch that can't be converted to arrays."""


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("raised", [Refused, KeyboardInterrupt])
@pytest.mark.parametrize("step", [0, 1, 17])
def test_a_batch_that_was_not_returned_is_not_lost(
    data: Data, shuffle: Any, raised: type[BaseException], step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ids_by_batch(pass_of(data, shuffle))
    batches = pass_of(data, shuffle)
    found = ids_by_batch(itertools.islice(batches, step))
    before = batches.get_state()

    def convert(batch: Any) -> Any:
        raise raised("here")

    monkeypatch.setattr(batches, "_convert", convert)
    with pytest.raises(raised, match="here") as caught:
        next(batches)
    assert batches.get_state() == before, "state in the exception handler"
    monkeypatch.undo()
    for _ in range(2):
        with pytest.raises(raised) as again:
            next(batches)
        assert again.value is caught.value
    other = pass_of(data, shuffle)
    other.set_state(through_json(batches.get_state()))
    assert found + ids_by_batch(other) == expected
    batches.set_state(before)
    assert found + ids_by_batch(batches) == expected, "loading the state must recover the batch"


@pytest.mark.parametrize("drawn", [False, True])
def test_ctrl_c_while_a_batch_is_awaited(data: Data, drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch is lost, whether or not it has arrived."""
    shown = fastpipe.Reader._shown

    class Interrupted(Iterator[dict[str, Any]]):
        def __init__(self, batches: Iterator[dict[str, Any]]) -> None:
            self._batches, self._asked = batches, 0

        def __next__(self) -> dict[str, Any]:
            self._asked += 1
            if self._asked == 3:
                if drawn:
                    next(self._batches)
                raise KeyboardInterrupt
            return next(self._batches)

    expected = ids_by_batch(pass_of(data))
    monkeypatch.setattr(fastpipe.Reader, "_shown", lambda reader, started: Interrupted(shown(reader, started)))
    batches = pass_of(data)
    found = ids_by_batch(itertools.islice(batches, 2))
    before = batches.get_state()
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert batches.get_state() == before
    monkeypatch.undo()
    if drawn:
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        batches.set_state(before)
    assert found + ids_by_batch(batches) == expected


def test_ctrl_c_at_any_line_loses_nothing(data: Data) -> None:
    """Raises an interrupt at each line of `next` except the last one, before which Python handles no signal."""
    code = fastpipe.jax.DatasetIterator.__next__.__code__
    last = max(line for *_, line in code.co_lines() if line)
    expected = ids_by_batch(pass_of(data))

    def interrupting(at: int) -> Any:
        seen = itertools.count()

        def trace(frame: Any, event: str, _: Any) -> Any:
            if frame.f_code.co_filename != fastpipe.jax.__file__:
                return None
            here = event == "line" and (frame.f_code is not code or frame.f_lineno != last)
            if here and next(seen) == at:
                raise KeyboardInterrupt
            return trace

        return trace

    for interrupted in itertools.count():
        batches = pass_of(data)
        found = ids_by_batch(itertools.islice(batches, 2))
        sys.settrace(interrupting(interrupted))
        try:
            next(batches)
        except KeyboardInterrupt:
            pass
        else:
            break
        finally:
            sys.settrace(None)
        other = pass_of(data)
        other.set_state(batches.get_state())
        assert found + ids_by_batch(other) == expected, interrupted
    assert interrupted > 15


def test_the_state_excludes_a_batch_made_by_another_thread(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids_by_batch(pass_of(data))
    batches = pass_of(data)
    next(batches)
    before, convert = batches.get_state(), batches._convert
    begun, go_on = threading.Event(), threading.Event()

    def slow(batch: Any) -> Any:
        if threading.current_thread() is thread:
            begun.set()
            assert go_on.wait(60)
        return convert(batch)

    monkeypatch.setattr(batches, "_convert", slow)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(next(batches)))
    thread.start()
    assert begun.wait(60)
    found.append(next(batches))
    assert batches.get_state() == before, "the first of the two batches has not been returned"
    go_on.set()
    thread.join()
    assert sorted(ids_by_batch(found)) == sorted(expected[1:3])
    assert ids_by_batch(batches) == expected[3:]


def test_an_abandoned_iterator_counts_as_an_epoch(data: Data) -> None:
    reader = data.read(**DENSE, **order_of(True))
    expected = [[batch["id"].tolist() for batch in reader] for _ in range(4)]
    reader.set_epoch(0)
    for epoch, steps in enumerate((1, 3)):
        batches = fastpipe.jax.iterator(reader)
        # An iterator from which no batch is taken doesn't count.
        fastpipe.jax.iterator(reader)
        assert ids_by_batch(next(batches) for _ in range(steps)) == expected[epoch][:steps]
        state = batches.get_state()
    again = fastpipe.jax.iterator(data.read(**DENSE, **order_of(True)))
    again.set_state(state)
    assert ids_by_batch(again) == expected[1][3:]
    assert ids_by_batch(fastpipe.jax.iterator(reader)) == expected[2]


def test_a_second_loop_over_a_pass_that_has_ended_is_an_error(data: Data) -> None:
    batches = pass_of(data)
    state = batches.get_state()
    for _ in batches:
        break
    expected = ids_by_batch(batches)
    assert len(expected) == 29, "a loop must continue where the previous one stopped"
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(batches)
        with pytest.raises(RuntimeError, match=r"call fastpipe\.jax\.iterator\(reader\)"):
            list(batches)
    batches.set_state(state)
    assert ids_by_batch(batches)[1:] == expected


def test_grain_handles_states_as_bytes(data: Data) -> None:
    """Imitates Grain's handler for iterators from other packages."""
    batches = pass_of(data)
    next(batches)
    text = batches.get_state().decode()
    assert json.loads(text) == batches.get_state()
    again = pass_of(data)
    again.set_state(text.encode())
    again.start_prefetch()
    assert again.get_state() == batches.get_state()
    assert ids_by_batch(again) == ids_by_batch(batches)
    for damaged in (b"", b"[1]", b"{}", b"\xff", text[:-1].encode(), b"[" * 100_000):
        with pytest.raises(fastpipe.errors.StateError):
            again.set_state(damaged)


def test_grain_saves_and_restores_it(data: Data, tmp_path: Path) -> None:
    handler = pytest.importorskip("grain.checkpoint").CheckpointHandler()
    epath = pytest.importorskip("etils.epath")
    batches = pass_of(data)
    next(batches)
    handler.save(epath.Path(tmp_path), batches)
    again = pass_of(data)
    assert handler.restore(epath.Path(tmp_path), again) is again
    assert ids_by_batch(again) == ids_by_batch(batches)


def test_arguments_of_other_types_are_named(data: Data) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    reader = data.read(**DENSE, batch_size=7, drop_last=True)
    for sharding in (PartitionSpec("data"), mesh, "data"):
        with pytest.raises(TypeError, match=r"sharding must be a jax\.sharding\.Sharding, such as"):
            fastpipe.jax.iterator(reader, sharding=sharding)  # type: ignore[arg-type]
    for other in (data.paths, iter(reader), None):
        with pytest.raises(TypeError, match=r"reader must be a fastpipe\.Reader"):
            fastpipe.jax.iterator(other)  # type: ignore[arg-type]


class Awaited:
    """A path that is still being created, as Orbax passes it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def await_creation(self) -> Path:
        self._path.mkdir(exist_ok=True)
        return self._path


def test_the_saved_state_is_that_of_the_call(data: Data, tmp_path: Path) -> None:
    async def save(batches: fastpipe.jax.DatasetIterator, path: Path) -> None:
        background = await batches.save(Awaited(path))
        next(batches)
        await background

    async def load(batches: fastpipe.jax.DatasetIterator, path: Path) -> None:
        await (await batches.load(path))

    reader = data.read(**DENSE, batch_size=7, shuffle=True, seed=1)
    batches = fastpipe.jax.iterator(reader)
    for _ in range(3):
        next(batches)
    state = batches.get_state()
    asyncio.run(save(batches, tmp_path / "data"))
    assert json.loads((tmp_path / "data" / "process_0-of-1.json").read_text()) == state
    batches = fastpipe.jax.iterator(reader)
    asyncio.run(load(batches, tmp_path / "data"))
    assert batches.get_state() == state

    # A state saved by two processes loads only if both saved the same step.
    two = tmp_path / "two"
    two.mkdir()
    with pytest.raises(fastpipe.errors.StateError, match="has no state"):
        asyncio.run(load(batches, two))
    for index in range(2):
        (two / f"process_{index}-of-2.json").write_text(json.dumps(state))
    asyncio.run(load(batches, two))
    assert batches.get_state() == state
    next(batches)
    (two / "process_1-of-2.json").write_text(json.dumps(batches.get_state()))
    with pytest.raises(fastpipe.errors.StateError, match="restore with the number of processes"):
        asyncio.run(load(batches, two))


def test_orbax_saves_and_restores_it(data: Data, tmp_path: Path) -> None:
    orbax = pytest.importorskip("orbax.checkpoint")
    v1 = pytest.importorskip("orbax.checkpoint.experimental.v1")

    def read() -> fastpipe.jax.DatasetIterator:
        return fastpipe.jax.iterator(data.read(**DENSE, batch_size=7, shuffle=True, seed=1))

    batches = read()
    next(batches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        v1.save_checkpointables(tmp_path / "v1", {"model": {"w": jnp.arange(3)}, "data": batches})
        restored = read()
        v1.load_checkpointables(tmp_path / "v1", {"data": restored})
        assert restored.get_state() == batches.get_state()

        with orbax.CheckpointManager(tmp_path / "v0") as manager:
            manager.save(0, args=orbax.args.Composite(data=orbax.args.JsonSave(batches.get_state())))
            manager.wait_until_finished()
            found = manager.restore(0, args=orbax.args.Composite(data=orbax.args.JsonRestore()))
        restored = read()
        restored.set_state(found["data"])
    assert next(restored)["id"].tolist() == next(batches)["id"].tolist()


def test_a_dropped_iterator_leaves_no_thread(data: Data) -> None:
    """Runs in a separate process, whose threads are only JAX's and the main one."""
    script = """
        import threading, time, jax, fastpipe, fastpipe.jax
        count = lambda: len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else 0
        reader = fastpipe.read_avro(sys.argv[1:], columns=["id"], batch_size=7, epochs=None, num_threads=2)
        def leave():
            for batch in fastpipe.jax.iterator(reader):
                return batch["id"].tolist()
        ids = leave()
        assert ids == list(range(7)), ids
        threads = count()
        for _ in range(20):
            leave()
            batches = fastpipe.jax.iterator(reader)
            kept = next(batches)
            assert reader._active is not None and reader._active.active
            del batches
            assert not reader._active.active
        assert threading.active_count() == 1
        # Threads of the pool serve all passes and exit when idle.
        assert count() <= threads + 2, (count(), threads)
        print(kept["id"].tolist())
    """
    assert outputs(run(script, *data.paths)) == [f"{list(range(7))}\n"]


def test_closing_ends_the_pass(data: Data) -> None:
    batches = fastpipe.jax.iterator(data.read(batch_size=7))
    kept = next(batches)
    batches.close()
    with pytest.raises(fastpipe.FastpipeError, match="closed"):
        next(batches)
    assert kept["id"].tolist() == list(range(7))


def test_errors_of_the_reader_are_raised(data: Data, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.avro"
    content = bytearray(Path(data.paths[0]).read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    damaged.write_bytes(content)
    with pytest.raises(fastpipe.errors.MalformedFileError, match=r"damaged\.avro"):
        list(fastpipe.jax.iterator(fastpipe.read_avro(str(damaged), features=samples.FEATURES, batch_size=7)))


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (fastpipe.SparseSpec((8,), "string"), "can only hold numbers"),
        (fastpipe.SparseSpec((8, 8), "float32", layout="csr"), 'use layout="coo"'),
    ],
)
def test_unsupported_features_are_rejected_before_reading(
    data: Data, monkeypatch: pytest.MonkeyPatch, spec: Any, match: str
) -> None:
    reader = data.read(**DENSE, batch_size=7)
    monkeypatch.setattr(fastpipe.Reader, "features", property(lambda _: fastpipe.typing.Features({"terms": spec})))
    with pytest.raises(fastpipe.errors.UnsupportedError, match=match) as caught:
        fastpipe.jax.iterator(reader)
    assert caught.value.feature == "terms"


def on(axis: str | None = "rows") -> NamedSharding:
    return NamedSharding(jax.make_mesh((1,), ("rows",)), PartitionSpec(axis))


@pytest.mark.parametrize(
    ("column", "match"), [("items", "pad them with DenseSpec"), ("terms", "sparse"), ("note", "string")]
)
def test_a_sharding_divides_only_dense_features(data: Data, column: str, match: str) -> None:
    features = {column: samples.FEATURES[column]}
    with pytest.raises(fastpipe.errors.UnsupportedError, match=match) as caught:
        fastpipe.jax.iterator(data.read(features=features, batch_size=7, drop_last=True), sharding=on())
    assert caught.value.feature == column


def test_a_sharding_needs_batches_of_one_size(data: Data) -> None:
    with pytest.raises(ValueError, match="drop_last=True"):
        fastpipe.jax.iterator(data.read(**DENSE, batch_size=7), sharding=on())
    padded = list(fastpipe.jax.iterator(data.read(**DENSE, batch_size=7, on_uneven="pad"), sharding=on()))
    assert {batch["id"].shape for batch in padded} == {(7,)}
    assert padded[-1]["valid"].tolist() == [True] * 3 + [False] * 4


def test_batches_are_laid_out_over_devices(data: Data) -> None:
    script = """
        import json, jax, numpy as np, fastpipe, fastpipe.jax
        from jax.sharding import NamedSharding, PartitionSpec as P
        dense = {"id": fastpipe.DenseSpec((), "int32"), "vector": fastpipe.DenseSpec((3,), "float32"),
                 "score": fastpipe.DenseSpec((), "float32", on_null="mask")}
        mesh = jax.make_mesh((4,), ("rows",))
        options = {"features": dense, "batch_size": 8, "drop_last": True, "shuffle": True, "seed": 3}
        plain = list(fastpipe.read_avro(sys.argv[1:], **options))
        reader = fastpipe.read_avro(sys.argv[1:], **options)
        rows = NamedSharding(mesh, P("rows"))
        weights = jax.device_put(np.ones(3, np.float32), NamedSharding(mesh, P()))
        for batch, wanted in zip(fastpipe.jax.iterator(reader, sharding=rows), plain, strict=True):
            for array in jax.tree.leaves(batch):
                assert array.sharding == rows and len(array.addressable_shards) == 4
                assert all(shard.data.shape[0] == 2 for shard in array.addressable_shards)
            assert np.array_equal(batch["id"], wanted["id"])
            assert np.array_equal(batch["vector"], wanted["vector"])
            assert np.array_equal(batch["score"].values, wanted["score"].values)
            assert np.array_equal(batch["score"].valid, wanted["score"].valid)
            product = jax.jit(lambda a, b: a @ b)(batch["vector"], weights)
            assert np.allclose(product, wanted["vector"].sum(axis=1)) and not product.is_fully_replicated
        # An array on a single device isn't committed to it.
        batch = next(fastpipe.jax.iterator(reader))
        jax.jit(lambda a, b: a @ b)(batch["vector"], weights)
        replicated = next(fastpipe.jax.iterator(reader, sharding=NamedSharding(mesh, P())))
        assert replicated["id"].is_fully_replicated
        try:
            fastpipe.jax.iterator(fastpipe.read_avro(sys.argv[1:], **options | {"batch_size": 6}), sharding=rows)
        except fastpipe.errors.UnsupportedError as error:
            assert error.feature == "id" and "(6,)" in str(error)
        else:
            raise AssertionError
        try:
            fastpipe.jax.iterator(reader, sharding=NamedSharding(mesh, P(None, "rows")))
        except fastpipe.errors.UnsupportedError as error:
            assert error.feature == "id"
        else:
            raise AssertionError
        print("ok")
    """
    assert outputs(run(script, *data.paths, devices=4)) == ["ok\n"]


PROCESS = """
    import itertools, json, logging, jax, numpy as np, fastpipe, fastpipe.jax
    from jax.sharding import NamedSharding, PartitionSpec as P
    port, index, axes, *paths = sys.argv[1:]
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("fastpipe").addHandler(handler)
    logging.getLogger("fastpipe").setLevel(logging.INFO)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index))
    dense = {"id": fastpipe.DenseSpec((), "int32"), "vector": fastpipe.DenseSpec((3,), "float32")}
    options = {"features": dense, "batch_size": 4, "drop_last": True, "shuffle": True}
    try:
        fastpipe.jax.iterator(fastpipe.read_avro(paths, **options))
    except ValueError as error:
        assert "set a seed" in str(error)
    else:
        raise AssertionError
    sharding = None
    if axes == "rows":  # Two devices per process, each with separate rows.
        sharding = NamedSharding(jax.make_mesh((4,), ("rows",)), P("rows"))
    elif axes == "columns":  # Each process reads all rows.
        sharding = NamedSharding(jax.make_mesh((4,), ("rows",)), P())
    reader = fastpipe.read_avro(paths, **options, seed=5)
    epochs = []
    for steps in (None, 1, None):
        ids = []
        for batch in itertools.islice(fastpipe.jax.iterator(reader, sharding=sharding), steps):
            if sharding is not None:
                assert batch["id"].shape == ((8,) if axes == "rows" else (4,))
                assert batch["vector"].sharding == sharding
            local = {str(shard.index): np.asarray(shard.data).tolist() for shard in batch["id"].addressable_shards}
            ids += sum(local.values(), [])
        epochs.append(ids)
    print(json.dumps([epochs, records, reader.epoch]))
"""


@pytest.mark.parametrize("axes", ["none", "rows", "columns"])
def test_processes_read_their_own_rows(data: Data, axes: str) -> None:
    port = str(free_port())
    started = [run(PROCESS, port, str(index), axes, *data.paths, devices=2) for index in range(2)]
    (first, logged, epoch), (second, _, _) = map(json.loads, outputs(*started))
    assert epoch == 3
    # One pass was left after its first batch, of four rows per process.
    assert {len(set(ids)) for ids in (first.pop(1), second.pop(1))} == {4}
    for one, other in zip(first, second, strict=True):
        if axes == "columns":
            assert one == other
            assert len(set(one)) == 100
        else:
            assert len(one) == len(other) == 48
            assert len({*one, *other}) == 96, "every row must come once"
    assert first[0] != first[1]
    division = "rank 0 of 2 reads its shard (by jax.process_index())"
    divisions = [line for line in logged if line.startswith("rank ")]
    assert divisions[:1] == ([] if axes == "columns" else [division])
