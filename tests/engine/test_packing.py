"""One buffer for many arrays, and results that are read behind an event; a GPU's part by stand-ins."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedserve.engine import packing
from pagedserve.engine.packing import ALIGNMENT, HostCopies, send

CPU, META = torch.device("cpu"), torch.device("meta")
DTYPES = (np.int64, np.int32, np.float32, np.float64)


def made(dtype: type, shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-(2**31), 2**31 - 1, shape).astype(dtype)


arrays = st.lists(
    st.builds(
        made,
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
        st.integers(0, 2**32),
    ),
    max_size=7,
)


@given(arrays)
def test_arrays_arrive_as_they_were(given_arrays: list[np.ndarray]) -> None:
    sent = send(given_arrays, CPU)
    for array, tensor in zip(given_arrays, sent, strict=True):
        assert tensor.shape == array.shape
        np.testing.assert_array_equal(tensor.numpy(), array, strict=True)
        assert tensor.data_ptr() % 8 == 0


@given(arrays)
def test_on_a_device_they_are_views_of_one_buffer_in_the_same_places(given_arrays: list[np.ndarray]) -> None:
    """The buffer is copied, as to a device, and taken apart there."""
    copies = []

    def copied(buffer: torch.Tensor, starts: list[int], parts: list[torch.Tensor]) -> list[torch.Tensor]:
        copies.append(buffer)
        return views(whole.clone(), starts, parts)

    views, host_buffer = packing._views, packing._host_buffer
    whole = torch.empty(0)

    def kept(num_bytes: int, device: torch.device) -> torch.Tensor:
        nonlocal whole
        whole = host_buffer(num_bytes, device)
        return whole

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_views", copied)
        patch.setattr(packing, "_host_buffer", kept)
        sent = send(given_arrays, META)
    assert len(copies) == 1
    assert copies[0].device == META
    for array, tensor in zip(given_arrays, sent, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array, strict=True)
        if array.size:
            assert (tensor.storage_offset() * tensor.element_size()) % ALIGNMENT == 0


def test_the_arrays_may_change_and_have_any_strides() -> None:
    wide = np.arange(12, dtype=np.int64).reshape(3, 4)
    column, transposed = wide[:, 1], wide.T
    sent = send([column, transposed, wide[::-1]], CPU)
    expected = [column.copy(), transposed.copy(), wide[::-1].copy()]
    wide[:] = -1
    for tensor, array in zip(sent, expected, strict=True):
        assert tensor.tolist() == array.tolist()


def test_a_dtype_that_torch_lacks_is_refused() -> None:
    with pytest.raises(TypeError):
        send([np.array(["a"])], CPU)


def test_on_a_cpu_results_are_there_already() -> None:
    copies, tensor = HostCopies(CPU), torch.arange(3)
    assert copies.take(tensor) is tensor
    copies.close()
    copies.wait()


class FakeEvent:
    """An event whose work is done when somebody waits for it, as late as a device may be."""

    def __init__(self, line: list[Callable[[], object]]) -> None:
        self.line, self.behind, self.waits = line, len(line), 0

    def synchronize(self) -> None:
        self.waits += 1
        for work in self.line[: self.behind]:
            work()


def test_on_a_gpu_only_what_was_asked_for_before_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    line: list[Callable[[], object]] = []

    class Late:
        """What is copied to without blocking: filled when the line gets there."""

        def __init__(self, like: torch.Tensor) -> None:
            self.value = torch.full_like(like, -1)

        def copy_(self, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
            assert non_blocking
            line.append(lambda: self.value.copy_(source))
            return self.value

    monkeypatch.setattr(packing, "_pinned_like", Late)
    monkeypatch.setattr(packing, "_record_event", lambda device: FakeEvent(line))
    device, done = torch.device("cuda"), []
    first = HostCopies(device)
    ids, peaks = first.take(torch.tensor([4, 5])), first.take(torch.tensor([0.5]))
    first.close()
    line.append(lambda: done.append("the next step"))
    assert ids.tolist() == [-1, -1], "nothing is read before it is waited for"
    first.wait()
    assert (ids.tolist(), peaks.tolist(), done) == ([4, 5], [0.5], [])
