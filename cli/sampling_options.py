"""How tokens are chosen and when an output ends, under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import BadParameter, Option

from pagedserve.cli.errors import refuse
from pagedserve.cli.flags import given
from pagedserve.cli.option_kinds import switch

if TYPE_CHECKING:
    from pagedserve.engine.params import SamplingParams
    from pagedserve.engine.structured_outputs import StructuredOutputs

PANEL = "Sampling"


def _as(kind: Callable[[Any], Any], words: str) -> Callable[[Any], Any]:
    """A parser of what ``kind`` can read; bounds are `SamplingParams`' own affair."""

    def parse(text: Any) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise BadParameter(f"{text!r} is not {words}") from None

    return parse


class TokenBias(NamedTuple):
    """What is added to a token's logit."""

    token_id: int
    bias: float


def _bias(text: Any) -> TokenBias:
    token, colon, value = str(text).partition(":")
    if not colon:
        raise BadParameter(f"{text!r} is not a token id, a colon and a number, such as 17:-2.5")
    return TokenBias(WHOLE(token), NUMBER(value))


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
    repetition_penalty: Annotated[
        float,
        Option(
            parser=NUMBER,
            metavar="R",
            help="Above 1: tokens of prompt and output become less likely.",
            rich_help_panel=PANEL,
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        Option(
            parser=NUMBER,
            metavar="P",
            help="Taken off the logit of a token that is in the output.",
            rich_help_panel=PANEL,
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Option(
            parser=NUMBER,
            metavar="F",
            help="Taken off for each time that it is in the output.",
            rich_help_panel=PANEL,
        ),
    ] = 0.0
    logit_bias: Annotated[
        list[TokenBias] | None,
        Option(
            parser=_bias,
            metavar="ID:B",
            help="Added to a token's logit, -100 to 100; may be given several times.",
            rich_help_panel=PANEL,
        ),
    ] = None
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
        bool, switch("--ignore-eos", "Go on after the model's own end of an output.", PANEL)
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

    prompt_logprobs: Annotated[
        int | None,
        Option(
            parser=WHOLE,
            metavar="K",
            help="The same for the prompt's tokens.",
            rich_help_panel=PANEL,
        ),
    ] = None

    def params(self, form: StructuredOutputs | None = None, has_json: bool = True) -> SamplingParams:
        """As the engine takes them. ValueError names the option, its value and its bounds."""
        from pagedserve.engine.params import SamplingParams

        for flag in () if has_json else given(self, ("logprobs", "prompt_logprobs")):
            refuse(f"{flag}: they are written as JSON only; give --json FILE, or - for standard output")
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        values.update(stop=self.stop or (), stop_token_ids=self.stop_token_ids or ())
        values["logit_bias"] = dict(self.logit_bias or ())
        return SamplingParams(**values, structured_outputs=form)
