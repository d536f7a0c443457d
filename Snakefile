# What depends on what. Every rule calls one `python -m pask` command; see README.md.
#
#   snakemake all --cores all                                  the default run
#   snakemake all --cores all --config run=configs/FILE.yaml   another run
#   ... --config run=FILE set=model.path=/models/qwen          with a value overridden
#   ... --config run=FILE set="[a.b=1, c.d=2]"                 with several

import os
import re
import shlex
import sys

from pask.bfcl.answers import ANSWER_FORMS
from pask.bfcl.prompts import STYLES
from pask.calibration.families import (
    families_to_make,
    method_without_policy,
    policy_families,
)
from pask.config import load
from pask.evaluation.keys import method_modules
from pask.methods.registry import method_class
from pask.provenance import source_digest

# `python` in the rules is the one that runs snakemake, also where .venv is not activated.
shell.prefix(f"export PATH={shlex.quote(os.path.dirname(sys.executable))}:$PATH; ")

RUN = config.get("run", "configs/smollm2-135m-sample.yaml")
SET = config.get("set", [])
SET = [SET] if isinstance(SET, str) else SET
cfg = load(RUN, SET)

OUT = f"results/{cfg.run}"
ARGS = shlex.join(
    ["--config", RUN, *(word for value in SET for word in ("--set", value))]
)
ENTRIES = [entry.name for entry in cfg.entries]
METHODS = sorted({entry.method for entry in cfg.entries})
METHOD = {entry.name: entry.method for entry in cfg.entries}
CALIBRATED = {
    entry.method for entry in cfg.entries if method_class(entry.method).calibrated
}
# Entries without a knob too: what they take on the same rows is worth knowing.
SEARCHED = cfg.entries if cfg.budget.search else ()


FAMILIES = families_to_make(cfg)  # whose policy this run makes
POLICIES = {  # what each family follows: a policy made before, or the run's own
    family: method_without_policy(entry).policy_file or f"{OUT}/policies/{family}.json"
    for family, entry in policy_families(cfg).items()
}


def calibration(methods):
    """What has to be there before any of these methods can be made."""
    measured = [f"{OUT}/calibration.json"] if CALIBRATED & set(methods) else []
    following = policy_families(cfg).items()
    return measured + [
        POLICIES[family] for family, e in following if e.method in methods
    ]


def shards_of(kind):
    return [f"{OUT}/{kind}/{n}-of-{SHARDS}.jsonl" for n in range(1, SHARDS + 1)]


def budgets(methods):
    return [f"{OUT}/budgets/{e.name}.json" for e in SEARCHED if e.method in methods]


SHARDS = cfg.engine.shards


# The platform the pinned requirements were resolved on. Jobs run in the project's own environment
# (`make all` makes it); this image is used only under --software-deployment-method apptainer and
# would need the project installed in it.
container: "docker://python:3.11-bookworm"


wildcard_constraints:
    shard=r"\d+",
    method="|".join(METHODS),
    style="|".join(STYLES),
    form="|".join(ANSWER_FORMS),
    entry="|".join(map(re.escape, ENTRIES)),
    family="|".join(map(re.escape, FAMILIES)) or "-",
    part="cal|dev|test",


rule all:
    default_target: True
    input:
        f"{OUT}/splits.json",
        f"{OUT}/tables/accuracy.html",
        f"{OUT}/tables/errors.md",
        f"{OUT}/figures/accuracy.png",
        f"{OUT}/tags/tags.html",
        [f"{OUT}/policy_page/policies.html"] if POLICIES else [],


rule splits:
    output:
        f"{OUT}/splits.json",
    log:
        f"{OUT}/logs/splits.log",
    params:
        args=ARGS,
        config=cfg.digest,
        source=source_digest("pask.bfcl.splits"),
    shell:
        "python -m pask splits {params.args} 2>&1 | tee {log}"


