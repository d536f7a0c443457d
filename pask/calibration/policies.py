"""The policy files of a run: where they are, and what they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pask.bfcl.data import data_digest
from pask.calibration.families import method_without_policy
from pask.config import Entry, RunConfig
from pask.digests import digest
from pask.evaluation.keys import RESULTS
from pask.policy.policy import Policy, check_made_for, read_policy
from pask.provenance import source_digest, versions

# What of the method decides its policy; the budget does not.
_PARAMETERS = (
    "recent", "sinks", "actions", "ranking", "floors", "tau", "alpha_decode", "alpha_prefill",
    "beta", "candidates", "stages", "distortion", "positions",
)  # fmt: skip


# What a policy made in another run, on whatever rows, has in common with the run that follows it.
_SHARED = (
    "model and tokenizer", "grammar", "prompt", "coarsening", "layer groups", "token limit",
    "kv_dtype",
)  # fmt: skip


def policy_file(config: RunConfig, family: str) -> Path:
    """Where the run's own policy of a family is."""
    return RESULTS / config.run / "policies" / f"{family}.json"


def made_for(config: RunConfig, entry: Entry, model_digest: str) -> Mapping[str, str]:
    """What a policy of this run belongs to, by name; a file made for anything else is refused."""
    method = method_without_policy(entry)
    parts = (config.data.sample_of(part) for part in ("cal", "dev"))
    return {
        # The tokenizer's files are among the model's.
        "model and tokenizer": model_digest,
        "grammar": f"{config.model.answer_form}, xgrammar {versions()['xgrammar']}",
        "prompt": config.model.prompt,
        "coarsening": config.structure.coarsening,
        "layer groups": str(config.structure.layer_groups),
        "token limit": str(config.max_new_tokens),
        "kv_dtype": config.engine.kv_dtype,
        "data": data_digest(),
        "rows": digest([config.data.split, config.data.seed, *parts]),
        "parameters": digest({name: getattr(method, name) for name in _PARAMETERS}),
        "source": source_digest("pask.calibration.select", "pask.calibration.scan"),
    }


def read_family_policy(config: RunConfig, entry: Entry, model_digest: str) -> Policy:
    """The policy of an entry's family: its `policy_file`'s, else the run's own.

    PaskError where it is missing or of something else.
    """
    given = method_without_policy(entry).policy_file
    path = Path(given) if given else policy_file(config, entry.family)
    policy = read_policy(path)
    wanted = made_for(config, entry, model_digest)
    if given:
        wanted = {name: wanted[name] for name in _SHARED}
    check_made_for(policy, wanted, str(path))
    return policy
