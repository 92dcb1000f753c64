"""What the policies run on: step times from a cost model, and the KV pool that fits beside the weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from pagedserve.cli.errors import refuse
from pagedserve.cli.values import one_of, real, whole
from pagedserve.simulator.devices import DEVICES, GIB, device, fit_num_blocks
from pagedserve.simulator.geometry import ModelGeometry, geometry

if TYPE_CHECKING:
    from pagedserve.simulator.cost import CostModel
    from pagedserve.simulator.devices import Device

PANEL = "Device and model"
CONSTANT_PANEL = "Constant step times (with --cost constant)"
DEFAULT_DEVICE, DEFAULT_MODEL, DEFAULT_UTILIZATION = "h200", "llama-3.1-8b", 0.92
TIME_US = real(0, high=3_600e6)
TIMES = ("step_us", "prefill_token_us", "decode_us")


@dataclass(frozen=True, slots=True)
class Setup:
    """A cost model, the number of KV blocks, and lines that say where both come from."""

    cost: CostModel
    num_blocks: int
    lines: tuple[str, ...]
    pool: dict[str, Any]


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """Step times and memory; None: not given."""

    cost: Annotated[
        str,
        Option(
            parser=one_of("roofline", "measured", "constant"),
            metavar="roofline|measured|constant",
            help="Step times: from device peaks and model geometry, from a profile, or fixed numbers.",
            rich_help_panel=PANEL,
        ),
    ] = "roofline"
    device: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help=f"One of {', '.join(DEVICES)}; the default is {DEFAULT_DEVICE}.",
            rich_help_panel=PANEL,
        ),
    ] = None
    model: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help=f"A model's name, hub id, or config.json; the default is {DEFAULT_MODEL}.",
            rich_help_panel=PANEL,
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        Option(
            parser=real(0, above=True, high=1),
            metavar="SHARE",
            help=f"Memory for weights, workspace and KV blocks; the default is {DEFAULT_UTILIZATION}.",
            rich_help_panel=PANEL,
        ),
    ] = None
    num_blocks: Annotated[
        int | None,
        Option(
            "--num-blocks",
            "--num-gpu-blocks-override",
            parser=whole(1),
            metavar="N",
            help="KV blocks in the pool, instead of what fits the memory.",
            rich_help_panel=PANEL,
        ),
    ] = None
    profile: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="What 'pagedserve profile' wrote; its device and model are simulated (implies --cost measured).",
            rich_help_panel=PANEL,
        ),
    ] = None
    host_gap_us: Annotated[
        float | None,
        Option(
            parser=TIME_US,
            metavar="US",
            help="Host time between schedule and launch of a step, in microseconds.",
            rich_help_panel=PANEL,
        ),
    ] = None
    host_gap_per_seq_us: Annotated[
        float | None,
        Option(
            parser=TIME_US,
            metavar="US",
            help="More host time for every sequence of a step (roofline).",
            rich_help_panel=PANEL,
        ),
    ] = None
    step_us: Annotated[
        float | None,
        Option(
            parser=TIME_US, metavar="US", help="Microseconds of every step.", rich_help_panel=CONSTANT_PANEL
        ),
    ] = None
    prefill_token_us: Annotated[
        float | None,
        Option(
            parser=TIME_US, metavar="US", help="More for every prefill token.", rich_help_panel=CONSTANT_PANEL
        ),
    ] = None
    decode_us: Annotated[
        float | None,
        Option(parser=TIME_US, metavar="US", help="More for every decode.", rich_help_panel=CONSTANT_PANEL),
    ] = None

    def decide(self, block_size: int, of: ModelGeometry | None = None) -> Setup:
        """The cost model and the pool. ``of``: a geometry that is known already, instead of --model's.

        ValueError says which number or name is wrong.
        """
        if self.num_blocks is not None and self.gpu_memory_utilization is not None:
            refuse("--num-blocks and --gpu-memory-utilization both size the KV pool; give one of them")
        if self.profile is not None or self.cost == "measured":
            return self._measured(block_size)
        return self._constant(block_size) if self.cost == "constant" else self._roofline(block_size, of)

    def _measured(self, block_size: int) -> Setup:
        from pagedserve.metrics.profile import Profile
        from pagedserve.simulator.measured import MeasuredCost

        if self.profile is None:
            refuse("--cost measured needs --profile FILE; 'pagedserve profile' writes one")
        if self.cost == "constant":
            refuse("--cost constant and --profile both give step times; give one of them")
        self._refuse_given(
            "a profile brings its own device, model and times",
            ("device", "model", "gpu_memory_utilization", "host_gap_us", "host_gap_per_seq_us", *TIMES),
        )
        profile = Profile.load(self.profile)
        own = profile.provenance
        says = (
            f"step times: measured, {own.get('model')} in {own.get('dtype')} on {own.get('device_name')} "
            f"({own.get('date')}, sha256 {profile.sha256()[:12]}…)"
        )
        cost = MeasuredCost(profile)
        if self.num_blocks is not None:
            return Setup(cost, self.num_blocks, (says, self._given_pool(block_size)), {"from": "num_blocks"})
        measured = own.get("limits", {})
        if "num_blocks" not in measured or "block_size" not in measured:
            refuse(f"{self.profile}: does not say how large its KV pool was; give --num-blocks")
        num_blocks = max(1, measured["num_blocks"] * measured["block_size"] // block_size)
        pool_says = f"{_pool(num_blocks, block_size)}: as when the profile was measured"
        return Setup(cost, num_blocks, (says, pool_says), {"from": "profile"})

    def _constant(self, block_size: int) -> Setup:
        from pagedserve.simulator.constant import ConstantCost

        self._refuse_given(
            "fixed step times (--cost constant) know no device and no model",
            ("device", "model", "gpu_memory_utilization", "host_gap_per_seq_us"),
        )
        if self.step_us is None or self.num_blocks is None:
            refuse("--cost constant needs --step-us, the time of a step, and --num-blocks, the KV pool")
        step, per_prefill = _nanoseconds(self.step_us), _nanoseconds(self.prefill_token_us)
        per_decode, host = _nanoseconds(self.decode_us), _nanoseconds(self.host_gap_us)
        says = (
            f"step times: {step / 1e3:g} us a step, {per_prefill / 1e3:g} us a prefill token, "
            f"{per_decode / 1e3:g} us a decode; host gap {host / 1e3:g} us: as given"
        )
        cost = ConstantCost(step, per_prefill, per_decode, host)
        return Setup(cost, self.num_blocks, (says, self._given_pool(block_size)), {"from": "num_blocks"})

    def _roofline(self, block_size: int, of: ModelGeometry | None) -> Setup:
        from pagedserve.simulator.roofline import CPU_PARAMETERS, GPU_PARAMETERS, RooflineCost

        self._refuse_given("these are the times of --cost constant, but the cost is roofline", TIMES)
        on, model = device(self.device or DEFAULT_DEVICE), of or geometry(self.model or DEFAULT_MODEL)
        parameters = CPU_PARAMETERS if on.kind == "cpu" else GPU_PARAMETERS
        gaps = {"host_step_ns": self.host_gap_us, "host_row_ns": self.host_gap_per_seq_us}
        for name, microseconds in gaps.items():
            if microseconds is not None:
                parameters = replace(parameters, **{name: _nanoseconds(microseconds)})
        given = sum(gap is not None for gap in gaps.values())
        gap_us, row_us = parameters.host_step_ns / 1e3, parameters.host_row_ns / 1e3
        says = (
            f"step times: roofline of {model.name} on {on.title}; host gap {gap_us:g} us a step and "
            f"{row_us:g} us a sequence ({('assumed, not measured', 'partly assumed', 'as given')[given]})"
        )
        cost = RooflineCost(on, model, parameters)
        if self.num_blocks is not None:
            return Setup(cost, self.num_blocks, (says, self._given_pool(block_size)), {"from": "num_blocks"})
        num_blocks, pool_says, pool = self._fitted_pool(on, model, block_size)
        return Setup(cost, num_blocks, (says, pool_says), pool)

    def _fitted_pool(
        self, on: Device, model: ModelGeometry, block_size: int
    ) -> tuple[int, str, dict[str, Any]]:
        share = DEFAULT_UTILIZATION if self.gpu_memory_utilization is None else self.gpu_memory_utilization
        num_blocks = fit_num_blocks(on, model, block_size, share)
        says = (
            f"{_pool(num_blocks, block_size)}: what fits {share:g} of {on.memory_bytes / GIB:.2f} GiB beside "
            f"{model.weight_bytes / GIB:.2f} GiB of weights and 1 GiB of workspace "
            f"({model.kv_bytes_per_token / 1024:g} KiB a token)"
        )
        pool = {
            "from": "gpu_memory_utilization",
            "gpu_memory_utilization": share,
            "memory_bytes": on.memory_bytes,
            "weight_bytes": model.weight_bytes,
            "kv_bytes_per_token": model.kv_bytes_per_token,
        }
        return num_blocks, says, pool

    def _given_pool(self, block_size: int) -> str:
        assert self.num_blocks is not None
        return f"{_pool(self.num_blocks, block_size)}: as given"

    def _refuse_given(self, why: str, names: tuple[str, ...]) -> None:
        given = ["--" + name.replace("_", "-") for name in names if getattr(self, name) is not None]
        if given:
            refuse(f"{', '.join(given)}: {why}; leave it out")


def _pool(num_blocks: int, block_size: int) -> str:
    return f"KV pool: {num_blocks:,} blocks of {block_size} tokens ({num_blocks * block_size:,} tokens)"


def _nanoseconds(microseconds: float | None) -> int:
    return round((microseconds or 0.0) * 1e3)
