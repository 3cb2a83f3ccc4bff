"""The `turnout` command: what it offers, and how every failure of it looks.

Invariants: nothing but click is imported before a command is chosen; a failure prints no traceback unless --debug asks
for it; exit codes are those of `services.cli.failures`.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final

import click

from services.cli.examples import with_examples
from services.cli.failures import EXIT_FAILED, EXIT_INTERRUPTED
from services.cli.lazy import Entry, LazyGroup

DEBUG_VARIABLE: Final = "TURNOUT_DEBUG"

_COMMANDS: Final = {
    "demo": Entry("services.cli.demo:demo", "Watch a training loop lend its GPUs, and measure what it gains."),
    "demo-vllm": Entry(
        "services.cli.demo_vllm:demo_vllm", "Watch a model learn through real vLLM engines that are lent."
    ),
    "up": Entry("services.cli.up:up", "Run all three services on this machine."),
    "status": Entry("services.cli.status:status", "Show runs, modes, depths and replicas."),
    "doctor": Entry("services.cli.doctor:doctor", "Say what is wrong around the services, and what to do."),
    "top": Entry("services.cli.top:top", "Watch one run live."),
    "events": Entry("services.cli.events:events", "Print a run's events, one JSON object a line."),
    "explain": Entry("services.cli.explain:explain_command", "Say why the GPUs of a run moved, or stayed."),
    "report": Entry("services.cli.report:report", "Report on one run, as a page or a picture."),
    "buffer": Entry("services.cli.serve:buffer", "The replay buffer: 'turnout buffer serve'."),
    "engine": Entry("services.cli.serve:engine", "The engine controller and its agents: 'turnout engine serve'."),
    "scheduler": Entry("services.cli.serve:scheduler", "The switch scheduler: 'turnout scheduler serve'."),
    "ray": Entry("services.cli.ray_group:ray_group", "Run the services on the nodes of a Ray cluster."),
    "token": Entry("services.cli.token:token", "Make the tokens that services ask for."),
    "simulate": Entry("services.cli.simulate:simulate_command", "What lending would gain, before anyone moves a GPU."),
    "bench": Entry("services.cli.bench:bench", "Measure the services on this machine."),
    "version": Entry("services.cli.version:version", "Print the versions of Turnout and of what it stands on."),
}

_HELP: Final = with_examples(
    "Turnout lends the idle GPUs of an RL trainer to generation and takes them back in time.",
    "turnout demo                 the same job without and with switching",
    "turnout up                   the three services, here",
    "turnout status               what they are doing",
    "turnout top --run my-run     watch one run",
)


@click.group(
    "turnout",
    cls=LazyGroup,
    entries=_COMMANDS,
    help=_HELP,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option("--debug", is_flag=True, envvar=DEBUG_VARIABLE, show_envvar=True, help="Show tracebacks of failures.")
def cli(debug: bool) -> None:
    """Hold the options of all commands."""
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"


_GRPC_VERBOSITY: Final = "GRPC_VERBOSITY"
"""gRPC's own variable. Unset, its core writes a line to stderr for every connection that ends."""


def run(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    os.environ.setdefault(_GRPC_VERBOSITY, "ERROR")
    try:
        code: Any = cli.main(arguments, prog_name="turnout", standalone_mode=False)
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.Abort:
        click.echo("turnout: interrupted", err=True)
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except KeyboardInterrupt:
        click.echo("turnout: interrupted", err=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone, as `head` does; there is nobody left to tell.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the interpreter's own flush at exit
        return EXIT_FAILED
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        click.echo(f"turnout: {type(error).__name__}: {text} (--debug shows where)", err=True)
        return EXIT_FAILED
    return code if isinstance(code, int) else 0


def main() -> None:
    """Be the program `turnout`."""
    sys.exit(run())


if __name__ == "__main__":
    main()
