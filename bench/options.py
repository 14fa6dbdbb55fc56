"""Cases as words, and the options that several commands take; what cannot be served is refused before any work."""

import math
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

import eval as evaluator
from eval import EXIT_BAD_CASE_FILE, CaseFileError
from task import BENCHMARKS, TESTS

DEFAULT_SEED = 4220

Case: TypeAlias = Mapping[str, Any]  # keyword arguments of `reference.generate_input`


def case_label(args: Case) -> str:
    """`32x8192`, with `x2` appended for two queries a sequence."""
    more = "" if args["qseqlen"] == 1 else f"x{args['qseqlen']}"
    return f"{args['batchsize']}x{args['kvseqlen']}{more}"


def parse_case_word(word: str, official: Sequence[Case]) -> Case:
    """`BxKV` or `BxKVxQ` as a case, with the seed of the first official case of that shape where there is one.

    Raises typer.BadParameter for anything else.
    """
    match = re.fullmatch(r"([0-9]+)x([0-9]+)(?:x([0-9]+))?", word)
    if match is None:
        raise typer.BadParameter(f"expected BATCHxKV or BATCHxKVxQ such as 32x8192, got {word!r}", param_hint="--case")
    batchsize, kvseqlen, qseqlen = match.groups("1")
    line = f"batchsize: {batchsize}; qseqlen: {qseqlen}; kvseqlen: {kvseqlen}; seed: {DEFAULT_SEED}"
    try:
        shape = evaluator.parse_case(line)
    except CaseFileError as error:
        raise typer.BadParameter(f"{word[: evaluator.MAX_TEXT]}: {error}", param_hint="--case") from error
    del shape["seed"]
    seeds = (case["seed"] for case in official if shape.items() <= case.items())
    return {**shape, "seed": next(seeds, DEFAULT_SEED)}


def choose_cases(mode: str, words: list[str] | None, case_file: Path | None = None) -> Sequence[Case]:
    """The cases of `--case` or `--cases`, else the official ones of the mode; exits with 113 for a bad file."""
    if words and case_file:
        raise typer.BadParameter("expected one of --case and --cases, got both", param_hint="--cases")
    if case_file:
        try:
            return [case.args for case in evaluator.read_case_file(case_file)]
        except CaseFileError as error:
            typer.echo(error, err=True)
            raise typer.Exit(EXIT_BAD_CASE_FILE) from error
    own, other = (TESTS, BENCHMARKS) if mode == "test" else (BENCHMARKS, TESTS)
    if words:
        return [parse_case_word(word, [*own, *other]) for word in words]
    return own


def require_arm(arm: str, arms: Collection[str], *options: str) -> None:
    if arm not in arms:
        raise typer.BadParameter(f"expected one of {', '.join(arms)}, got {arm!r}", param_hint=list(options))


def require_number(value: float | None) -> float | None:
    if value is not None and math.isnan(value):
        raise typer.BadParameter("expected a number, got nan")
    return value


def require_folder(folder: Path, *, make: bool = False, option: str | None = None) -> None:
    """Refuse a folder that takes no new file."""
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        message = f"expected a place to write to, got {str(folder)!r}: {error.strerror}"
        raise typer.BadParameter(message, param_hint=option) from error


def _require_place(path: Path | None) -> Path | None:
    if path is not None and not path.exists():
        require_folder(path.parent)
    return path


def require_picture(path: Path | None) -> Path | None:
    if path is None:
        return None
    from bench.roofline import picture_formats

    formats = picture_formats()
    if path.suffix[1:].lower() not in formats:
        raise typer.BadParameter(f"expected a name that ends in one of {', '.join(formats)}, got {str(path)!r}")
    return _require_place(path)


CaseOption = Annotated[
    list[str] | None,
    typer.Option(
        "--case", metavar="BxKV[xQ]", help="Batch x cached tokens, x queries a sequence if not one; repeatable."
    ),
]
JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        dir_okay=False,
        writable=True,
        callback=_require_place,
        help="Write environment and results to this file.",
    ),
]
PlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE.png",
        dir_okay=False,
        writable=True,
        callback=require_picture,
        help="Draw each case's time beside its roof.",
    ),
]
