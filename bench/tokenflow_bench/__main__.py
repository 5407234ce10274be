"""`python -m tokenflow_bench`: measure an endpoint."""

from __future__ import annotations

import click

from tokenflow_bench.load.cli import load

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """Measurements from outside, over real sockets."""


main.add_command(load)

if __name__ == "__main__":
    main(prog_name="python -m tokenflow_bench")
