"""Whether batches of a reader can be JAX arrays, and can be laid out by a sharding."""

from __future__ import annotations

from typing import Any

import jax

from fastpipe._reader.passes import Passes, passes_of
from fastpipe.errors import UnsupportedError
from fastpipe.specs import DenseSpec, SparseSpec, Spec

__all__ = ["check_dense", "check_divisible", "check_feature", "check_sizes", "checked_passes", "share_of"]


def checked_passes(reader: Any, sharding: Any) -> Passes:
    """The passes of a reader, if it is one, and the sharding is one."""
    passes = passes_of(reader)
    if sharding is not None and not isinstance(sharding, jax.sharding.Sharding):
        raise TypeError(
            "sharding is a jax.sharding.Sharding, such as NamedSharding(mesh, PartitionSpec('data')), not"
            f" {type(sharding).__name__}"
        )
    return passes


def check_feature(name: str, spec: Spec) -> None:
    if not isinstance(spec, SparseSpec):
        return
    if spec.dtype in ("string", "bytes"):
        reason = f"JAX's sparse arrays hold numbers, not {spec.dtype}: leave it out with columns="
    elif spec.layout == "csr" and len(spec.shape) > 1:
        reason = f'JAX\'s BCSR has one dimension besides the rows, not {len(spec.shape)}: use layout="coo"'
    else:
        return
    raise UnsupportedError(f"feature {name!r}: {reason}", feature=name, reason=reason)


def check_dense(name: str, spec: Spec) -> None:
    if isinstance(spec, DenseSpec) and spec.dtype not in ("string", "bytes"):
        return
    if isinstance(spec, DenseSpec):
        reason = f"a sharding can't divide {spec.dtype}: read enums as codes, or leave it out with columns="
    elif isinstance(spec, SparseSpec):
        reason = (
            "a sharding can't divide sparse rows: leave it out with columns=, or read without a sharding and place it"
            " yourself"
        )
    else:
        reason = (
            "a sharding can't divide ragged rows: pad them with DenseSpec((size,), pad=0), or leave it out with"
            " columns="
        )
    raise UnsupportedError(f"feature {name!r}: {reason}", feature=name, reason=reason)


def check_sizes(passes: Passes) -> None:
    if not passes.one_size:
        raise ValueError(
            "a sharding needs batches of one size, and the last one may be smaller: read with drop_last=True, or with"
            ' uneven="pad" to fill it up'
        )
    if passes.uneven == "allow" and jax.process_count() > 1:
        raise ValueError('with uneven="allow" some processes would wait for others for ever: use "drop" or "pad"')


def check_divisible(name: str, shape: tuple[Any, ...], sharding: jax.sharding.Sharding) -> None:
    reason = ""
    if isinstance(sharding, jax.sharding.NamedSharding) and len(sharding.spec) > len(shape):
        reason = f"{sharding.spec} has more dimensions"
    else:
        try:
            sharding.shard_shape(shape)
        except ValueError as error:
            reason = str(error)
    if reason:
        raise UnsupportedError(
            f"feature {name!r}: the sharding can't divide batches of shape {shape}: {reason}", feature=name
        )


def share_of(sharding: jax.sharding.Sharding) -> tuple[int, int]:
    """Into how many shares a sharding divides the rows among processes, and which of them is this process's."""
    dimensions = len(sharding.spec) if isinstance(sharding, jax.sharding.NamedSharding) else 1
    # Whatever the axes of the mesh, their sizes divide the number of devices.
    rows = len(sharding.device_set)
    held: dict[int, set[tuple[int, int]]] = {}
    device: Any
    for device, index in sharding.devices_indices_map((rows,) * max(dimensions, 1)).items():
        start, stop, _ = index[0].indices(rows)
        held.setdefault(device.process_index, set()).add((start, stop))
    own = jax.process_index()
    if own not in held:
        raise UnsupportedError(f"process {own} has no device in the sharding's mesh: put one there")
    shares = sorted({tuple(sorted(ranges)) for ranges in held.values()})
    sizes = {sum(stop - start for start, stop in ranges) for ranges in shares}
    if sizes != {rows // len(shares)} or rows % len(shares):
        raise UnsupportedError(
            "under the sharding processes hold rows in part alike, or differ in how many they hold: let those that hold"
            " some of the same rows hold all of the same"
        )
    return len(shares), shares.index(tuple(sorted(held[own])))
