"""Random queries that PostgreSQL, DuckDB and SQLite interpret identically. Each query always returns the same rows."""

from __future__ import annotations

import random

# Columns of t, grouped by the operations that they support.
NUMBERS = ["id", "k", "z", "x"]
ANY = ["id", "k", "z", "g", "x", "n", "d", "ts", "f", "b"]
GROUPS = ["k", "g", "d", "f", "n"]


def query(seed: int) -> str:
    """Returns the query of a seed."""
    draw = random.Random(seed)
    return draw.choice([_plain, _plain, _joined, _grouped, _windowed, _united, _distinct, _limited, _with, _nested])(
        draw
    )


def _value(draw: random.Random, of: str = "t") -> str:
    kind = draw.randrange(5)
    if kind == 0:
        return f"{of}.{draw.choice(NUMBERS)} * 2"
    if kind == 1:
        return f"CASE WHEN {of}.k > {draw.randint(0, 3)} THEN {of}.g ELSE NULL END"
    if kind == 2:
        return f"COALESCE({of}.g, 'none')"
    return f"{of}.{draw.choice(ANY)}"


def _values(draw: random.Random, of: str = "t") -> str:
    names = ["c", "C d", "e'", "q", "t"]
    quoted = [name.replace('"', '""') for name in draw.sample(names, draw.randint(1, 4))]
    return ", ".join(f'{_value(draw, of)} AS "{name}"' for name in quoted)


def _where(draw: random.Random, of: str = "t") -> str:
    conditions = [
        f"{of}.k = {draw.randint(1, 3)}",
        f"{of}.k IS NULL",
        f"{of}.g IS NOT NULL",
        f"{of}.id > {draw.randint(0, 170)}",
        f"{of}.g = 'a'",
        f"{of}.g <> '''; DROP TABLE t; --'",
        f"NOT ({of}.z < {draw.randint(1, 9)})",
        f"{of}.id IN (SELECT u.id FROM u)",
        f"EXISTS (SELECT 1 FROM u WHERE u.k = {of}.k)",
        "1 = 0",
    ]
    # Weighted so that few results are empty.
    chosen = draw.choices(conditions, weights=[3, 3, 3, 3, 2, 3, 3, 2, 2, 1], k=draw.randint(0, 2))
    return " WHERE " + draw.choice([" AND ", " OR "]).join(chosen) if chosen else ""


def _plain(draw: random.Random) -> str:
    selected = draw.choice(["*", "t.*", _values(draw)])
    end = draw.choice(["", " ORDER BY id", ";", " -- all of it"])
    return f"SELECT {selected} FROM t{_where(draw)}{end}"


def _joined(draw: random.Random) -> str:
    kind = draw.choice(["JOIN", "LEFT JOIN", "CROSS JOIN"])
    on = "" if kind == "CROSS JOIN" else f" ON {draw.choice(['u.k = t.k', 'u.name = t.g', 'u.id = t.id'])}"
    where = f" WHERE t.id < {draw.randint(3, 20)}" if kind == "CROSS JOIN" else _where(draw)
    return f"SELECT {_values(draw)}, u.name FROM t {kind} u{on}{where}"


def _grouped(draw: random.Random) -> str:
    # If 'a' and 'A' are equal, the one that represents the group varies between runs.
    keys = ["lower(g)" if key == "g" else key for key in draw.sample(GROUPS, draw.randint(1, 2))]
    having = draw.choice(["", " HAVING count(*) > 1", " HAVING min(t.id) > 5"])
    told = (
        f"count(*) AS rows_, sum(t.k) AS total, min(t.id) AS first_, count(DISTINCT t.z) AS several, {', '.join(keys)}"
    )
    return f"SELECT {told} FROM t{_where(draw)} GROUP BY {', '.join(keys)}{having}"


def _windowed(draw: random.Random) -> str:
    key = draw.choice(GROUPS)
    return (
        f"SELECT t.{key}, row_number() OVER (PARTITION BY t.{key} ORDER BY t.id) AS place, "
        f"sum(t.k) OVER (ORDER BY t.id) AS running, lag(t.g) OVER (ORDER BY t.id) AS earlier FROM t{_where(draw)}"
    )


def _united(draw: random.Random) -> str:
    kind = draw.choice(["UNION", "UNION ALL", "EXCEPT", "INTERSECT"])
    return f"SELECT t.k, lower(t.g) FROM t{_where(draw)} {kind} SELECT u.k, lower(u.name) FROM u"


def _distinct(draw: random.Random) -> str:
    columns = ", ".join(draw.sample(["k", "z", "d", "f", "n", "b"], draw.randint(1, 3)))
    return f"SELECT DISTINCT {columns} FROM t{_where(draw)}"


def _limited(draw: random.Random) -> str:
    offset = draw.choice(["", f" OFFSET {draw.randint(0, 9)}"])
    return f"SELECT {_values(draw)} FROM t{_where(draw)} ORDER BY t.k, t.id LIMIT {draw.randint(0, 50)}{offset}"


def _with(draw: random.Random) -> str:
    return (
        f"WITH w AS (SELECT t.* FROM t{_where(draw)}), v AS (SELECT k, count(*) AS n FROM w GROUP BY k) "
        "SELECT w.id, w.g, v.n FROM w LEFT JOIN v ON v.k = w.k"
    )


def _nested(draw: random.Random) -> str:
    inner = draw.choice([_plain, _limited, _joined, _united])(draw).rstrip(";")
    return f"SELECT * FROM (\n{inner}\n) AS q"
