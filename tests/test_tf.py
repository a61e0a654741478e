"""fastpipe.tf: batches as tensors, and how iterations begin and end."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastavro
import pytest

import fastpipe
import oracle
import processes
import samples
import wire
from apart import wait_until
from forked_programs import Run, forked

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed", exc_type=ImportError)
fptf = pytest.importorskip("fastpipe.tf")

FILES = [samples.blocks_of(100), samples.blocks_of(57)]


@pytest.fixture
def data(tmp_path: Path) -> samples.Data:
    return samples.write(tmp_path, FILES)


def rows_of(value: Any) -> list[Any]:
    """Returns the rows of any kind of tensor, in the representation of `oracle.rows`."""
    if isinstance(value, fptf.Masked):
        return [row if valid else None for row, valid in zip(rows_of(value.values), value.valid.numpy(), strict=True)]
    if isinstance(value, tf.SparseTensor):
        rows: list[Any] = [[] for _ in range(int(value.dense_shape[0]))]
        for (row, *index), item in zip(value.indices.numpy().tolist(), value.values.numpy().tolist(), strict=True):
            rows[row].append((tuple(index), item))
        return rows
    return _text(value.to_list() if isinstance(value, tf.RaggedTensor) else value.numpy().tolist())


def _text(value: Any) -> Any:
    if isinstance(value, list):
        return [_text(item) for item in value]
    return value.decode() if isinstance(value, bytes) else value


def check(element: dict[str, Any], batch: dict[str, Any]) -> None:
    """Checks that an element contains the same values as a batch of NumPy arrays."""
    assert sorted(element) == sorted(batch)
    for name, value in element.items():
        problem = oracle.difference(oracle.rows(batch[name]), rows_of(value), name)
        assert problem is None, problem


@pytest.mark.parametrize("shuffle", samples.SHUFFLES)
@pytest.mark.parametrize("drop_last", [False, True])
def test_elements_are_the_batches(data: samples.Data, shuffle: bool | str, drop_last: bool) -> None:
    options = samples.order_of(shuffle) | {"drop_last": drop_last}
    dataset = fptf.dataset(data.read(**options))
    reader = data.read(**options)
    for _ in range(2):  # Each iteration is an epoch.
        elements, batches = list(dataset), list(reader)
        assert len(elements) == len(batches) > 1
        for element, batch in zip(elements, batches, strict=True):
            check(element, batch)
    for element in elements:
        tf.nest.map_structure(
            lambda spec, value: spec.is_compatible_with(value) or pytest.fail(str(spec)), dataset.element_spec, element
        )
    assert dataset.element_spec["vector"] == tf.TensorSpec((7 if drop_last else None, 3), tf.float32)
    assert dataset.element_spec["terms"] == tf.SparseTensorSpec((7 if drop_last else None, 8), tf.float32)


def test_a_second_iterator_explains_how_to_use_two(data: samples.Data) -> None:
    dataset = fptf.dataset(data.read(**samples.order_of(False)))
    first, second = iter(dataset), iter(dataset)
    next(first)
    check(next(second), next(iter(data.read(**samples.order_of(False)))))
    told = r"another iterator over the tf\.data\.Dataset .* create a second reader and fastpipe\.tf\.dataset"
    with pytest.raises(tf.errors.UnknownError, match=told):
        next(first)
    assert len(list(second)) > 1


def test_an_iteration_that_was_left_counts_as_an_epoch(data: samples.Data) -> None:
    reader = data.read(**samples.order_of(True))
    expected = [[batch["id"].tolist() for batch in reader] for _ in range(4)]
    read = data.read(**samples.order_of(True))
    # Not with `map`, because TensorFlow may prefetch its elements.
    dataset = fptf.dataset(read)
    for epoch, steps in enumerate((1, 3, len(expected[2]))):
        assert [element["id"].numpy().tolist() for element in dataset.take(steps)] == expected[epoch][:steps]
        assert read.epoch == epoch
    assert [element["id"].numpy().tolist() for element in dataset] == expected[3]


def test_every_dtype_and_nesting(tmp_path: Path) -> None:
    dtypes = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64"]
    schema = wire.record("R", **dict.fromkeys(dtypes, "int"), deep=wire.list_of(wire.list_of(["null", "string"])))
    schema["fields"][0]["type"] = "boolean"
    for field in schema["fields"][-3:-1]:
        field["type"] = "double"
    deep = wire.array(wire.array(wire.long(0), wire.long(1) + wire.text("é")), wire.array())
    record = b"\x01" + b"".join(wire.long(5) for _ in dtypes[1:9]) + wire.double(0.5) * 2 + deep
    path = tmp_path / "a.avro"
    path.write_bytes(wire.container(schema, [(3, record * 3)], "null"))
    features: dict[str, Any] = {name: fastpipe.DenseSpec((), name) for name in dtypes}
    features["deep"] = fastpipe.RaggedSpec((None, None), "string", on_null="mask")
    (element,) = fptf.dataset(fastpipe.read_avro(path, features=features, batch_size=8))
    for name in dtypes:
        assert element[name].dtype.name == name
        assert element[name].numpy().tolist() == [0.5 if "float" in name else 1 if name == "bool" else 5] * 3
    assert element["deep"].values.to_list() == [[[b"", "é".encode()], []]] * 3
    assert element["deep"].valid.to_list() == [[[False, True], []]] * 3


@pytest.mark.parametrize("kind", ["string", "bytes"])
@pytest.mark.parametrize("lengths", [[0], [21, 22, 23, 24], [127, 128, 0], [16_383, 16_384, 70_000], [1] * 300])
def test_strings_of_any_length(tmp_path: Path, kind: str, lengths: list[int]) -> None:
    texts = [bytes(97 + (i + j) % 26 for j in range(length)) for i, length in enumerate(lengths)]
    path = tmp_path / "a.avro"
    records = b"".join(wire.long(len(text)) + text for text in texts)
    path.write_bytes(wire.container(wire.record("R", x=kind), [(len(texts), records)], "null"))
    for _ in range(3):  # Several times, so that the memory is reused.
        (element,) = fptf.dataset(fastpipe.read_avro(path, batch_size=1000))
        assert element["x"].numpy().tolist() == texts
        # `tf.reverse` copies the strings, so they outlive the tensor.
        kept = tf.reverse(element["x"], [0])
        del element
        assert kept.numpy().tolist() == texts[::-1]


def test_tensors_share_the_memory_of_the_batch(data: samples.Data) -> None:
    def slabs(keep: Any) -> int:
        reader = data.read(batch_size=2, columns=["id", "vector", "terms", "items"], prefetch=2)
        kept = [keep(element) for element in fptf.dataset(reader)]
        assert len(kept) == len(reader)
        found: int = reader.stats()["memory"]["slabs_fresh"]
        return found

    batches = -(-data.total // 2)
    # TensorFlow's threads may release tensors late on a busy machine, so one prompt pass of ten is enough.
    assert any(slabs(lambda element: time.sleep(0.001)) < batches / 2 for _ in range(10))
    # Each tensor of a batch prevents reuse of the batch's memory.
    for part in (
        lambda element: element["id"],
        lambda element: element["vector"],
        lambda element: element["terms"].values,
        lambda element: element["terms"].indices,
        lambda element: element["items"].flat_values,
    ):
        assert slabs(part) >= batches


def test_a_reader_with_a_progress_bar_is_refused(data: samples.Data) -> None:
    with pytest.raises(ValueError, match="progress=True"):
        fptf.dataset(data.read(batch_size=8, progress=True))


def test_ranks_share_the_rows(data: samples.Data) -> None:
    ids: list[int] = []
    for rank in range(3):
        context = tf.distribute.InputContext(num_input_pipelines=3, input_pipeline_id=rank)
        dataset = fptf.dataset(data.read(batch_size=8, on_uneven="allow"), input_context=context)
        assert dataset.options().experimental_distribute.auto_shard_policy == tf.data.experimental.AutoShardPolicy.OFF
        ids += [i for element in dataset for i in element["id"].numpy().tolist()]
    assert sorted(ids) == list(range(data.total))


def test_pipelines_with_different_shuffles_are_refused(data: samples.Data) -> None:
    context = tf.distribute.InputContext(num_input_pipelines=2, input_pipeline_id=1)
    with pytest.raises(ValueError, match="set a seed: every process must use the same seed"):
        fptf.dataset(data.read(batch_size=8, shuffle=True), input_context=context)
    fptf.dataset(data.read(batch_size=8, shuffle=True, seed=1), input_context=context)


def test_padded_batches_have_valid(data: samples.Data) -> None:
    reader = data.read(batch_size=10, on_uneven="pad", rank=0, world_size=2)
    elements = list(fptf.dataset(reader))
    assert all(element["valid"].shape == (10,) for element in elements)


def test_a_model_is_fitted(data: samples.Data) -> None:
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    reader = data.read(batch_size=16, columns=["id", "vector"])
    # Without a length, Keras warns at the end of the first epoch for any dataset.
    dataset = fptf.dataset(reader).apply(tf.data.experimental.assert_cardinality(len(reader)))
    pairs = dataset.map(lambda element: (element["vector"] / 100, tf.cast(element["id"], tf.float32) / 100))
    history = model.fit(pairs.prefetch(2), epochs=3, shuffle=False, verbose=0)
    assert len(history.history["loss"]) == 3


def test_datasets_run_in_graphs(data: samples.Data) -> None:
    dataset = fptf.dataset(data.read(batch_size=16))

    @tf.function
    def total() -> Any:
        out = tf.constant(0, tf.int64)
        for element in dataset.prefetch(2):
            out += tf.reduce_sum(element["id"])
        return out

    for _ in range(2):
        assert int(total()) == sum(range(data.total))


def test_the_state_is_at_the_last_batch(data: samples.Data) -> None:
    reader = data.read(batch_size=4)
    for step, _ in enumerate(fptf.dataset(reader), 1):
        time.sleep(0.01)  # Gives TensorFlow time to prefetch, which it must not do.
        assert reader._cursor.position is not None
        assert reader._cursor.position.delivered == step


def test_a_dropped_iteration_ends_its_pass(data: samples.Data) -> None:
    reader = data.read(batch_size=4)
    for drop in (lambda dataset: next(iter(dataset)), lambda dataset: list(dataset.prefetch(3).take(2))):
        drop(fptf.dataset(reader))
        gc.collect()
        active = reader._active
        assert active is not None
        assert wait_until(lambda active=active: not active.active)


def test_errors_are_raised_by_next(tmp_path: Path) -> None:
    schema = wire.record("R", x="int", v=wire.list_of("float"))
    good = wire.long(1) + wire.array(wire.float_(1.0))
    bad = wire.long(1) + wire.array(wire.float_(1.0), wire.float_(2.0))
    path = tmp_path / "a.avro"
    path.write_bytes(wire.container(schema, [(2, good * 2), (2, good + bad)], "null"))
    features = {"v": fastpipe.DenseSpec((1,), "float32")}
    iterator = iter(fptf.dataset(fastpipe.read_avro(path, features=features, batch_size=2)))
    assert next(iterator)["v"].shape == (2, 1)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"ShapeError: feature 'v'.*a\.avro"):
        next(iterator)


def test_only_readers_and_coordinates_are_accepted(data: samples.Data) -> None:
    with pytest.raises(TypeError, match=r"must be a fastpipe\.Reader; got list"):
        fptf.dataset([{}])
    reader = data.read(features={"terms": fastpipe.SparseSpec((8,), "float32", layout="csr")}, batch_size=4)
    with pytest.raises(ValueError, match=r"'terms'.*coo"):
        fptf.dataset(reader)


IMPORTS = """
    import fastpipe, sys
    assert "tensorflow" not in sys.modules
    import fastpipe.tf
    import tensorflow as tf
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    if not hasattr(os, "fork"):
        pytest.skip("requires os.fork")
    folder = tmp_path_factory.mktemp("outputs")
    with forked(IMPORTS, folder, TF_CPP_MIN_LOG_LEVEL="1", CUDA_VISIBLE_DEVICES="") as run:
        yield run


