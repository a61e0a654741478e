"""Results of SQL queries, split into disjoint queries. Each of these queries is a unit of the reader."""

from __future__ import annotations

from fastpipe.sql._describing import describe
from fastpipe.sql._plan import SqlPartition, SqlPlan
from fastpipe.sql._reading import partition_sql, read_sql

__all__ = ["SqlPartition", "SqlPlan", "describe", "partition_sql", "read_sql"]
