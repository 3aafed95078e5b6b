"""The parts of the pages that follow from the code: tables of fields, options, calls and metrics, an example.

    .venv/bin/python docs/tables.py

writes them between `<!-- generated: NAME -->` and `<!-- end -->`; tests/test_docs.py fails if one is old.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click

from gfgen.cli.main import cli
from gfgen.job.fields import FIELDS
from gfgen.job.samplers import SAMPLERS, SCHEDULES, known_sampler
from gfgen.models.geometry.rules import FLOW_SCHEDULERS
from gfgen.policies.catalog import BUILT_IN, describe
from gfgen.server.http.front import make_app
from gfgen.server.http.guard import ApiKeys
from gfgen.server.protocol.limits import ApiOptions, ServerLimits
from gfgen.server.shown.prometheus import ServerMetrics

FOLDER = Path(__file__).parent
MANY_FIELDS = 8  # of a request: only such lists stand for others
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
MEANINGS = {
    "id": "name of the job in reports and of its file; default: from the prompt ([Identity](#identity))",
    "prompt": "what to make; the only field that is required",
    "negative_prompt": "what to avoid",
    "prompt_syntax": "whether [weights](models.md#prompts-with-weights) (`(red:1.3)`) act; default `plain`",
    "model": "default: `--model`, or the built-in `shapes` ([models.md](models.md))",
    "size": "pixels; the model may round down, with a warning ([rounding](models.md#defaults-and-rounding))",
    "width": "the first half of `size`; if you give both, they must agree",
    "height": "the second half of `size`",
    "frames": "length of a video; width x height x frames is at most 2^32",
    "fps": "frames per second of the video file",
    "steps": "denoising steps; Qwen-Image needs 2",
    "guidance_scale": "classifier-free guidance; 1 or less turns it off",
    "guidance_scale_2": "the same for the second expert of a two-expert model",
    "boundary_ratio": "where the second expert takes over",
    "flow_shift": "shift of the noise schedule",
    "true_cfg_scale": "guidance of Qwen-Image",
    "seed": "start of the noise; default: from the id. -1 is random: gfgen draws it once and keeps it",
    "image": "first frame or picture to edit; the path is relative to the job file's folder",
    "background": "under [transparent pixels](#pictures); default: white; outputs stay transparent",
    "args": "arguments of the call of a [pipeline](pipelines.md#fields-of-the-call)",
    "files": "pictures and videos for arguments of this call",
    "scheduler": "another [scheduler or sampler](models.md#schedulers), or other options of the model's own",
    "lora": "[LoRAs](models.md#loras) for this job",
    "sigmas": "noise levels of the steps, in place of `steps`",
    "recipe": "[values of a distilled LoRA](models.md#recipes) for fields that the job leaves open",
    "reuse": "steps that run [no transformer](precision.md#reused-steps); default `never`",
    "upscale": "a [second pass](models.md#a-second-pass) makes the picture so many times larger",
    "upscale_strength": "how much the second pass changes; default 0.4",
    "upscale_steps": "its steps, of which the share `upscale_strength` runs; default: `steps`",
    "deadline": "when the output should be complete ([times](#times))",
    "arrival": "the job appears this long after the start of the run",
    "timeout": "the job fails if it has not ended this long after its arrival",
    "priority": "higher goes first; default 0",
    "tag": "a class for reports, such as S, M, L",
    "output": "name inside the output folder, may be a [template](#names-of-files); default: the id",
    "format": "[format](#formats) of the file; default: that of `output`, or PNG and MP4",
    "quality": "of JPEG, WebP, AVIF and videos; default: hardly visible compression",
}


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def table(heads: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *([cell(each) for each in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def fields() -> str:
    assert MEANINGS.keys() == FIELDS.keys(), "say in MEANINGS what each field means"
    rows = ((f"`{name}`", field.accepted, MEANINGS[name]) for name, field in FIELDS.items())
    return table(("field", "accepted", "meaning"), rows)


def commands(
    command: click.Command, name: str, context: click.Context
) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield name, command
        return
    for each in command.list_commands(context):
        found = command.get_command(context, each)
        assert found is not None
        yield from commands(found, f"{name} {each}".strip(), context)


def options() -> str:
    """One row for each option and meaning, with the commands that have it."""
    records: dict[tuple[str, str], list[str]] = {}
    for name, command in commands(cli, "", click.Context(cli)):
        context = click.Context(command, info_name=name)
        for option in command.params:
            if isinstance(option, click.Option) and (record := option.get_help_record(context)):
                records.setdefault(record, []).append(name)
    rows = ((f"`{names}`", ", ".join(users), text) for (names, text), users in records.items())
    return table(("option", "commands", "meaning"), rows)


def policies() -> str:
    """What each policy does, and what it is for: the beginning of its docstring."""
    rows = ((f"`{name}`", *described(name)) for name in BUILT_IN)
    return table(("policy", "options", "does", "use it"), rows)


def described(name: str) -> tuple[str, str, str]:
    options, text = describe(name)
    first, _, rest = text.partition("\n\n")
    return options, first, re.split(r"(?<=\.)\s", rest, maxsplit=1)[0]


def samplers() -> str:
    """Samplers with the same scheduler share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name in SAMPLERS:
        of_flow = scheduler(name, is_flow=True)
        of_flow = of_flow if of_flow.partition(" ")[0] in FLOW_SCHEDULERS else ""
        rows.setdefault((scheduler(name, is_flow=False), of_flow), []).append(f"`{name}`")
    heads = "sampler", "scheduler of diffusers", "of models that predict flow"
    return table(heads, ((", ".join(names), *schedulers) for schedulers, names in rows.items()))


