"""``pagedserve serve``: a model behind an OpenAI-compatible HTTP API."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Context, Exit, Option

from pagedserve.cli.engine_options import EngineOptions, EnginePolicyOptions, tell
from pagedserve.cli.errors import as_bad_input, refuse
from pagedserve.cli.option_kinds import count, seconds
from pagedserve.cli.output_options import overwriting
from pagedserve.cli.policy_options import described
from pagedserve.cli.run_options import LIMITS_PANEL
from pagedserve.cli.simulate import SavingOptions
from pagedserve.cli.simulated_options import SimulatedOptions
from pagedserve.cli.values import whole
from pagedserve.engine.server.settings import KEYS_VARIABLE, ApiKeys, ServerSettings

if TYPE_CHECKING:
    from socket import socket

    from pagedserve.engine.llm import LLM
    from pagedserve.validation.wall_time_llm import WallTimeLLM

HELP = f"""Serve a model to OpenAI clients, with vLLM's extensions and metrics.

Open its address in a browser to watch the KV blocks, the sequences and the latencies.

It listens on this machine only, unless --host says otherwise. SIGTERM and Ctrl-C let the open requests finish.

Keys, if there are any, are asked for everywhere but /health; they come from a file or from the variable
{KEYS_VARIABLE} (several with commas between), never from the command line, where others could read them.

\b
Examples:
  pagedserve serve smollm2-135m
  pagedserve serve --model smollm2-135m --policy mixed --record runs
\b
  # No weights and no device: filler tokens at the times of a profile, or of a GPU that is not there
  pagedserve serve --model smollm2-135m --engine simulated --profile smollm2.json
  pagedserve serve --model smollm2-135m --engine simulated --cost roofline --simulated-device h100
\b
  # For other machines, with a key
  pagedserve serve --model smollm2-135m --host 0.0.0.0 --api-key-file keys.txt
\b
  # Then, as with any OpenAI server
  curl http://127.0.0.1:8000/v1/completions \\
      -H "Content-Type: application/json" \\
      -d '{{"prompt": "The capital of France is", "max_tokens": 8}}'
