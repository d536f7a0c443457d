"""Arguments that several commands read alike."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from pask.errors import PaskError

if TYPE_CHECKING:
    from pask.config import RunConfig


def count(text: str) -> int:
    """A number of one or more, as an argument."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def add_shard(command: argparse.ArgumentParser) -> None:
    command.add_argument("--shard", default="1/1", metavar="I/N", help="do the I-th of N shards")
    command.add_argument("--threads", type=count, default=1, help="torch threads")


def shard_of(args: argparse.Namespace) -> tuple[int, int]:
    """The shard, from 0, and how many there are; PaskError for what is none."""
    numbers = re.fullmatch(r"([0-9]+)/([0-9]+)", args.shard)
    shard, shards = map(int, numbers.groups()) if numbers else (0, 0)
    if not 1 <= shard <= shards:
        raise PaskError(f"cannot read the shard {args.shard!r}", todo="write 1/2, 2/2, ...")
    return shard - 1, shards


def config_of(args: argparse.Namespace) -> RunConfig:
    from pask.config import load

    return load(args.config, args.set)