ENDINGS = {
    "endless": "iterator = iter(tf.data.Dataset.range(1 << 60).interleave(lambda _: dataset))",
    # The error is raised while batches are prefetched. The iterator lives until the end of the program.
    "in a model": """
        try:
            for element in dataset:
                raise RuntimeError("a model's")
        except RuntimeError as error:
            kept = error
    """,
}


@pytest.mark.parametrize(
    "end",
    [
        "",
        "raise SystemExit(0)",
        "del iterator",
        "list(dataset)",
        "iterator = None; dataset = None",
        "endless",
        "in a model",
    ],
)
def test_programs_exit_silently(data: samples.Data, run: Run, end: str) -> None:
    status, _, errors = run(f"""
        reader = fastpipe.read_avro({data.paths!r}, batch_size=2, columns=["id", "words"])
        dataset = fastpipe.tf.dataset(reader)
        if {end != "list(dataset)"}:
            dataset = dataset.repeat().prefetch(4)
        iterator = iter(dataset)
        next(iterator)
        {ENDINGS.get(end, end)}
    """)
    complaints = [line for line in errors.splitlines() if line.startswith(("W0", "E0", "F0", "Traceback"))]
    assert (status, complaints) == (0, [])


LOOPS = {
    "in Python": """
        for number, element in enumerate(dataset):
            if number == 5:
                print("at work", flush=True)
    """,
    "in a model": """
        class Tell(tf.keras.callbacks.Callback):
            def on_train_batch_end(self, number, logs=None):
                if number == 5:
                    print("at work", flush=True)

        inputs = tf.keras.Input((1,))
        model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
        pairs = dataset.map(lambda element: (tf.cast(element["id"], tf.float32)[:, None],) * 2)
        model.fit(pairs, steps_per_epoch=1 << 40, verbose=0, callbacks=[Tell()])
    """,
}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no os.kill with SIGINT")
@pytest.mark.parametrize("loop", list(LOOPS))
def test_ctrl_c_ends_a_program(data: samples.Data, loop: str) -> None:
    code = f"""
        import signal
        import fastpipe.tf
        import tensorflow as tf

        # The parent process may have ignored SIGINT.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        reader = fastpipe.read_avro({data.paths!r}, batch_size=2, columns=["id"], shuffle="buffer")
        dataset = fastpipe.tf.dataset(reader).repeat().prefetch(4)
    """
    env = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", textwrap.dedent(code) + textwrap.dedent(LOOPS[loop])]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "at work\n"
            told = processes.press_until_ended(child)
        finally:
            child.kill()
    lines = told.splitlines()
    # Ctrl-C may arrive while TensorFlow handles an internal exception, whose traceback is printed first.
    last = len(lines) - lines[::-1].index("Traceback (most recent call last):")
    # In a finalizer of TensorFlow, Python ignores the interrupt, and the test sends it again.
    lost = "Exception ignored in: <function Executor.__del__"
    told_of = [line for line in lines if line.startswith(("W0", "E0", "F0", "Exception ignored"))]
    assert [line for line in told_of if not line.startswith(lost)] == []
    # Lines of frames are indented, and CPython 3.11 prints an empty line for a decorator that it can't underline.
    # Nothing follows the exception.
    assert [line for line in lines[last:] if line and not line.startswith(" ")] == ["KeyboardInterrupt"]
    assert child.returncode == -signal.SIGINT


