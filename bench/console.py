"""How every command of this project talks and ends: `eval.py` for a person, and the tools of bench/."""

import contextlib
import io
import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from eval import EXIT_USAGE

T = TypeVar("T")

EXIT_UNWRITTEN = 1
EXIT_BROKEN_PIPE = 141
PIPE_WIDTH = 160
# Packages that some commands alone need, and what brings them.
OPTIONAL_PACKAGES = {
    "hypothesis": "pip install -e '.[test]'",
    "matplotlib": "pip install -e '.[plot]'",
    "triton": "a GPU build of torch",
}


_end_with_rich = Console.on_broken_pipe


def _end_unread(self: Console) -> None:
    """Without a traceback; what is still printed goes nowhere."""
    with contextlib.suppress(SystemExit):
        _end_with_rich(self)
    sys.exit(EXIT_BROKEN_PIPE)


# On the class, because typer prints its help to consoles of its own.
Console.on_broken_pipe = _end_unread  # type: ignore[method-assign]


class _Console(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        """As rich does, but a table keeps its figures whole: a narrow terminal breaks its lines."""
        own_width = self.width
        if len(objects) == 1 and isinstance(objects[0], Table):
            wanted = self.measure(objects[0], options=self.options.update(width=PIPE_WIDTH)).maximum
            self.width = max(own_width, wanted)
        super().print(*objects, **options)
        self.width = own_width


def make_console() -> Console:
    """Standard output; a pipe or file gets a width of its own, so that tables are not squeezed into 80 columns."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may be no UTF-8
    console = _Console(highlight=False)
    return console if console.is_terminal else _Console(highlight=False, width=PIPE_WIDTH)


def nobody_reads() -> bool:
    """Whether standard output is a pipe or terminal whose other end is gone."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


@contextlib.contextmanager
def progress_bar(description: str, total: int) -> Iterator[tuple[Progress, Any]]:
    """A bar on standard error, shown on a terminal only, whatever FORCE_COLOR says."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    shown = sys.stderr and sys.stderr.isatty()
    with progress if shown else contextlib.nullcontext():  # one that is not started prints nothing
        yield progress, progress.add_task(description, total=total)


def tracked(items: Sequence[T], description: str) -> Iterator[T]:
    """The items one by one, with a `progress_bar`."""
    with progress_bar(description, len(items)) as (bar, task):
        for item in items:
            yield item
            bar.advance(task)


def _end(message: object, exit_code: int) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(exit_code)


def require_gpu() -> None:
    """End a command that measures a GPU where there is none."""
    import torch

    if not torch.cuda.is_available():
        _end("device: expected a CUDA or ROCm GPU, got none", EXIT_USAGE)


def run_app(app: typer.Typer, argv: list[str] | None = None, prog_name: str | None = None) -> NoReturn:
    """Run a command line to its exit code; a package it lacks, or a full disk, is told in one line."""
    try:
        sys.exit(app(argv, prog_name=prog_name))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in OPTIONAL_PACKAGES:
            raise
        _end(f"{package}: expected this package, got none; it comes with {OPTIONAL_PACKAGES[package]}", EXIT_USAGE)
    except OSError as error:  # standard output takes no more, as on a full disk, and would say so again at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        _end(error, EXIT_UNWRITTEN)


def tool_app(command: Callable[..., object]) -> typer.Typer:
    """The command line of `python -m bench.<tool>`: one function, its options taken from its signature."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    return app


def run_tool(command: Callable[..., object]) -> NoReturn:
    run_app(tool_app(command))
