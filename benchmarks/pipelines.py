"""Step every transformer pipeline of diffusers at small size, and compare with its own call bit by bit.

python -m benchmarks.pipelines [--only REGEX] [--table docs/models.md]

Each pipeline runs in a process of its own. The call takes 5 steps, guidance, and every file argument that
the pipeline has; its tasks alternate between two pipeline objects.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import time
import traceback
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SEED = 7
TIMEOUT_S = 60
MEMORY_BYTES = 12 << 30


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one pipeline."""

    name: str
    kind: str
    """bitwise, different, not stepped, not built"""
    note: str = ""
    num_steps: int = 0
    arguments: tuple[str, ...] = ()
    """Of the files that the call was given."""
    seconds: float = 0.0


def check(name: str) -> Result:
    """Step one pipeline."""
    from benchmarks.small_pipelines import CannotBuildError, small_call, small_pipeline
    from gfgen.models.stepping.program import NotSteppableError
    from gfgen.models.stepping.verify import difference, stepped_call, whole_call

    start_s = time.monotonic()
    try:
        args = small_call(name)
        whole = whole_call(small_pipeline(name), args, seed=SEED)
    except CannotBuildError as error:
        return Result(name, "not built", str(error))
    except Exception as error:
        return Result(name, "not built", _where(error))
    try:
        stepped, num_steps = stepped_call([small_pipeline(name), small_pipeline(name)], args, seed=SEED)
    except NotSteppableError as error:
        return Result(name, "not stepped", str(error))
    except Exception as error:
        return Result(name, "not stepped", _where(error))
    files = tuple(name for name in args if re.search("image|video|mask|audio|frames", name))
    seconds = time.monotonic() - start_s
    if found := difference(stepped, whole):
        return Result(name, "different", found, num_steps, files, seconds)
    return Result(name, "bitwise", "", num_steps, files, seconds)


def _where(error: Exception) -> str:
    """The error and the line of diffusers that raised it."""
    frames = [x for x in traceback.extract_tb(error.__traceback__) if "diffusers" in x.filename]
    at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{at}"


def check_apart(name: str, *, is_traced: bool = False) -> Result:
    """Step one pipeline in a child process, which may run out of memory or time."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(TIMEOUT_S)
        try:
            result = check(name)
        except BaseException as error:
            result = Result(name, "not built", f"{type(error).__name__}: {error}")
        os.write(writer, json.dumps(asdict(result)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    if not text:
        return Result(name, "not built", f"ends without a result within {TIMEOUT_S} s")
    return Result(**json.loads(text))


def main() -> None:
    """Step the pipelines and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--json", type=Path, help="a file to which results are added")
    options = parser.parse_args()
    _quiet()
    from benchmarks.small_pipelines import pipeline_names

    names = [name for name in pipeline_names() if re.search(options.only, name)][options.skip :]
    results = []
    for name in names:
        result = check_apart(name)
        results.append(result)
        print(f"{name}: {result.kind} {result.num_steps or ''} {result.note}"[:300], flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
    counts = {
        kind: sum(result.kind == kind for result in results) for kind in sorted({x.kind for x in results})
    }
    print(counts)


def _quiet() -> Any:
    warnings.filterwarnings("ignore")
    import diffusers
    import torch
    import transformers

    torch.set_num_threads(1)
    diffusers.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()


if __name__ == "__main__":
    main()
