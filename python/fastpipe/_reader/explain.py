"""Explains in words what limits the speed of a pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastpipe._reader.selection import Selected

if TYPE_CHECKING:
    from fastpipe._reader.dataset import Dataset

# Entries of `seconds` that are not work.
_WAITS = {"elapsed", "waiting_for_consumer", "consumer_waiting", "fetching"}

# Description of a pass that is limited by each kind of work. A source can override it.
_BOUND = {
    "reading": "read-bound",
    "opening": "open-bound",
    "indexing": "index-bound",
    "skipping": "skip-bound",
    "decoding": "decode-bound",
    "gathering": "gather-bound",
    "assembling": "assembly-bound",
    "planning": "planning-bound",
}

# Advice that applies to all sources. Each source adds advice for its own kinds of work.
_ADVICE = {
    "skipping": "Threads share {units} that are larger than a batch. A larger `prefetch` avoids that.",
    "assembling": "Ragged and sparse values are joined from several tasks: a larger `prefetch` or `batch_size` helps.",
    "planning": "Batches are very small: increase `batch_size`.",
}

# A consumer that waits for less than this share of the time isn't slowed down noticeably: nothing is a bottleneck.
UNNOTICED = 0.05

# A pass is fetch-bound if its threads work for less than this share of the time.
_IDLE = 0.5

# Smaller shares are not reported.
_COLUMN = 0.1
_WAIT = 0.1
_COLUMNS_NAMED = 3


def explain(stats: Mapping[str, Any], data: Dataset) -> str:
    """Describes what limits a pass.

    Args:
        stats: Statistics as `Reader.stats` returns them.
        data: The dataset that was read.
    """
    if data.handle.num_rows == 0:
        return f"The reader has no rows, so its passes have no batches.\nThe reader reads {data}."
    if not stats or not stats["batches"]:
        return "Nothing was read yet: explain() describes the last pass."
    text = _explained(stats, data)
    return f"{text}\nThe reader reads {data}." if isinstance(data, Selected) else text


def _explained(stats: Mapping[str, Any], data: Dataset) -> str:
    seconds = stats["seconds"]
    work = {name: spent for name, spent in seconds.items() if name not in _WAITS}
    total = sum(work.values()) or 1e-12
    threads = stats["threads"]
    used = threads["chosen"]
    waited, away = seconds["consumer_waiting"], seconds["waiting_for_consumer"]
    elapsed = max(seconds["elapsed"], waited + away) or 1e-12
    waits = f"{waited / elapsed:.0%} of the time"
    unnoticed = waited < UNNOTICED * elapsed
    on = f"on {used} thread" + ("s" if used > 1 else "")
    if used < threads["available"]:
        on += f" of {threads['available']}"
    if not work:
        rate = stats["bytes_delivered"] / elapsed / 1e6
        if unnoticed:
            return f"not a bottleneck: the consumer waits for servers {waits}."
        if away > waited:
            return (
                f"consumer-bound: servers make the batches and wait for the consumer {away / elapsed:.0%} of the time."
            )
        return (
            f"server-bound: the consumer waits for servers {waits}; {rate:,.0f} MB/s arrive."
            " Use more or faster servers or a faster network; call explain() of the served reader for details."
        )
    lines = []
    largest = max(work, key=lambda name: work[name])
    fetching = seconds["fetching"]
    fetch_bound = fetching > 0 and total < _IDLE * used * elapsed
    bound = {**_BOUND, **data.words.bound}.get(largest, f"{largest}-bound")
    if unnoticed:
        next_bound = "fetch-bound" if fetch_bound else bound
        lines.append(
            f"not a bottleneck: the consumer waits for the reader {waits}, {on}."
            f" With a faster consumer, the pass would be {next_bound}."
        )
    elif away > waited:
        lines.append(f"consumer-bound: the reader waits for the consumer {away / elapsed:.0%} of the time, {on}.")
        if waited > _WAIT * elapsed:
            lines.append(f"The consumer also waits {waits}.")
    elif fetch_bound:
        lines.append(
            f"fetch-bound: {fetching / elapsed:.1f} calls wait for the source at once on average, and the "
            f"threads are idle {1 - total / (used * elapsed):.0%} of the time."
        )
    else:
        lines.append(f"{bound} {on}: the consumer waits for the reader {waits}.")
    shares = sorted(((part / total, name) for name, part in work.items()), reverse=True)
    shown = [f"{name} {share:.0%}" for share, name in shares if share >= 0.01]
    lines.append(f"Of the work: {', '.join(shown)}.")
    if unnoticed:
        return "\n".join(lines)
    advice = {**_ADVICE, **data.words.advice}.get("fetching" if fetch_bound else largest)
    if away <= waited and advice is not None:
        lines.append(advice.replace("{units}", data.words.units))
    if data.column_times is not None and work.get("decoding", 0.0) > _COLUMN * total:
        lines += _columns(work["decoding"] / total, *data.column_times())
    reopened = stats["rows_reopened"]
    if reopened > _WAIT * stats["rows"]:
        lines.append(
            f"{reopened / stats['rows']:.0%} of the rows are in {data.words.units} that were opened twice because "
            "window boundaries split them: a larger `shuffle_buffer` reduces this."
        )
    return "\n".join(lines)


def _columns(decoding: float, everything: float, without: list[tuple[str, float]]) -> list[str]:
    """Describes the columns that take most of the decoding time. `decoding` is its share of all work."""
    if everything <= 0 or len(without) < 2:
        return []
    shares = sorted(((1 - rest / everything, name) for name, rest in without), reverse=True)
    lines = []
    for share, name in shares[:_COLUMNS_NAMED]:
        if share >= _COLUMN:
            less = min(decoding * share, 1.0)
            lines.append(
                f"The column {name!r} takes {share:.0%} of decoding: without it there is {less:.0%} less work."
            )
    return lines
