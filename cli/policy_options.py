"""Which policies: presets by name, each with settings of its own, and settings for all of them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

from typer import Option

from pagedserve.cli.errors import refuse
from pagedserve.cli.values import one_of
from pagedserve.policy.spec import PARTS, Policy, policy, policy_names

PANEL = "Policy"
DEFAULT = "vllm_v1"
SETTINGS = {field.name: field.default for field in fields(Policy) if field.name != "name"}
WORDS = {"true": True, "1": True, "false": False, "0": False}
PRESETS = f"One of {', '.join(policy_names())}, perhaps with settings"
Settings = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="KEY=VALUE",
        help=f"A setting of the policy, of every one if several: {', '.join(SETTINGS)}.",
        rich_help_panel=PANEL,
    ),
]
EnablePrefixCaching = Annotated[
    bool | None,
    Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="The same as --set enable_prefix_caching=true or false.",
        show_default=False,
        rich_help_panel=PANEL,
    ),
]
PreemptionModeName = Annotated[
    str | None,
    Option(
        "--preemption-mode",
        parser=one_of(*PARTS["preemption_mode"]),
        metavar="|".join(PARTS["preemption_mode"]),
        help="The same as --set preemption_mode=...; swap copies a victim's KV to host memory and back.",
        show_default=False,
        rich_help_panel=PANEL,
    ),
]


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """The policies to run, in order."""

    policy: Annotated[
        list[str] | None,
        Option(
            metavar="NAME[,KEY=VALUE...]",
            help=f"{PRESETS}; the default is {DEFAULT}. Give it several times to compare.",
            rich_help_panel=PANEL,
        ),
    ] = None
    settings: Settings = None
    enable_prefix_caching: EnablePrefixCaching = None
    preemption_mode: PreemptionModeName = None

    def chosen(self) -> dict[str, Policy]:
        """Label to policy; the label is the option as written. ValueError names what is unknown."""
        common = _parsed(self.settings or [], "--set")
        for key in ("enable_prefix_caching", "preemption_mode"):
            value = getattr(self, key)
            if value is not None and key in common:
                refuse(f"{key} is given by --set and by its own option; give one of them")
            if value is not None:
                common[key] = value
        policies: dict[str, Policy] = {}
        for text in self.policy or [DEFAULT]:
            name, *items = [item.strip() for item in text.split(",")]
            own = _parsed(items, f"--policy {text}")
            for key in own.keys() & common.keys():
                refuse(f"{key} is set for all policies and again in --policy {text}; set it in one place")
            label = ",".join((name, *items))
            if label in policies:
                refuse(f"--policy {label} is given twice; the same policy gives the same run")
            policies[label] = policy(name, **common, **own)
        return policies


def described(chosen: Policy) -> str:
    """A policy's parts and settings on one line."""
    parts = [f"{kind} {getattr(chosen, kind)}" for kind in PARTS]
    reserve = "the whole prompt" if chosen.scheduler_reserve_full_isl else "its first chunk"
    caching = "on" if chosen.enable_prefix_caching else "off"
    parts += [f"admission needs blocks for {reserve}", f"watermark {chosen.watermark:g}"]
    return ", ".join([*parts, f"prefix caching {caching}"])


def _parsed(items: list[str], where: str) -> dict[str, Any]:
    """KEY=VALUE texts as settings, each of the type of its default."""
    found: dict[str, Any] = {}
    for item in items:
        key, equals, text = (part.strip() for part in item.partition("="))
        if not equals:
            refuse(f"{where}: {item!r} is no setting; write KEY=VALUE, such as allocator=contiguous_max")
        if key not in SETTINGS:
            refuse(f"{where}: unknown setting {key!r}; choose from {', '.join(SETTINGS)}")
        if key in found:
            refuse(f"{where}: {key} is set twice; set it once")
        found[key] = _value(key, text, where)
    return found


def _value(key: str, text: str, where: str) -> Any:
    default = SETTINGS[key]
    if isinstance(default, bool):
        if text.lower() not in WORDS:
            refuse(f"{where}: {key} is {text!r}; it is true or false")
        return WORDS[text.lower()]
    if isinstance(default, float):
        try:
            return float(text)
        except ValueError:
            refuse(f"{where}: {key} is {text!r}; it is a number")
    return text