rule model:
    output:
        f"{OUT}/model.json",
    log:
        f"{OUT}/logs/model.log",
    params:
        args=ARGS,
        config=cfg.digest,
        source=source_digest("pask.evaluation.model"),
    shell:
        "python -m pask model {params.args} 2>&1 | tee {log}"


# What the grammar says about each token of the calibration rows. The tokenizer comes with the model.
rule tags:
    input:
        f"{OUT}/model.json",
    output:
        expand(f"{OUT}/tags/{{name}}_tokens.csv", name=["answer", "prompt"]),
        expand(f"{OUT}/tags/{{name}}.json", name=["manifest", "example"]),
        f"{OUT}/tags/buckets.csv",
        f"{OUT}/tags/tags.md",
        multiext(f"{OUT}/figures/tags", ".svg", ".pdf"),
        page=report(f"{OUT}/tags/tags.html", category="Tags"),
        picture=report(f"{OUT}/figures/tags.png", category="Tags"),
    log:
        f"{OUT}/logs/tags.log",
    params:
        args=ARGS,
        config=cfg.digest,
        source=source_digest(
            "pask.evaluation.tags", "pask.report.tags", "pask.report.tag_picture"
        ),
    shell:
        "python -m pask tags {params.args} 2>&1 | tee {log}"


# Full KV's answers to the run's sample of a part, one file.
rule trajectories:
    input:
        f"{OUT}/model.json",
    output:
        f"{OUT}/trajectories/{{part}}.jsonl",
    log:
        f"{OUT}/logs/trajectories-{{part}}.log",
    threads: 1
    resources:
        mem_mb=3000,
    params:
        args=ARGS,
        config=cfg.digest,
        source=source_digest("pask.evaluation.trajectories"),
    shell:
        "python -m pask trajectories {params.args} --part {wildcards.part} 2>&1 | tee {log}"


# What the methods that are calibrated are calibrated with.
rule calibrate:
    input:
        splits=f"{OUT}/splits.json",
        model=f"{OUT}/model.json",
    output:
        f"{OUT}/calibration.json",
    log:
        f"{OUT}/logs/calibrate.log",
    threads: 1
    resources:
        mem_mb=3000,
    params:
        args=ARGS,
        config=cfg.digest,
        source=source_digest(
            "pask.calibration.run",
            *(method_class(name).__module__ for name in sorted(CALIBRATED)),
        ),
    shell:
        "python -m pask calibrate {params.args} 2>&1 | tee {log}"


# What lowering each bucket does to attention and to the answers, on the calibration rows.
rule evidence:
    input:
        splits=f"{OUT}/splits.json",
        model=f"{OUT}/model.json",
        cal=f"{OUT}/trajectories/cal.jsonl",
    output:
        multiext(f"{OUT}/evidence/{{shard}}-of-{SHARDS}", ".jsonl", ".manifest.json"),
    log:
        f"{OUT}/logs/evidence-{{shard}}.log",
    priority: 1  # as soon as it can: all of PASK waits for it, and budgets fill the other cores
    threads: 1
    resources:
        mem_mb=3000,
    params:
        args=ARGS,
        config=cfg.digest,
        source=source_digest("pask.calibration.rows"),
        shards=SHARDS,
    shell:
        "python -m pask evidence {params.args} --shard {wildcards.shard}/{params.shards} --threads {threads}"
        " 2>&1 | tee {log}"


# What the policies that come into question do to the development rows.
rule scan:
    input:
        shards_of("evidence"),
        dev=f"{OUT}/trajectories/dev.jsonl",
    output:
        multiext(f"{OUT}/scan/{{shard}}-of-{SHARDS}", ".jsonl", ".manifest.json"),
    log:
        f"{OUT}/logs/scan-{{shard}}.log",
    threads: 1
    resources:
        mem_mb=3000,
    params:
        args=ARGS,
        config=cfg.digest,
        source=source_digest("pask.calibration.scan"),
        shards=SHARDS,
    shell:
        "python -m pask scan {params.args} --shard {wildcards.shard}/{params.shards} --threads {threads}"
        " 2>&1 | tee {log}"


