"""Workers of torch's loaders lend the batches of their readers without copying them or mixing them up."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
import lending
import samples
from apart import apart
from fastpipe import _fastpipe
from samples import Data

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="requires shared memory and os.fork"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return samples.write(tmp_path_factory.mktemp("lending"), [samples.blocks_of(100), samples.blocks_of(103, (3, 1))])


@apart(looks=False)
def answers(request: dict[str, Any], to: str) -> None:
    # torch and torchdata emit warnings about their own code.
    warnings.simplefilter("default")
    Path(to).write_text(json.dumps(lending.answer(request)))


def run(**request: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder, "answer")
        answers(request=request, to=str(to))
        return json.loads(to.read_text())


FORMS: list[dict[str, str]] = [{}, {"sparse": "csr", "strings": "lists"}, {"sparse": "bag"}]


def test_lent_batches_match_the_reader(data: Data) -> None:
    cases = [("fork", "torch", forms) for forms in FORMS]
    cases += [("fork", "stateful", {}), ("fork", "fastpipe", {}), ("spawn", "torch", {})]
    for case, found in zip(cases, run(program="same", paths=data.paths, cases=cases), strict=True):
        assert found["alike"], case
        assert found["batches"] >= 29, case
        # torch sends what the user's function creates in the usual way.
        assert "twice" in found["others"], case
        assert {"id", "vector", "score"} <= set(found["lent"]), case
        if not case[2]:
            assert {"items", "words", "note", "terms"} <= set(found["lent"]), case


def test_kept_batches_do_not_change(data: Data) -> None:
    assert run(program="kept", paths=data.paths) == {"rows": data.total, "sorted": True, "alike": True}


def test_memory_is_reused(data: Data) -> None:
    found = run(program="reused", paths=data.paths)
    assert found["batches"] == 30
    assert found["last"] <= found["first"] * 1.25


def test_collate_fn_receives_the_batches_of_the_dataset(data: Data) -> None:
    assert run(program="collated", paths=data.paths) == {"kinds": ["dict"], "lent": False}


def test_batches_outlive_a_killed_worker(data: Data) -> None:
    assert run(program="killed", paths=data.paths) == {"error": "RuntimeError", "same": True}


def test_slabs_return_when_the_borrower_releases_them() -> None:
    slabs = _fastpipe.SharedSlabs(2**40)
    reader = fastpipe.from_arrays({"x": np.arange(1000)}, batch_size=100)
    passes = reader._passes
    memory = passes.shared_memory(slabs, 2)
    started = passes.start(memory)
    batch = next(started.batches)
    lent = batch["x"].base.lend(slabs)
    assert lent is not None
    (address, size, offset) = lent[0]
    assert address <= batch["x"].ctypes.data < address + size
    assert slabs.file is not None
    arena = _fastpipe.SharedArena(slabs.file)
    borrowed = arena.borrow([(offset, size)])
    start = batch["x"].ctypes.data - address
    seen = borrowed.array(0, start, batch["x"].nbytes).view(np.int64)
    assert seen.tolist() == list(range(100))
    del batch
    assert slabs.away == 1
    # The reader doesn't decode other batches into the lent slab.
    assert [batch["x"].tolist() for batch in started.batches][-1] == list(range(900, 1000))
    assert seen.tolist() == list(range(100))
    del seen
    assert slabs.away == 1
    del borrowed
    assert slabs.away == 0


def test_unlent_batches_are_not_borrowed() -> None:
    slabs, others = _fastpipe.SharedSlabs(2**40), _fastpipe.SharedSlabs(2**40)
    assert slabs.file is not None
    arena = _fastpipe.SharedArena(slabs.file)
    for piece in ((0, 1), (64, 1), (4096, 1), (2**62, 2**62), (4096 + 64, 1)):
        with pytest.raises(ValueError, match="was not shared"):
            arena.borrow([piece])
    passes = fastpipe.from_arrays({"x": np.arange(1000)}, batch_size=100)._passes
    batch = next(passes.start(passes.shared_memory(slabs, 2)).batches)
    assert batch["x"].base.lend(others) is None
    _, size, offset = batch["x"].base.lend(slabs)[0]
    borrowed = arena.borrow([(offset, size)])
    for place in ((1, 0, 1), (0, 0, size + 1), (0, size, 1), (0, 2**63, 2**63)):
        with pytest.raises(ValueError, match="outside"):
            borrowed.array(*place)
    with pytest.raises(OSError, match="Bad file"):
        _fastpipe.SharedArena(10**6)
    with pytest.raises(ValueError, match="not a file descriptor"):
        _fastpipe.SharedArena(-1)


def test_a_limit_is_kept() -> None:
    slabs = _fastpipe.SharedSlabs(1 << 20)
    passes = fastpipe.from_arrays({"x": np.zeros((1000, 1000))}, batch_size=500)._passes
    with pytest.raises(fastpipe.errors.OutOfMemoryError, match="limit of 1048576"):
        next(passes.start(passes.shared_memory(slabs, 2)).batches)
