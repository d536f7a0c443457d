"""The workflow as users type it: targets, dry runs, reruns, and the forms of `--cores`."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pask.config import load
from pask.paths import PROJECT

CONFIG = load(PROJECT / "configs/smollm2-135m-sample.yaml")
BIN = Path(sys.executable).parent


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / arguments[0]), *arguments[1:]], cwd=cwd, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the workflow reads, so that a run under way in the project is not met."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copy(PROJECT / "Snakefile", folder)
    for name in ("configs", "profiles"):
        shutil.copytree(PROJECT / name, folder / name)
    return folder


def dry_run(checkout: Path, *arguments: str) -> str:
    done = run("snakemake", *arguments, "--dry-run", cwd=checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def jobs(output: str) -> dict[str, int]:
    """Rule -> number of jobs, from the table that a dry run prints."""
    table = output[output.index("Job stats:") :].split("\n\n")[0].splitlines()[3:]
    return {line.split()[0]: int(line.split()[1]) for line in table if line.split()}


def test_all_is_one_job_a_step_and_one_a_shard(checkout: Path) -> None:
    counts = jobs(dry_run(checkout, "all", "--cores", "all"))
    once = ("all", "splits", "model", "tags", "calibrate", "score", "tables",
            "figures", "policy", "policy_page")  # fmt: skip
    shards, entries = CONFIG.engine.shards, len(CONFIG.entries)
    assert counts == {
        **dict.fromkeys(once, 1),
        "trajectories": 2,
        "budget": entries,
        **dict.fromkeys(("evidence", "scan", "evaluate"), shards),
        "total": len(once) + 2 + entries + 3 * shards,
    }


def test_a_policy_is_made_before_what_follows_it(checkout: Path) -> None:
    config = load(PROJECT / "configs/smollm2-135m-pask.yaml")
    run_it = ("--cores", "all", "--config", "run=configs/smollm2-135m-pask.yaml")
    counts = jobs(dry_run(checkout, "all", *run_it))
    families = {entry.family for entry in config.entries if entry.method.startswith("pask")}
    assert len(families) == 8
    shards = config.engine.shards
    assert counts["policy"] == len(families)
    assert (counts["evidence"], counts["scan"], counts["trajectories"]) == (shards, shards, 2)
    assert counts["policy_page"] == 1
    one = dry_run(checkout, "results/smollm2-135m-pask/policies/pask.json", *run_it)
    assert jobs(one) == {
        **dict.fromkeys(("model", "policy", "splits"), 1),
        "evidence": shards,
        "scan": shards,
        "trajectories": 2,
        "total": 5 + 2 * shards,
    }
    alone = "results/smollm2-135m-pask/methods/pask_decode.csv"
    commands = dry_run(checkout, alone, "--printshellcmds", *run_it)
    assert "--methods pask_decode pask_decode-round_robin pask_decode-no_floors" in commands


def test_the_shipped_profile_makes_the_short_form_work(checkout: Path) -> None:
    assert jobs(dry_run(checkout, "all")) == jobs(dry_run(checkout, "all", "--cores", "all"))


def test_cores_without_a_number_is_refused_as_the_readme_says(checkout: Path) -> None:
    done = run("snakemake", "all", "--cores", cwd=checkout)
    assert done.returncode == 2
    assert "argument --cores/-c: expected one argument" in done.stderr


@pytest.mark.parametrize("target", ["tables", "figures", "splits", "model", "tags", "score"])
def test_single_steps_are_targets(checkout: Path, target: str) -> None:
    assert target in jobs(dry_run(checkout, target, "--cores", "1"))


def test_one_method_alone_is_a_target(checkout: Path) -> None:
    output = dry_run(checkout, f"results/{CONFIG.run}/methods/snapkv.csv", "--cores", "1")
    before = {"splits": 1, "model": 1, "trajectories": 1, "budget": 1}
    assert jobs(output) == before | {"method": 1, "total": 5}
    output = dry_run(checkout, f"results/{CONFIG.run}/methods/triaxialkv.csv", "--cores", "1")
    assert jobs(output) == before | {"budget": 2, "calibrate": 1, "method": 1, "total": 7}


def test_knobs_that_are_not_searched_need_no_answers(checkout: Path) -> None:
    config = ["run=configs/smollm2-135m-dev.yaml", "set=budget.search=false"]
    output = dry_run(checkout, "all", "--cores", "1", "--config", *config)
    assert jobs(output).keys().isdisjoint({"budget", "trajectories"})


def test_tags_need_the_model_and_nothing_else(checkout: Path) -> None:
    assert jobs(dry_run(checkout, "tags", "--cores", "1")) == {"model": 1, "tags": 1, "total": 2}


def test_another_config_and_an_override_reach_the_commands(checkout: Path) -> None:
    config = ["run=configs/smollm2-135m.yaml", "set=engine.shards=5"]
    output = dry_run(checkout, "all", "--cores", "1", "--printshellcmds", "--config", *config)
    assert jobs(output)["evaluate"] == 5
    assert "--config configs/smollm2-135m.yaml --set engine.shards=5 --shard 3/5" in output


def test_an_unknown_config_key_is_one_line(checkout: Path) -> None:
    done = run("snakemake", "all", "-n", "--config", "set=modle.name=x", cwd=checkout)
    assert done.returncode != 0
    assert "unknown key 'modle' in top level; did you mean 'model'?" in done.stdout + done.stderr


def test_what_is_stale_follows_from_the_sources(checkout: Path) -> None:
    assert run("snakemake", "splits", "--cores", "1", cwd=checkout).returncode == 0
    assert "Nothing to be done" in dry_run(checkout, "splits", "--cores", "1")
    seeded = dry_run(checkout, "splits", "--cores", "1", "--config", "set=data.seed=1")
    assert jobs(seeded) == {"splits": 1, "total": 1}


def test_lint_and_format() -> None:
    for command in (["snakemake", "--lint"], ["snakefmt", "--check", "Snakefile"]):
        done = run(*command, cwd=PROJECT)
        assert done.returncode == 0, done.stdout + done.stderr
