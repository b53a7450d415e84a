"""Puts the state diagram into a page: `python -m service.core.diagram [--check] README.md`.

It is drawn from the table. The block between the two markers is the table's; `--check` changes nothing and
fails when the page is behind.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from service.contracts.errors import UserError
from service.core import machine

BEGIN, END = "<!-- diagram -->", "<!-- /diagram -->"


def embed(page: str) -> str:
    """The page with the block drawn anew. UserError when it has no markers."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise UserError("the page has no diagram block", hint=f"put {BEGIN} and {END} where it belongs")
    return f"{head}{BEGIN}\n```mermaid\n{machine.diagram()}\n```\n{END}{tail}"


def main(arguments: list[str]) -> str | None:
    """None, or why the page could not be brought up to date."""
    parser = argparse.ArgumentParser(prog="python -m service.core.diagram")
    parser.add_argument("page", type=Path)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when the page is behind")
    options = parser.parse_args(arguments)
    page = options.page.read_text(encoding="utf-8")
    try:
        drawn = embed(page)
    except UserError as error:
        return f"{options.page}: {error.message}; {error.hint}"
    if options.check:
        return None if drawn == page else f"{options.page}: the diagram is behind; run without --check"
    options.page.write_text(drawn, encoding="utf-8")
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
