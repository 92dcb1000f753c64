"""``pagedserve replay``: a trace sent to a live engine, here or behind a URL, and recorded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from pagedserve.cli.engine_options import EngineOptions, EnginePolicyOptions, tell
from pagedserve.cli.errors import as_bad_input, refuse
from pagedserve.cli.flags import given
from pagedserve.cli.option_kinds import count, seconds, switch
from pagedserve.cli.output_options import ResultOptions, out_folder
from pagedserve.cli.policy_options import described
from pagedserve.cli.run_options import declared_limit
from pagedserve.cli.screen import Screen, endings, refusals
from pagedserve.cli.simulate import SavingOptions, traffic_line
from pagedserve.cli.synthetic_options import SyntheticOptions
from pagedserve.cli.trace_options import PANEL as TRACE_PANEL
from pagedserve.cli.trace_options import TraceOptions, prompts_seed, trace_source

if TYPE_CHECKING:
    from pagedserve.metrics.record import RunRecord
    from pagedserve.traces.trace import Trace

HELP = """Send a trace to a live engine at its own times (open loop), and record what came of it.

With --url the requests go to an OpenAI-compatible server, vLLM for one; the record then has what a client
can see. Prompts are token ids made from the trace: equal prefixes where it says so.

\b
Examples:
  pagedserve replay --model smollm2-135m --trace sample:azure_shaped_500 --first 50 \\
      --length-scale 0.1 --rate 2 --policy mixed --out runs
  pagedserve replay --url http://127.0.0.1:8000 --model my-model --trace conv.csv --rate 4 --out runs/vllm
  pagedserve report runs
