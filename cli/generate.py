"""``pagedserve generate``: prompts in, text out, on a model in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any, cast

from typer import Argument, Exit, Option

from pagedserve.cli.completions import PrinterState, prompts_as_json, statistics
from pagedserve.cli.engine_options import EngineOptions, EnginePolicyOptions, tell
from pagedserve.cli.errors import as_bad_input, refuse
from pagedserve.cli.form_options import FormOptions
from pagedserve.cli.option_kinds import switch
from pagedserve.cli.output_options import PANEL, ResultOptions, out_folder
from pagedserve.cli.policy_options import described
from pagedserve.cli.sampling_options import SamplingOptions
from pagedserve.cli.screen import Screen
from pagedserve.cli.simulate import SavingOptions

if TYPE_CHECKING:
    from pagedserve.engine.llm import LLM
    from pagedserve.engine.outputs import Completion, CompletionState, Delta
    from pagedserve.engine.params import SamplingParams

HELP = """Generate text: prompts in, tokens out as they come.

Standard output gets the text and nothing else. What was decided and measured is said on standard error.

Several prompts are computed together and printed one after the other.

\b
Examples:
  pagedserve generate --model smollm2-135m --temperature 0 "The capital of France is"
\b
  # A chat model answers; the same seed gives the same answer
  pagedserve generate --model smollm2-135m --chat --seed 1 "Why is the sky blue?"
\b
  # Three prompts in one batch, under a policy, with a record to look into
  pagedserve generate --model smollm2-135m --policy static --out runs \\
      "Once upon a time" "The moon is" "My favourite number is"
  pagedserve report runs
\b
  # An answer that is one of two words
  pagedserve generate --model smollm2-135m --chat --guided-choice yes --guided-choice no \\
      "Is the sky blue?"
\b
  # A prompt from a file, results to a program
  pagedserve generate --model smollm2-135m --prompt-file question.txt \\
      --json - | jq .prompts
"""
EXIT_FAILED = 1
PROMPT_PANEL = "Prompts"
LABEL_WIDTH = 60


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Where prompts come from beside the arguments, and what is made of them."""

    prompt_file: Annotated[
        list[str] | None,
        Option(
            metavar="FILE",
            help="A file that is one prompt, without its last line end; - is standard input. May be given "
            "several times.",
            rich_help_panel=PROMPT_PANEL,
        ),
    ] = None
    chat: Annotated[
        bool,
        switch(
            "--chat", "Each prompt is a message of a user: apply the model's chat template.", PROMPT_PANEL
        ),
    ] = False

    def read(self, arguments: Sequence[str]) -> list[str]:
        """All prompts, those of the arguments first. Raises OSError or ValueError for a file."""
        files = self.prompt_file or []
        if files.count("-") > 1:
            refuse("--prompt-file -: standard input can be read once; give it once")
        prompts = [*arguments, *map(_read, files)]
        if not prompts:
            refuse("no prompt; give one as an argument, or a file with --prompt-file")
        return prompts

    def encoded(self, llm: LLM, prompts: list[str]) -> list[list[int]]:
        """Token ids of the prompts."""
        if not self.chat:
            return [llm.engine.vocabulary.encode(prompt) for prompt in prompts]
        tokenizer: Any = llm.tokenizer
        if tokenizer.chat_template is None:
            refuse("--chat: this model's tokenizer has no chat template; leave the option out")
        try:
            return [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": prompt}],
                    add_generation_prompt=True,
                    tokenize=True,
                    return_dict=False,
                )
                for prompt in prompts
            ]
        except Exception as error:  # a template is a program of the model's author
            refuse(f"--chat: this model's chat template failed ({type(error).__name__}: {error})")


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """Where the record goes, and how much is said."""

    out: Annotated[
        Path | None, out_folder("Save the run's record in DIR, in a folder named as its policy.")
    ] = None
    quiet: Annotated[
        bool, Option("--quiet", "-q", help="Say nothing on standard error.", rich_help_panel=PANEL)
    ] = False


