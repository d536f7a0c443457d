"""The commands that make PASK's policies; see `pask.cli`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from pask.arguments import add_shard, config_of, shard_of


class Adder(Protocol):
    """Adds a command to the command line, or `within` another."""

    def __call__(
        self,
        name: str,
        run: Callable[[argparse.Namespace], None],
        text: str,
        *,
        config: bool = ...,
        within: Any = ...,
    ) -> argparse.ArgumentParser: ...


def add_commands(command: Adder, commands: Any) -> None:
    """`commands`: what argparse calls the special action of the command line's commands."""
    evidence = command(
        "evidence", _evidence, "Measure distortion and failures of every bucket on cal rows."
    )
    add_shard(evidence)
    scan = command("scan", _scan, "Try candidate policies on development rows.")
    add_shard(scan)
    text = "Make PASK's policies, or show one."
    policy = commands.add_parser("policy", help=text, description=text)
    parts = policy.add_subparsers(metavar="COMMAND", required=True)
    text = "Select the run's policies from what was measured."
    make = command("make", _policy, text, within=parts)
    make.add_argument("--methods", nargs="+", metavar="NAME", help="only these methods")
    text = "Write the page on the run's policies: tables and figures."
    command("page", _page, text, within=parts)
    text = "Print a policy file as a table."
    show = command("show", _show, text, config=False, within=parts)
    show.add_argument("file", type=Path, metavar="FILE", help="results/<run>/policies/<name>.json")


def _evidence(args: argparse.Namespace) -> None:
    from pask.calibration.families import interventions_of
    from pask.calibration.rows import measure_rows

    config, (shard, shards) = config_of(args), shard_of(args)
    wanted = interventions_of(config)
    print(measure_rows(config, wanted, shard=shard, shards=shards, threads=args.threads))


def _scan(args: argparse.Namespace) -> None:
    from pask.calibration.scan import scan

    shard, shards = shard_of(args)
    print(scan(config_of(args), shard=shard, shards=shards, threads=args.threads))


def _policy(args: argparse.Namespace) -> None:
    from pask.calibration.select import make_policies

    for path in make_policies(config_of(args), args.methods):
        print(path)


def _page(args: argparse.Namespace) -> None:
    from pask.report.run import policy_page

    for path in policy_page(config_of(args)):
        print(path)


def _show(args: argparse.Namespace) -> None:
    from pask.policy.policy import read_policy
    from pask.policy.show import policy_text

    print(policy_text(read_policy(args.file)))
