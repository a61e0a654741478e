"""A local service of every source and form of batch: what comes is what a local reader yields, from every state."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest

import fastpipe
import samples
from every_source import Make, digests, make
from samples import SHUFFLES, Data, order_of

pa = pytest.importorskip("pyarrow")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes share memory by means of Linux")

__all__ = ["make"]

FORMS: dict[str, dict[str, Any]] = {
    "dense": {"vector": fastpipe.DenseSpec((3,), "float32")},
    "text": {"note": fastpipe.DenseSpec((), "string", nulls="mask"), "words": fastpipe.RaggedSpec((None,), "string")},
    "ragged": {"items": fastpipe.RaggedSpec((None,), "int32")},
    "masked": {"score": fastpipe.DenseSpec((), "float64", nulls="mask")},
    "coo": {"terms": fastpipe.SparseSpec((8,), "float32")},
    "csr": {"terms": fastpipe.SparseSpec((8,), "float32", layout="csr")},
    "all": samples.FEATURES,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """59 rows in two files."""
    return samples.write(tmp_path_factory.mktemp("forms"), [samples.blocks_of(40), samples.blocks_of(19, (6, 0, 2))])


def check_states(local: fastpipe.Reader, remote: fastpipe.Reader) -> None:
    """Each state of one reader resumes in both."""
    whole = digests(local)
    local.set_epoch(0)
    states = [remote.state_dict(), *(remote.state_dict() for _ in remote)]
    assert states == [local.state_dict(), *(local.state_dict() for _ in local)]
    assert len(states) == len(whole) + 1 > 5
    for step, state in enumerate(states):
        for reader in (remote, local):
            reader.load_state_dict(json.loads(json.dumps(state)))
            assert digests(reader) == whole[step:]


def test_states_of_every_source_resume_at_every_step(make: Make) -> None:
    local = make(batch_size=32, shuffle=True, shuffle_buffer=64, seed=3)
    with fastpipe.LocalService(local) as remote:
        check_states(local, remote)


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_states_of_every_order_resume_at_every_step(data: Data, shuffle: bool | str) -> None:
    local = data.read(**order_of(shuffle))
    with fastpipe.LocalService(local) as remote:
        check_states(local, remote)


@pytest.mark.parametrize("features", FORMS.values(), ids=FORMS)
def test_every_form_of_batch(data: Data, features: dict[str, Any]) -> None:
    options = {"features": features, **order_of(True)}
    with fastpipe.LocalService(data.read(**options)) as remote:
        local = data.read(**options)
        kept = list(remote)
        assert len(kept) == 9
        assert samples.digests(kept) == digests(local)
        # Arrow's streams, in which sparse columns are CSR; all batches are held until the end.
        table, expected = pa.table(remote), pa.table(local)
        assert table.equals(expected)
        assert table.schema.equals(expected.schema, check_metadata=True)
        # Other passes haven't used their memory.
        assert samples.digests(kept) == digests(data.read(**options))


@pytest.mark.parametrize("uneven", ["drop", "pad", "allow"])
def test_ranks_of_every_form(data: Data, uneven: str) -> None:
    options = {**order_of(True), "uneven": uneven, "world_size": 2}
    with fastpipe.LocalService(data.read(**options, rank=0)) as first:
        local = data.read(**options, rank=0)
        assert ("valid" in next(iter(local))) == (uneven == "pad")
        local.set_epoch(0)
        assert digests(first) == digests(local)
    with fastpipe.LocalService(data.read(**options, rank=0), rank=1, world_size=2) as second:
        assert digests(second) == digests(data.read(**options, rank=1))


def test_columns_without_rows_or_values() -> None:
    """Batches of one row, of none in some columns, and of columns of no width."""
    offsets = np.zeros(6, np.int64)
    arrays = {"none": fastpipe.Ragged(np.empty(0, "int32"), offsets), "flat": np.empty((5, 0), "float32")}
    reader = fastpipe.from_arrays({"id": np.arange(5), **arrays}, batch_size=1)
    with fastpipe.LocalService(reader) as remote:
        check_states(reader, remote)
