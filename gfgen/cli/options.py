"""Options that several commands have."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from gfgen import log
from gfgen.cli.config import name_of, own_recipes
from gfgen.errors import InputError
from gfgen.job.fields import parse_duration
from gfgen.job.reader import JobSource
from gfgen.job.shared import parse_loras, parse_overrides
from gfgen.job.weighted import SYNTAXES
from gfgen.layout import MAX_RANKS
from gfgen.models.families.registry import DEFAULT_MODEL, MODELS
from gfgen.models.geometry.weights import VAE_DTYPES
from gfgen.policies.catalog import BUILT_IN
from gfgen.runtime.control.ranks import LOOKAHEAD_S
from gfgen.runtime.core.devices import DEFAULT_CPU_RANKS, DEVICES, TRANSPORTS
from gfgen.runtime.files.resume import GRACE_S
from gfgen.session.ranks import AskedRanks, Ranks

logger = logging.getLogger(__name__)

Command = Callable[..., Any]

LOOKAHEAD_MS = 1e3 * LOOKAHEAD_S


class FiniteRange(click.FloatRange):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class NamedPath(click.Path):
    """Refuses the empty path, which a script with an unset variable gives; expands ~ at the beginning.

    A path that `may_be_store` may also be the URL of an object store, which stays a text.
    """

    def __init__(self, *, may_be_store: bool = False, **options: Any) -> None:
        super().__init__(path_type=Path, **options)
        self._may_be_store = may_be_store

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("it is empty; name a path", param, ctx)
        if "://" in str(value):  # which is not repeated: it may have a key
            if self._may_be_store and re.fullmatch(r"s3://[a-z0-9.-]+(/[^?#@]*)?", value):
                return value
            store = "or s3://BUCKET/NAME without keys " if self._may_be_store else ""
            self.fail(f"a path of this machine {store}is accepted (docs/data.md)", param, ctx)
        return super().convert(os.path.expanduser(value), param, ctx)


class Duration(click.ParamType[float]):
    """Seconds, written as 30, 30s, 12h or 7d."""

    name = "duration"

    def __init__(self, *, may_be_zero: bool = False) -> None:
        self._may_be_zero = may_be_zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = f"{value}s" if str(value).isdigit() else str(value)
        seconds = value if isinstance(value, float) else parse_duration(text)
        if seconds is None or (seconds == 0 and not self._may_be_zero):
            self.fail(f"{value!r}: a duration like 30s, 12h or 7d is accepted", param, ctx)
        return seconds


class RunOnly(click.Option):
    """An option of `gfgen run` that decides nothing that `gfgen check` tells."""


class Named(click.ParamType[str]):
    """Any text; ~ is expanded. Shells complete it to one of these names or, if none begins so, to a file."""

    name = "text"

    def __init__(self, *names: str) -> None:
        self._names = names

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return os.path.expanduser(str(super().convert(value, param, ctx)))

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        found = [CompletionItem(name) for name in self._names if name.startswith(incomplete)]
        return found or [CompletionItem(incomplete, type="file")]


A_MODEL, A_POLICY = Named(*MODELS), Named(*BUILT_IN)


def option(help_: str, *names: str, **attributes: Any) -> Any:
    """A field of a dataclass of options, named like the option; `attributes` are click's."""
    shown = {"show_default": True} if "default" in attributes else {}
    default = attributes.get("default", () if attributes.get("multiple") else None)
    return field(default=default, metadata={"click": (names, {**shown, **attributes, "help": help_})})


def flag(help_: str, *names: str, **attributes: Any) -> Any:
    return field(default=False, metadata={"click": (names, {"is_flag": True, **attributes, "help": help_})})


def argument(**attributes: Any) -> Any:
    default = () if attributes.get("nargs") == -1 else None
    return field(default=default, metadata={"click": ((), {"cls": click.Argument, **attributes})})


def group(kind: type[Any], *, without: Collection[str] = (), cls: Any = None, **own: Any) -> Any:
    """A field with a dataclass: its options without some, with `own` ones; `cls` replaces click's class."""
    found = {name: each for name, each in {**_fields_of(kind), **own}.items() if name not in without}
    return field(default_factory=kind, metadata={"kind": kind, "fields": found, "cls": cls})