"""
EXIT_FAILED = 1
SERVER_PANEL = "Server"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
DEFAULT = ServerSettings(("model",))


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where the server listens, who may use it, and how much waits; names are vLLM's where it has them."""

    host: Annotated[str, Option(metavar="ADDRESS", help="Where to listen.", rich_help_panel=SERVER_PANEL)] = (
        "127.0.0.1"
    )
    port: Annotated[
        int, Option(parser=whole(0, 65535), metavar="N", help="0: any free.", rich_help_panel=SERVER_PANEL)
    ] = 8000
    served_model_name: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="What clients call the model; may be given several times; the default is --model.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        Option(metavar="FILE", help="Keys, one a line.", rich_help_panel=SERVER_PANEL),
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        Option(
            metavar="ORIGIN",
            help="Whose pages may use the server from a browser, as http://localhost:3000; * for all; may be given "
            "several times; without it none may.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None
    max_num_queued_reqs: Annotated[
        int, count("Outputs accepted and without a first token; requests beyond get 503.", LIMITS_PANEL)
    ] = DEFAULT.max_num_queued_reqs
    max_num_queued_tokens: Annotated[
        int, count("The same in prompt tokens: time to first token wanted x prefill tokens/s.", LIMITS_PANEL)
    ] = DEFAULT.max_num_queued_tokens or 0
    max_body_bytes: Annotated[int, count("Largest body of a request; larger ones get 413.", LIMITS_PANEL)] = (
        DEFAULT.max_body_bytes
    )
    request_timeout: Annotated[
        float | None,
        seconds("A request that has not ended S seconds after its arrival is ended, with 504.", SERVER_PANEL),
    ] = None
    send_timeout: Annotated[
        float, seconds("A connection whose reader takes nothing for S seconds is dropped.", SERVER_PANEL)
    ] = DEFAULT.send_timeout_s
    receive_timeout: Annotated[
        float,
        seconds(
            "A request, or what was opened for one, that is not there after S seconds is dropped.",
            SERVER_PANEL,
        ),
    ] = DEFAULT.receive_timeout_s
    shutdown_timeout: Annotated[
        float, seconds("How long open requests may go on after SIGTERM.", SERVER_PANEL, above_0=False)
    ] = DEFAULT.shutdown_timeout_s

    def settings(self, model: str) -> ServerSettings:
        """The server's settings. OSError or ValueError for a key file."""
        return ServerSettings(
            model_names=tuple(self.served_model_name or [model]),
            api_keys=ApiKeys.read(self.api_key_file, os.environ.get(KEYS_VARIABLE, "")),
            max_num_queued_reqs=self.max_num_queued_reqs,
            max_num_queued_tokens=self.max_num_queued_tokens,
            request_timeout_s=self.request_timeout,
            send_timeout_s=self.send_timeout,
            receive_timeout_s=self.receive_timeout,
            allowed_origins=tuple(self.allowed_origins or ()),
            shutdown_timeout_s=self.shutdown_timeout,
            max_body_bytes=self.max_body_bytes,
        )

    def bound(self) -> socket:
        """The socket to listen on, bound before a model is loaded."""
        from pagedserve.engine.server.service import bound_socket

        try:
            return bound_socket(self.host, self.port)
        except OSError as error:
            why = error.strerror or str(error)
            refuse(f"--host {self.host} --port {self.port}: {why}; choose another address or port")


@dataclass(frozen=True, slots=True)
class ServeSaving:
    """Whether a record is kept."""

    record: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="Keep a record of what is served, and save it at the end in DIR, in a folder named as the "
            "policy; it grows with every step.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None
    overwrite: Annotated[bool, overwriting("a record that exists already", SERVER_PANEL)] = False

    def folder(self, label: str) -> Path | None:
        """Where the record goes, checked; None if none is kept."""
        if self.overwrite and self.record is None:
            refuse("--overwrite: no record is saved that could be replaced; leave it out or give --record")
        return SavingOptions(self.record).folders([label], self.overwrite).get(label)


def _also_model(context: Context, value: str | None) -> str | None:
    """Let MODEL be --model where that is not given."""
    if value is not None:
        context.default_map = {**(context.default_map or {}), "model": value}
    return value


def serve(
    engine_options: EngineOptions,
    simulated: SimulatedOptions,
    policy_options: EnginePolicyOptions,
    server_options: ServerOptions,
    saving: ServeSaving,
    positional: Annotated[
        str | None,
        Argument(
            metavar="MODEL",
            help="The same as --model, which is then not needed.",
            callback=_also_model,
            is_eager=True,
        ),
    ] = None,
) -> None:
    """The command; see ``HELP``."""
    if positional not in (None, engine_options.model):
        refuse(
            f"MODEL is {positional} and --model is {engine_options.model}; a server has one model: give one of them"
        )
    with as_bad_input():
        engine_options.check()
        simulated.check(engine_options)
        label, spec = policy_options.chosen()
        folder = saving.folder(label)
        settings = server_options.settings(engine_options.model)
        sock = server_options.bound()
        tell([f"loading {engine_options.model}"])
        depth, record = policy_options.overlap_depth, folder is not None
        wall_time = None
        if simulated.is_simulated:
            llm = wall_time = simulated.start(
                engine_options, spec, depth, host=policy_options.host, record=record
            )
        else:
            # No record unless one is wanted: it grows for as long as it is kept.
            llm = engine_options.start(spec, depth, host=policy_options.host, record=record)
    tell([*llm.decisions, f"policy {label}: {described(spec)}"])
    try:
        ended_well = _serve(llm, label, settings, sock)
    finally:
        llm.close()
    if wall_time is not None:
        tell([wall_time.punctuality])
    if folder is not None:
        with as_bad_input():
            llm.record({"name": "served traffic"}).save(folder, overwrite=saving.overwrite)
        tell([f"record saved in {folder}"])
    if not ended_well:
        raise Exit(EXIT_FAILED)


def _serve(llm: LLM | WallTimeLLM, label: str, settings: ServerSettings, sock: socket) -> bool:
    """Until the server ends; False if its engine failed."""
    from pagedserve.engine.async_engine import AsyncEngine
    from pagedserve.engine.server.app import make_app
    from pagedserve.engine.server.backend import ThreadBackend
    from pagedserve.engine.server.service import serve, url_of

    with AsyncEngine(llm.engine) as served:
        app = make_app(ThreadBackend(served, label), llm.tokenizer, settings)
        line = start_line(url_of(sock), sock.getsockname()[0], settings)
        return asyncio.run(serve(app, sock, lambda text: tell([text]), lambda: tell([line])))


def start_line(url: str, host: str, settings: ServerSettings) -> str:
    """Where it listens, who can reach it and who may use it, on one line."""
    reach = "this machine only" if host in LOOPBACK else "open to the network"
    keys = len(settings.api_keys)
    who = f"{keys} API {'key' if keys == 1 else 'keys'}" if keys else "no API key asked for"
    return f"serving {', '.join(settings.model_names)} on {url} ({reach}, {who})"
