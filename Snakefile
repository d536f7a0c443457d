# What depends on what. Every rule calls one `python -m pask` command; see README.md.
#
#   snakemake all --cores all                                  the default run
#   snakemake all --cores all --config run=configs/FILE.yaml   another run
#   ... --config run=FILE set="model.path=/models/qwen"        with a value overridden

from pask.config import load
from pask.methods.registry import method_class
from pask.provenance import digest, source_digest

RUN = config.get("run", "configs/smollm2-135m-sample.yaml")
SET = config.get("set", "")
cfg = load(RUN, SET.split())

OUT = f"results/{cfg.run}"
ENTRIES = [entry.name for entry in cfg.entries]
METHODS = sorted({entry.method for entry in cfg.entries})
SHARDS = range(cfg.engine.shards)
MODULES = [method_class(name).__module__ for name in METHODS]

# An edit of any file that a step runs, and of no other, makes the step's results stale.
PASK = f"python -m pask {{}} --config {RUN} " + " ".join(f"--set {s}" for s in SET.split())


wildcard_constraints:
    shard=r"\d+",
    method="|".join(METHODS),


rule all:
    default_target: True
    input:
        rules_tables := expand(OUT + "/tables/accuracy.{form}", form=["csv", "md", "tex", "html"]),
