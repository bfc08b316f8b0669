"""The face: a table of commands. A command's module is imported when it runs, so `spectrain --help` answers at once."""

import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated, Any, NamedTuple, NoReturn

import typer

from . import __version__


class Command(NamedTuple):
    """Where a command lives, `module:attribute` below `commands`, and its line in the help."""

    path: str
    summary: str


COMMANDS = {
    "extract": Command("extract:extract", "Run the target over conversations and store its hidden states as shards."),
    "fit": Command("fit:fit", "Train a draft head on shards."),
    "eval": Command("eval:evaluate", "Measure a head: acceptance, speed-up, losslessness."),
    "inspect": Command("inspect:inspect", "Show what a shard folder or a head folder holds."),
    "quickstart": Command("quickstart:quickstart", "The whole loop on a small real model, in minutes, on a CPU."),
    "data": Command("data:app", "Make training conversations of the target's own, or prompts to measure with."),
    "bench": Command("bench:app", "Speed beside other ways to decode, checked first."),
    "doctor": Command("doctor:doctor", "Show versions, devices and what is missing."),
}


SEVERAL = frozenset(
    {"--prompts", "--data", "--shards", "--set"}
    | {"--stop", "--stop-token-ids", "--allowed-token-ids", "--bad-words", "--logit-bias"}
)
"""Options that take one or more values."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and exits: 0 done, 2 wrong input (one line on stderr), 130 interrupted.

    Faults of our own keep their traceback; code of a user that asks to exit gets a line too.
    """
    arguments = spread(sys.argv[1:] if arguments is None else arguments)
    if not sys.stderr.isatty():
        # bars of other libraries fill logs with control characters
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        build_app(_invoked(arguments))(arguments, prog_name="spectrain")
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit as leaving:
        left = left_by(leaving)
        if left is None:
            raise
        print("spectrain: error:", " ".join(left.split()), file=sys.stderr)
        sys.exit(2)
    except (ValueError, OSError) as error:
        if not is_for_user(error):
            raise
        advice = "; free space and run the command again" if getattr(error, "errno", None) == errno.ENOSPC else ""
        print("spectrain: error:", " ".join(str(error).split()) + advice, file=sys.stderr)
        sys.exit(2)
    sys.exit(0)


def spread(arguments: Sequence[str]) -> list[str]:
    """Repeats an option that takes several values: `--prompts a b` becomes `--prompts a --prompts b`.

    So that `--prompts sets/*.jsonl` works; no command that has these options takes a positional argument.
    """
    out: list[str] = []
    option, filled = "", False
    for argument in arguments:
        if argument.startswith("-"):
            option, filled = argument if argument in SEVERAL else "", False
        elif option:
            out += [option] if filled else []
            filled = True
        out.append(argument)
    return out


def build_app(invoked: str | None) -> typer.Typer:
    """The application, with the invoked command's own options and a line each for the others."""
    app = typer.Typer(
        help="Draft heads for speculative decoding: extract, fit, eval.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name, (path, summary) in COMMANDS.items():
        command = load(path) if name == invoked else _unloaded
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, help=summary)
        else:
            # the invoked command tells all of itself, the others a line each
            app.command(name, help=summary if command is _unloaded else None)(command)
    return app


def load(path: str) -> Callable[..., Any] | typer.Typer:
    """The function or sub-application a table entry names."""
    module, attribute = path.split(":")
    return getattr(import_module(f".commands.{module}", __package__), attribute)


def is_for_user(error: BaseException) -> bool:
    """Whether an error speaks to the user: the system's about a file, or a ValueError of our own.

    Another library's ValueError is a fault we did not foresee and needs its traceback.
    """
    if isinstance(error, OSError):
        return True
    if any(_is_ours(base.__module__) for base in type(error).__mro__):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and _is_ours(trace.tb_frame.f_globals.get("__name__", ""))


def left_by(leaving: SystemExit) -> str | None:
    """Which code that is not ours asked to end the process, such as the class of a user; None where we did."""
    places = [(f.f_globals.get("__name__", ""), f.f_code, line) for f, line in traceback.walk_tb(leaving.__traceback__)]
    # the innermost one; argparse and the like end a process for whoever called them
    module, code, line = [place for place in places if place[0].split(".")[0] not in sys.stdlib_module_names][-1]
    if _is_ours(module) or module.split(".")[0] in ("typer", "click", "rich"):
        return None
    name = module if code.co_name == "<module>" else f"{module}:{code.co_qualname}"
    return f"{name} ended the command: SystemExit: {leaving} ({os.path.basename(code.co_filename)}:{line})"


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == __package__


def _invoked(arguments: Sequence[str]) -> str | None:
    return next((argument for argument in arguments if not argument.startswith("-")), None)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _unloaded() -> None:
    """Stands in the help for a command that was not invoked; it never runs."""
