"""Device table and memory planning."""

from dataclasses import replace

import pytest

from pagedserve.simulator.devices import DEVICES, GIB, MIB, device, fit_num_blocks
from pagedserve.simulator.geometry import geometry


@pytest.mark.parametrize(
    ("asked", "name", "tflops", "tb_per_s", "mib"),
    [
        ("h100", "h100-sxm", 989.5, 3.35, 81_559),
        ("H200 SXM", "h200-sxm", 989.5, 4.8, 143_771),
        ("A100_SXM_80GB", "a100-sxm-80gb", 312, 2.039, 81_920),
        ("L40S", "l40s", 362.05, 0.864, 46_068),
        ("cpu", "cpu-2core", 0.192, 0.0256, 16_384),
    ],
)
def test_device_table(asked: str, name: str, tflops: float, tb_per_s: float, mib: int) -> None:
    found = device(asked)
    assert found.name == name
    assert found.flops_per_s == pytest.approx(tflops * 1e12)
    assert found.bytes_per_s == pytest.approx(tb_per_s * 1e12)
    assert found.memory_bytes == mib * MIB


def test_every_number_has_a_source_that_says_datasheet_or_assumption() -> None:
    for entry in DEVICES.values():
        for source in (entry.flops_source, entry.bandwidth_source, entry.memory_source):
            assert "datasheet" in source or source.startswith("assumption"), (entry.name, source)


def test_unknown_device_lists_the_names() -> None:
    with pytest.raises(ValueError, match=r"'tpu'; known: h100-sxm, .*cpu-2core.*h200"):
        device("tpu")


def test_blocks_by_hand() -> None:
    # 100 GiB, half of it usable, 10 GiB weights, 8 GiB workspace: 32 GiB over 1 MiB a block.
    gpu = replace(device("h100"), memory_bytes=100 * GIB)
    model = replace(geometry("Llama-3.1-8B"), weight_element_bytes=10 * GIB / 8_030_261_248)
    assert model.weight_bytes == 10 * GIB
    assert model.kv_bytes_per_token * 8 == MIB
    assert fit_num_blocks(gpu, model, 8, memory_utilization=0.5, workspace_bytes=8 * GIB) == 32 * 1024
    assert (
        fit_num_blocks(gpu, model, 16, memory_utilization=0.5, workspace_bytes=8 * GIB + 1) == 16 * 1024 - 1
    )


@pytest.mark.parametrize(
    ("model", "published"),
    # vLLM 0.15.1 on one H100 SXM 80 GB, memory utilization 0.9, block size 16, 2,048 tokens a step:
    # inference-sim/training@ed5c1d2 and inference-sim/sim-to-real-accuracy-validation.
    [("Llama-2-7b", 7_463), ("Qwen2.5-7B", 65_352)],
)
def test_blocks_agree_with_published_vllm_runs(model: str, published: int) -> None:
    planned = fit_num_blocks(device("h100"), geometry(model), 16, memory_utilization=0.9)
    assert planned == pytest.approx(published, rel=0.015)


def test_a_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        ValueError, match=r"Llama-3\.1-70B does not fit on NVIDIA L40S.*131\.4\d GiB of weights"
    ):
        fit_num_blocks(device("l40s"), geometry("Llama-3.1-70B"))


@pytest.mark.parametrize(
    ("block_size", "utilization", "workspace"), [(0, 0.9, 0), (16, 0.0, 0), (16, 1.01, 0), (16, 0.9, -1)]
)
def test_bad_planning_arguments_are_refused(block_size: int, utilization: float, workspace: int) -> None:
    with pytest.raises(ValueError, match=r"block_size is|memory_utilization is"):
        fit_num_blocks(device("h100"), geometry("Llama-3.1-8B"), block_size, utilization, workspace)