def scheduler(name: str, *, is_flow: bool) -> str:
    known = dict(known_sampler(name, is_flow=is_flow) or {})
    return f"{known.pop('class')} {shown(known)}".rstrip()


def schedules() -> str:
    rows = ((f"`{name}`", shown(options)) for name, options in SCHEDULES.items())
    return table(("schedule", "options"), rows)


def shown(options: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}` {value}" for name, value in options.items())


def example() -> str:
    return f"```python\n{(FOLDER / 'examples/shortest_first.py').read_text()}```\n"


def document() -> dict[str, Any]:
    """What the server answers at /openapi.json, with A1111's API."""
    api = ApiOptions(a1111=True)
    service: Any = SimpleNamespace(
        api=api, limits=ServerLimits(), mirror=SimpleNamespace(metrics=ServerMetrics())
    )
    app = make_app(service, feeds=cast(Any, None), keys=ApiKeys("key"), address="127.0.0.1", version="0")
    return cast(dict[str, Any], app.openapi())


def endpoints() -> str:
    """A call with all fields of an earlier one names that call instead."""
    rows: list[tuple[str, str, str]] = []
    long: dict[str, list[str]] = {}
    for path, methods in document()["paths"].items():
        for method, call in methods.items():
            shown = f"`{method.upper()} {path}`"
            given = [each for each in call.get("parameters", ()) if each["in"] == "query"]
            query = ", ".join(f"`?{each['name']}`" for each in given)
            names = body_of(call)
            like = next((each for each, theirs in long.items() if set(theirs) <= set(names)), None)
            if like is None and len(names) > MANY_FIELDS:
                long[shown] = names
            own = [f"`{name}`" for name in names if like is None or name not in long[like]]
            body = ", ".join([f"those of {like}", *own] if like else own)
            rows.append((shown, call["summary"], "; ".join(filter(None, (query, body)))))
    return table(("call", "does", "query; fields of the request"), rows)


def body_of(call: dict[str, Any]) -> list[str]:
    contents = call.get("requestBody", {}).get("content", {}).values()
    return list(
        dict.fromkeys(name for each in contents for name in each.get("schema", {}).get("properties", ()))
    )


def schema(name: str) -> Callable[[], str]:
    def made() -> str:
        known = document()["components"]["schemas"][name]["properties"]
        rows = ((f"`{key}`", meaning(value)) for key, value in known.items() if meaning(value))
        return table(("field", "meaning"), rows)

    return made


def meaning(value: dict[str, Any]) -> str:
    values = [each for one in (value, *value.get("anyOf", ())) for each in one.get("enum", ())]
    return value.get("description") or ", ".join(f"`{each}`" for each in values)


def metrics() -> str:
    own = ServerMetrics()
    mirror = SimpleNamespace(
        status="ready",
        records={},
        ranks=lambda _: [],
        now=lambda: 0.0,
        longest_turn_s=0.0,
        num_turns=0,
        num_streams=0,
    )
    own.mirror = mirror
    found = [each for each in own.registry.collect() if each.name.startswith("gfgen_")]
    rows = (
        (f"`{each.name}{'_total' if each.type == 'counter' else ''}`", each.type, each.documentation)
        for each in found
    )
    return table(("metric", "kind", "meaning"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "fields": fields,
    "options": options,
    "policies": policies,
    "example": example,
    "samplers": samplers,
    "schedules": schedules,
    "endpoints": endpoints,
    "job": schema("Job"),
    "state": schema("LiveState"),
    "metrics": metrics,
}


def with_tables(text: str) -> str:
    """A page with its tables as the code has them now."""
    return BLOCK.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", text)


if __name__ == "__main__":
    for page in sorted(FOLDER.glob("*.md")):
        page.write_text(with_tables(page.read_text()))
