"""`gfgen policies` and `gfgen models`."""

from __future__ import annotations

import contextlib
import io
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gfgen.cli.config import own_recipes, read_files
from gfgen.cli.options import A_MODEL, RANKS, TRUST_CODE, FiniteRange, Named, NamedPath, configure_log
from gfgen.errors import InputError, JobFileError, ModelError
from gfgen.job.reader import read_job_stream
from gfgen.job.recipes import is_for, recipes
from gfgen.job.spec import JobSpec
from gfgen.layout import MAX_RANKS
from gfgen.models.families.registry import (
    HUB_IDS,
    MODELS,
    TINY_NAMES,
    cached,
    make_tiny_models,
    resolve_checkpoint,
)
from gfgen.models.geometry.model import Geometry, load_geometry
from gfgen.models.geometry.pipeline import PipelineGeometry
from gfgen.models.geometry.weights import device_bytes, footprint
from gfgen.policies.catalog import BUILT_IN, describe
from gfgen.runtime.core.devices import CPU, CUDA, DEVICES, choose_devices
from gfgen.session.memory import HostMemory
from gfgen.session.ranks import AskedRanks
from gfgen.system.machine import COMPUTING, check_packages
from gfgen.system.wording import counted

if TYPE_CHECKING:
    from gfgen.models.stepping.check import Trial


@click.command()
def policies() -> None:
    """List the scheduling policies, their options, and when to use each.

    Choose one with --policy NAME[,option=value...]. NAME can also be a policy of your own:
    package.module:attribute, or the path of a file (docs/policies.md shows how to write one).
    """
    for name in BUILT_IN:
        options, text = describe(name)
        summary, _, details = text.partition("\n\n")
        click.secho(name + (f"  ({options})" if options else ""), bold=True)
        for paragraph in (summary, details):
            click.echo(textwrap.fill(paragraph, width=88, initial_indent="  ", subsequent_indent="  "))
        click.echo()
    click.echo("Your own: --policy package.module:attribute or path/to/file.py; see docs/policies.md")


@click.group(invoke_without_command=True)
@click.option(
    "--pipelines", is_flag=True, help="List pipeline classes of diffusers with result and output kind."
)
@click.pass_context
def models(ctx: click.Context, *, pipelines: bool) -> None:
    """List the models that you can name in jobs and with --model."""
    if ctx.invoked_subcommand is not None:
        return
    text = resources.files("gfgen.models.families").joinpath("pipelines.json").read_text()
    found: dict[str, tuple[str, str]] = json.loads(text)
    if pipelines:
        width = max(map(len, found))
        for name, (result, kind) in found.items():
            click.echo(f"{name:<{width}}  {result:<11}  {kind}")
        return
    width = max(map(len, MODELS))
    for name, summary in MODELS.items():
        click.echo(f"{name:<{width}}  {summary}")
    for recipe, families in (recipes() | own_recipes()).items():
        click.echo(f"recipe {recipe}: {', '.join(families)}")
    click.echo("Or name a directory in diffusers' format, or the hub id of such a pipeline.")
    click.echo(
        f"{sum(result == 'in steps' for result, _ in found.values())} pipeline classes of diffusers for "
        "pictures and videos are verified in steps: --pipelines lists them, docs/pipelines.md says more, "
        "'gfgen models check MODEL' tries a checkpoint."
    )


@models.command("make-tiny")
@click.argument("directory", type=NamedPath(file_okay=False))
@click.argument("names", nargs=-1, type=Named(*TINY_NAMES))
def make_tiny(directory: Path, names: tuple[str, ...]) -> None:
    """Write small pipelines with random weights to DIRECTORY: all of them, or NAMES.

    They use the real model classes and run anywhere in seconds. Their pictures show only texture.
    """
    unknown = [name for name in names if name not in TINY_NAMES]
    if unknown:
        raise ModelError(f"no tiny model {unknown[0]!r}; there are {', '.join(TINY_NAMES)}")
    make_tiny_models(directory, names or TINY_NAMES)
    for name in names or TINY_NAMES:
        click.echo(str(directory / name))


