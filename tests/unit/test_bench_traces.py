"""Recorded traffic in each documented schema, in samples written by hand; and the real one that ships."""

from __future__ import annotations

import gzip
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from tokenflow_bench.traces import TraceError, read_trace
from tokenflow_bench.traces.documents import ShareGptFormat

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9305900,396,109
2023-11-16 18:16:50,1,0
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 02:00:01.009930+02:00,2399,6
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,API log
118,GPT-4,417,276,693,Conversation log
"""
BURSTGPT_SESSIONS = """
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
19440110.0,1722ac82,43,GPT-4,906,446,1352,Conversation log
19440161.5,d5983bf9,2,ChatGPT,36,29,65,Conversation log
"""
MOONCAKE = """{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}

{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46]}
"""
SHAREGPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "x" * 40},
            {"from": "gpt", "value": "y" * 80},
            {"from": "human", "value": "z"},
        ],
    },
    {"id": "no answer", "conversations": [{"from": "human", "value": "hello?"}]},
    {"id": "begins with the answer", "conversations": [{"from": "gpt", "value": "y"}] * 2},
    {
        "id": "b",
        "conversations": [{"from": "user", "value": "[,]" * 4}, {"from": "assistant", "value": "y" * 8}],
    },
]


def written(tmp_path: Path, text: str, name: str = "trace") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "arrived", "prompt", "output", "failed"),
    [
        (AZURE_2023, [0, 4.25], [374, 396], [44, 109], 1),
        (AZURE_2024, [0, 1], [2162, 2399], [5, 6], 0),
        (BURSTGPT, [0, 113], [472, 417], [18, 276], 1),
        (BURSTGPT_SESSIONS.lstrip(), [0, 51.5], [906, 36], [446, 29], 0),
        (MOONCAKE, [0, 3.053], [6955, 6472], [52, 26], 0),
    ],
)
def test_formats_with_times(
    tmp_path: Path, text: str, arrived: list[float], prompt: list[int], output: list[int], failed: int
) -> None:
    trace = read_trace(written(tmp_path, text))
    np.testing.assert_allclose(trace.arrived, arrived, atol=1e-6)
    assert (trace.prompt.tolist(), trace.output.tolist(), trace.failed) == (prompt, output, failed)


@pytest.mark.parametrize("indent", [None, 2])
def test_sharegpt_has_lengths_and_no_times(tmp_path: Path, indent: int | None) -> None:
    """The first question and its answer, four characters a token."""
    trace = read_trace(written(tmp_path, json.dumps(SHAREGPT, indent=indent)))
    assert trace.arrived is None
    assert (trace.prompt.tolist(), trace.output.tolist()) == ([10, 3], [20, 2])
    work = trace.workload(np.array([5.0, 5.0]), arrived=np.array([1.0, 2.0]))
    assert (work.arrived.tolist(), work.max_output.tolist()) == ([1.0, 2.0], [20, 2])


def test_sharegpt_is_read_in_pieces_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, json.dumps(SHAREGPT, indent=1))
    whole = read_trace(path)
    for chars in (1, 2, 3, 7, 50):
        monkeypatch.setattr("tokenflow_bench.traces.documents._CHUNK_CHARS", chars)
        assert read_trace(path).output.tolist() == whole.output.tolist()


def test_files_are_read_as_far_as_needed(tmp_path: Path) -> None:
    """The bad row after the limit or the window is never seen (and is seen without them)."""
    path = written(tmp_path, BURSTGPT + "nonsense,,,\n")
    assert len(read_trace(path, limit=2)) == 2
    assert len(read_trace(path, end_s=100.0)) == 1
    with pytest.raises(TraceError, match="line 5"):
        read_trace(path)


def test_pieces_of_sharegpt_come_before_the_file_is_over(tmp_path: Path) -> None:
    endless = written(tmp_path, json.dumps(SHAREGPT)[:-1] + "," + "[" * 100)
    with endless.open() as file:
        rows = list(itertools.islice(ShareGptFormat().rows(file), 2))
    assert [row.output for row in rows] == [20, 2]


def test_windows_and_scales(tmp_path: Path) -> None:
    """From 10 s on, twice as fast, a tenth as long but at least a token; times from the first one in it."""
    rows = "".join(f"{at},M,{tokens},{tokens},0,x\n" for at, tokens in [(5, 1), (15, 100), (25, 4), (99, 7)])
    path = written(tmp_path, BURSTGPT.partition("\n")[0] + "\n" + rows)
    trace = read_trace(path, begin_s=10, end_s=90, faster=2.0, length_scale=0.1)
    assert trace.arrived is not None
    assert (trace.arrived.tolist(), trace.prompt.tolist()) == ([0.0, 5.0], [10, 1])


def test_packed_files(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(AZURE_2023.encode()))
    assert len(read_trace(path)) == 2
    path.write_bytes(gzip.compress(AZURE_2023.encode())[:-20])
    with pytest.raises(TraceError, match=r"trace\.csv\.gz"):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (AZURE_2023 + "2023-11-16 18:17:50,many,4\n", "line 5: ContextTokens is 'many', not a whole number"),
        (AZURE_2023 + "2023-11-16 18:17:50,4\n", "line 5: 2 values, too few"),
        (AZURE_2023 + "2023-11-16 18:17:50,4,-1\n", "line 5: GeneratedTokens is -1, less than 0"),
        (AZURE_2023 + "tomorrow,4,4\n", "line 5: TIMESTAMP is 'tomorrow', neither a number nor a date"),
        (BURSTGPT + "nan,M,1,1,2,x\n", "line 5: Timestamp is 'nan', neither"),
        (BURSTGPT + "18,M,1,1,2,x\n", "line 5: its time is 100 s before"),
        (MOONCAKE + '{"timestamp": 1\n', "line 4: not JSON"),
        (MOONCAKE + '{"timestamp": 99999, "input_length": 3}\n', "line 4: no output_length"),
        (MOONCAKE + "[]\n", "line 4: not an object"),
        ('[\n{"conversations": []},\n{"turns": []}]', "line 3: not an object with a list of conversations"),
        ('[{"conversations": [{"from": "human"}]}]', "line 1: a turn of a conversation without a text"),
        ('[\n{"conversations": []},\n{"conversations', "line 3: not JSON"),
        ('[\n{"conversations": []}\n', "not JSON"),
        ("a,b\n1,2\n", "none of burstgpt, azure, mooncake, sharegpt; it begins with 'a,b'"),
        ("", "none of burstgpt"),
        (AZURE_2023.partition("\n")[0], "no answered request between 0 and inf s"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = written(tmp_path, text, "bad.trace")
    with pytest.raises(TraceError) as raised:
        read_trace(path)
    assert str(raised.value).startswith(str(path))
    assert complaint in str(raised.value)


def test_the_trace_that_ships() -> None:
    """Azure's conversations of 2023, whole: as many, as long and as far apart as in the original."""
    trace = read_trace(Path(__file__).parents[2] / "bench" / "data" / "azure_llm_2023_conv.csv.gz")
    assert trace.arrived is not None
    assert len(trace) == 19366
    assert trace.arrived[-1] == pytest.approx(3501.7, abs=0.1)
    assert (trace.prompt.mean(), trace.output.mean()) == pytest.approx((1154.7, 211.1), abs=0.1)
    gaps = np.diff(trace.arrived)
    assert math.isclose((gaps.mean() / gaps.std()) ** 2, 0.835, abs_tol=0.01)
