"""A method is one file: dropped into a copy of the project, it is everywhere, nothing else edited.

The file is the example of `baselines/README.md`, under a name and a colour that nobody else has.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pask.paths import PROJECT, cache_dir
from tests.cpu.tiny import tiny_folder

NAME, LABEL, COLOR = "dropped_in", "Dropped in", "#12ab34"
BIN = Path(sys.executable).parent


def example() -> str:
    """The method that the page shows, renamed."""
    page = (PROJECT / "baselines/README.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    for what, new in (("name", NAME), ("label", LABEL), ("color", COLOR)):
        text, count = re.subn(rf'( {what}: ClassVar\[str\] = )".*"', rf'\g<1>"{new}"', text)
        assert count == 1, what
    return text


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, the new file, and a run's config that names the method."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copy(PROJECT / "Snakefile", folder)
    for name in ("baselines", "configs", "kernels", "pask", "profiles"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PROJECT / name, folder / name, ignore=ignored)
    (folder / "baselines" / "from_the_page.py").write_text(example(), encoding="utf-8")
    model = tiny_folder(tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=16384)
    run = {
        "run": "mine",
        "model": {
            "name": "tiny",
            "source": str(model),
            "prompt": "one_example",
            "answer_form": "json_list",
            "expected_new_tokens": {"nonlive": 12, "live": 12},
        },
        "data": {"sample": {"simple_python": 2, "live_simple": 1}},
        "decode": {"max_new_tokens": 12},
        "engine": {"shards": 1},
        "methods": [{"name": "full"}, {"name": NAME, "budgets": [0.33, 1.0]}],
    }
    (folder / "configs/mine.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    return folder


def done(checkout: Path, *command: str) -> str:
    """What a command prints that runs on the copy's code alone."""
    more = {"PYTHONPATH": str(checkout), "PASK_CACHE": str(cache_dir()), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        cwd=checkout,
        env=os.environ | more,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout + found.stderr


def test_the_registry_lists_it(checkout: Path) -> None:
    listed = {one["name"]: one for one in json.loads(done(checkout, "pask", "methods", "--json"))}
    assert listed[NAME]["module"] == "baselines.from_the_page"
    assert (listed[NAME]["label"], listed[NAME]["color"]) == (LABEL, COLOR)
    assert {"full", "snapkv"} <= listed.keys()


def test_the_workflow_plans_its_entries_and_it_alone(checkout: Path) -> None:
    alone = f"results/mine/methods/{NAME}.csv"
    plan = ("--dry-run", "--printshellcmds", "--cores", "1", "--config", "run=configs/mine.yaml")
    output = done(checkout, "snakemake", "all", alone, *plan)
    for budget in ("0.33", "1.00"):
        assert f"results/mine/predictions/{NAME}@{budget}/1-of-1.jsonl" in output
        assert f"--methods {NAME}@{budget}" in output  # its knob is searched
    its_own = rf"{NAME}@0\.33 {NAME}@1\.00"
    assert re.search(rf"pask evaluate .* --methods {its_own} --threads", output)


def test_the_tables_and_the_figure_have_it(checkout: Path) -> None:
    steps = ("splits", "evaluate", "score", "tables", "figures")
    options = ["--config", "configs/mine.yaml", "--set", "budget.search=false"]
    program = (
        "import sys; from pask.cli import main; "
        f"sys.exit(any(main([step, *{options}]) for step in {steps}))"
    )
    done(checkout, "python", "-c", program)
    results = checkout / "results/mine"
    for page in ("accuracy.md", "accuracy.html", "accuracy.csv", "accuracy.tex", "errors.md"):
        text = (results / "tables" / page).read_text(encoding="utf-8")
        assert LABEL in text or NAME in text, page
    figure = (results / "figures/accuracy.svg").read_text(encoding="utf-8")
    assert LABEL in figure
    assert COLOR in figure
