import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagedserve.metrics.profile import HostPoint, Profile, ProfileError, StepPoint, SwapPoint
from pagedserve.policy import StepShape

PROFILE = Profile(
    {"model": "tiny", "device": "cpu", "grid": {"chunk_tokens": [1, 64]}, "num_threads": 2},
    (
        StepPoint("chunk", StepShape(((64, 0),), num_samples=1), 90, 100, 120, 5),
        StepPoint("decode", StepShape((), 2, 40, 30, 1000, 2), 10, 10, 11, 5),
        StepPoint("mixed", StepShape(((8, 16), (4, 0)), 1, 5, 5, 25, 3), 0, 2**60, 2**60 + 1, 1),
    ),
    (HostPoint(1, 3, 4, 5, 70), HostPoint(8, 6, 7, 9, 70)),
)


SWAPS = (SwapPoint("out", 1, 3, 4, 9, 5), SwapPoint("out", 16, 30, 40, 41, 5), SwapPoint("in", 1, 0, 1, 2, 5))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    return path


def test_what_is_saved_comes_back_equal(path: Path) -> None:
    assert Profile.load(path) == Profile.load(str(path)) == PROFILE
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]


def test_swaps_come_back_and_are_in_the_file_only_if_there_are_any(path: Path) -> None:
    assert "swap" not in path.read_text()
    shape = replace(PROFILE.steps[0].shape, num_blocks_swapped_in=3)
    steps = (replace(PROFILE.steps[0], shape=shape), *PROFILE.steps[1:])
    swapping = replace(PROFILE, steps=steps, swaps=SWAPS)
    swapping.save(path)
    assert Profile.load(path) == swapping
    assert Profile.load(path).sha256() == swapping.sha256() != PROFILE.sha256()
    content = json.loads(path.read_text())
    assert [row["shape"].get("num_blocks_swapped_in") for row in content["steps"]] == [3, None, None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"direction": "up"}, r"swaps\[1\].direction: expected one of out, in, found 'up'"),
        ({"num_blocks": 0}, r"swaps\[1\].num_blocks: .* at least 1, found 0"),
        ({"p20_ns": 99}, r"swaps\[1\]: .*quantiles cannot fall"),
        ({"bytes": 1}, r"swaps\[1\]: bytes is unknown"),
    ],
)
def test_swaps_that_this_version_does_not_read(path: Path, change: dict[str, Any], message: str) -> None:
    replace(PROFILE, swaps=SWAPS).save(path)
    content = json.loads(path.read_text())
    content["swaps"][1] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(ProfileError, match=rf"profile\.json: {message}"):
        Profile.load(path)
    path.write_text(json.dumps({**content, "swaps": []}))
    with pytest.raises(ProfileError, match="swaps: expected a list of measurements"):
        Profile.load(path)


def test_the_hash_is_of_the_content_alone(path: Path) -> None:
    # Pinned: results already published name profiles by it.
    assert PROFILE.sha256() == "974ade7b7dbe39d17f4ab8071b7021227fe0fd05971c61f881938a0ad007a01d"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(content.items()))))
    assert Profile.load(path).sha256() == PROFILE.sha256()


@pytest.mark.parametrize(
    "other",
    [
        replace(PROFILE, provenance={**PROFILE.provenance, "num_threads": 3}),
        replace(PROFILE, steps=PROFILE.steps[:-1]),
        replace(PROFILE, steps=(replace(PROFILE.steps[0], p50_ns=101), *PROFILE.steps[1:])),
        replace(PROFILE, host=(*PROFILE.host, HostPoint(16, 1, 1, 1, 1))),
        replace(PROFILE, swaps=SWAPS),
    ],
)
def test_any_difference_changes_the_hash(other: Profile) -> None:
    assert other.sha256() != PROFILE.sha256()


def _set(*keys: Any, to: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = to

    return change


def _delete(*keys: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return change


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "a newer version": (_set("format_version", to=2), "format_version is 2; this version reads 1"),
    "no version": (_delete("format_version"), "format_version is None"),
    "no provenance": (_delete("provenance"), "the profile: provenance is missing"),
    "a provenance of another kind": (
        _set("provenance", to=[1]),
        r"provenance: expected an object, found \[1\]",
    ),
    "more than a profile has": (_set("extra", to=1), "the profile: extra is unknown"),
    "no steps": (_set("steps", to=[]), r"steps: expected a list of measurements, found \[\]"),
    "no host times": (_set("host", to=None), "host: expected a list of measurements, found None"),
    "a step without a time": (_delete("steps", 1, "p50_ns"), r"steps\[1\]: p50_ns is missing"),
    "a step with more": (_set("steps", 0, "mean_ns", to=1), r"steps\[0\]: mean_ns is unknown"),
    "a step of unknown kind": (_set("steps", 0, "kind", to="swap"), r"steps\[0\].kind: .*'swap'"),
    "a time with a fraction": (_set("steps", 0, "p50_ns", to=1.5), r"steps\[0\].p50_ns: .* found 1.5"),
    "a negative time": (_set("host", 1, "p20_ns", to=-1), r"host\[1\].p20_ns: .* found -1"),
    "a time that is true": (_set("host", 1, "p80_ns", to=True), r"host\[1\].p80_ns: .* found True"),
    "quantiles that fall": (_set("steps", 0, "p20_ns", to=101), r"steps\[0\]: .*\[101, 100, 120\]"),
    "never measured": (
        _set("steps", 0, "num_repeats", to=0),
        r"steps\[0\].num_repeats: .* at least 1, found 0",
    ),
    "a host without rows": (_set("host", 0, "num_rows", to=0), r"host\[0\].num_rows: .* at least 1"),
    "half a shape": (
        _delete("steps", 2, "shape", "num_decodes"),
        r"steps\[2\].shape: num_decodes is missing",
    ),
    "more than a shape has": (
        _set("steps", 2, "shape", "swaps", to=0),
        r"steps\[2\].shape: swaps is unknown",
    ),
    "a shape of words": (_set("steps", 2, "shape", to="big"), r"steps\[2\].shape: expected an object"),
    "a chunk of three": (
        _set("steps", 0, "shape", "chunks", to=[[1, 2, 3]]),
        r"steps\[0\].shape.chunks: expected pairs",
    ),
    "a chunk of nothing": (
        _set("steps", 0, "shape", "chunks", to=[[0, 2]]),
        r"steps\[0\].shape.chunks: .* found 0",
    ),
    "a row that is none": (_set("host", 0, to=3), r"host\[0\]: expected an object, found 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_this_version_does_not_read_is_refused_by_name(case: str, path: Path) -> None:
    change, message = REFUSED[case]
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ProfileError, match=rf"profile\.json: {message}"):
        Profile.load(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"7", b"\xff\xfe"])
def test_files_that_are_no_profile(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=r"profile\.json: "):
        Profile.load(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"nope\.json: cannot be read as a profile: .*No such file"):
        Profile.load(tmp_path / "nope.json")


def test_a_profile_that_cannot_be_written_leaves_the_old_one(path: Path) -> None:
    before = path.read_text()
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(PROFILE, provenance={"speed": float("nan")}).save(path)
    assert path.read_text() == before
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]
