"""The ``specdec`` command: a thin layer over the library.

What an error says is the library's message, on one line; the exit code is 1, and 2 for a wrong
command line. torch and transformers are imported by the commands that need them, when they run.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from typer.core import TyperGroup

from .. import __version__
from . import bench, demo, generate, info


class OneLineErrors(TyperGroup):
    """Expected errors become one line on stderr; others keep their traceback."""

    def main(self, args=None, *rest, standalone_mode: bool = True, **kwargs):
        args = list(sys.argv[1:] if args is None else args) or ["--help"]
        if not standalone_mode:
            return super().main(args, *rest, standalone_mode=False, **kwargs)
        try:
            code = super().main(args, *rest, standalone_mode=False, **kwargs)
        except typer.Abort:
            code = _fail("aborted", 1)
        except (ValueError, OSError, ImportError) as error:
            code = _fail(str(error) or type(error).__name__, 1)
        except Exception as error:
            if hasattr(error, "format_message"):  # a ClickException, which typer may vendor
                code = _fail(error.format_message(), error.exit_code)
            elif type(error).__name__ == "OutOfMemoryError":
                code = _fail(str(error), 1)
            else:
                raise
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> int:
    typer.echo(f"specdec: {' '.join(message.split())}", err=True)
    return code


app = typer.Typer(
    cls=OneLineErrors,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Speculative decoding for Hugging Face causal language models.",
)
for command in (generate.generate, bench.bench, demo.demo, info.info, info.speedup):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    app(prog_name="specdec")