"""
URL_PANEL = "A server elsewhere"
DEFAULT_VOCAB = 30_000
NOTABLE_STALL_NS = 5_000_000


@dataclass(frozen=True, slots=True)
class UrlOptions:
    """A server to send to, instead of an engine in this process."""

    url: Annotated[
        str | None,
        Option(
            metavar="URL",
            help="Where it listens, such as http://127.0.0.1:8000; --model is then its name there.",
            rich_help_panel=URL_PANEL,
        ),
    ] = None
    api_key: Annotated[
        str | None,
        Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.", rich_help_panel=URL_PANEL),
    ] = None
    timeout: Annotated[float | None, seconds("Give a request up after so many seconds.", URL_PANEL)] = None
    vocab_size: Annotated[
        int | None, count(f"Token ids from 0 to N - 1 are sent; the default is {DEFAULT_VOCAB:,}.", URL_PANEL)
    ] = None
    no_extensions: Annotated[
        bool,
        switch(
            "--no-extensions",
            "Send no ignore_eos and min_tokens, which not every server knows; outputs may then be shorter.",
            URL_PANEL,
        ),
    ] = False

    def refuse_without_url(self) -> None:
        """Refuse what is about a server when there is none; a key may lie in the environment."""
        for flag in given(self, ("timeout", "vocab_size", "no_extensions")):
            refuse(f"{flag} is about a server elsewhere; give --url as well")

    def refuse_engine_options(self, *groups: Any) -> None:
        """Refuse what is about an engine here, which a server elsewhere never hears of."""
        for group in groups:
            for flag in given(group):
                refuse(
                    f"{flag} is about an engine in this process, and with --url the server decides; leave it out"
                )


@dataclass(frozen=True, slots=True)
class ReplaySaving:
    """Where the record goes."""

    out: Annotated[
        Path | None,
        out_folder("Save the record in DIR, in a folder named as its policy ('client' with --url)."),
    ] = None


def replay(
    source: Annotated[str, trace_source()],
    engine_options: EngineOptions,
    trace_options: TraceOptions,
    synthetic: SyntheticOptions,
    policy_options: EnginePolicyOptions,
    url_options: UrlOptions,
    saving: ReplaySaving,
    results: ResultOptions,
    max_tokens: Annotated[int | None, declared_limit(TRACE_PANEL)] = None,
    prompt_seed: Annotated[
        int, prompts_seed(TRACE_PANEL, "; give another to repeat against a server that caches prefixes")
    ] = 0,
) -> None:
    """The command; see ``HELP``."""
    from pagedserve.metrics.summary import summarize

    results.check(writes_more=saving.out is not None)
    with as_bad_input():
        if url_options.url is None:
            url_options.refuse_without_url()
            engine_options.check()
            label, _ = policy_options.chosen()
        else:
            url_options.refuse_engine_options(engine_options, policy_options)
            if max_tokens is not None:
                refuse("--max-tokens: with --url every request asks for its true length; leave it out")
            label = "client"
        folders = SavingOptions(saving.out).folders([label], results.overwrite)
        trace = trace_options.load(source, synthetic)
    screen = Screen(results.is_quiet)
    screen.lines([*trace.report.lines(), traffic_line(trace)])
    if url_options.url is None:
        record = _here(trace, engine_options, policy_options, max_tokens, prompt_seed, screen)
    else:
        record = _elsewhere(trace, url_options, engine_options.model, prompt_seed, screen)
    summary = summarize(record)
    if folders:
        with as_bad_input():
            record.save(folders[label], overwrite=results.overwrite)
        screen.lines([f"record saved in {folders[label]}"])
    screen.lines([*endings(label, record, summary), _lateness(record)])
    screen.table({label: summary})
    results.write(
        {
            "metrics": summary.as_dict(),
            "refusals": refusals(record),
            "header": record.header,
            "record": str(folders[label]) if folders else None,
        }
    )


def _here(
    trace: Trace,
    engine_options: EngineOptions,
    policy_options: EnginePolicyOptions,
    max_tokens: int | None,
    seed: int,
    screen: Screen,
) -> RunRecord:
    """On an engine in this process."""
    from pagedserve.validation.planning import Setting
    from pagedserve.validation.runnable import check_runnable
    from pagedserve.validation.validate import LiveBench

    label, spec = policy_options.chosen()
    with as_bad_input():
        tell([f"loading {engine_options.model}"], screen.is_quiet)
        llm = engine_options.start(
            spec, policy_options.overlap_depth, host=policy_options.host, is_quiet=screen.is_quiet
        )
    try:
        screen.lines([*llm.decisions, f"policy {label}: {described(spec)}"])
        limits = llm.engine.limits
        with as_bad_input():
            check_runnable(trace, limits, max_tokens)
        bench = LiveBench(llm.engine)
        bench.warm_up()
        setting = Setting(spec, limits, policy_options.overlap_depth, max_tokens)
        with screen.progress("replaying") as progress:
            return bench.replay(trace, setting, seed=seed, progress=progress)
    finally:
        llm.close()


def _elsewhere(trace: Trace, options: UrlOptions, model: str, seed: int, screen: Screen) -> RunRecord:
    """On a server behind a URL."""
    from pagedserve.validation.http_client import ServerError
    from pagedserve.validation.http_replay import replay_url
    from pagedserve.validation.prompts import TracePrompts

    assert options.url is not None
    prompts = TracePrompts(trace, options.vocab_size or DEFAULT_VOCAB, seed)
    try:
        with screen.progress("replaying") as progress:
            record = replay_url(
                trace,
                options.url,
                prompts=prompts,
                model=model,
                api_key=options.api_key,
                timeout_s=options.timeout,
                extensions=not options.no_extensions,
                progress=progress,
            )
            record.header["trace"]["prompt_seed"] = seed
            return record
    except ServerError as error:
        refuse(str(error))


def _lateness(record: RunRecord) -> str:
    from pagedserve.validation.send_lag import SendLag

    lag = SendLag.of(record)
    says = f"requests were sent at most {lag.max_s * 1e3:,.1f} ms late (median {lag.p50_s * 1e3:,.1f} ms)"
    stall_ns = record.header["counters"].get("client_stall_p50_ns", 0)
    if stall_ns > NOTABLE_STALL_NS:
        says += (
            f"; this client itself was busy for {stall_ns / 1e6:,.1f} ms at the median: its times say more of "
            "the client than of the server"
        )
    return says
