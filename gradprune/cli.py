"""``gradprune explain`` a loss; ``gradprune estimate`` what pruning a rollout would save."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gradprune.errors import PruneError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@app.command()
def explain(
    loss: Annotated[str, typer.Argument(help="file.py:function, or file.py if it holds one function; - reads stdin")],
    zero: Annotated[str, typer.Option(help="product of parameter names that is zero, such as 'adv * mask'")],
    wrt: Annotated[str, typer.Option(help="parameters that depend on the model, comma-separated")],
    shape: Annotated[
        list[str] | None, typer.Option(help="name=8x128 or name=8x128:int64; by default every tensor is 6x8:float32")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="name=value: a parameter that is no tensor")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the verdict as JSON")] = False,
) -> None:
    """Prove that a loss has no gradient where a product is zero, or show the line through which it flows.

    Exit status 0: proved. 1: refused. 2: bad input.
    """
    from gradprune.proof import prove
    from gradprune.snippets import example_of, load_function

    function = load_function(loss)
    example = example_of(function, _pairs(shape, "--shape"), _values(set_))
    verdict = prove(function, example, zero=zero, wrt=[name.strip() for name in wrt.split(",")])
    typer.echo(json.dumps(verdict.to_json()) if as_json else str(verdict))
    raise typer.Exit(0 if verdict else 1)


@app.command()
def estimate(
    rollout: Annotated[Path, typer.Argument(help="JSON lines, one a sequence: length, and advantage or reward")],
    group_size: Annotated[int, typer.Option(help="samples of one prompt, consecutive lines")],
    token_budget: Annotated[int, typer.Option(help="tokens of a microbatch")] = 16384,
    ranks: Annotated[int, typer.Option(help="data-parallel ranks")] = 1,
    recompute: Annotated[bool, typer.Option(help="the trainer uses full activation recomputation")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the figures as JSON")] = False,
) -> None:
    """What share of a rollout is dead, and what the slowest rank would save under a plan of gradprune.

    Times are counted in tokens of a forward (backward: twice that), which leaves attention's square out.
    """
    from gradprune.estimation import estimate_rollout, read_rollout

    figures = estimate_rollout(read_rollout(rollout), group_size, token_budget, ranks, recompute)
    typer.echo(json.dumps(figures.to_json()) if as_json else str(figures))


def _pairs(items: list[str] | None, option: str) -> dict[str, str]:
    pairs = [item.partition("=") for item in items or []]
    for name, equals, value in pairs:
        if not (name and equals and value):
            raise PruneError(f"{option} {name!r}: write {option} name=value")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _values(items: list[str] | None) -> dict[str, Any]:
    values = {}
    for name, text in _pairs(items, "--set").items():
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[name] = text
    return values


def main() -> None:
    """Entry point: bad input is one line on stderr and exit status 2."""
    try:
        app()
    except PruneError as error:
        sys.stderr.write(f"gradprune: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
