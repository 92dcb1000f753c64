"""Which model runs, in which numbers, and within which limits; and what an engine says of itself."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from pagedserve.cli.errors import refuse
from pagedserve.cli.policy_options import DEFAULT as DEFAULT_POLICY
from pagedserve.cli.policy_options import PANEL as POLICY_PANEL
from pagedserve.cli.policy_options import SETTINGS, PolicyOptions
from pagedserve.cli.run_options import LIMITS_PANEL
from pagedserve.cli.values import one_of, whole
from pagedserve.policy import Limits, Policy, policy_names

if TYPE_CHECKING:
    from pagedserve.engine.llm import LLM
    from pagedserve.engine.model.load import LoadedModel

PANEL = "Model"
GIB = 1 << 30
DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTIONS = ("auto", "cpu", "reference")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """A model and the limits of its engine, under vLLM's names; None: chosen for the model and the memory."""

    model: Annotated[
        str,
        Option(
            "--model",
            metavar="MODEL",
            help="A directory of safetensors, a .gguf file, smollm2-135m (fetched once), or owner/name.",
            rich_help_panel=PANEL,
        ),
    ]
    dtype: Annotated[
        str,
        Option(
            parser=one_of(*DTYPES),
            metavar="|".join(DTYPES),
            help="Numbers to compute in; auto: bfloat16 where the device has it in hardware.",
            rich_help_panel=PANEL,
        ),
    ] = "auto"
    attention: Annotated[
        str,
        Option(
            parser=one_of(*ATTENTIONS),
            metavar="|".join(ATTENTIONS),
            help="How attention is computed; auto: the fastest.",
            rich_help_panel=PANEL,
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        Option(
            parser=whole(2),
            metavar="N",
            help="Prompt plus output of one request; the default is the model's own, at most 4096.",
            rich_help_panel=LIMITS_PANEL,
        ),
    ] = None
    max_num_seqs: Annotated[
        int,
        Option(parser=whole(1), metavar="N", help="Requests running at once.", rich_help_panel=LIMITS_PANEL),
    ] = 64
    max_num_batched_tokens: Annotated[
        int,
        Option(
            parser=whole(1), metavar="N", help="Tokens computed in one step.", rich_help_panel=LIMITS_PANEL
        ),
    ] = 512
    block_size: Annotated[
        int, Option(parser=whole(1), metavar="N", help="Tokens in a KV block.", rich_help_panel=LIMITS_PANEL)
    ] = 16
    num_blocks: Annotated[
        int | None,
        Option(
            "--num-blocks",
            "--num-gpu-blocks-override",
            parser=whole(1),
            metavar="N",
            help="KV blocks; default: what all requests could use, within 1 GiB and a third of free memory.",
            rich_help_panel=LIMITS_PANEL,
        ),
    ] = None

    def check(self) -> None:
        """Refuse limits that contradict each other, before a model is loaded."""
        Limits(self.max_num_batched_tokens, self.max_num_seqs, self.max_model_len or 2, self.block_size)

    def start(self, spec: Policy | None = None, overlap_depth: int = 0, *, is_quiet: bool = False) -> LLM:
        """Load the model and make its engine. ValueError says what does not exist, work or fit."""
        from pagedserve.engine.llm import LLM
        from pagedserve.engine.model.load import load_model

        loaded = load_model(
            self.model,
            dtype=self.dtype,
            attention=self.attention,
            max_model_len=self.max_model_len,
            progress=not is_quiet and sys.stderr.isatty(),
        )
        self._refuse_unless_pool_fits(loaded)
        more: dict[str, Any] = {} if spec is None else {"policy": spec}
        return LLM(
            loaded,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            overlap_depth=overlap_depth,
            **more,
        )

    def _refuse_unless_pool_fits(self, loaded: LoadedModel) -> None:
        from pagedserve.engine.model.placement import available_bytes

        if self.num_blocks is None:
            return
        model = loaded.model
        free = available_bytes(model.device)
        token_bytes = model.config.kv_bytes_per_token(model.dtype.itemsize)
        needed = self.num_blocks * self.block_size * token_bytes
        if free is not None and needed > free:
            refuse(
                f"--num-blocks {self.num_blocks}: so many KV blocks of {self.block_size} tokens need "
                f"{needed / GIB:,.2f} GiB and {free / GIB:,.2f} GiB are free: at most "
                f"{free // (self.block_size * token_bytes)} would fit; leave the option out for a good number"
            )


@dataclass(frozen=True, slots=True)
class EnginePolicyOptions:
    """The one policy of an engine."""

    policy: Annotated[
        str,
        Option(
            metavar="NAME[,KEY=VALUE...]",
            help=f"One of {', '.join(policy_names())}, perhaps with settings.",
            rich_help_panel=POLICY_PANEL,
        ),
    ] = DEFAULT_POLICY
    settings: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="KEY=VALUE",
            help=f"A setting of the policy: {', '.join(SETTINGS)}.",
            rich_help_panel=POLICY_PANEL,
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool | None,
        Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="The same as --set enable_prefix_caching=true or false.",
            show_default=False,
            rich_help_panel=POLICY_PANEL,
        ),
    ] = None
    overlap_depth: Annotated[
        int,
        Option(
            parser=whole(0, 1),
            metavar="0|1",
            help="1: schedule a step while the one before runs (vLLM: async scheduling).",
            rich_help_panel=POLICY_PANEL,
        ),
    ] = 0

    def chosen(self) -> tuple[str, Policy]:
        """Its label, as written, and the policy. ValueError names what is unknown."""
        options = PolicyOptions([self.policy], self.settings, self.enable_prefix_caching)
        ((label, spec),) = options.chosen().items()
        return label, spec


def tell(lines: Iterable[str], is_quiet: bool = False) -> None:
    """Lines on standard error, which leaves standard output to the results."""
    if not is_quiet:
        for line in lines:
            print(line, file=sys.stderr, flush=True)
