"""Devices as a roofline sees them: dense peak arithmetic, memory bandwidth, memory, each with its source."""

from dataclasses import dataclass
from typing import Literal

from pagedserve.simulator.geometry import ModelGeometry

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator or CPU.

    ``flops_per_s`` is the dense peak in the precision a model runs in there (bf16 or fp16 with fp32
    accumulation on GPUs, fp32 on the CPU), one multiply-add counting two. ``memory_bytes`` is what the
    driver or system offers to a process, which is what KV planning divides; ``host_bytes_per_s`` what its
    link to host memory carries in each direction.
    """

    name: str
    title: str
    kind: Literal["gpu", "cpu"]
    flops_per_s: float
    flops_source: str
    bytes_per_s: float
    bandwidth_source: str
    memory_bytes: int
    memory_source: str
    host_bytes_per_s: float
    host_link_source: str


DEVICES = {
    entry.name: entry
    for entry in (
        Device(
            name="h100-sxm",
            title="NVIDIA H100 SXM5 80 GB",
            kind="gpu",
            flops_per_s=989.5e12,
            flops_source="NVIDIA H100 Tensor Core GPU datasheet: BF16 1,979 TFLOPS sparse, half dense",
            bytes_per_s=3.35e12,
            bandwidth_source="NVIDIA H100 Tensor Core GPU datasheet: 3.35 TB/s",
            memory_bytes=81_559 * MIB,
            memory_source="NVIDIA H100 Tensor Core GPU datasheet: 80 GB; nvidia-smi reports 81,559 MiB",
            host_bytes_per_s=64e9,
            host_link_source="NVIDIA H100 Tensor Core GPU datasheet: PCIe Gen5 128 GB/s, half of it each way",
        ),
        Device(
            name="h200-sxm",
            title="NVIDIA H200 SXM 141 GB",
            kind="gpu",
            flops_per_s=989.5e12,
            flops_source="NVIDIA H200 Tensor Core GPU datasheet: BF16 1,979 TFLOPS sparse, half dense",
            bytes_per_s=4.8e12,
            bandwidth_source="NVIDIA H200 Tensor Core GPU datasheet: 4.8 TB/s",
            memory_bytes=143_771 * MIB,
            memory_source="NVIDIA H200 Tensor Core GPU datasheet: 141 GB; nvidia-smi reports 143,771 MiB",
            host_bytes_per_s=64e9,
            host_link_source="NVIDIA H200 Tensor Core GPU datasheet: PCIe Gen5 128 GB/s, half of it each way",
        ),
        Device(
            name="gh200-96gb",
            title="NVIDIA GH200 96 GB",
            kind="gpu",
            flops_per_s=989.5e12,
            flops_source="NVIDIA GH200 Grace Hopper Superchip datasheet: BF16 1,979 TFLOPS sparse, half dense",
            bytes_per_s=4e12,
            bandwidth_source="NVIDIA GH200 Grace Hopper Superchip datasheet: HBM3 up to 4 TB/s",
            memory_bytes=97_871 * MIB,
            memory_source="NVIDIA GH200 Grace Hopper Superchip datasheet: 96 GB; the MiB a driver offers: unchecked",
            host_bytes_per_s=450e9,
            host_link_source="NVIDIA GH200 Grace Hopper Superchip datasheet: NVLink-C2C 900 GB/s, half each way",
        ),
        Device(
            name="a100-sxm-80gb",
            title="NVIDIA A100 SXM4 80 GB",
            kind="gpu",
            flops_per_s=312e12,
            flops_source="NVIDIA A100 Tensor Core GPU datasheet: BF16 312 TFLOPS dense",
            bytes_per_s=2.039e12,
            bandwidth_source="NVIDIA A100 Tensor Core GPU datasheet: 2,039 GB/s (80 GB SXM)",
            memory_bytes=81_920 * MIB,
            memory_source="NVIDIA A100 Tensor Core GPU datasheet: 80 GB; nvidia-smi reports 81,920 MiB",
            host_bytes_per_s=32e9,
            host_link_source="NVIDIA A100 Tensor Core GPU datasheet: PCIe Gen4 64 GB/s, half of it each way",
        ),
        Device(
            name="l40s",
            title="NVIDIA L40S 48 GB",
            kind="gpu",
            flops_per_s=362.05e12,
            flops_source="NVIDIA L40S datasheet: BF16 362.05 TFLOPS dense (733 with sparsity)",
            bytes_per_s=864e9,
            bandwidth_source="NVIDIA L40S datasheet: 864 GB/s",
            memory_bytes=46_068 * MIB,
            memory_source="NVIDIA L40S datasheet: 48 GB, 1/16 of it for ECC; nvidia-smi reports 46,068 MiB",
            host_bytes_per_s=32e9,
            host_link_source="NVIDIA L40S datasheet: PCIe Gen4 x16 64 GB/s bidirectional, half of it each way",
        ),
        Device(
            name="cpu-2core",
            title="two x86 cores with AVX2",
            kind="cpu",
            flops_per_s=192e9,
            flops_source=(
                "assumption: 2 cores at 3.0 GHz, each 2 FMA units x 8 fp32 lanes x 2 FLOP a cycle "
                "(Intel 64 and IA-32 Architectures Optimization Reference Manual, Haswell and later)"
            ),
            bytes_per_s=25.6e9,
            bandwidth_source="assumption: one channel of DDR4-3200, 8 bytes x 3,200 MT/s (JEDEC JESD79-4)",
            memory_bytes=16 * GIB,
            memory_source="assumption: 16 GiB",
            host_bytes_per_s=12.8e9,
            host_link_source="assumption: a copy within memory reads and writes every byte, at half the bandwidth",
        ),
    )
}

_SHORT_NAMES = {
    "h100": "h100-sxm",
    "h200": "h200-sxm",
    "gh200": "gh200-96gb",
    "a100": "a100-sxm-80gb",
    "cpu": "cpu-2core",
}


def device(name: str) -> Device:
    """The device of that name, in any case: ``h100-sxm`` or short ``h100``. ValueError lists the names."""
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    found = DEVICES.get(_SHORT_NAMES.get(key, key))
    if found is None:
        known = ", ".join((*DEVICES, *_SHORT_NAMES))
        raise ValueError(f"unknown device {name!r}; known: {known}; or make your own Device(...)")
    return found


def fit_num_blocks(
    device: Device,
    geometry: ModelGeometry,
    block_size: int = 16,
    memory_utilization: float = 0.92,
    workspace_bytes: int = GIB,
) -> int:
    """KV blocks of ``block_size`` tokens that fit beside the weights on one device.

    ``memory_utilization`` of the memory may be used (0.92 is vLLM's default); weights and
    ``workspace_bytes`` (activations, library workspaces) come off it, the rest is blocks. The 1 GiB is
    between what published vLLM block counts on an H100 imply: 0.8 GiB (Llama-2-7B) and 1.7 GiB (Qwen2.5-7B),
    both at 2,048 tokens a step. Raises ValueError if not one block fits, with the bytes.
    """
    if not 0 < memory_utilization <= 1:
        raise ValueError(f"memory_utilization is {memory_utilization}; it must lie in (0, 1]")
    if block_size < 1 or workspace_bytes < 0:
        raise ValueError(
            f"block_size is {block_size} and workspace_bytes {workspace_bytes}; at least 1 and 0 are needed"
        )
    usable = int(device.memory_bytes * memory_utilization)
    block_bytes = block_size * geometry.kv_bytes_per_token
    left = usable - geometry.weight_bytes - workspace_bytes
    if left < block_bytes:
        raise ValueError(
            f"{geometry.name} does not fit on {device.title}: {memory_utilization:g} of "
            f"{device.memory_bytes / GIB:.2f} GiB, less {geometry.weight_bytes / GIB:.2f} GiB of weights and "
            f"{workspace_bytes / GIB:.2f} GiB of workspace, leaves {left / GIB:.2f} GiB, and a block of "
            f"{block_size} tokens takes {block_bytes / GIB:.4f} GiB; use a larger device, a smaller model or "
            "fewer bytes per weight"
        )
    return left // block_bytes
