"""The command line: ``tokenflow up | engine | serve | keys | usage | model pull | doctor | bench``.

Imports the standard library, click and `local/` alone, so that it runs in an engine's image too; the
gateway's parts are imported by its commands, the benchmarks by theirs, when these are called.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

import click

from tokenflow_engine.policy.names import POLICY_NAMES
from tokenflow_gateway.local.checks import Place, check_ports, require
from tokenflow_gateway.local.doctor import examine, table
from tokenflow_gateway.local.engine_command import EngineCommand
from tokenflow_gateway.local.environment import find_engine_python
from tokenflow_gateway.local.errors import SetupError
from tokenflow_gateway.local.home import Home
from tokenflow_gateway.local.install import pull_model
from tokenflow_gateway.local.machine import Machine
from tokenflow_gateway.local.model import EMBEDDED_MODEL, resolve
from tokenflow_gateway.local.process import run_logged
from tokenflow_gateway.local.up import Up, UpOptions

__all__ = ["main"]

PORT = 8080
ENGINE_PORT = 30000
LOOPBACK = "127.0.0.1"
INTERRUPTED = 130
"""Exit code by convention: 128 + SIGINT."""


class OneLineErrors(click.Group):
    """Shows what a person has to put right as one line, never as a traceback."""

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; exit code 1 for a `SetupError`, 130 for Ctrl-C."""
        try:
            return super().invoke(ctx)
        except SetupError as error:
            click.echo(f"tokenflow: {error}", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            click.echo("Interrupted. The same command, run again, continues here.", err=True)
            ctx.exit(INTERRUPTED)


def _policy(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """The name is checked here, options after it by the engine."""
    if value is not None and value.partition(":")[0] not in POLICY_NAMES:
        raise click.BadParameter(f"{value!r} is not one of {', '.join(POLICY_NAMES)}.")
    return value


model_option = click.option(
    "--model",
    envvar=["TOKENFLOW_MODEL", "MODEL"],
    default=EMBEDDED_MODEL,
    show_default=True,
    show_envvar=True,
    help="A directory with a model, or a name that the engine can download.",
)
port_option = click.option(
    "--port",
    envvar="TOKENFLOW_PORT",
    type=click.IntRange(1, 65535),
    default=PORT,
    show_default=True,
    show_envvar=True,
    help="Where the gateway listens.",
)
engine_port_option = click.option(
    "--engine-port",
    envvar="TOKENFLOW_ENGINE_PORT",
    type=click.IntRange(1, 65535),
    default=ENGINE_PORT,
    show_default=True,
    show_envvar=True,
    help="Where the engine listens (on this machine only).",
)
host_option = click.option(
    "--host",
    envvar="TOKENFLOW_HOST",
    default=LOOPBACK,
    show_default=True,
    show_envvar=True,
    help="The gateway's address; 0.0.0.0 opens it to the network.",
)
config_option = click.option(
    "--config",
    "config_file",
    envvar="TOKENFLOW_CONFIG",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    show_envvar=True,
    help="The gateway's configuration (YAML).",
)


@click.group(
    cls=OneLineErrors, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(package_name="tokenflow-serving")
def cli() -> None:
    """Streamed text at the speed people read: a gateway and an engine that know their readers.

    Start with `tokenflow up`. Everything lies under TOKENFLOW_HOME (default ~/.cache/tokenflow).
    """


@cli.command()
@model_option
@host_option
@port_option
@engine_port_option
@config_option
@click.option("--prepare", is_flag=True, help="Install what is missing, start nothing.")
def up(
    *, model: str, host: str, port: int, engine_port: int, config_file: Path | None, prepare: bool
) -> None:
    """Run everything on this machine, in the foreground, until Ctrl-C.

    The first start installs the engine (SGLang 0.5.23) into an environment of its own and makes the
    embedded model, about three minutes; if it is interrupted, the next start continues. Later starts
    take half a minute. With an NVIDIA GPU the CUDA build is installed.

    \b
    Examples:
      tokenflow up
      tokenflow up --port 9000
      tokenflow up --model Qwen/Qwen3-8B        (with a GPU)

    \b
    Environment beside the options' own:
      TOKENFLOW_HOME     environments, models and logs
      TOKENFLOW_...      every setting of the gateway, see docs/configuration.md; its engines, host
                         and port are those of this command, not those of --config
      TOKENFLOW_DEVICE   cpu or cuda, instead of looking for a GPU
      PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, ...   as pip knows them; PyTorch's CPU index
                         makes the first start smaller on a machine without a GPU
    """  # noqa: D301  # \b keeps click from filling a paragraph
    machine = Machine()
    options = UpOptions(model=model, host=host, port=port, engine_port=engine_port, config_file=config_file)
    run = Up(options, home=Home.from_environ(os.environ), machine=machine, device=machine.device(os.environ))
    if prepare:
        run.prepare()
    else:
        run.run()


@cli.command(context_settings={"ignore_unknown_options": True})
@model_option
@click.option(
    "--port",
    envvar="TOKENFLOW_ENGINE_PORT",
    type=click.IntRange(1, 65535),
    default=ENGINE_PORT,
    show_default=True,
    show_envvar=True,
    help="Where the engine listens.",
)
@click.option(
    "--host",
    envvar="TOKENFLOW_ENGINE_HOST",
    default=LOOPBACK,
    show_default=True,
    show_envvar=True,
    help="The engine's address; it has no access control of its own.",
)
@click.option(
    "--policy",
    metavar="|".join(POLICY_NAMES),
    callback=_policy,
    envvar="TOKENFLOW_POLICY",
    show_envvar=True,
    help="Who runs, waits or is parked; can be changed as it runs. Options may follow after a colon: "
    "adaptive:write_s=0.2. Default: the plugin's.",
)
@click.argument("sglang_arguments", nargs=-1, type=click.UNPROCESSED)
def engine(
    *, model: str, port: int, host: str, policy: str | None, sglang_arguments: tuple[str, ...]
) -> None:
    """Run the engine alone: SGLang with TokenFlow's plugin. Replaces this process.

    What follows `--` goes to SGLang as it is, and wins over what is set here.

    \b
    Examples:
      tokenflow engine
      tokenflow engine --model /models/llama --port 30001 -- --mem-fraction-static 0.8
    """  # noqa: D301  # \b keeps click from filling a paragraph
    machine, home = Machine(), Home.from_environ(os.environ)
    device = machine.device(os.environ)
    require(
        check_ports(machine, [Place(name="engine", host=host, port=port, variable="TOKENFLOW_ENGINE_PORT")])
    )
    python = find_engine_python(home)
    if model == EMBEDDED_MODEL:
        pull_model(home, run=run_logged)
    command = EngineCommand(
        python=python,
        model=resolve(model, home=home),
        served_name=EMBEDDED_MODEL if model == EMBEDDED_MODEL else None,
        host=host,
        port=port,
        device=device,
        available_memory_bytes=machine.available_memory_bytes(),
        extra=sglang_arguments,
        policy=policy,
    )
    argv = command.argv()
    os.execve(argv[0], argv, command.environ(os.environ))  # noqa: S606  # a list, no shell


@cli.command()
@click.option(
    "--engine",
    "engines",
    multiple=True,
    metavar="URL",
    help="An OpenAI-compatible engine, such as http://127.0.0.1:30000. May be given more than once.",
)
@config_option
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(1, 65535), help="Port to listen on.  [default: 8080]")
@click.option("--workers", type=click.IntRange(1), help="Processes, for more than one core.  [default: 1]")
def serve(
    *,
    engines: tuple[str, ...],
    config_file: Path | None,
    host: str | None,
    port: int | None,
    workers: int | None,
) -> None:
    """Run the gateway alone, in front of engines that run already.

    Options win over the environment (TOKENFLOW_...), which wins over the configuration file.

    \b
    Examples:
      tokenflow serve --engine http://127.0.0.1:30000
      tokenflow serve --engine http://gpu1:30000 --engine http://gpu2:30000 --host 0.0.0.0
      tokenflow serve --engine http://127.0.0.1:30000 --workers 4
      tokenflow serve --config gateway.yaml
    """  # noqa: D301  # \b keeps click from filling a paragraph
    given: dict[str, object] = {"engines": list(engines), "host": host, "port": port, "workers": workers}
    overrides = {name: value for name, value in given.items() if value}
    try:
        from tokenflow_gateway.server import serve as run_gateway
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tokenflow_"):
            raise
        raise SetupError(
            f"The gateway needs {error.name}: pip install '.[gateway]' in a clone of TokenFlow"
        ) from error
    sys.exit(run_gateway(config_file, overrides))


@cli.group()
def model() -> None:
    """The embedded model, SmolLM2-135M-Instruct (Apache-2.0)."""


@model.command()
def pull() -> None:
    """Download, check and convert the embedded model; does nothing if it is complete.

    Needs the engine's environment: `tokenflow up --prepare` makes both.
    """
    click.echo(pull_model(Home.from_environ(os.environ), run=run_logged))


@cli.command()
@host_option
@port_option
@engine_port_option
def doctor(*, host: str, port: int, engine_port: int) -> None:
    """Check this machine as `tokenflow up` does, and say what to do about what is missing.

    Exit code 1 if something would stop `tokenflow up`.
    """
    machine = Machine()
    places = [
        Place(name="gateway", host=host, port=port, variable="TOKENFLOW_PORT"),
        Place(name="engine", host=LOOPBACK, port=engine_port, variable="TOKENFLOW_ENGINE_PORT"),
    ]
    home = Home.from_environ(os.environ)
    checks = examine(machine, home=home, device=machine.device(os.environ), places=places)
    click.echo(table(checks))
    sys.exit(1 if any(check.advice for check in checks) else 0)


def _later(name: str, target: str, summary: str, *, extra: str) -> None:
    """Register a command, ``module:command``, which is imported when it is used, with what it needs."""

    @cli.command(
        name,
        short_help=summary,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True},
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def command(*, arguments: tuple[str, ...]) -> None:
        module, _, attribute = target.partition(":")
        try:
            found: click.Command = getattr(import_module(module), attribute)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("tokenflow_") and error.name != "tokenflow_bench":
                raise
            raise SetupError(
                f"tokenflow {name} needs {error.name}: pip install '.[{extra}]' in a clone of TokenFlow"
            ) from error
        found.main(list(arguments), prog_name=f"tokenflow {name}")


_later(
    "keys",
    "tokenflow_gateway.tenants.commands:keys",
    "API keys: create, list, rotate, revoke.",
    extra="gateway",
)
_later(
    "usage", "tokenflow_gateway.tenants.commands:usage", "What streams have used, by tenant.", extra="gateway"
)
_later(
    "engines",
    "tokenflow_gateway.engines.commands:engines",
    "Engines of a running gateway: list, drain, resume.",
    extra="gateway",
)
_later(
    "check-config",
    "tokenflow_gateway.tenants.commands:check_config",
    "Check the gateway's configuration.",
    extra="gateway",
)
_later(
    "bench",
    "tokenflow_bench.load.cli:bench",
    "Drive any OpenAI-compatible endpoint with simulated people.",
    extra="bench",
)
_later("sim", "tokenflow_bench.sim:sim", "Simulate policies on GPUs.", extra="bench")
_later(
    "calibrate",
    "tokenflow_bench.calibrate.cli:calibrate",
    "Measure what an engine's passes cost, for sim.",
    extra="bench",
)
_later(
    "report",
    "tokenflow_bench.report.cli:report",
    "Draw a result: one HTML page, PNG plots.",
    extra="bench",
)


def main() -> None:
    """Entry point of ``tokenflow``."""
    cli(prog_name="tokenflow")


if __name__ == "__main__":
    main()
