"""The traces that are CSV files with a header.

BurstGPT (github.com/HPMLL/BurstGPT, CC BY 4.0): `Timestamp` in seconds, `Model`, `Request tokens`, `Response
tokens`, `Total tokens`, `Log Type`; its later files have `Session ID` and `Elapsed time` after the first one.
Failures have 0 response tokens. Azure (github.com/Azure/AzurePublicDataset, CC BY 4.0), 2023 and 2024:
`TIMESTAMP` as a date, `ContextTokens`, `GeneratedTokens`.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from tokenflow_bench.traces.errors import RowError
from tokenflow_bench.traces.rows import Row, Rows, as_count, as_seconds

__all__ = ["AZURE", "BURSTGPT", "TableFormat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFormat:
    """Names of the columns that say what we need; what else there is does not matter."""

    at: str
    prompt: str
    output: str

    def fits(self, head: str) -> bool:
        """Whether a file that begins with this line is one."""
        return {self.at, self.prompt, self.output} <= set(next(csv.reader([head]), []))

    def rows(self, file: TextIO) -> Rows:
        """All of them, read as they are asked for."""
        lines = csv.reader(file)
        names = next(lines)
        at, prompt, output = (names.index(name) for name in (self.at, self.prompt, self.output))
        most = max(at, prompt, output)
        for values in lines:
            if values:
                line = lines.line_num
                _check_width(values, most, line=line)
                yield Row(
                    line,
                    as_seconds(values[at], self.at, line=line),
                    as_count(values[prompt], self.prompt, line=line),
                    as_count(values[output], self.output, line=line),
                )


BURSTGPT = TableFormat(at="Timestamp", prompt="Request tokens", output="Response tokens")
AZURE = TableFormat(at="TIMESTAMP", prompt="ContextTokens", output="GeneratedTokens")


def _check_width(values: Sequence[str], most: int, *, line: int) -> None:
    if len(values) <= most:
        raise RowError(f"{len(values)} values, too few", line)