def test_strategies_distribute_datasets(data: samples.Data, run: Run) -> None:
    status, printed, errors = run(f"""
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], two)
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

        def rows(dataset):
            found = [strategy.experimental_local_results(element["id"]) for element in dataset]
            assert all(len(values) == 2 for values in found)
            return [[value.numpy().tolist() for value in values] for values in found]

        def make(context):
            reader = fastpipe.read_avro({data.paths!r}, batch_size=2, columns=["id"], shuffle=True, seed=1)
            return fastpipe.tf.dataset(reader, input_context=context)

        whole = fastpipe.tf.dataset(fastpipe.read_avro({data.paths!r}, batch_size=4, columns=["id"]))
        ways = strategy.distribute_datasets_from_function(make), strategy.experimental_distribute_dataset(whole)
        print([rows(dataset) for dataset in ways])
    """)
    assert status == 0, errors
    made, whole = json.loads(printed.splitlines()[-1])
    batches = [batch["id"].tolist() for batch in data.read(batch_size=2, columns=["id"], shuffle=True, seed=1)]
    assert [batch for step in made for batch in step if batch] == batches
    assert [i for step in whole for batch in step for i in batch] == list(range(data.total))


@pytest.mark.parametrize("ahead", [0, 2])
def test_dropped_keys_are_logged(ahead: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (tmp_path / "a.avro").open("wb") as file:
        fastavro.writer(file, wire.record("R", x=wire.list_of("string")), [{"x": ["a", "b", "c"]}, {"x": ["a"]}])
    features = {"x": fastpipe.VocabularySpec(["a", "b"], on_unknown="drop")}
    reader = fastpipe.read_avro(tmp_path / "a.avro", features=features, batch_size=1, epochs=2)
    with caplog.at_level("INFO", "fastpipe"):
        assert len(list(fptf.dataset(reader).prefetch(ahead))) == 4
    found = [message.partition(", with")[0] for message in caplog.messages if " keys (" in message]
    text = "1 of 4 keys (25%) of feature 'x' are left out of this reader's batches of epoch"
    assert found == [f"{text} {epoch}" for epoch in range(2)]
    assert reader.stats()["keys"] == {"x": {"read": 8, "dropped": 2}}
