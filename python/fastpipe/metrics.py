"""Metrics of readers for Prometheus, OpenTelemetry, and loggers of training runs.

    fastpipe.metrics.prometheus({"train": reader, "valid": other})

    scalars = fastpipe.metrics.Scalars(reader)
    wandb.log(scalars(), step=step)

A reader counts the batches that its passes yield in this process, and how long the program waited for each batch.
Totals continue over epochs. Reading them takes a few microseconds. Nothing runs between two reads. A registration keeps
the counters of a reader alive, but not the reader.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from fastpipe._fastpipe import ReaderTotals, __version__
from fastpipe._reader.passes import passes_of

if TYPE_CHECKING:
    from fastpipe._reader.reader import Reader

__all__ = ["PrometheusCollector", "Scalars", "opentelemetry", "prometheus"]

# The unit in OpenTelemetry's notation, and a description.
_COUNTERS = {
    "batches": ("{batch}", "Number of batches that readers have yielded."),
    "rows": ("{row}", "Number of rows in these batches, without padding rows."),
    "bytes": ("By", "Size of the arrays of these batches in bytes."),
    "read_bytes": ("By", "Number of stored bytes read from files and other storage."),
    "fetch_seconds": ("s", "Total duration of the calls that fetch units. No thread waits for these calls."),
}
_GAUGES = {
    "epoch": ("{epoch}", "Epoch of the last batch."),
    "rows_left_out": ("{row}", "Number of rows per epoch that are in no batch of any rank (drop_last, uneven)."),
}
_WORK = ("s", "Time that threads worked, summed over all threads, by activity.")
_WAIT = ("s", "Time that the program waited for a batch.")

_QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_OWN_LABELS = {"reader", "activity", "le", "quantile"}
# Prometheus gets one bucket per power of two; readers have four.
_COARSER = 4
_BOUNDS: Sequence[float] = ReaderTotals.wait_bounds()

_HINT = ". For a Rebatcher, pass the reader that its batches come from"


class _Counted:
    """The counters of readers, by name."""

    def __init__(self, readers: Reader | Mapping[str, Reader], labels: Mapping[str, object] | None = None) -> None:
        named = readers if isinstance(readers, Mapping) else {"": readers}
        self.totals = {str(name): passes_of(reader, _HINT).totals for name, reader in named.items()}
        self._labels = {str(name): str(value) for name, value in (labels or {}).items()}
        if taken := _OWN_LABELS & self._labels.keys():
            raise ValueError(f"fastpipe already sets the label {min(taken)!r}: choose another name")
        self.names = list({"reader": "", "rank": ""} | self._labels)

    def labels(self, name: str) -> dict[str, str]:
        return {"reader": name, "rank": str(self.totals[name].rank)} | self._labels

    def read(self) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
        """Yields the labels and the totals of each reader."""
        for name, totals in self.totals.items():
            yield self.labels(name), totals.read()


def prometheus(
    readers: Reader | Mapping[str, Reader],
    *,
    registry: Any = None,
    labels: Mapping[str, object] | None = None,
) -> PrometheusCollector:
    """Registers readers with prometheus-client, which reads their totals on each scrape (extra `metrics`).

    The metrics are `fastpipe_batches_total`, `fastpipe_rows_total`, `fastpipe_bytes_total`,
    `fastpipe_read_bytes_total`, `fastpipe_work_seconds_total` (by `activity`), `fastpipe_fetch_seconds_total`,
    `fastpipe_rows_left_out`, `fastpipe_epoch`, and the histogram `fastpipe_wait_seconds`. Each metric has the labels
    `reader` (a name) and `rank`.

    Args:
        readers: A reader, or a dict from name to reader. A registry accepts the metrics only once, so pass all of its
            readers together.
        registry: A `prometheus_client.CollectorRegistry`. Defaults to `prometheus_client.REGISTRY`.
        labels: Additional labels for all samples, such as the name of the job. A `rank` label replaces the reader's
            rank.

    Returns:
        The collector, which you can pass to `registry.unregister`.

    Raises:
        ImportError: If prometheus-client isn't installed.
        TypeError: If `readers` are not readers.
        ValueError: If fastpipe uses the name of a label, or if the registry already has these metrics.

    Example:
        >>> import fastpipe, prometheus_client
        >>> reader = fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=1024)
        >>> registry = prometheus_client.CollectorRegistry()
        >>> _ = fastpipe.metrics.prometheus({"train": reader}, registry=registry, labels={"job": "demo"})
        >>> for batch in reader:
        ...     pass
        >>> registry.get_sample_value("fastpipe_rows_total", {"reader": "train", "rank": "0", "job": "demo"})
        6144
    """
    collector = PrometheusCollector(readers, labels=labels)
    if registry is None:
        from prometheus_client import REGISTRY as registry
    registry.register(collector)
    return collector


class PrometheusCollector:
    """Collects the totals of readers for prometheus-client. `prometheus` creates and registers a collector.

    Args:
        readers: A reader, or a dict from name to reader.
        labels: Additional labels for all samples.

    Raises:
        ImportError: If prometheus-client isn't installed.
    """

    def __init__(self, readers: Reader | Mapping[str, Reader], *, labels: Mapping[str, object] | None = None) -> None:
        try:
            from prometheus_client import core
        except ImportError as error:
            raise ImportError(
                "Prometheus metrics require prometheus-client: pip install 'fastpipe-data[metrics]'"
            ) from error
        self._core: Any = core
        self._counted = _Counted(readers, labels)

    def collect(self) -> Iterator[Any]:
        """Yields the current values of all metrics."""
        found, core = list(self._counted.read()), self._core
        names = self._counted.names
        for kind, metrics in ((core.CounterMetricFamily, _COUNTERS), (core.GaugeMetricFamily, _GAUGES)):
            for name, (_, text) in metrics.items():
                family = kind(f"fastpipe_{name}", text, labels=names)
                for labels, totals in found:
                    family.add_metric(list(labels.values()), totals[name])
                yield family
        work = core.CounterMetricFamily("fastpipe_work_seconds", _WORK[1], labels=[*names, "activity"])
        wait = core.HistogramMetricFamily("fastpipe_wait_seconds", _WAIT[1], labels=names)
        for labels, totals in found:
            for activity, seconds in totals["work_seconds"].items():
                work.add_metric([*labels.values(), activity], seconds)
            upto = list(accumulate(totals["waits"]))
            buckets = [(str(bound), count) for bound, count in zip(_BOUNDS, upto, strict=False)][::_COARSER]
            wait.add_metric(list(labels.values()), [*buckets, ("+Inf", upto[-1])], totals["wait_seconds"])
        yield from (work, wait)


def opentelemetry(
    readers: Reader | Mapping[str, Reader],
    *,
    meter: Any = None,
    attributes: Mapping[str, object] | None = None,
) -> None:
    """Reports the totals of readers to OpenTelemetry through observable instruments (package `opentelemetry-api`).

    Instruments are named like the metrics of `prometheus`, with a dot: `fastpipe.batches`. Waits are reported by the
    counter `fastpipe.wait_seconds` and the gauge `fastpipe.wait_quantile_seconds`, whose attribute `quantile` is 0.5,
    0.95 or 0.99. The gauge covers the waits since the previous collection, so only one exporter should read it.

    Args:
        readers: A reader, or a dict from name to reader.
        meter: An `opentelemetry.metrics.Meter`. Defaults to a meter of the global provider.
        attributes: Additional attributes for all observations. A `rank` attribute replaces the reader's rank.

    Raises:
        ImportError: If opentelemetry-api isn't installed.
        TypeError: If `readers` are not readers.
        ValueError: If fastpipe uses the name of an attribute.

    Example:
        >>> import fastpipe
        >>> reader = fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=1024)
        >>> fastpipe.metrics.opentelemetry({"train": reader}, attributes={"job": "demo"})
    """
    try:
        from opentelemetry.metrics import Observation, get_meter
    except ImportError as error:
        raise ImportError("OpenTelemetry metrics require opentelemetry-api: pip install opentelemetry-api") from error
    meter = get_meter("fastpipe", __version__) if meter is None else meter
    counted = _Counted(readers, attributes)

    def reading(name: str) -> list[Callable[[Any], Iterable[Any]]]:
        return [lambda options: [Observation(totals[name], labels) for labels, totals in counted.read()]]

    def work(options: Any) -> Iterator[Any]:
        for labels, totals in counted.read():
            for activity, seconds in totals["work_seconds"].items():
                yield Observation(seconds, labels | {"activity": activity})

    before = {name: totals.read() for name, totals in counted.totals.items()}

    def waits(options: Any) -> Iterator[Any]:
        for name, totals in counted.totals.items():
            now = totals.read()
            found, before[name] = _waits(before[name], now), now
            for quantile in _QUANTILES.values() if any(found) else ():
                yield Observation(_quantile(found, quantile), counted.labels(name) | {"quantile": str(quantile)})

    for name, (unit, text) in {**_COUNTERS, "wait_seconds": _WAIT}.items():
        meter.create_observable_counter(f"fastpipe.{name}", reading(name), unit, text)
    for name, (unit, text) in _GAUGES.items():
        meter.create_observable_gauge(f"fastpipe.{name}", reading(name), unit, text)
    meter.create_observable_counter("fastpipe.work_seconds", [work], *_WORK)
    meter.create_observable_gauge("fastpipe.wait_quantile_seconds", [waits], *_WAIT)


class Scalars:
    """Metrics of readers as a flat dict, for `wandb.log`, TensorBoard, or Lightning's `log_dict`.

    Each call returns the following values under names such as `fastpipe/rows_per_second`:

    - `batches_per_second`, `rows_per_second`, `bytes_per_second` and `read_bytes_per_second` since the previous call;
    - `wait_p50_seconds`, `wait_p95_seconds` and `wait_p99_seconds`: quantiles of the waits for batches since the
      previous call, accurate to 1/8 of their value, and omitted if no batch arrived; `wait_fraction`, the fraction of
      time spent waiting;
    - `busy_threads`: the average number of threads that worked; `decoding_threads`: the average number that decoded;
      `open_fetches`: the average number of fetches in flight;
    - `batches` and `rows` in total, the `epoch` of the last batch, and `rows_left_out`: rows of an epoch that are in no
      batch.

    Args:
        readers: A reader, or a dict from name to reader. Names of readers are included:
            `fastpipe/train/rows_per_second`.
        prefix: Prefix of all names. Defaults to "fastpipe/".

    Raises:
        TypeError: If `readers` are not readers.

    Example:
        >>> import fastpipe
        >>> reader = fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=1024)
        >>> scalars = fastpipe.metrics.Scalars(reader)
        >>> for step, batch in enumerate(reader, 1):
        ...     if step % 3 == 0:
        ...         print(step, scalars()["fastpipe/rows"])
        3 3072.0
        6 6144.0
    """

    def __init__(self, readers: Reader | Mapping[str, Reader], *, prefix: str = "fastpipe/") -> None:
        self._counted, self._prefix = _Counted(readers), prefix
        now = time.monotonic()
        self._before = {name: (now, totals.read()) for name, totals in self._counted.totals.items()}

    def __call__(self) -> dict[str, float]:
        """Returns the values since the previous call, or since this object was created."""
        scalars = {}
        for name, totals in self._counted.totals.items():
            (since, before), now = self._before[name], (time.monotonic(), totals.read())
            self._before[name] = now
            prefix = f"{self._prefix}{name}/" if name else self._prefix
            for scalar, value in _scalars(before, now[1], max(now[0] - since, 1e-9)):
                scalars[prefix + scalar] = float(value)
        return scalars


def _scalars(before: dict[str, Any], now: dict[str, Any], seconds: float) -> Iterator[tuple[str, float]]:
    waits = _waits(before, now)
    before = _earlier(before, now)
    for name in ("batches", "rows", "bytes", "read_bytes"):
        yield f"{name}_per_second", (now[name] - before[name]) / seconds
    for name, quantile in _QUANTILES.items() if any(waits) else ():
        yield f"wait_{name}_seconds", _quantile(waits, quantile)
    yield "wait_fraction", (now["wait_seconds"] - before["wait_seconds"]) / seconds
    work = {name: spent - before["work_seconds"][name] for name, spent in now["work_seconds"].items()}
    yield "busy_threads", sum(work.values()) / seconds
    yield "decoding_threads", work["decoding"] / seconds
    yield "open_fetches", (now["fetch_seconds"] - before["fetch_seconds"]) / seconds
    for name in ("batches", "rows", "epoch", "rows_left_out"):
        yield name, now[name]


def _earlier(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Returns the earlier totals, or zeros after a fork, because a child process counts from zero."""
    return before if now["batches"] >= before["batches"] else ReaderTotals(0).read()


def _waits(before: dict[str, Any], now: dict[str, Any]) -> list[int]:
    """Returns the number of waits that were added to each bucket."""
    earlier = _earlier(before, now)["waits"]
    return [count - less for count, less in zip(now["waits"], earlier, strict=True)]


def _quantile(waits: Sequence[int], quantile: float) -> float:
    """Returns a quantile of at least one wait, interpolated linearly within its bucket."""
    rank, below = quantile * sum(waits), 0
    bounds = [0.0, *_BOUNDS, _BOUNDS[-1]]
    for bucket, count in enumerate(waits):
        if count and below + count >= rank:
            low, high = bounds[bucket], bounds[bucket + 1]
            return low + (high - low) * (rank - below) / count
        below += count
    return bounds[-1]
