"""The table of cases in docs/wire.md is true: each case has its tests, and they are where it says."""

from __future__ import annotations

import re
from pathlib import Path

WIRE = Path(__file__).parent
DOCS = WIRE.parent.parent / "docs" / "wire.md"
ROW = re.compile(r"^\| (\d+) \|.*\| `(test_\w+\.py)` \|$", re.MULTILINE)
CASES = 28


def test_every_case_has_its_tests_where_the_table_says() -> None:
    rows = {int(number): module for number, module in ROW.findall(DOCS.read_text())}
    assert sorted(rows) == list(range(1, CASES + 1))
    for number, module in rows.items():
        assert f"def test_case_{number:02}_" in (WIRE / module).read_text(), (
            f"case {number} is not in {module}"
        )
