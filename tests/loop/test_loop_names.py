"""Names that statements read and bind, and where in a loop's body the region is."""

from __future__ import annotations

import ast
import textwrap

import pytest

import gradprune
from gradprune.loop.names import bound_names, changed_names, needed_names, read_names
from tests.loop import shapes


def parse(text: str) -> list[ast.stmt]:
    return ast.parse(textwrap.dedent(text)).body


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("a, (b, *c) = 1, (2, 3)", "a b c"),
        ("a.b = c[d] = 1", ""),
        ("for a in b: c = 1", "a c"),
        ("with f() as (a, b): pass", "a b"),
        ("import a.b, c as d\nfrom e import f as g", "a d g"),
        ("def a(b): c = 1\nclass d: e = 1", "a d"),
        ("try: pass\nexcept E as a: del b", "a b"),
        ("a = [b for b in c if (d := b)]", "a d"),
        ("f(lambda a: (b := a))", ""),
        ("match a:\n    case [b, *c]: pass\n    case {'k': d, **e}: pass\n    case F(g) as h: pass", "b c d e g h"),
    ],
)
def test_bound_names(text: str, bound: str) -> None:
    assert bound_names(parse(text)) == set(bound.split())


def test_read_names_include_those_of_nested_functions() -> None:
    assert read_names(parse("a = b\ndef f(c): return d + c")) == {"b", "c", "d"}


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("batch['x'] = 1", "batch"),
        ("batch.meta.mask[0] += 1", "batch"),
        ("batch.to(device)", "batch"),
        ("del batch['x']", "batch"),
        ("x = batch.to(device)", "x"),
        ("f(batch)", ""),
    ],
)
def test_changed_names(text: str, changed: str) -> None:
    assert changed_names(parse(text)[0]) == set(changed.split())


def test_needed_names() -> None:
    region = parse(
        """
        count += 1
        with autocast() as context:
            logits = model(batch)
            loss = f(logits, context)
        if loss > limit:
            scale = 2
        total = total + loss * scale
        """
    )
    # The scale is bound only on one branch: its value from before may be read.
    assert needed_names(region) == ["autocast", "batch", "count", "f", "limit", "model", "scale", "total"]


def region_of(name: str) -> str:
    """The lines of the rewritten shape from the one that opens the microbatch to the end of its block."""
    shape = shapes.SHAPES[name]
    text = gradprune.grpo_loop(shape.zero, strict=True)(shape.loop).gradprune_source
    lines = textwrap.dedent(text).splitlines()
    opening = next(index for index, line in enumerate(lines) if "with _gradprune.microbatch" in line)
    indent = len(lines[opening]) - len(lines[opening].lstrip())
    body = (index for index, line in enumerate(lines) if index > opening and not line.startswith(" " * (indent + 1)))
    return "\n".join(lines[opening - 1 : next(body, len(lines))])


def test_region_starts_after_the_factors() -> None:
    region = region_of("parallel lists by index")
    assert region.startswith("        mb_mask = masks[index]\n        with _gradprune.microbatch")


def test_region_is_inside_a_context_that_holds_all() -> None:
    region = region_of("an accelerator's accumulation context")
    assert region.startswith("        with accelerator.accumulate(t.model):\n            with _gradprune.microbatch")
    assert "accelerator.step()" not in region


def test_region_ends_with_the_backward() -> None:
    assert region_of("gradient accumulation").endswith("_microbatch.loss(loss).backward()")
