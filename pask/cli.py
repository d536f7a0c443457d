"""The command line: one command a step of the workflow, each usable on its own.

Modules that cost seconds to import (torch, transformers, pandas) are imported by the command that
needs them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pask import __version__
from pask.arguments import add_shard, config_of, count, shard_of
from pask.bench import BENCHES
from pask.calibration.commands import add_commands
from pask.errors import PaskError

DEFAULT_CONFIG = "configs/smollm2-135m-sample.yaml"


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, ensure_ascii=False))


def _splits(args: argparse.Namespace) -> None:
    from pask.bfcl.data import load_rows
    from pask.bfcl.splits import PARTS, build_splits, leaks
    from pask.evaluation.keys import splits_file

    config = config_of(args)
    rows = load_rows()
    splits = build_splits(rows, config.data.split, config.data.seed)
    splits.sample(config.data.part, config.data.sample)  # refuse a sample that is too large now
    path = splits_file(config)
    splits.write(path)
    shared = leaks(splits, rows)
    sizes = {part: splits.sizes(part) for part in PARTS}
    if args.json:
        _print_json(
            {
                "path": str(path),
                "kind": splits.kind,
                "seed": splits.seed,
                "digest": splits.digest,
                "data_digest": splits.data_digest,
                "sizes": sizes,
                "leaks": shared,
            }
        )
        return
    print(f"{path}: {splits.kind} split, seed {splits.seed}, digest {splits.digest[:16]}")
    print(f"{'category':24}{'cal':>6}{'dev':>6}{'test':>6}   test rows that share with cal or dev")
    for category, leak in shared.items():
        counts = "".join(f"{sizes[part][category]:6}" for part in PARTS)
        print(f"{category:24}{counts}   {leak['tool_set']} tool set, {leak['question']} question")


def _methods(args: argparse.Namespace) -> None:
    from pask.methods.registry import describe

    found = describe()
    if args.json:
        _print_json(found)
        return
    for method in found:
        low, high = method["budgets"]
        print(f"{method['name']:18}{method['label']:22}budget {low} to {high}: {method['knob']}")
        print(f"{'':18}{method['paper']} ({method['module']})")


def _model(args: argparse.Namespace) -> None:
    from pask.evaluation.model import prepare

    print(prepare(config_of(args)))


def _calibrate(args: argparse.Namespace) -> None:
    from pask.calibration.run import calibrate

    print(calibrate(config_of(args)) or "no method of this run is calibrated")


def _budget(args: argparse.Namespace) -> None:
    from pask.evaluation.budget import find_settings

    print(f"{'entry':28}{'budget':>8}{'B_persist':>11}{'knob':>10}   on development rows")
    for found in find_settings(config_of(args), args.methods):
        reached = "-" if found.reached is None else f"{found.reached:.4f}"
        knob = "-" if found.nominal is None else f"{found.nominal:g}"
        why = f" ({found.why})" if found.why else ""
        print(
            f"{found.entry:28}{found.budget:8.4g}{reached:>11}{knob:>10}   {found.status}{why}, "
            f"{found.rows} rows, {found.unreachable} of them held above it",
            flush=True,
        )


def _evaluate(args: argparse.Namespace) -> None:
    from pask.evaluation.run import evaluate

    shard, shards = shard_of(args)
    for path in evaluate(
        config_of(args),
        shard=shard,
        shards=shards,
        methods=args.methods,
        threads=args.threads,
    ):
        print(path)


def _score(args: argparse.Namespace) -> None:
    from pask.evaluation.score import score

    print(score(config_of(args), methods=args.methods, shards=args.shards, out=args.out))


def _trajectories(args: argparse.Namespace) -> None:
    from pask.evaluation.trajectories import collect

    print(collect(config_of(args), args.part, args.engine, args.sample))


def _tables(args: argparse.Namespace) -> None:
    from pask.report.run import tables

    for path in tables(config_of(args)):
        print(path)


def _figures(args: argparse.Namespace) -> None:
    from pask.report.run import figures

    for path in figures(config_of(args)):
        print(path)


def _tags(args: argparse.Namespace) -> None:
    from pask.evaluation.tags import count_tags, folder_of
    from pask.report.tag_picture import read_example, tag_figure
    from pask.report.tags import write_page

    config = config_of(args)
    folder = folder_of(config)
    written = count_tags(config, args.sample)
    written += write_page(folder)
    written += tag_figure(read_example(folder / "example.json"), folder.parent / "figures")
    for path in written:
        print(path)


def _prompts(args: argparse.Namespace) -> None:
    from pask.bfcl.answers import ANSWER_FORMS
    from pask.bfcl.prompts import STYLES
    from pask.evaluation.prompts import run_trial, write_comparison

    config = config_of(args)
    if not args.gather:
        for style in args.styles or STYLES:
            for answer_form in args.answer_forms or ANSWER_FORMS:
                print(run_trial(config, style, answer_form, args.sample))
    if args.gather or not (args.styles or args.answer_forms):
        print(write_comparison(config).read_text(encoding="utf-8"))


def _ceiling(args: argparse.Namespace) -> None:
    from pask.bfcl.ceiling import measure_ceiling
    from pask.bfcl.data import load_rows

    rows = load_rows()
    ceiling = measure_ceiling(rows)
    ceiling.write(args.out)
    for row in ceiling.rows:
        print(f"{row.id}: {row.reason}, {row.detail}")
    print(f"{args.out}: {ceiling.passable(rows)} of {len(rows)} rows can be passed")


def _bench(args: argparse.Namespace) -> None:
    from pask.bench import run

    print(json.dumps(run(args.name, config_of(args), args.items, device=args.device)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pask", description=__import__("pask").__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(
        name: str,
        run: Callable[[argparse.Namespace], None],
        text: str,
        *,
        config: bool = True,
        within: Any = commands,
    ) -> argparse.ArgumentParser:
        sub: argparse.ArgumentParser = within.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        if config:
            sub.add_argument(
                "--config", default=DEFAULT_CONFIG, metavar="FILE", help="a run's YAML"
            )
            sub.add_argument(
                "--set",
                action="append",
                default=[],
                metavar="KEY=VALUE",
                help="override one value, e.g. model.path=/models/qwen",
            )
        return sub

    splits = command("splits", _splits, "Write the run's calibration, dev and test split.")
    splits.add_argument("--json", action="store_true", help="print sizes and digests as JSON")

    methods = command("methods", _methods, "List the methods that are installed.", config=False)
    methods.add_argument("--json", action="store_true", help="print them as JSON")

    command("model", _model, "Fetch and prepare the run's model.")

    command("calibrate", _calibrate, "Measure what methods are calibrated with.")

    add_commands(command, commands)

    budget = command(
        "budget", _budget, "Find each method's knob for its budgets, by the bytes of dev rows."
    )
    budget.add_argument("--methods", nargs="+", metavar="NAME", help="only these methods")

    evaluate = command("evaluate", _evaluate, "Generate the run's answers; resumes after a kill.")
    add_shard(evaluate)
    evaluate.add_argument("--methods", nargs="+", metavar="NAME", help="only these methods")

    score = command("score", _score, "Judge the answers by BFCL's checker: the long table.")
    score.add_argument("--methods", nargs="+", metavar="NAME", help="only these methods")

    score.add_argument("--shards", type=count, metavar="N", help="files an entry is in")
    score.add_argument("--out", type=Path, metavar="FILE", help="default: results/<run>/long.csv")

    command("tables", _tables, "Make the tables from the long table.")
    command("figures", _figures, "Make the figures from the long table.")

    tags = command(
        "tags", _tags, "Count the calibration rows' tokens by structural tag; draw one row."
    )
    tags.add_argument("--sample", type=count, metavar="N", help="rows per category; default: all")

    trajectories = command(
        "trajectories", _trajectories, "Write the Full-KV answers of a part to one file, resumably."
    )
    trajectories.add_argument("--part", required=True, choices=("cal", "dev", "test"))
    trajectories.add_argument(
        "--engine", default="pask", choices=("pask", "vllm"), help="who answers; default: pask"
    )
    trajectories.add_argument(
        "--sample", type=count, metavar="N", help="rows per category; default: the run's sample"
    )

    prompts = command(
        "prompts", _prompts, "Compare prompt styles and answer forms on the calibration split."
    )
    prompts.add_argument("--styles", nargs="+", metavar="STYLE", help="default: every style")
    prompts.add_argument("--answer-forms", nargs="+", metavar="FORM", help="default: both")
    prompts.add_argument(
        "--sample", type=count, metavar="N", help="rows per category; default: all"
    )
    prompts.add_argument("--gather", action="store_true", help="only gather finished trials")

    ceiling = command("ceiling", _ceiling, "List the rows that no output can pass.", config=False)
    ceiling.add_argument(
        "--out", type=Path, default=Path("configs/bfcl-ceiling.json"), metavar="FILE"
    )

    bench = command("bench", _bench, "Measure a speed as a ratio; ends with one JSON line.")
    bench.add_argument(
        "name",
        metavar="NAME",
        help=f"one of {', '.join(BENCHES)}",
    )
    bench.add_argument(
        "--items", type=count, metavar="N", help="how many rows, tokens, ... to measure on"
    )
    bench.add_argument("--device", default=None, help="for `kernels`: cuda, or cuda:1")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0, or 2 for bad input and 3 for a fault of the harness or a method."""
    args = _parser().parse_args(arguments)
    try:
        args.run(args)
    except PaskError as error:
        print(f"pask: error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        what = error.strerror or type(error).__name__
        print(f"pask: error: {error.filename or 'a file'}: {what}", file=sys.stderr)
        return PaskError.exit_code
    except KeyboardInterrupt:
        print("pask: interrupted; finished items are kept", file=sys.stderr)
        return 130
    return 0