@models.command("check")
@click.argument("model", type=A_MODEL)
@click.option(
    "--job", default="{}", metavar="JSON", help="Fields of the job to try, such as '{\"frames\": 5}'."
)
@click.option(
    "--device", type=click.Choice(DEVICES), default="auto", show_default=True, help="Where to try the model."
)
@click.option("--trust-remote-code", is_flag=True, help=TRUST_CODE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(model: str, *, job: str, device: str, trust_remote_code: bool, as_json: bool) -> int:
    """Load MODEL, run a small job in steps, and compare it with the pipeline's own call bit by bit.

    MODEL is a directory, a hub id or a name. The exit code is 1 if the results differ.
    """
    checkpoint, devices = resolve_checkpoint(model), choose_devices(device, 1)
    geometry = load_geometry(checkpoint, trusts_code=trust_remote_code)
    given = _given_job(job, geometry)
    if devices.kind == CPU:
        HostMemory(devices=devices).weights([checkpoint])
    check_packages(COMPUTING)
    from gfgen.models.stepping.check import try_checkpoint

    trial = try_checkpoint(checkpoint, given, device=devices.kind, trusts_code=trust_remote_code)
    weights = {CPU: footprint(checkpoint).on(1), CUDA: sum(device_bytes(checkpoint).values())}
    memory = weights | {"peak": trial.peak_bytes}
    facts = _facts(model, geometry, trial) | {"device": devices.kind, "memory_bytes": memory}
    click.echo(json.dumps(facts) if as_json else _told(facts))
    return 1 if facts["differs"] else 0


@models.command("prove")
@click.argument("names", metavar="[MODEL]...", nargs=-1, type=A_MODEL)
@click.option(
    "--minutes", type=FiniteRange(0, min_open=True), default=30, show_default=True, help="Stop then."
)
@click.option("--device", type=click.Choice(DEVICES), default="auto", show_default=True, help="Where to try.")
@click.option("--ranks", type=RANKS, help="The most ranks to try. [all GPUs, or 4 on a CPU]")
@click.option("--random-weights", is_flag=True, help="Draw the weights at random from config files.")
@click.option("--output", "-o", type=NamedPath(dir_okay=False), help="Also write the table to this new file.")
def prove(*, names: tuple[str, ...], minutes: float, output: Path | None, **asked: Any) -> int:
    """Compare pictures and times with diffusers' on this machine, and print a table to send back.

    MODEL is a directory, a hub id or a name. By default, it is every published model that is here: in the
    hub's cache, or as `model` in gfgen.toml. Nothing is downloaded. The exit code is 1 if a picture differs
    although gfgen promises the same bytes.
    """
    configure_log("info")
    if output is not None and (output.exists() or not output.parent.is_dir()):
        raise InputError(f"--output {output}: a new file in an existing folder is accepted")
    ranks = AskedRanks(**asked).here()
    here = HUB_IDS if ranks.has_random_weights else _models_here()
    if not (names := tuple(dict.fromkeys(names or here))):
        raise InputError(
            f"no model is here: name one, or run 'hf download' for {', '.join(HUB_IDS.values())}"
        )
    check_packages(COMPUTING)
    from gfgen.bench.prove import Row, proof, table

    rows: list[Row] = []
    try:
        rows.extend(proof(names, ranks, minutes=minutes))
    finally:
        click.echo(text := table(rows, ranks), nl=False)
        if output is not None:
            with output.open("x") as file:
                file.write(text)
    return int(any(row.breaks_promise for row in rows))


def _models_here() -> Iterator[str]:
    for name, hub_id in HUB_IDS.items():
        with contextlib.suppress(ModelError):
            cached(hub_id)
            yield name
    for content in (file.content for file in read_files()):
        for each in (content, *content.values()):
            given = each.get("model", ()) if isinstance(each, dict) else ()
            yield from [given] if isinstance(given, str) else given


def _given_job(text: str, geometry: Geometry) -> JobSpec:
    """A small job of one line, with guidance where the call takes a negative prompt."""
    try:
        said = json.loads(text)
    except ValueError as error:
        raise InputError(f"--job {text}: is not JSON ({error})") from None
    if not isinstance(said, dict):
        raise InputError(f"--job {text}: a JSON object is accepted")
    small: dict[str, Any] = {"id": "check", "prompt": "a red cat", "steps": 4}
    small |= {"frames": 9} if geometry.kind == "video" else {}
    if not isinstance(geometry, PipelineGeometry) or "negative_prompt" in geometry.signature.arguments:
        small["negative_prompt"] = "blurry"
    line = json.dumps(small | said).encode()
    parsed = read_job_stream(io.BytesIO(line), source="--job", folder=Path())
    if parsed.problems:
        raise JobFileError("--job", parsed.problems)
    return parsed.specs[0]


def _facts(model: str, geometry: Geometry, trial: Trial) -> dict[str, Any]:
    """What --json prints, except for device and memory."""
    job, known = trial.job, recipes() | own_recipes()
    is_general = isinstance(geometry, PipelineGeometry)
    tokens = geometry.num_tokens(replace(job, width=1024, height=1024))
    found: dict[str, Any] = {
        "model": model,
        "family": geometry.family,
        "adapter": "general" if is_general else "own",
        "output": geometry.output_kind(job),
        "recipes": [name for name, of in known.items() if any(is_for(key, geometry.family) for key in of)],
        "in_steps": trial.is_stepped and trial.problem is None,
        "differs": trial.is_stepped and trial.problem is not None,
        "problem": trial.problem,
        "tried": {name: getattr(job, name) for name in ("width", "height", "frames", "steps")},
        "num_iterations": trial.num_iterations,
        "ranks_per_step": {"guidance": 2 if geometry.uses_cfg(job) else 1, "tokens": min(MAX_RANKS, tokens)},
    }
    if isinstance(geometry, PipelineGeometry):
        found |= {"args": dict(geometry.signature.args), "files": geometry.signature.files}
    return found


def _told(facts: Mapping[str, Any]) -> str:
    tried, degrees = facts["tried"], facts["ranks_per_step"]
    size = f"{tried['width']}x{tried['height']}" if tried["width"] else "its own size"
    size += f"x{tried['frames']}" if facts["output"] == "video" else ""
    steps = f"{counted(tried['steps'], 'step')} at {size} on {facts['device']}"
    if facts["in_steps"]:
        result = f"yes; {steps} give the bits of the pipeline's own call"
    elif facts["differs"]:
        result = f"no; {steps}: {facts['problem']}"
    else:
        result = f"no, each job runs as one task: {facts['problem']}"
    shared = [f"{degrees[name]} for {name}" for name in ("guidance", "tokens") if degrees[name] > 1]
    kind = "a general adapter" if facts["adapter"] == "general" else "an adapter of its own"
    cpu, gpu, peak = (f"{facts['memory_bytes'][name] / 1e9:.2f} GB" for name in ("cpu", "cuda", "peak"))
    lines = {
        "family": f"{facts['family']} ({kind})",
        "output": facts["output"],
        "in steps": result,
        "ranks a step": f"up to {' x '.join(shared)}" if shared else "1",
        "memory": f"weights {cpu} on a CPU, {gpu} on a GPU; this job {peak} at its peak",
    }
    if facts["recipes"]:
        lines["recipes"] = ", ".join(facts["recipes"])
    if "files" in facts:
        lines["files"] = ", ".join(facts["files"]) or "none"
        lines["args"] = ", ".join(f"{name} ({kind})" for name, kind in facts["args"].items()) or "none"
    return "\n".join(f"{name:<14}{text}" for name, text in lines.items())