def _fields_of(kind: type[Any]) -> dict[str, Any]:
    fields = {each.name: each for each in dataclasses.fields(kind)}
    return {name: fields[name] for name in kind.__annotations__ if fields[name].metadata}


def _parameters(fields: Mapping[str, Any], cls: Any = None) -> Iterator[click.Parameter]:
    for name, each in fields.items():
        if "kind" in each.metadata:
            yield from _parameters(each.metadata["fields"], each.metadata["cls"])
            continue
        names, attributes = each.metadata["click"]
        kind = attributes.get("cls") or cls or click.Option
        if kind is not click.Argument and not any(text.startswith("--") for text in names):
            names = (f"--{name.replace('_', '-')}", *names)
        yield kind([*names, name], **{key: value for key, value in attributes.items() if key != "cls"})


def _taken(fields: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """The values of these fields, which leave `values`."""
    return {
        name: each.metadata["kind"](**_taken(each.metadata["fields"], values))
        if "kind" in each.metadata
        else values.pop(name)
        for name, each in fields.items()
    }


def given_in(options: Any, *names: str) -> str | None:
    """The first of these options, or of all in the dataclass, that has not its default."""
    for name, each in _fields_of(type(options)).items():
        if name in (names or (name,)) and "click" in each.metadata and getattr(options, name) != each.default:
            (parameter,) = _parameters({name: each})
            if isinstance(parameter, click.Option):
                return f"--{name_of(parameter)}"
    return None


def checked(kind: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A program's values for options of this dataclass, as commands have them. Raises: InputError."""
    found = {}
    for name, value in given.items():
        (parameter,) = _parameters({name: _fields_of(kind)[name]})
        try:
            found[name] = parameter.type_cast_value(click.Context(click.Command(name)), value)
        except click.BadParameter as error:
            raise InputError(f"{name} = {value!r}: {error.message}") from None
    return found


def takes(**kinds: Any) -> Callable[[Command], Command]:
    """A decorator: the command gets each of these dataclasses, or fields of `group`, as one argument."""
    fields = {name: group(kind) if isinstance(kind, type) else kind for name, kind in kinds.items()}

    def add(command: Command) -> Command:
        @functools.wraps(command)
        def call(**values: Any) -> Any:
            return command(**_taken(fields, values), **values)

        others = getattr(command, "__click_params__", ())
        call.__click_params__ = [*others, *reversed([*_parameters(fields)])]  # type: ignore[attr-defined]
        return call

    return add


model_option = functools.partial(
    option,
    "Model for jobs without one: a name from 'gfgen models', a directory or a hub id.",
    type=A_MODEL,
    default=DEFAULT_MODEL,
)
policy_option = functools.partial(
    option, "NAME[,option=value...]; 'gfgen policies' lists them.", type=A_POLICY, default="auto"
)
profile_option = functools.partial(
    option,
    "Profile with task times. [this machine's, or one shipped with gfgen]",
    "--profile",
    type=NamedPath(dir_okay=False),
)
lookahead_option = functools.partial(
    option,
    "Queue the next task this long before the predicted end of the current one, plus 2% of the current "
    "task's time. With 0, gfgen waits until the task has ended.",
    type=FiniteRange(0, 1000),
    default=LOOKAHEAD_MS,
    metavar="MS",
)
grace_option = functools.partial(
    option,
    "Time that running steps get to end by themselves when the run stops.",
    "--grace",
    type=Duration(may_be_zero=True),
    default=f"{GRACE_S:g}s",
)
max_step_time_option = functools.partial(
    option, "Refuse a job if one of its steps is predicted to take longer.", type=Duration()
)
TRUST_CODE = "Run Python code that comes with a checkpoint. Without it, such a checkpoint is refused."
RANKS = click.IntRange(1, MAX_RANKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions(AskedRanks):
    ranks: int | None = option(
        f"Number of workers, one process each. [all GPUs, or {DEFAULT_CPU_RANKS} on a CPU]", type=RANKS
    )
    device: str = option(
        "Device of the workers. auto takes GPUs if there are any.", type=click.Choice(DEVICES), default="auto"
    )
    gpus: str | None = option(
        "Use only these GPUs, such as 0,2, by the numbers of 'gfgen doctor'.", metavar="LIST"
    )
    ranks_per_gpu: int = option(
        "Let N ranks share each GPU, to try layouts of several ranks on one GPU. This is slower.",
        type=RANKS,
        default=1,
        metavar="N",
    )
    transport: str = option(
        "How GPUs share a step (docs/install.md): peer memory, where they reach each other, or main memory. "
        "auto: peer memory where there is, main memory between the others where that gains.",
        type=click.Choice(TRANSPORTS),
        default="auto",
    )
    link: str | None = option(
        'Limit what a rank sends through main memory, such as "12GB/s", to test slow links. [no limit]',
        metavar="RATE",
    )
    memory: str | None = option(
        'Memory limit for weights and jobs, such as "40GB": per GPU, or of main memory. [all available]',
        metavar="SIZE",
    )
    offload: bool = flag(
        "Has no effect any more: what does not fit on a GPU is streamed from main memory (docs/memory.md)."
    )
    trust_remote_code: bool = flag(TRUST_CODE)
    compile: str = option(
        "Compile blocks of general diffusers pipelines (docs/pipelines.md). auto: on GPUs, if it saves the "
        "run more time than compiling takes.",
        type=click.Choice(("auto", "on", "off")),
        default="auto",
    )
    precision: tuple[str, ...] = option(
        "Compute transformers in fp8, of one model or of all: less time and memory, less exact "
        "(docs/precision.md). On GPUs, for Wan and Qwen-Image. Repeatable.",
        multiple=True,
        metavar="[MODEL=]fp8",
    )
    attention: tuple[str, ...] = option(
        "Attention in fp8, alike: less time for many tokens, less exact. Repeatable.",
        multiple=True,
        metavar="[MODEL=]fp8",
    )
    random_weights: bool = flag(
        "Draw full-size weights at random from config files, to measure speed without checkpoints."
    )
    vae_dtype: str = option(
        "Precision of VAEs. auto follows the model cards (Wan: float32).",
        type=click.Choice(VAE_DTYPES),
        default="auto",
    )
    graphs: bool = option(
        "On GPUs: use CUDA graphs where they are faster (docs/models.md).",
        "--graphs/--no-graphs",
        default=True,
    )

    def found(self, *, cpu_ranks: int = DEFAULT_CPU_RANKS) -> Ranks:
        """These ranks on this machine, `cpu_ranks` without GPUs. Raises: InputError if it has fewer GPUs."""
        ranks = self.here(cpu_ranks=cpu_ranks, gpus=self.gpus)
        if not ranks.are_on_gpus:
            source = click.get_current_context().get_parameter_source("graphs")
            if source is ParameterSource.COMMANDLINE:
                word = "--graphs" if self.graphs else "--no-graphs"
                logger.warning("%s has no effect on CPU ranks, which launch no kernels", word)
        if self.offload:
            logger.warning("--offload has no effect any more: gfgen streams what does not fit on a GPU")
        return ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    log_file: Path | None = option(
        "Also append log lines to FILE. It may be rotated at any time.", type=NamedPath(dir_okay=False)
    )
    quiet: bool = flag("Print only problems, failures and how a run ended.", "-q")
    verbose: bool = flag("Also print details.", "-v")
    log_json: bool = flag("Log one JSON object per line instead of progress bars and text.")

    @property
    def level(self) -> str:
        return "debug" if self.verbose or _is_debug() else "warning" if self.quiet else "info"

    def configure(self, *, file: Path | None) -> None:
        file_level = "debug" if _is_debug() else "info"
        log.configure(level=self.level, as_json=self.log_json, file=file, file_level=file_level)


def configure_log(level: str) -> None:
    """Log to standard error from this level on; with --debug, log everything."""
    log.configure(level="debug" if _is_debug() else level)


def _is_debug() -> bool:
    context = click.get_current_context()
    return bool(context.obj and context.obj["debug"])


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    jobs: tuple[str, ...] = argument(metavar="[JOBS]...", nargs=-1, type=Named())
    prompts: tuple[str, ...] = option(
        "Make a job of this prompt. May be repeated.", "--prompt", "-p", multiple=True, metavar="TEXT"
    )
    settings: tuple[str, ...] = option(
        "Set this field of all jobs, whatever the job file says. May be repeated.",
        "--set",
        multiple=True,
        metavar="FIELD=VALUE",
    )
    columns: tuple[str, ...] = option(
        "Of job files in Parquet: read this column as this field, and no column without a name. May be "
        "repeated.",
        "--column",
        multiple=True,
        metavar="FIELD=COLUMN",
    )
    vary: bool = flag('Expand {a|b} and {@file} in all prompts, as if each line had "vary": true.')
    size: str | None = option("The same as --set size=WxH, such as 832x480.", metavar="WxH")
    steps: str | None = option("The same as --set steps=N.", metavar="N")
    seed: str | None = option("The same as --set seed=N.", metavar="N")
    frames: str | None = option("The same as --set frames=N.", metavar="N")
    loras: tuple[str, ...] = option(
        "LoRA for jobs that name none: a file, a folder or a hub id. May be repeated.",
        "--lora",
        multiple=True,
        type=Named(),
        metavar="FILE[:SCALE]",
    )
    lora_dir: Path | None = option(
        "Folder of the LoRAs that prompts name as <lora:NAME:SCALE>.",
        type=NamedPath(file_okay=False),
    )
    plain: bool = flag("Take lines of prompts as they are, with options of A1111 and kohya as text.")
    prompt_syntax: str | None = option(
        "Syntax of prompts, for jobs that name none; a1111 has weights. Lines of A1111 have auto by default.",
        type=click.Choice(SYNTAXES),
    )
    negative_prompt: str | None = option("The same as --set negative_prompt=TEXT.", metavar="TEXT")
    output_name: str | None = option(
        "File name of the job, or of all, such as {index:04}-{seed}.png.", metavar="NAME"
    )
    format: str | None = option("The same as --set format=NAME, such as webp.", metavar="NAME")
    num_images: str | None = option("Make N of each job, with different seeds.", "-n", metavar="N")
    only: tuple[str, ...] = option(
        'Take only the job with this id, or those of a pattern, such as "fox-*". May be repeated.',
        multiple=True,
        metavar="ID",
    )
    tags: tuple[str, ...] = option(
        "Take only jobs with this tag. May be repeated.", "--tag", multiple=True, metavar="TAG"
    )
    limit: int | None = option(
        "Take only the first N of the selected jobs.", type=click.IntRange(1), metavar="N"
    )

    def source(self) -> JobSource:
        """Raises UsageError without jobs, InputError for a value that its field does not accept."""
        if not (self.jobs or self.prompts):
            raise click.UsageError(
                'name a job file, - for standard input, or give a prompt: -p "a red circle falls"'
            )
        if wrong := next((text for text in self.columns if "=" not in text), None):
            raise InputError(f"--column {wrong}: FIELD=COLUMN is accepted, such as prompt=caption")
        pairs = [("--set", text) for text in self.settings]
        names = ("size", "steps", "seed", "frames", "num_images", "negative_prompt", "output_name", "format")
        for name in names:
            if (value := getattr(self, name)) is not None:
                pairs.append((f"--{name.replace('_', '-')}", f"{name.removesuffix('_name')}={value}"))
        fallbacks = {"lora": parse_loras(self.loras), "prompt_syntax": self.prompt_syntax}
        fields = [text.split("=", 1)[0] for text in self.columns]
        if twice := next((name for name in fields if fields.count(name) > 1), None):
            raise InputError(f"--column gives {twice} twice; name one column for it")
        return JobSource(
            files=self.jobs,
            prompts=self.prompts,
            overrides=parse_overrides(pairs) | ({"vary": True} if self.vary else {}),
            fallbacks={name: value for name, value in fallbacks.items() if value},
            columns=dict(text.split("=", 1) for text in self.columns),
            own_recipes=own_recipes(),
            lora_folder=self.lora_dir.absolute() if self.lora_dir else None,
            is_plain=self.plain,
            only=self.only,
            tags=self.tags,
            limit=self.limit,
        )
