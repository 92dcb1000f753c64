"""What a roofline assumes beside device peaks and model geometry, each number with its source."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class RooflineParameters:
    """Fractions of peak that kernels reach, and times that no peak explains.

    Efficiencies lie in (0, 1]. ``kernel_overhead_ns`` is the start and end of one kernel, of which a layer
    has ``kernels_per_layer`` beside attention and a step ``kernels_per_step`` beside its layers;
    ``attention_overhead_ns`` is the floor of an attention kernel. Host time between schedule and launch is
    ``host_step_ns`` plus ``host_row_ns`` for every chunk and decode. Raises ValueError outside these ranges.
    """

    gemm_efficiency: float = 0.8
    attention_efficiency: float = 0.6
    bandwidth_efficiency: float = 0.8
    kernel_overhead_ns: int = 3_000
    attention_overhead_ns: int = 12_000
    kernels_per_layer: int = 9
    kernels_per_step: int = 4
    activation_element_bytes: float = 2.0
    host_step_ns: int = 500_000
    host_row_ns: int = 5_000
    host_link_efficiency: float = 0.8

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_efficiency"):
                if not 0 < value <= 1:
                    raise ValueError(f"{field.name} is {value}; a fraction of peak lies in (0, 1]")
            elif field.name == "activation_element_bytes":
                if not value > 0:
                    raise ValueError(f"{field.name} is {value}; it must be positive")
            elif not isinstance(value, int) or value < 0:
                raise ValueError(f"{field.name} is {value!r}; a whole number, at least 0, is needed")


_HOST_ASSUMPTION = (
    "assumption, not a measurement: a Python scheduler and input preparation take about half a millisecond "
    "a step and a few microseconds a sequence; replace it by a measured host gap before trusting TTFT"
)
# Read off kernels of an H200 and assumed for other GPUs.
GPU_PARAMETERS = RooflineParameters()
GPU_SOURCES = {
    "gemm_efficiency": "aiconfigurator-core gemm_perf, H200 bf16: 4096^3 in 168 us is 0.83 of peak",
    "attention_efficiency": "aiconfigurator-core context_attention_perf, H200: 0.59 at 8,192 tokens",
    "bandwidth_efficiency": "aiconfigurator-core system file of the H200: empirical bandwidth factor 0.8",
    "host_link_efficiency": "assumption: copies from and to page-locked memory reach about 0.8 of PCIe's raw rate",
    "kernel_overhead_ns": "aiconfigurator-core system file of the H200: 3 us beside the bandwidth time",
    "attention_overhead_ns": "aiconfigurator-core generation_attention_perf, H200: 11.7 us for 1 x 127",
    "kernels_per_layer": "count: 2 norms, 4 GEMMs, rotary, KV write, gated activation",
    "kernels_per_step": "count: embedding, final norm, LM head, sampling",
    "activation_element_bytes": "bf16",
    "host_step_ns": _HOST_ASSUMPTION,
    "host_row_ns": _HOST_ASSUMPTION,
}
CPU_PARAMETERS = RooflineParameters(
    gemm_efficiency=0.6,
    attention_efficiency=0.3,
    bandwidth_efficiency=0.7,
    host_link_efficiency=0.7,
    kernel_overhead_ns=10_000,
    attention_overhead_ns=30_000,
    activation_element_bytes=4.0,
)
CPU_SOURCES = {
    **dict.fromkeys(GPU_SOURCES, "assumption: order of magnitude of a tensor library on a small x86 machine"),
    "kernels_per_layer": GPU_SOURCES["kernels_per_layer"],
    "kernels_per_step": GPU_SOURCES["kernels_per_step"],
    "activation_element_bytes": "fp32",
    "host_step_ns": _HOST_ASSUMPTION,
    "host_row_ns": _HOST_ASSUMPTION,
}
