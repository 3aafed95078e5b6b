"""Options that several commands have."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from gfgen import log
from gfgen.errors import InputError
from gfgen.job.fields import parse_duration
from gfgen.job.reader import JobSource
from gfgen.job.shared import parse_loras, parse_overrides
from gfgen.layout import MAX_RANKS
from gfgen.models.families.registry import DEFAULT_MODEL, MODELS
from gfgen.models.geometry.weights import VAE_DTYPES
from gfgen.policies.catalog import BUILT_IN
from gfgen.runtime.control.ranks import LOOKAHEAD_S
from gfgen.runtime.core.devices import DEFAULT_CPU_RANKS, DEVICES
from gfgen.runtime.files.start import GRACE_S
from gfgen.session.ranks import AskedRanks, Ranks

logger = logging.getLogger(__name__)

Command = Callable[..., Any]
Option = Callable[[Command], Command]

LOOKAHEAD_MS = 1e3 * LOOKAHEAD_S


class FiniteRange(click.FloatRange):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class NamedPath(click.Path):
    """Refuses the empty path, which a script with an unset variable gives."""

    def __init__(self, **options: Any) -> None:
        super().__init__(path_type=Path, **options)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("it is empty; name a path", param, ctx)
        return super().convert(value, param, ctx)


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


class Named(click.ParamType[str]):
    """Any text. Shells complete it to one of these names or, where none begins so, to a file."""

    name = "text"

    def __init__(self, *names: str) -> None:
        self._names = names

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        found = [CompletionItem(name) for name in self._names if name.startswith(incomplete)]
        return found or [CompletionItem(incomplete, type="file")]


A_MODEL, A_POLICY = Named(*(model.name for model in MODELS)), Named(*BUILT_IN)


def taken_as(name: str, kind: type[Any], *options: Option) -> Option:
    """A decorator that adds options, and gives them to the command as one argument: `kind`, a dataclass.

    Each option has the name of a field; a field without an option keeps its default.
    """
    fields = {field.name for field in dataclasses.fields(kind)}

    def add(command: Command) -> Command:
        @functools.wraps(command)
        def taking_one(*arguments: Any, **values: Any) -> Any:
            own = {field: values.pop(field) for field in fields & values.keys()}
            return command(*arguments, **values, **{name: kind(**own)})

        return all_of(*options)(taking_one)

    return add


def all_of(*options: Option) -> Option:

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


model_option = click.option(
    "--model",
    type=A_MODEL,
    default=DEFAULT_MODEL,
    show_default=True,
    help="Model for jobs without one: a name from 'gfgen models', a directory or a hub id.",
)
policy_option = click.option(
    "--policy",
    type=A_POLICY,
    default="auto",
    show_default=True,
    help="NAME[,option=value...]; 'gfgen policies' lists them.",
)
profile_option = click.option(
    "--profile",
    "profile_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Profile with task times. [this machine's, or one shipped with gfgen]",
)
lookahead_option = click.option(
    "--lookahead",
    type=FiniteRange(0, 1000),
    default=LOOKAHEAD_MS,
    show_default=True,
    metavar="MS",
    help="Queue the next task this long before the predicted end of the current one, plus 2% of the current "
    "task's time. With 0, gfgen waits until the task has ended.",
)
batch_option = click.option(
    "--batch",
    type=click.IntRange(1, 8),
    default=1,
    show_default=True,
    metavar="N",
    help="Compute the steps of up to N equal jobs that follow each other in the file together, on one rank. "
    "Small pictures take less time each, and differ in rounding from those without --batch.",
)
grace_option = click.option(
    "--grace",
    type=Duration(may_be_zero=True),
    default=f"{GRACE_S:g}s",
    show_default=True,
    help="Time that running steps get to end by themselves when the run stops.",
)


def max_step_time_option(default: str | None) -> Option:
    return click.option(
        "--max-step-time",
        type=Duration(),
        default=default,
        show_default=default or "no bound",
        help="Refuse a job if one of its steps is predicted to take longer.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions(AskedRanks):
    gpus: str | None = None

    def found(self, *, cpu_ranks: int = DEFAULT_CPU_RANKS) -> Ranks:
        """These ranks on this machine; without GPUs and --ranks, `cpu_ranks` of them.

        Raises: InputError if the machine has fewer GPUs, or if --memory is no size.
        """
        if self.gpus is not None:
            _show_only(self.gpus)
        ranks = self.here(cpu_ranks=cpu_ranks)
        if not ranks.are_on_gpus:
            _tell_of_graphs("on CPU ranks, which launch no kernels")
        elif ranks.is_offloaded:
            _tell_of_graphs("with --offload, which moves weights")
        if self.offload and not ranks.is_offloaded:
            logger.info("--offload has no effect on CPU ranks")
        return ranks

    @property
    def asked(self) -> AskedRanks:
        """The same for another machine, whose GPUs have other numbers."""
        return AskedRanks(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(AskedRanks)}
        )


def _show_only(gpus: str) -> None:
    """Hide the other GPUs from this process and its children; numbers are those of `gfgen doctor`."""
    shown = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    chosen = [part.strip() for part in gpus.split(",")]
    if len(set(chosen)) < len(chosen) or not all(part.isascii() and part.isdigit() for part in chosen):
        raise InputError(f"--gpus {gpus}: numbers of GPUs are accepted, such as 0,2")
    if shown and any(int(part) >= len(shown) for part in chosen):
        raise InputError(f"--gpus {gpus}: CUDA_VISIBLE_DEVICES shows {len(shown)} GPUs, from 0")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(shown[int(part)] if shown else part for part in chosen)


def _tell_of_graphs(where: str) -> None:
    context = click.get_current_context()
    if context.get_parameter_source("graphs") is ParameterSource.COMMANDLINE:
        word = "--graphs" if context.params["graphs"] else "--no-graphs"
        logger.info("%s has no effect %s", word, where)


memory_option = click.option(
    "--memory",
    metavar="SIZE",
    help='Memory limit for weights and jobs, such as "40GB": per GPU, or of main memory. [all available]',
)
ranks_per_gpu_option = click.option(
    "--ranks-per-gpu",
    type=click.IntRange(1, MAX_RANKS),
    default=1,
    show_default=True,
    metavar="N",
    help="Let N ranks share each GPU, to try layouts of several ranks on one GPU. This is slower.",
)
offload_option = click.option(
    "--offload",
    is_flag=True,
    help="On small GPUs: keep text encoders and idle experts in main memory (docs/models.md). Slower.",
)
precision_options = (
    click.option(
        "--precision",
        multiple=True,
        metavar="[MODEL=]fp8",
        help="Compute transformers in fp8, of one model or of all: less time and memory, less exact "
        "(docs/precision.md). On GPUs, for Wan and Qwen-Image. Repeatable.",
    ),
    click.option(
        "--attention",
        multiple=True,
        metavar="[MODEL=]fp8",
        help="Attention in fp8, alike: less time for many tokens, less exact. Repeatable.",
    ),
)
compile_option = click.option(
    "--compile",
    type=click.Choice(("auto", "on", "off")),
    default="auto",
    show_default=True,
    help="Compile blocks of general diffusers pipelines (docs/models.md). auto: on GPUs, if it saves the run "
    "more time than compiling takes.",
)
trust_code_option = click.option(
    "--trust-remote-code",
    is_flag=True,
    help="Run Python code that comes with a checkpoint. Without it, such a checkpoint is refused.",
)
RANKS_HELP = f"Number of workers, one process each. [all GPUs, or {DEFAULT_CPU_RANKS} on a CPU]"


def rank_options(*more: Option, ranks_help: str = RANKS_HELP) -> Option:
    """Options of commands that start ranks, as one argument `ranks`."""
    return taken_as(
        "ranks",
        RankOptions,
        click.option("--ranks", type=click.IntRange(1, MAX_RANKS), help=ranks_help),
        click.option(
            "--device",
            type=click.Choice(DEVICES),
            default="auto",
            show_default=True,
            help="Device of the workers. auto takes GPUs if there are any.",
        ),
        click.option(
            "--gpus",
            metavar="LIST",
            help="Use only these GPUs, such as 0,2, by the numbers of 'gfgen doctor'.",
        ),
        *more,
        click.option(
            "--random-weights",
            is_flag=True,
            help="Draw full-size weights at random from config files, to measure speed without checkpoints.",
        ),
        click.option(
            "--vae-dtype",
            type=click.Choice(VAE_DTYPES),
            default="auto",
            show_default=True,
            help="Precision of VAEs. auto follows the model cards (Wan: float32).",
        ),
        click.option(
            "--graphs/--no-graphs",
            default=True,
            show_default=True,
            help="On GPUs: use CUDA graphs where they are faster (docs/models.md).",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    quiet: bool = False
    verbose: bool = False
    log_json: bool = False
    log_file: Path | None = None

    @property
    def level(self) -> str:
        return "debug" if self.verbose or _is_debug() else "warning" if self.quiet else "info"

    def configure(self, *, file: Path | None) -> None:
        file_level = "debug" if _is_debug() else "info"
        log.configure(level=self.level, as_json=self.log_json, file=file, file_level=file_level)


log_options = taken_as(
    "logs",
    LogOptions,
    click.option(
        "--log-file",
        type=NamedPath(dir_okay=False),
        help="Also append log lines to FILE. It may be rotated at any time.",
    ),
    click.option("--quiet", "-q", is_flag=True, help="Print only problems, failures and how a run ended."),
    click.option("--verbose", "-v", is_flag=True, help="Also print details."),
    click.option(
        "--log-json", is_flag=True, help="Log one JSON object per line instead of progress bars and text."
    ),
)


def configure_log(level: str) -> None:
    """Log to standard error from this level on; with --debug, log everything."""
    log.configure(level="debug" if _is_debug() else level)


def _is_debug() -> bool:
    context = click.get_current_context()
    return bool(context.obj and context.obj["debug"])


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    jobs: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()
    vary: bool = False
    size: str | None = None
    steps: str | None = None
    seed: str | None = None
    frames: str | None = None
    num_images: str | None = None
    only: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    limit: int | None = None

    @property
    def given(self) -> str | None:
        """The first of these options that was given."""
        named = {"--prompt": self.prompts, "--vary": self.vary, "--only": self.only, "--tag": self.tags}
        named |= {"--limit": self.limit, "--lora": self.loras}
        pairs = self._pairs
        return pairs[0][0] if pairs else next((name for name, value in named.items() if value), None)

    def source(self) -> JobSource:
        """Raises UsageError without jobs, InputError for a value that its field does not accept."""
        if not (self.jobs or self.prompts):
            raise click.UsageError(
                'name a job file, - for standard input, or give a prompt: -p "a red circle falls"'
            )
        return JobSource(
            files=self.jobs,
            prompts=self.prompts,
            overrides=parse_overrides(self._pairs) | ({"vary": True} if self.vary else {}),
            fallbacks={"lora": parse_loras(self.loras)} if self.loras else {},
            only=self.only,
            tags=self.tags,
            limit=self.limit,
        )

    @property
    def _pairs(self) -> Sequence[tuple[str, str]]:
        """Each option that sets a field, with FIELD=VALUE."""
        short = {"size": self.size, "steps": self.steps, "seed": self.seed, "frames": self.frames}
        short["num_images"] = self.num_images
        given = {name: value for name, value in short.items() if value is not None}
        pairs = [("--set", text) for text in self.settings]
        return pairs + [(f"--{name.replace('_', '-')}", f"{name}={value}") for name, value in given.items()]


job_options = taken_as(
    "jobs",
    JobOptions,
    click.argument("jobs", metavar="[JOBS]...", nargs=-1, type=Named()),
    click.option(
        "--prompt",
        "-p",
        "prompts",
        multiple=True,
        metavar="TEXT",
        help="Make a job of this prompt. May be repeated.",
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="FIELD=VALUE",
        help="Set this field of all jobs, whatever the job file says. May be repeated.",
    ),
    click.option(
        "--vary",
        is_flag=True,
        help='Expand {a|b} and {@file} in all prompts, as if each line had "vary": true.',
    ),
    click.option("--size", metavar="WxH", help="The same as --set size=WxH, such as 832x480."),
    click.option("--steps", metavar="N", help="The same as --set steps=N."),
    click.option("--seed", metavar="N", help="The same as --set seed=N."),
    click.option("--frames", metavar="N", help="The same as --set frames=N."),
    click.option(
        "--lora",
        "loras",
        multiple=True,
        type=Named(),
        metavar="FILE[:SCALE]",
        help="LoRA for jobs that name none: a file, a folder or a hub id. May be repeated.",
    ),
    click.option("--num-images", "-n", metavar="N", help="Make N of each job, with different seeds."),
    click.option(
        "--only",
        multiple=True,
        metavar="ID",
        help='Take only the job with this id, or those of a pattern, such as "fox-*". May be repeated.',
    ),
    click.option(
        "--tag", "tags", multiple=True, metavar="TAG", help="Take only jobs with this tag. May be repeated."
    ),
    click.option(
        "--limit", type=click.IntRange(1), metavar="N", help="Take only the first N of the selected jobs."
    ),
)