# The policy that is selected, frozen from then on.
rule policy:
    input:
        shards_of("evidence"),
        shards_of("scan"),
    output:
        f"{OUT}/policies/{{family}}.json",
    log:
        f"{OUT}/logs/policy-{{family}}.log",
    params:
        args=ARGS,
        config=cfg.digest,
        source=source_digest("pask.calibration.select"),
        entry=lambda wildcards: FAMILIES[wildcards.family].name,
    shell:
        "python -m pask policy make {params.args} --methods {params.entry} 2>&1 | tee {log}"


# The value of an entry's knob that meets its budget in bytes, on development rows.
rule budget:
    input:
        lambda wildcards: calibration([METHOD[wildcards.entry]]),
        splits=f"{OUT}/splits.json",
        dev=f"{OUT}/trajectories/dev.jsonl",
    output:
        f"{OUT}/budgets/{{entry}}.json",
    log:
        f"{OUT}/logs/budget-{{entry}}.log",
    threads: 1
    resources:
        mem_mb=2000,
    params:
        args=ARGS,
        config=cfg.digest,
        source=lambda wildcards: source_digest(
            "pask.evaluation.budget",
            method_class(METHOD[wildcards.entry]).__module__,
        ),
    shell:
        "python -m pask budget {params.args} --methods {wildcards.entry} 2>&1 | tee {log}"


rule evaluate:
    input:
        calibration(METHODS),
        budgets(METHODS),
        splits=f"{OUT}/splits.json",
        model=f"{OUT}/model.json",
    output:
        expand(
            f"{OUT}/predictions/{{entry}}/{{{{shard}}}}-of-{SHARDS}.jsonl",
            entry=ENTRIES,
        ),
    log:
        f"{OUT}/logs/evaluate-{{shard}}.log",
    threads: 1
    resources:
        mem_mb=3000,
    params:
        args=ARGS,
        config=cfg.digest,
        source=source_digest("pask.evaluation.run", *method_modules(cfg)),
        shards=SHARDS,
    shell:
        "python -m pask evaluate {params.args} --shard {wildcards.shard}/{params.shards} --threads {threads}"
        " 2>&1 | tee {log}"


# One method alone: `snakemake results/<run>/methods/snapkv.csv --cores all`. It shares the part
# files with the rule above, so nothing is computed twice.
rule method:
    input:
        lambda wildcards: calibration([wildcards.method]),
        lambda wildcards: budgets([wildcards.method]),
        splits=f"{OUT}/splits.json",
        model=f"{OUT}/model.json",
    output:
        f"{OUT}/methods/{{method}}.csv",
    log:
        f"{OUT}/logs/method-{{method}}.log",
    threads: 1
    resources:
        mem_mb=3000,
    params:
        args=ARGS,
        config=cfg.digest,
        source=source_digest("pask.evaluation.score", *method_modules(cfg)),
        # By name: a variant's entry is the method's too.
        entries=lambda wildcards: shlex.join(
            name for name, method in METHOD.items() if method == wildcards.method
        ),
    shell:
        "(python -m pask evaluate {params.args} --methods {params.entries} --threads {threads} &&"
        " python -m pask score {params.args} --methods {params.entries} --shards 1"
        " --out {output})"
        " 2>&1 | tee {log}"


# Which prompt suits the model, on calibration rows: `snakemake prompts --cores all`.
rule prompt_trial:
    input:
        f"{OUT}/model.json",
    output:
        f"{OUT}/prompts/{{style}}.{{form}}.json",
    log:
        f"{OUT}/logs/prompt-{{style}}-{{form}}.log",
    threads: 1
    resources:
        mem_mb=3000,
    params:
        args=ARGS,
        config=cfg.digest,
        source=source_digest("pask.evaluation.prompts", "pask.methods.full"),
        sample=config.get("trial_rows", 10),
    shell:
        "python -m pask prompts {params.args} --styles {wildcards.style}"
        " --answer-forms {wildcards.form} --sample {params.sample} 2>&1 | tee {log}"


