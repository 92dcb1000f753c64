"""The metrics as Prometheus reads them: vLLM's names and meanings, and ours under ``pagedserve:``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

import pagedserve
from pagedserve.engine.server.backend import BackendStats
from pagedserve.engine.server.front import FrontEnd
from pagedserve.engine.server.histograms import HistogramState
from pagedserve.engine.server.tenants import TenantLabelsState

Number = int | float


def registry_of(front: FrontEnd) -> CollectorRegistry:
    """A registry of its own for one server: its metrics, and the process's."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_ServerCollector(front))
    ProcessCollector(registry=registry)
    return registry


class _ServerCollector(Collector):
    """Reads everything when asked; nothing is kept here."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front
        self._tenants = TenantLabelsState()
        facts = front.backend.facts
        self._labels = {"model_name": front.settings.model_names[0], "engine": "0", "policy": facts.policy}

    def describe(self) -> list[Metric]:
        """Nothing in advance."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics, as of now."""
        stats = self._front.backend.stats()
        yield from self._gauges(stats)
        yield from self._labelled_gauges(stats)
        yield from self._engine_counters(stats)
        yield from self._engine_histograms(stats)
        yield from self._front_metrics()
        yield from self._facts()

    def _gauges(self, stats: BackendStats) -> Iterator[Metric]:
        limits, admission = self._front.backend.facts.limits, self._front.admission
        share = stats.num_used_blocks / limits.num_blocks
        gauges: dict[str, tuple[Number, str]] = {
            "vllm:num_requests_running": (stats.num_running, "Sequences that hold KV blocks."),
            "vllm:num_requests_waiting": (stats.num_waiting, "Sequences that wait in the engine."),
            "vllm:kv_cache_usage_perc": (share, "Used share of the KV blocks, 0 to 1; cached ones excluded."),
            "pagedserve:kv_blocks_used": (stats.num_used_blocks, "KV blocks that belong to sequences."),
            "pagedserve:kv_blocks_cached": (stats.num_cached_blocks, "Free KV blocks that may be hit."),
            "pagedserve:kv_blocks_free": (stats.num_free_blocks, "Free KV blocks without content."),
            "pagedserve:requests_swapped": (
                stats.num_swapped,
                "Of the waiting, those with KV in host memory.",
            ),
            "pagedserve:cpu_kv_blocks_used": (
                stats.num_used_cpu_blocks,
                "Blocks of host memory that hold KV of preempted sequences.",
            ),
            "pagedserve:kv_wasted_slots": (stats.num_wasted_slots, "Slots of used blocks without a token."),
            "pagedserve:queued_requests": (
                admission.num_reqs,
                "Sequences accepted and without a first token, which max_num_queued_reqs bounds.",
            ),
            "pagedserve:queued_tokens": (
                admission.num_tokens,
                "Their prompt tokens, which max_num_queued_tokens bounds.",
            ),
            "pagedserve:requests_open": (self._front.counts.num_open, "Prompts accepted and not ended."),
        }
        for name, (value, text) in gauges.items():
            yield self._one(GaugeMetricFamily, name, text, value)

    def _labelled_gauges(self, stats: BackendStats) -> Iterator[Metric]:
        running, waiting = self._tenants.fold(stats.running, stats.waiting)
        for name, counts in (("running", running), ("waiting", waiting)):
            text = f"Sequences {name}, by tenant; those beyond the first few tenants together."
            yield self._gauge_by(f"pagedserve:requests_{name}_by_tenant", text, "tenant", counts)
        # What is deferred in vLLM waits for something remote; nothing here waits for anything but room.
        reasons = {"capacity": stats.num_waiting, "deferred": 0}
        text = "Sequences that wait in the engine, by reason."
        yield self._gauge_by("vllm:num_requests_waiting_by_reason", text, "reason", reasons)

    def _engine_counters(self, stats: BackendStats) -> Iterator[Metric]:
        counts = stats.counts
        counters: dict[str, tuple[Number, str]] = {
            "vllm:num_preemptions": (counts.num_preemptions, "Preemptions."),
            "vllm:prompt_tokens": (counts.num_prompt_tokens, "Prompt tokens of sequences that have a token."),
            "vllm:prompt_tokens_cached": (counts.num_cached_prompt_tokens, "Of those, found in the cache."),
            "vllm:generation_tokens": (counts.num_generated_tokens, "Tokens generated."),
            "vllm:prefix_cache_queries": (counts.num_prefix_queried_tokens, "Tokens looked up in the cache."),
            "vllm:prefix_cache_hits": (counts.num_prefix_hit_tokens, "Tokens found there."),
            "pagedserve:recomputed_tokens": (
                counts.num_recomputed_tokens,
                "Computed again after preemption.",
            ),
            "pagedserve:kv_blocks_swapped_out": (
                counts.num_blocks_swapped_out,
                "KV blocks copied to host memory at preemptions.",
            ),
            "pagedserve:kv_blocks_swapped_in": (
                counts.num_blocks_swapped_in,
                "KV blocks copied back from host memory.",
            ),
            "pagedserve:discarded_tokens": (
                counts.num_discarded_tokens,
                "Computed after their request's end.",
            ),
            "pagedserve:device_busy_seconds": (counts.device.busy_s, "Time with a step in flight."),
            "pagedserve:engine_steps": (counts.num_steps, "Steps scheduled."),
            "pagedserve:engine_refusals": (counts.num_refused, "Sequences that the scheduler refused."),
        }
        for name, (value, text) in counters.items():
            yield self._one(CounterMetricFamily, name, text, value)
        sources = {
            "local_compute": counts.num_computed_prompt_tokens,
            "local_cache_hit": counts.num_cached_prompt_tokens,
        }
        yield self._by_label("vllm:prompt_tokens_by_source", "Prompt tokens, by source.", "source", sources)
        yield self._by_label(
            "pagedserve:sequences_finished", "Sequences ended.", "finished_reason", dict(counts.finished)
        )

    def _engine_histograms(self, stats: BackendStats) -> Iterator[Metric]:
        counts = stats.counts
        yield self._histogram(
            "vllm:inter_token_latency_seconds", "Between a sequence's tokens, in the engine.", counts.itl
        )
        yield self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token behind the first.", counts.tpot
        )
        for name, histogram, text in (
            ("queue", counts.queue, "First scheduled - handed to the engine."),
            ("prefill", counts.prefill, "First token - first scheduled."),
            ("decode", counts.decode, "Last - first token."),
            ("inference", counts.inference, "Last token - first scheduled."),
        ):
            yield self._histogram(f"vllm:request_{name}_time_seconds", text, histogram)
        yield self._histogram(
            "vllm:request_prefill_kv_computed_tokens",
            "Prompt tokens of a sequence that were not in the prefix cache.",
            counts.prefill_computed,
        )
        yield self._histogram(
            "pagedserve:host_gap_seconds",
            "From a step's commit, or a request's coming, to the next launch: no step in flight, and work there.",
            counts.device.gap,
        )
        yield self._histogram("vllm:iteration_tokens_total", "Tokens of a step.", counts.iteration_tokens)
        yield self._histogram(
            "vllm:request_num_preemptions", "Preemptions of a sequence.", counts.preemptions
        )

    def _front_metrics(self) -> Iterator[Metric]:
        counts = self._front.counts
        for name, histogram, text in (
            ("time_to_first_token_seconds", counts.ttft, "First token - arrival of the request here."),
            ("e2e_request_latency_seconds", counts.e2e, "Last token - arrival of the request here."),
            ("request_prompt_tokens", counts.prompt_tokens, "Prompt tokens."),
            ("request_generation_tokens", counts.generation_tokens, "Tokens of all samples of a prompt."),
            ("request_max_num_generation_tokens", counts.max_generation_tokens, "Of its longest sample."),
            ("request_params_max_tokens", counts.params_max_tokens, "max_tokens asked for, or the room."),
            ("request_params_n", counts.params_n, "n asked for."),
        ):
            yield self._histogram(f"vllm:{name}", text, histogram)
        ended = dict(counts.ended)
        yield self._by_label(
            "vllm:request_success", "Prompts accepted that ended, by reason.", "finished_reason", ended
        )
        yield self._one(
            CounterMetricFamily, "pagedserve:requests_accepted", "Prompts accepted.", counts.num_accepted
        )
        rejections = dict(self._front.admission.rejections)
        yield self._by_label(
            "vllm:admission_rejections", "Requests refused for want of room.", "reason", rejections
        )
        names = [*self._labels, "path", "status"]
        family = CounterMetricFamily("pagedserve:http_responses", "Answers.", labels=names)
        for (path, status), count in dict(counts.responses).items():
            family.add_metric([*self._labels.values(), path, str(status)], count)
        yield family

    def _facts(self) -> Iterator[Metric]:
        facts = self._front.backend.facts
        config = {
            "block_size": str(facts.limits.block_size),
            "num_gpu_blocks": str(facts.limits.num_blocks),
            "num_cpu_blocks": str(facts.limits.num_cpu_blocks),
            "enable_prefix_caching": str(facts.caches_prefixes),
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "The KV pool.", labels=[*self._labels, *config])
        family.add_metric([*self._labels.values(), *config.values()], 1)
        yield family
        build = GaugeMetricFamily("pagedserve:build_info", "This server.", labels=["version"])
        build.add_metric([pagedserve.__version__], 1)
        yield build

    def _one(
        self, kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, value: Number
    ) -> Metric:
        family = kind(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _gauge_by(self, name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=[*self._labels, label])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), key], value)
        return family

    def _by_label(self, name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=[*self._labels, label])
        for key, count in values.items():
            family.add_metric([*self._labels.values(), key], count)
        return family

    def _histogram(self, name: str, text: str, histogram: HistogramState) -> Metric:
        family = HistogramMetricFamily(name, text, labels=list(self._labels))
        buckets = [(floatToGoString(bound), count) for bound, count in histogram.cumulative()]
        family.add_metric(list(self._labels.values()), buckets, histogram.total)
        return family
