"""How tokens are chosen and when an output ends, under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

from typer import BadParameter, Option

from pagedserve.cli.errors import refuse

if TYPE_CHECKING:
    from pagedserve.engine.params import SamplingParams

PANEL = "Sampling"


def _as(kind: Callable[[Any], Any], words: str) -> Callable[[Any], Any]:
    """A parser of what ``kind`` can read; bounds are `SamplingParams`' own affair."""

    def parse(text: Any) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise BadParameter(f"{text!r} is not {words}") from None

    return parse


NUMBER, WHOLE = _as(float, "a number"), _as(int, "a whole number")


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """The fields of `SamplingParams`, which checks them."""

    temperature: Annotated[
        float,
        Option(parser=NUMBER, metavar="T", help="0 takes the most likely token.", rich_help_panel=PANEL),
    ] = 1.0
    top_k: Annotated[
        int,
        Option(
            parser=WHOLE, metavar="K", help="Keep the K most likely tokens; 0: all.", rich_help_panel=PANEL
        ),
    ] = 0
    top_p: Annotated[
        float,
        Option(
            parser=NUMBER,
            metavar="P",
            help="Keep the most likely tokens of total probability P.",
            rich_help_panel=PANEL,
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        Option(
            parser=NUMBER,
            metavar="P",
            help="Keep tokens at least P times as likely as the most likely one.",
            rich_help_panel=PANEL,
        ),
    ] = 0.0
    seed: Annotated[
        int | None,
        Option(parser=WHOLE, metavar="N", help="The same seed, the same output.", rich_help_panel=PANEL),
    ] = None
    n: Annotated[
        int,
        Option("--n", "-n", parser=WHOLE, metavar="N", help="Outputs of each prompt.", rich_help_panel=PANEL),
    ] = 1
    max_tokens: Annotated[
        int, Option(parser=WHOLE, metavar="N", help="Tokens of an output at most.", rich_help_panel=PANEL)
    ] = 128
    min_tokens: Annotated[
        int,
        Option(
            parser=WHOLE, metavar="N", help="Tokens before anything may end an output.", rich_help_panel=PANEL
        ),
    ] = 0
    stop: Annotated[
        list[str] | None,
        Option(
            metavar="TEXT",
            help="A text that ends an output; may be given several times.",
            rich_help_panel=PANEL,
        ),
    ] = None
    stop_token_ids: Annotated[
        list[int] | None,
        Option(
            parser=WHOLE,
            metavar="ID",
            help="A token id that ends an output; may be given several times.",
            rich_help_panel=PANEL,
        ),
    ] = None
    ignore_eos: Annotated[
        bool,
        Option("--ignore-eos", help="Go on after the model's own end of an output.", rich_help_panel=PANEL),
    ] = False
    logprobs: Annotated[
        int | None,
        Option(
            parser=WHOLE,
            metavar="K",
            help="Put the log probabilities of each token and of the K most likely ones into the JSON.",
            rich_help_panel=PANEL,
        ),
    ] = None

    def params(self, has_json: bool = True) -> SamplingParams:
        """As the engine takes them. ValueError names the option, its value and its bounds."""
        from pagedserve.engine.params import SamplingParams

        if self.logprobs is not None and not has_json:
            refuse("--logprobs: they are written as JSON only; give --json FILE, or - for standard output")
        given: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        given.update(stop=self.stop or (), stop_token_ids=self.stop_token_ids or ())
        return SamplingParams(**given)