rule prompts:
    input:
        expand(
            f"{OUT}/prompts/{{style}}.{{form}}.json", style=STYLES, form=ANSWER_FORMS
        ),
    output:
        f"{OUT}/prompts/trials.md",
    log:
        f"{OUT}/logs/prompts.log",
    params:
        args=ARGS,
    shell:
        "python -m pask prompts {params.args} --gather 2>&1 | tee {log}"


rule score:
    input:
        expand(
            f"{OUT}/predictions/{{entry}}/{{shard}}-of-{SHARDS}.jsonl",
            entry=ENTRIES,
            shard=range(1, SHARDS + 1),
        ),
        splits=f"{OUT}/splits.json",
    output:
        f"{OUT}/long.csv",
        f"{OUT}/long.manifest.json",
    log:
        f"{OUT}/logs/score.log",
    params:
        args=ARGS,
        source=source_digest("pask.evaluation.score"),
    shell:
        "python -m pask score {params.args} > {log} 2>&1"


rule tables:
    input:
        long=f"{OUT}/long.csv",
        made_for=f"{OUT}/long.manifest.json",
        splits=f"{OUT}/splits.json",
        ceiling="configs/bfcl-ceiling.json",
        paper="configs/paper/table1.csv",
    output:
        multiext(f"{OUT}/tables/accuracy", ".csv", ".tex"),
        multiext(f"{OUT}/tables/pairs", ".csv", ".md", ".tex"),
        multiext(f"{OUT}/tables/errors", ".csv", ".md"),
        md=f"{OUT}/tables/accuracy.md",
        html=report(f"{OUT}/tables/accuracy.html", category="Tables"),
        pairs=report(f"{OUT}/tables/pairs.html", category="Tables"),
        errors=report(f"{OUT}/tables/errors.html", category="Tables"),
    log:
        f"{OUT}/logs/tables.log",
    params:
        args=ARGS,
        config=cfg.digest,
        source=source_digest("pask.report.run"),
    shell:
        "python -m pask tables {params.args} > {log} 2>&1 && cat {output.md}"


# What the policies are and what they rest on, beside the paper's figures.
rule policy_page:
    input:
        list(POLICIES.values()),
        long=f"{OUT}/long.csv",
        made_for=f"{OUT}/long.manifest.json",
        paper=expand("configs/paper/table{n}.csv", n=(4, 5)),
    output:
        multiext(f"{OUT}/policy_page/policies", ".md", ".tex"),
        expand(
            f"{OUT}/policy_page/policy_{{name}}.csv",
            name=["selection", "ablation", "thresholds", "buckets", "candidates"]
            + ["frontier", "correlation"],
        ),
        expand(
            f"{OUT}/policy_page/policy_{{name}}.{{form}}",
            name=["buckets", "mismatch", "cost"],
            form=["png", "svg", "pdf"],
        ),
        page=report(f"{OUT}/policy_page/policies.html", category="Policies"),
    log:
        f"{OUT}/logs/policy-page.log",
    params:
        args=ARGS,
        config=cfg.digest,
        source=source_digest("pask.report.run"),
    shell:
        "python -m pask policy page {params.args} > {log} 2>&1"


rule figures:
    input:
        long=f"{OUT}/long.csv",
        made_for=f"{OUT}/long.manifest.json",
        splits=f"{OUT}/splits.json",
        ceiling="configs/bfcl-ceiling.json",
        paper="configs/paper/table1.csv",
    output:
        multiext(f"{OUT}/figures/accuracy", ".svg", ".pdf"),
        report(f"{OUT}/figures/accuracy.png", category="Figures"),
    log:
        f"{OUT}/logs/figures.log",
    params:
        args=ARGS,
        config=cfg.digest,
        source=source_digest("pask.report.run"),
    shell:
        "python -m pask figures {params.args} > {log} 2>&1"
