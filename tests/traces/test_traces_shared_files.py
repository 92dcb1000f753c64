"""The real traces: the numbers that their README publishes, and the quirks it tells of."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pagedserve.traces.readers import read_trace, write_trace
from pagedserve.traces.requests import to_requests
from pagedserve.traces.trace import Trace

CONV = "azure2023/AzureLLMInferenceTrace_conv.csv"
CODE = "azure2023/AzureLLMInferenceTrace_code.rows1-6000.csv"
CONVERSATION = "mooncake/conversation_trace.rows1-9000.jsonl.gz"
SYNTHETIC = "mooncake/synthetic_trace.rows1-3000.jsonl.gz"

# file: format, rows, span s, rate, CV, input mean/median/p99/max, output mean/median/p99/max
PUBLISHED = {
    CONV: (
        "azure2023", 19_366, 3_501.7, 5.53, 1.094,
        (1_154.7, 1_020, 4_142, 14_050), (211.1, 129, 601, 1_000),
    ),
    CODE: (
        "azure2023", 6_000, 1_898.4, 3.16, 13.191,
        (2_026.7, 1_452.5, 7_436, 7_437), (27.2, 13, 246, 1_899),
    ),
    CONVERSATION: (
        "mooncake", 9_000, 2_718, 3.311, 2.989,
        (12_206.6, 7_109.5, 87_173.1, 124_847), (346.7, 355, 1_181, 2_000),
    ),
    SYNTHETIC: (
        "mooncake", 3_000, 782.1, 3.836, 1.010,
        (13_629.9, 6_786.5, 61_416.8, 191_374), (176.3, 118, 776, 842),
    ),
}  # fmt: skip


@pytest.mark.parametrize("file", PUBLISHED)
def test_published_statistics(shared_traces: Path, file: str) -> None:
    trace_format, num_rows, span_s, rate, gap_cv, prompt, output = PUBLISHED[file]
    trace = read_trace(shared_traces / file)
    summary = trace.describe()
    assert trace.report.format == trace_format
    assert trace.report.tallies == ()
    assert (trace.report.num_rows_read, trace.report.num_rows_kept, len(trace)) == (num_rows,) * 3
    assert summary.span_s == pytest.approx(span_s, abs=0.05)
    assert summary.rate_per_s == pytest.approx(rate, abs=0.005 if rate in (5.53, 3.16) else 0.0005)
    assert summary.gap_cv == pytest.approx(gap_cv, abs=0.0005)
    for found, published in ((summary.prompt, prompt), (summary.output, output)):
        assert found is not None
        assert (found.mean, found.median, found.p99, found.max) == pytest.approx(published, abs=0.0501)


@pytest.mark.parametrize(
    ("file", "num_hit", "num_blocks", "share", "token_share"),
    [(CONVERSATION, 77_295, 218_830, 0.353219, 0.360104), (SYNTHETIC, 40_317, 81_711, 0.493410, 0.504141)],
)
def test_infinite_cache(
    shared_traces: Path, file: str, num_hit: int, num_blocks: int, share: float, token_share: float
) -> None:
    prefix = read_trace(shared_traces / file).describe().prefix
    assert prefix is not None
    assert (prefix.num_hit_blocks, prefix.num_blocks) == (num_hit, num_blocks)
    assert prefix.hit_share == pytest.approx(share, abs=5e-7)
    assert prefix.hit_token_share == pytest.approx(token_share, abs=5e-7)


@pytest.mark.parametrize(
    ("file", "block_size", "num_hit", "num_full"),
    [
        (CONVERSATION, 512, 77_227, 209_848),
        (SYNTHETIC, 512, 40_224, 78_714),
        (CONVERSATION, 16, 2_472_514, 6_862_041),
        (SYNTHETIC, 16, 1_288_329, 2_554_192),
    ],
)
def test_full_block_hits_of_our_keys(
    shared_traces: Path, file: str, block_size: int, num_hit: int, num_full: int
) -> None:
    """Requests served one after another, unlimited cache, a full hit leaving its last block to compute."""
    trace = read_trace(shared_traces / file)
    assert trace.blocks is not None
    seen = np.zeros((trace.blocks.ids.max() + 1) * 512 // block_size, dtype=bool)
    hits = full = 0
    for request in to_requests(trace, block_size):
        assert request.prefix_keys is not None
        keys = np.array(request.prefix_keys, dtype=np.int64)
        assert len(keys) == request.num_prompt_tokens // block_size
        known = seen[keys]
        num_leading = len(keys) if known.all() else int(known.argmin())
        hits += num_leading - (num_leading * block_size == request.num_prompt_tokens)
        full += len(keys)
        seen[keys] = True
    assert (hits, full) == (num_hit, num_full)


def test_azure_conversation_quirks(shared_traces: Path) -> None:
    path = shared_traces / CONV
    assert not path.read_bytes().endswith(b"\n")
    trace = read_trace(path, format="azure2023")
    assert int((trace.num_output_tokens == 1_000).sum()) == 11  # the output cap
    assert bool(np.all(np.diff(trace.arrival_ns) > 0))  # no two at one instant, so no digit was lost
    assert trace.arrival_ns[1] == 4_314_579_000


def test_azure_code_keeps_times_that_fewer_digits_would_merge(shared_traces: Path) -> None:
    trace = read_trace(shared_traces / CODE)
    assert len(np.unique(trace.arrival_ns)) == len(trace)
    assert len(np.unique(trace.arrival_ns // 1_000_000)) < len(trace)


def test_azure_2024_samples(shared_traces: Path) -> None:
    week = read_trace(shared_traces / "schema-samples/azure2024_code_1week.transcribed.csv")
    assert week.report.format == "azure2024"
    assert (week.arrival_ns[1], week.arrival_ns[-1]) == (7_405_000, 604_799_919_571_000)
    mixed = read_trace(shared_traces / "schema-samples/azure2024_mixed_fraction.constructed.csv")
    assert len(mixed) == 60
    assert int(((mixed.arrival_ns + mixed.report.origin_ns) % 1_000_000_000 == 0).sum()) == 3


def test_mooncake_quirks(shared_traces: Path) -> None:
    trace = read_trace(shared_traces / CONVERSATION)
    assert trace.blocks is not None
    assert set(trace.blocks.ids[trace.blocks.offsets[:-1]].tolist()) == {0}  # one system prompt for all
    with gzip.open(shared_traces / CONVERSATION) as lines:
        stamps = [json.loads(line)["timestamp"] for line in lines]
    instants, at_once = np.unique(trace.arrival_ns, return_counts=True)
    assert dict(zip((instants // 10**6).tolist(), at_once.tolist(), strict=True)) == Counter(stamps)
    assert 1 < at_once.max() <= 28
    assert trace.row.tolist() == list(range(1, 9_001))  # rows of one instant keep their order
    twins = [int(np.flatnonzero(trace.row == row)[0]) for row in (7728, 7733)]
    assert trace.blocks.of(twins[0]).tolist() == trace.blocks.of(twins[1]).tolist()
    assert int(read_trace(shared_traces / SYNTHETIC).num_prompt_tokens.min()) == 13


def test_mooncake_readme_example(shared_traces: Path) -> None:
    trace = read_trace(shared_traces / "schema-samples/mooncake_readme_example.transcribed.jsonl")
    assert trace.report.origin_ns == 27_482_000_000
    assert trace.arrival_ns.tolist() == [0, 3_053_000_000]


@pytest.mark.parametrize(
    "file",
    [
        "schema-samples/azure2025_multimodal.transcribed.csv",
        "schema-samples/burstgpt_1.transcribed.csv",
        "schema-samples/bailian_blksz_16.constructed.jsonl",
        "ragpulse/0_trace.rows1-5000.jsonl.gz",
        "vidur/splitwise_conv.csv",
        "tracelab/sanitized_round_trace.jsonl",
    ],
)
def test_other_formats_are_not_mistaken_for_ours(shared_traces: Path, file: str) -> None:
    with pytest.raises(ValueError, match="fits no trace format"):
        read_trace(shared_traces / file)


@pytest.mark.parametrize("file", [CONV, SYNTHETIC])
def test_conversion_to_native_changes_nothing(shared_traces: Path, tmp_path: Path, file: str) -> None:
    trace = read_trace(shared_traces / file)
    write_trace(trace, tmp_path / "copy.csv.gz")
    copy: Trace = read_trace(tmp_path / "copy.csv.gz")
    assert copy.sha256() == trace.sha256()
    assert copy.row.tolist() == trace.row.tolist()
