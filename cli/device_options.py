"""What the policies run on: step times from a cost model, and the KV pool that fits beside the weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from pagedserve.cli.errors import refuse
from pagedserve.cli.flags import given
from pagedserve.cli.option_kinds import choice, microseconds
from pagedserve.cli.run_options import memory_share, pool_size
from pagedserve.simulator.devices import DEVICES, GIB, device, fit_num_blocks
from pagedserve.simulator.geometry import ModelGeometry, geometry

if TYPE_CHECKING:
    from pagedserve.simulator.cost import CostModel
    from pagedserve.simulator.devices import Device

PANEL = "Device and model"
CONSTANT_PANEL = "Constant step times (with --cost constant)"
DEFAULT_DEVICE, DEFAULT_MODEL, DEFAULT_UTILIZATION = "h200", "llama-3.1-8b", 0.92
COSTS = ("roofline", "measured", "constant")
TIMES = ("step_us", "prefill_token_us", "decode_us", "swap_block_us")


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
        choice(
            "Step times: from device peaks and model geometry, from a profile, or fixed numbers.",
            PANEL,
            *COSTS,
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
        memory_share(
            f"Memory for weights, workspace and KV blocks; the default is {DEFAULT_UTILIZATION}.", PANEL
        ),
    ] = None
    num_blocks: Annotated[
        int | None, pool_size("KV blocks in the pool, instead of what fits the memory.", PANEL)
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
        float | None, microseconds("Host time between schedule and launch of a step, in microseconds.", PANEL)
    ] = None
    host_gap_per_seq_us: Annotated[
        float | None, microseconds("More host time for every sequence of a step (roofline).", PANEL)
    ] = None
    step_us: Annotated[float | None, microseconds("Microseconds of every step.", CONSTANT_PANEL)] = None
    prefill_token_us: Annotated[
        float | None, microseconds("More for every prefill token.", CONSTANT_PANEL)
    ] = None
    decode_us: Annotated[float | None, microseconds("More for every decode.", CONSTANT_PANEL)] = None
    swap_block_us: Annotated[float | None, microseconds("More for every block swapped.", CONSTANT_PANEL)] = (
        None
    )

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
        per_block = _nanoseconds(self.swap_block_us)
        swapped = f", {per_block / 1e3:g} us a block swapped" if per_block else ""
        says = (
            f"step times: {step / 1e3:g} us a step, {per_prefill / 1e3:g} us a prefill token, "
            f"{per_decode / 1e3:g} us a decode{swapped}; host gap {host / 1e3:g} us: as given"
        )
        cost = ConstantCost(step, per_prefill, per_decode, host, per_block)
        return Setup(cost, self.num_blocks, (says, self._given_pool(block_size)), {"from": "num_blocks"})

    def _roofline(self, block_size: int, of: ModelGeometry | None) -> Setup:
        from pagedserve.simulator.roofline import CPU_PARAMETERS, GPU_PARAMETERS, RooflineCost

        self._refuse_given("these are the times of --cost constant, but the cost is roofline", TIMES)
        on, model = device(self.device or DEFAULT_DEVICE), of or geometry(self.model or DEFAULT_MODEL)
        parameters = CPU_PARAMETERS if on.kind == "cpu" else GPU_PARAMETERS
        gaps = {"host_step_ns": self.host_gap_us, "host_row_ns": self.host_gap_per_seq_us}
        for name, value_us in gaps.items():
            if value_us is not None:
                parameters = replace(parameters, **{name: _nanoseconds(value_us)})
        num_given = sum(gap is not None for gap in gaps.values())
        gap_us, row_us = parameters.host_step_ns / 1e3, parameters.host_row_ns / 1e3
        says = (
            f"step times: roofline of {model.name} on {on.title}; host gap {gap_us:g} us a step and "
            f"{row_us:g} us a sequence ({('assumed, not measured', 'partly assumed', 'as given')[num_given]})"
        )
        cost = RooflineCost(on, model, parameters, block_size)
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
        if found := given(self, names):
            refuse(f"{', '.join(found)}: {why}; leave it out")


def _pool(num_blocks: int, block_size: int) -> str:
    return f"KV pool: {num_blocks:,} blocks of {block_size} tokens ({num_blocks * block_size:,} tokens)"


def _nanoseconds(microseconds: float | None) -> int:
    return round((microseconds or 0.0) * 1e3)