def generate(
    engine_options: EngineOptions,
    prompt_options: PromptOptions,
    sampling: SamplingOptions,
    form_options: FormOptions,
    policy_options: EnginePolicyOptions,
    recording: RecordOptions,
    results: ResultOptions,
    prompts: Annotated[list[str] | None, Argument(metavar="PROMPT...", help="Texts to continue.")] = None,
) -> None:
    """The command; see ``HELP``."""
    from pagedserve.metrics.summary import summarize

    results.check(writes_more=recording.out is not None)
    with as_bad_input():
        params = sampling.params(form_options.form(), has_json=results.json is not None)
        engine_options.check()
        label, spec = policy_options.chosen()
        folders = SavingOptions(recording.out).folders([label], results.overwrite)
        texts = prompt_options.read(prompts or [])
        tell([f"loading {engine_options.model}"], recording.quiet)
        llm = engine_options.start(
            spec, policy_options.overlap_depth, host=policy_options.host, is_quiet=recording.quiet
        )
    try:
        tell([*llm.decisions, f"policy {label}: {described(spec)}"], recording.quiet)
        printer = None if results.is_quiet else PrinterState(_labels(texts, params.n))
        with as_bad_input():
            ids = prompt_options.encoded(llm, texts)
            groups = _submit(llm, ids, params, printer)
        _run(llm, len(texts) * params.n, printer)
    finally:
        llm.close()
    record = llm.record(_trace(ids, params))
    if folders:
        with as_bad_input():
            record.save(folders[label], overwrite=results.overwrite)
    completions = [[state.completion() for state in group] for group in groups]
    everything = [completion for group in completions for completion in group]
    summary, decode = summarize(record), cast(Any, llm.tokenizer).decode
    tell([statistics(everything, summary)], recording.quiet)
    tell([f"record saved in {folder}" for folder in folders.values()], recording.quiet)
    results.write(
        {
            "model": engine_options.model,
            "decisions": list(llm.decisions),
            "prompts": prompts_as_json(texts, ids, completions, decode),
            "metrics": summary.as_dict(),
            "header": record.header,
            "record": str(folders[label]) if folders else None,
        }
    )
    _fail_if_any(everything)


def _fail_if_any(completions: Sequence[Completion]) -> None:
    """Exit with 1, having said which outputs failed and why."""
    failed = [completion for completion in completions if completion.error is not None]
    tell(f"Error: request {completion.request}: {completion.error}" for completion in failed)
    if failed:
        raise Exit(EXIT_FAILED)


def _labels(texts: Sequence[str], num_samples: int) -> list[str | None]:
    """A line for each completion; none for the only one."""
    if len(texts) == num_samples == 1:
        return [None]
    labels: list[str | None] = []
    for number, text in enumerate(texts, 1):
        for sample in range(1, num_samples + 1):
            which = f" (output {sample} of {num_samples})" if num_samples > 1 else ""
            labels.append(f"--- {number} of {len(texts)}{which}: {shorten(text, LABEL_WIDTH)}")
    return labels


def _submit(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams, printer: PrinterState | None
) -> list[list[CompletionState]]:
    """Hand all prompts in; ValueError for one that can never run."""

    def told(first: int) -> Callable[[Delta], None] | None:
        if printer is None:
            return None
        add = printer.add
        # What an interrupt aborts has not ended: the outputs behind it are not printed.
        return lambda delta: add(first + delta.index, delta.text, delta.finish_reason not in (None, "abort"))

    return [llm.engine.submit(prompt, params, told(index * params.n)) for index, prompt in enumerate(prompts)]


def _run(llm: LLM, num_requests: int, printer: PrinterState | None) -> None:
    """Step until all have ended; a bar shows how many have where nothing is printed meanwhile."""
    if printer is not None:
        printer.begin()
        try:
            llm.finish_all()
        finally:
            printer.break_off()
        return
    with Screen().progress("generating") as advance:
        show = None if advance is None else lambda: advance(num_requests - llm.engine.num_live, num_requests)
        llm.finish_all(show)


def _trace(prompts: Sequence[Sequence[int]], params: SamplingParams) -> dict[str, Any]:
    """What names the prompts in a record."""
    content = json.dumps([list(map(list, prompts)), asdict(params)], sort_keys=True)
    name = "1 prompt" if len(prompts) == 1 else f"{len(prompts)} prompts"
    return {"name": name, "sha256": sha256(content.encode()).hexdigest()}


def _read(name: str) -> str:
    """One prompt: a file's text without its last line end."""
    if name == "-":
        text = sys.stdin.read()
    else:
        path = Path(name)
        if path.is_dir() or not path.exists():
            refuse(
                f"--prompt-file {name}: {'a folder' if path.is_dir() else 'nothing there'}; give a text file"
            )
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            refuse(f"--prompt-file {name}: not UTF-8 text ({error}); give a text file")
    return text.removesuffix("\n").removesuffix("\r")
