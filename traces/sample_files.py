"""Small traces that come with the package, made by `synthesize`; see samples/README.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pagedserve.traces.lengths import LogNormal
from pagedserve.traces.readers import read_trace
from pagedserve.traces.report import TraceError
from pagedserve.traces.synthesis import SharedPrefixes, synthesize
from pagedserve.traces.trace import Trace

FOLDER = Path(__file__).parent / "samples"
SUFFIX = ".csv.gz"
PREFIX = "sample:"


def _azure_shaped_500() -> Trace:
    """Rate, gap CV, means, medians and output cap as published for the Azure 2023 conversation trace."""
    return synthesize(
        500,
        rate=5.53,
        burstiness=1 / 1.094**2,
        prompt=LogNormal(median=1020, sigma=0.498, maximum=14_050),
        output=LogNormal(median=129, sigma=0.992, maximum=1_000),
        seed=2023,
        rescale=True,
        name="azure_shaped_500",
    )


def _shared_prefix_200() -> Trace:
    """8 system prompts of 512 tokens before short questions: most of every prompt can come from a cache."""
    return synthesize(
        200,
        rate=4.0,
        prompt=LogNormal(median=160, sigma=0.7, maximum=1_024),
        output=LogNormal(median=80, sigma=0.6, maximum=512),
        seed=8,
        prefixes=SharedPrefixes(num_groups=8, prefix_tokens=512, block_size=16),
        name="shared_prefix_200",
    )


SAMPLES: dict[str, Callable[[], Trace]] = {
    "azure_shaped_500": _azure_shaped_500,
    "shared_prefix_200": _shared_prefix_200,
}
"""How each packaged file was made."""


def sample_names() -> tuple[str, ...]:
    """The names of the packaged traces."""
    return tuple(SAMPLES)


def sample_path(name: str) -> Path:
    """The file of a packaged trace, in the native format. Raises `TraceError` for an unknown name."""
    if name not in SAMPLES:
        raise TraceError(f"there is no sample trace {name!r}; choose one of {', '.join(SAMPLES)}")
    return FOLDER / (name + SUFFIX)


def sample(name: str) -> Trace:
    """A packaged trace. Synthetic: never report a result on it as one on production traffic."""
    return read_trace(sample_path(name), format="native")


def named_trace(source: str) -> Trace:
    """A packaged trace for "sample:NAME", else the trace in that file. Raises `TraceError` or OSError."""
    if source.startswith(PREFIX):
        return sample(source.removeprefix(PREFIX))
    return read_trace(Path(source))
