"""Run the job line in each file's metadata again, for every pipeline at small size, and compare the bytes.

    python -m benchmarks.lines [--only REGEX] [--to RESULTS.md]

A job with every field and file of the pipeline's call runs in gfgen's adapter of any pipeline, and its files
are written. The line that they contain is parsed, resolved and run by a fresh pipeline with equal weights.
Each pipeline runs in a process of its own.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from small_pipelines import CannotBuildError, small_calls, small_pipeline

from benchmarks.measured import head, row
from benchmarks.pipelines import in_child, quiet, verified
from gfgen.errors import JobError, WorkerError
from gfgen.job.fields import parse_fields
from gfgen.job.images import ImageReader
from gfgen.job.spec import JobSpec, with_defaults
from gfgen.models.geometry.checkpoint import Checkpoint
from gfgen.models.geometry.pipeline import PipelineGeometry, pipeline_geometry
from gfgen.models.stepping.adapter import PipelineAdapter
from gfgen.models.stepping.check import moved
from gfgen.runtime.files.metadata import describe
from gfgen.runtime.files.outputs import read_metadata, write_output
from gfgen.runtime.files.writer import frames_by_file

TIMEOUT_S = 120
SAME = "same bytes"
FIELDS: tuple[str, ...] = ("prompt", "negative_prompt", "width", "height", "frames", "steps", "sigmas")
FIELDS += ("guidance_scale", "guidance_scale_2", "true_cfg_scale")


def again(name: str, folder: Path) -> str:
    """`SAME`, or what a line out of a file of this pipeline does instead; inputs and files go to a folder."""
    for number, call in enumerate(small_calls(name)):
        inputs = folder / str(number)
        inputs.mkdir()
        geometry = _geometry(name)
        line = _line(geometry, call, inputs)
        try:
            first = _made(name, geometry, _spec(geometry, line, inputs), inputs / "first")
        except Exception as error:
            raise CannotBuildError(f"the job itself fails: {error}") from None
        metadata = read_metadata(first[0])
        for path in first:
            assert read_metadata(path) == metadata
        second = _made(name, geometry, _spec(geometry, metadata, inputs), inputs / "second")
        if [path.read_bytes() for path in first] != [path.read_bytes() for path in second]:
            return "other bytes"
    return SAME


def _geometry(name: str) -> PipelineGeometry:
    parts = small_pipeline(name).components
    configs = {
        key: dict(part.config) for key, part in parts.items() if type(part).__module__[:9] == "diffusers"
    }
    index = {key: ["diffusers", type(parts[key]).__name__] for key in configs}
    return pipeline_geometry(Checkpoint(Path("."), {"_class_name": name, **index}, configs, {}))


def _line(geometry: PipelineGeometry, call: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The job that makes this call, with its files in a folder."""
    signature = geometry.signature
    fields = {argument: field for field in FIELDS if (argument := signature.argument_of(field))}
    line: dict[str, Any] = {"id": "again", "seed": 7, "prompt": "a red cat"}
    for name, value in call.items():
        if name in fields:
            line[fields[name]] = value
        elif name in signature.files:
            line.setdefault("files", {})[name] = _saved(value, folder, name)
        elif name in signature.args and isinstance(value, (str, int, float, list, type(None))):
            line.setdefault("args", {})[name] = value
        elif name not in ("output_type", "prompt"):
            raise CannotBuildError(f"{name}: no job has it")
    return line


def _saved(value: Any, folder: Path, name: str) -> str | list[str]:
    if isinstance(value, list):
        return [str(_saved(each, folder, f"{name}-{number}")) for number, each in enumerate(value)]
    if not hasattr(value, "save"):
        raise CannotBuildError(f"{name}: is no picture")
    value.save(folder / f"{name}.png")
    return f"{name}.png"


def _spec(geometry: PipelineGeometry, line: Mapping[str, Any], folder: Path) -> JobSpec:
    values, problems = parse_fields(line, images=ImageReader(folder))
    if problems:
        raise JobError(*problems)
    return geometry.resolve(with_defaults(JobSpec(**values), model=geometry.family))


def _made(name: str, geometry: PipelineGeometry, spec: JobSpec, folder: Path) -> list[Path]:
    adapter = PipelineAdapter(geometry, small_pipeline(name), device="cpu")
    prompt = moved(adapter.encode(spec))
    condition, latents = map(moved, adapter.prepare(spec, prompt))
    for step in range(spec.steps or 0):
        latents = moved(adapter.denoise(spec, prompt, condition, latents, step=step))
    frames = adapter.decode(spec, latents).tensors["frames"].numpy()
    options: dict[str, Any] = {"fps": spec.fps, "metadata": describe(spec)}
    path = folder / ("a.mp4" if geometry.kind == "video" else "a.png")
    parts = frames_by_file(frames, path, fps=spec.fps)
    for number, (each, part) in enumerate(parts.items(), start=1):
        place = (number, len(parts)) if len(parts) > 1 else None
        write_output(part, each, place=place, **options)
    return [*parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--to", type=Path, help="a file for the table")
    options = parser.parse_args()
    quiet()
    found = {}
    for name in (name for name in verified() if re.search(options.only, name)):
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[name] = in_child(partial(again, name, Path(folder)), TIMEOUT_S)
            except WorkerError as error:
                found[name] = str(error).replace("CannotBuildError:", "not tried:")
        print(f"{name}: {found[name]}", flush=True)
    print(dict(Counter(text.partition(":")[0] for text in found.values())))
    if options.to is not None:
        rows = [row(name, text.replace("|", "/")) for name, text in found.items()]
        options.to.write_text("\n".join([head("pipeline", "its line again"), *rows]) + "\n")


if __name__ == "__main__":
    main()
