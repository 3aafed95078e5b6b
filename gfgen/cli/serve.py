"""`gfgen serve`: the runtime of `gfgen run` behind HTTP."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from gfgen import log
from gfgen.cli import options as opt
from gfgen.cli.config import own_recipes, tell_of_variables
from gfgen.cli.remote.server import is_loopback
from gfgen.cli.run_files import ClusterOptions, options_of, session_of
from gfgen.cli.shown.progress import LineProgress
from gfgen.cluster.ray_cluster import RayCluster
from gfgen.errors import InputError, InterruptedRunError
from gfgen.job.spec import JobSpec, lack_of
from gfgen.models.families.registry import DEFAULT_MODEL
from gfgen.policies.catalog import load_policy
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.devices import parse_memory
from gfgen.runtime.core.events import Clock
from gfgen.runtime.files import resume
from gfgen.runtime.files.ownership import check_no_run
from gfgen.runtime.predict.job_bounds import JobBounds
from gfgen.runtime.simulate.choosers import ThreadedChooser
from gfgen.server.bridge import RunBridge, Supervisor, listen
from gfgen.server.protocol.limits import ApiOptions, NamedKey, ServerLimits, check_key, read_keys
from gfgen.server.protocol.link import Admit, FrontSettings, RunInfo
from gfgen.server.protocol.server_schemas import ServedModel, served_model
from gfgen.server.shown.webhooks import secret_bytes
from gfgen.server.store import STORE_NAME
from gfgen.session.live import write_live
from gfgen.session.loras import ServedLora, find_loras
from gfgen.session.session import Arrivals, Session, SessionOptions
from gfgen.system import machine
from gfgen.system.machine import SERVING, check_limits, check_packages, versions
from gfgen.system.signals import SignalPipe
from gfgen.system.wording import counted

logger = logging.getLogger(__name__)

KEY_VARIABLE = "GFGEN_API_KEY"
DEFAULTS = ServerLimits()
DEFAULT_JOB_BOUNDS = JobBounds(pixels=2048 * 2048, frames=257, steps=200)
"""Accept all that the models are made for: Wan2.2 in 1280x720 with 121 frames, Qwen-Image in 2048x2048."""
NOT_SERVED = "it is not served any more: start the server with --model NAME too"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(SessionOptions):
    keeps_records: bool = False
    waits_for_space: bool = True
    host: str
    port: int
    front: FrontSettings
    models: tuple[str, ...] = (DEFAULT_MODEL,)
    loras: Mapping[str, ServedLora] = field(default_factory=dict)
    cluster: RayCluster | None = None


class _Size(click.ParamType[int]):
    """Bytes, as 500M or 20G."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return parse_memory(str(value), option="" if param is None else param.opts[0])


def _pattern(name: str, pattern: str, *, accepted: str, dropped: str = "/") -> Callable[[object], str]:
    """A type: text that matches a pattern, without a slash at its end."""

    def check(value: object) -> str:
        if not re.fullmatch(pattern, found := str(value).rstrip(dropped)):
            raise click.BadParameter(f"{value!r}: {accepted} is accepted")
        return found

    check.__name__ = name  # which --help shows
    return check


_SITE = r"https?://[A-Za-z0-9.\-\[\]:]+"


def _most(help_: str, name: str, default: int | None) -> Any:
    return opt.option(help_, name, type=click.IntRange(1), default=default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    port: int = opt.option("Port to listen on.", type=click.IntRange(1, 65535), default=3000)
    host: str = opt.option(
        "Address to listen on.",
        type=_pattern("text", r"[^:/\s]+|[^/\s]*:[^/\s]*:[^/\s]*", accepted="an address without --port"),
        default="127.0.0.1",
    )
    api_key: str | None = opt.option(
        f"Key that every request must send. Prefer the environment variable {KEY_VARIABLE}. "
        "With --key-file, the key that sees all jobs and may change the policy.",
        envvar=KEY_VARIABLE,
    )
    key_file: Path | None = opt.option(
        "File of keys, each on a line with a name and the key. Each sees its own jobs.", type=opt.NamedPath()
    )
    no_key: bool = opt.flag("Allow requests without a key even if other machines can reach --host.")
    output: Path = opt.option(
        "Folder for results and the job database.", "-o", type=opt.NamedPath(), default=Path("outputs/serve")
    )
    models: tuple[str, ...] = opt.option(
        f"Model to serve: a name from 'gfgen models', a directory or a hub id. Repeatable. [{DEFAULT_MODEL}]",
        "--model",
        type=opt.A_MODEL,
        multiple=True,
        metavar="NAME",
    )
    loras: tuple[str, ...] = opt.option(
        "LoRA that requests can name: a file, a folder or a hub id. Repeatable.",
        "--lora",
        multiple=True,
        metavar="NAME=PATH",
        type=_pattern("lora", r"[A-Za-z0-9._-]{1,64}=.+", accepted="NAME=PATH"),
    )
    api: ApiOptions = opt.group(
        ApiOptions,
        served_names=opt.option(
            "Also serve MODEL under the name ALIAS, for example sora-2=wan2.2-ti2v-5b. Repeatable.",
            "--served-model-name",
            multiple=True,
            type=_pattern("alias=model", r"[^=]+=.+", accepted="ALIAS=MODEL"),
        ),
        strict=opt.flag("Refuse requests with unknown fields, in place of ignoring these fields."),
        path_prefix=opt.option(
            "Path of the server behind a proxy. [the path of --public-url]",
            "--root-path",
            type=_pattern("path", r"(/[A-Za-z0-9._~\-]+)*", accepted="a path like /films"),
            default="",
            show_default=False,
        ),
        public_url=opt.option(
            "URL under which clients reach the server. The URLs of results begin with it.",
            type=_pattern("url", _SITE + r"(/[A-Za-z0-9._~\-]+)*", accepted="a URL like https://host/films"),
        ),
        allowed_origins=opt.option(
            "Site whose pages may use the API from a browser. Repeatable.",
            "--allow-origin",
            multiple=True,
            type=_pattern("origin", rf"{_SITE}|\*", accepted="an origin like https://example.com, or *,"),
        ),
        access_log=opt.flag("Log a line for each request."),
        a1111=opt.flag("Also serve A1111's API (/sdapi/v1), for clients such as SillyTavern."),
        webhook_url=opt.option(
            "URL to which the server sends each job when it has ended.",
            "--webhook",
            type=_pattern("url", r"https?://[!-~]+", accepted="a URL like https://host/path", dropped=""),
        ),
        webhook_hosts=opt.option(
            "Host that a job's own `webhook` may name; HOST alone stands for ports 80 and 443. Repeatable.",
            "--webhook-host",
            multiple=True,
            type=_pattern("host", r"[a-z0-9.\-\[\]:]+", accepted="HOST or HOST:PORT in small letters"),
        ),
        webhook_secret=opt.option(
            "Secret that signs requests to webhooks, whsec_BASE64. Prefer the environment variable "
            "GFGEN_WEBHOOK_SECRET."
        ),
    )
    ranks: opt.RankOptions = opt.group(opt.RankOptions)
    cluster: ClusterOptions = opt.group(ClusterOptions)
    policy: str = opt.policy_option()
    lookahead: float = opt.lookahead_option()
    grace_s: float = opt.grace_option()
    max_step_time: float = opt.max_step_time_option(default="10m", show_default="10m")
    bounds: JobBounds = opt.group(
        JobBounds,
        pixels=_most("Largest width x height of a job.", "--max-pixels", DEFAULT_JOB_BOUNDS.pixels),
        frames=_most("Most frames of a job.", "--max-frames", DEFAULT_JOB_BOUNDS.frames),
        steps=_most("Most steps of a job.", "--max-steps", DEFAULT_JOB_BOUNDS.steps),
    )
    limits: ServerLimits = opt.group(
        ServerLimits,
        open_jobs=_most("Most jobs open at once.", "--max-open", DEFAULTS.open_jobs),
        streams=_most("Most event streams open at once.", "--max-streams", DEFAULTS.streams),
        body_bytes=opt.option("Largest request in bytes.", "--max-body", type=_Size(), default="64M"),
        keep_s=opt.option(
            "Remove finished jobs after this time.", "--keep", type=opt.Duration(), default="7d"
        ),
        keep_bytes=opt.option("Remove the oldest jobs when files exceed this.", type=_Size(), default="100G"),
    )
    umask: str = opt.option(
        "Permissions that new files do not have.",
        type=_pattern("mode", r"0?[0-7]{3}", accepted="three octal digits like 027"),
        default="077",
    )
    logs: opt.LogOptions = opt.group(opt.LogOptions)


@click.command()
@opt.takes(given=Arguments)
def serve(given: Arguments) -> int:
    """Generate pictures and videos over HTTP: OpenAI's image and video API, and a web page.

    SIGTERM stops the server within --grace. After a restart it continues every accepted job.
    """
    context, logs = click.get_current_context(), given.logs
    context.call_on_close(partial(os.umask, os.umask(int(given.umask, 8))))
    logs.configure(file=logs.log_file)
    tell_of_variables(context)
    if lack := lack_of("mp4"):
        logger.warning("no request for a video is accepted: %s", lack)
    keys = _checked_keys(given)
    models = given.models or (DEFAULT_MODEL,)
    for alias, name in given.api.aliases.items():
        if name not in models:
            raise InputError(f"--served-model-name {alias}={name}: {name} is not served; add --model {name}")
    _check_webhooks(given.api)
    given.cluster.check({"--gpus": given.ranks.gpus is not None, "--lora": bool(given.loras)})
    check_packages(SERVING)
    if not (given.output / STORE_NAME).exists():
        check_no_run(given.output)
    connected = given.cluster.connected(given, model=models[0], output_dir=given.output)
    cluster = context.with_resource(connected)
    options = options_of(
        ServeOptions,
        given,
        cluster,
        output_dir=given.output,
        front=FrontSettings(
            output_dir=given.output.absolute(),
            api_key=given.api_key,
            keys=keys,
            limits=given.limits,
            version=versions().get("gfgen", "unknown"),
            commit=machine.commit(),
            api=replace(given.api, patch_names=tuple(each.partition("=")[0] for each in given.loras)),
            log_level=logs.level,
            log_json=logs.log_json,
            log_file=None if logs.log_file is None else logs.log_file.absolute(),
            recipes=own_recipes(),
        ),
        job_bounds=replace(given.bounds, step_s=given.max_step_time),
        model=models[0],
        models=models,
        loras=find_loras(given.loras),
    )
    serve_models(options)
    return 0


def serve_models(options: ServeOptions) -> None:
    """Serve until a signal comes. Raises: InputError; LockedError; InterruptedRunError at a second signal."""
    machine.allow_most()
    check_limits()
    with contextlib.ExitStack() as stack:
        listener = listen(options.host, options.port)
        stack.callback(listener.close)
        cluster = options.cluster
        session = stack.enter_context(session_of(options, cluster))
        _ = session.signals  # caught from here on, so that the HTTP process is always stopped
        chooser = stack.enter_context(contextlib.closing(ThreadedChooser(options.policy.choose)))
        bridge = RunBridge(on_policy=lambda policy: chooser.follow(load_policy(policy).choose))
        supervisor = Supervisor(listener, options.front, bridge)
        supervisor.start()
        stack.callback(supervisor.stop)
        with contextlib.suppress(OSError):  # then gfgen status needs the URL
            write_live(options.output_dir, {"url": url_of(options.host, options.port)})
        logger.info("listening on http://%s:%d; loading the models", options.host, options.port)
        known, memory = session.admission.models, session.admission.memory
        found = [known.find(name) for name in options.models]
        checkpoints = [model.checkpoint for model in found]
        known.precision.tell_of_other_models(checkpoints)
        memory.patches.serve(options.loras, checkpoints, memory)
        try:
            session.load([], models=options.models)
            loaded = session.admission.of_loaded(session.checkpoints, help_=NOT_SERVED)
            bounds = options.job_bounds or JobBounds()
            created = int(time.time())
            models = [served_model(x, created=created, bounds=bounds, patches=options.loras) for x in found]
            for each in models:
                if each.limited:
                    values = ", ".join(f"{name} = {value}" for name, value in each.limited.items())
                    which = f"--max-frames, --max-steps or --max-pixels is below a default of {each.id}"
                    logger.warning("%s: jobs without it have %s", which, values)
            session.warm_up(usual_jobs(models, loaded))
        except InterruptedRunError:
            text = "stopped while the models were loading; open jobs continue at the next start"
            logger.info("%s", text, extra=log.fields(event="server_stopped"))
            return
        serve_on(session, bridge, chooser, models, admit=loaded, admit_again=loaded.again)


def usual_jobs(models: Sequence[ServedModel], admit: Admit) -> Sequence[AdmittedJob]:
    usual: list[dict[str, Any]] = [{"prompt": "as usual", "model": x.id, **x.limited} for x in models]
    admitted, _ = admit([JobSpec(id=f"usual-{number}", **each) for number, each in enumerate(usual)])
    return admitted


def serve_on(
    session: Session,
    bridge: RunBridge,
    chooser: ThreadedChooser,
    models: Sequence[ServedModel],
    *,
    admit: Admit,
    admit_again: Admit,
) -> None:
    """Run the control loop, first with the jobs of the store, which `admit_again` admits, until the stop."""
    options, clock = session.options, Clock()
    device, num_ranks = options.ranks.gpu_name or options.ranks.devices.kind, session.num_own_ranks
    info = RunInfo(
        admit=admit,
        admit_again=admit_again,
        models=tuple(models),
        device=device,
        num_ranks=num_ranks,
        policy=options.policy.name,
        started_at=clock.started_at,
        began_s=-clock.from_monotonic(0.0),
    )
    todo = bridge.open(info, is_stopped=lambda: _has_signal(session.signals))
    if todo is None:
        text = "stopped before it began; open jobs continue at the next start"
        logger.info("%s", text, extra=log.fields(event="server_stopped"))
        return
    resume.forget_others(options.output_dir, {job.job_id for job in todo})
    if session.residency is not None:
        session.residency.note(todo)
    ranks = counted(num_ranks, "rank") if num_ranks else "the ranks of nodes"
    logger.info("ready: %s (%s), policy %s", ranks, device, options.policy.name)
    arrivals = Arrivals(bridge, observers=[bridge], requests=bridge, chooser=chooser, on_turn=bridge.turned)
    with contextlib.closing(bridge):
        summary = session.run(todo, observers=[LineProgress()], arrivals=arrivals, clock=clock)
    num_open = summary.num_unfinished
    some = "1 job is open and continues" if num_open == 1 else f"{num_open} jobs are open and continue"
    text = f"{some} at the next start" if num_open else "no job is open"
    logger.info("stopped; %s", text, extra=log.fields(event="server_stopped", open=num_open))


def _checked_keys(given: Arguments) -> Mapping[str, NamedKey]:
    """The keys of --key-file. Raises InputError for bad keys, or if others could use the server without."""
    if given.api_key is not None:
        check_key(given.api_key, where="--api-key")
    keys = {} if given.key_file is None else read_keys(given.key_file)
    if given.api_key in [each.key for each in keys.values()]:
        raise InputError(f"--api-key: it is also in {given.key_file}; give the admin a key of its own")
    if given.no_key and (given.api_key or keys):
        logger.warning("--no-key has no effect: requests need a key of --key-file or --api-key")
    if not (is_loopback(given.host) or given.api_key or keys or given.no_key):
        raise InputError(
            f"--host {given.host}: other machines can reach this address; give --api-key (or "
            f"{KEY_VARIABLE}), or --no-key to allow requests without a key"
        )
    return keys


def _check_webhooks(api: ApiOptions) -> None:
    is_good = api.webhook_secret is not None and secret_bytes(api.webhook_secret) is not None
    if (api.webhook_url or api.webhook_hosts or api.webhook_secret) and not is_good:
        raise InputError(
            "--webhook-secret: webhooks need a secret of whsec_ and 24 to 64 bytes in base64; "
            "'echo whsec_$(openssl rand -base64 32)' makes a good one, for GFGEN_WEBHOOK_SECRET"
        )


def url_of(host: str, port: int) -> str:
    """Where this machine reaches a server that listens there."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _has_signal(signals: SignalPipe) -> bool:
    with contextlib.suppress(BlockingIOError):
        return bool(signals.take())
    return False
