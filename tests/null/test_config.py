"""The run config: what it accepts, how it names entries, what a mistake is told."""

from pathlib import Path

import pytest
import yaml

from pask.config import load
from pask.errors import PaskError
from pask.paths import CONFIGS

SHIPPED = sorted(CONFIGS.glob("*.yaml"))
DEFAULT = CONFIGS / "smollm2-135m-sample.yaml"


def test_there_are_configs() -> None:
    assert DEFAULT in SHIPPED
    assert CONFIGS / "smollm2-135m.yaml" in SHIPPED


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs_load_and_are_named_after_their_file(path: Path) -> None:
    config = load(path)
    assert config.run == path.stem
    assert config.entries[0].name == "full"


def test_full_split_config_takes_the_whole_test_part() -> None:
    config = load(CONFIGS / "smollm2-135m.yaml")
    assert config.data.sample is None
    assert config.data.part == "test"


def test_defaults_are_filled(tmp_path: Path) -> None:
    raw = yaml.safe_load(DEFAULT.read_text())
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({key: raw[key] for key in ("run", "model", "methods")}))
    config = load(path)
    assert config.data.split == "paper"
    assert config.data.seed == 0
    assert config.max_new_tokens == 512
    assert config.engine.kv_dtype == "float16"
    assert config.paper_model == "Qwen3-4B"
    assert config.structure.layer_groups == 3
    assert config.structure.coarsening == "role_choice_next"


def test_entries_are_named_by_method_variant_and_budget() -> None:
    narrow = "{name: snapkv, variant: w8, budgets: [0.2, 0.5], params: {window: 8}}"
    listed = f"[{{name: full}}, {{name: snapkv}}, {narrow}]"
    config = load(DEFAULT, [f"methods={listed}"])
    names = [entry.name for entry in config.entries]
    assert names == ["full", "snapkv@0.33", "snapkv-w8@0.20", "snapkv-w8@0.50"]
    assert [entry.name for entry in config.select(["snapkv"])] == names[1:]
    assert [entry.name for entry in config.select(["snapkv-w8@0.50"])] == names[3:]


def test_no_two_budgets_share_a_name() -> None:
    config = load(DEFAULT, ["methods=[{name: snapkv, budgets: [0.2, 0.204, 0.205]}]"])
    names = [entry.name for entry in config.entries]
    assert names == ["snapkv@0.20", "snapkv@0.204", "snapkv@0.205"]


def test_override_reaches_a_nested_key_and_changes_the_digest() -> None:
    plain, other = load(DEFAULT), load(DEFAULT, ["model.path=/models/x", "data.seed=3"])
    assert other.model.path == "/models/x"
    assert other.data.seed == 3
    assert plain.digest != other.digest
    assert plain.digest == load(DEFAULT).digest


def test_layer_groups_may_be_given_by_their_first_layers() -> None:
    config = load(DEFAULT, ["structure.layer_groups=[0, 10, 20]", "structure.coarsening=role"])
    assert config.structure.layer_groups == (0, 10, 20)
    assert config.structure.coarsening == "role"
    assert config.digest != load(DEFAULT).digest


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("modle.name=x", "unknown key 'modle' in top level; did you mean 'model'?"),
        ("model.promt=x", "unknown key 'promt' in model; did you mean 'prompt'?"),
        ("data.sample={simple: 3}", "unknown key 'simple' in data.sample"),
        ("data.sample={multiple: 0}", "data.sample.multiple: 0 is less than the minimum of 1"),
        ("engine.kv_dtype=fp8", "engine.kv_dtype: 'fp8' is not one of"),
        ("run=Up/Down", "run: 'Up/Down' does not match"),
        ("methods=[]", "methods: [] should be non-empty"),
        ("methods=[{name: snapvk}]", "unknown method 'snapvk'; did you mean 'snapkv'?"),
        ("methods=[{name: full}, {name: full}]", "'full' appears twice"),
        ("methods=[{name: full, budgets: [0.5]}]", "budget 0.5, but its bytes are what they are"),
        ("methods=[{name: snapkv, params: {windw: 8}}]", "did you mean 'window'?"),
        ("methods=[{name: snapkv, params: {kernel: 4}}]", "kernel must be odd"),
        ("max_new_tokens", "cannot read the override"),
        ("model.path=", "gives no value; write model.path=null"),
        ("model.path=[1", "cannot read the override 'model.path=[1'"),
        ("engine={shards: 1, shards: 2}", "the key 'shards' is written twice"),
        ("engine.shards=2.0", "engine.shards: 2.0 is not of type 'integer'"),
        ("model.prompt=format_lst", "unknown prompt style 'format_lst'; did you mean"),
        ("structure.coarsening=role_choise", "unknown coarsening 'role_choise'; did you mean"),
        ("structure.layers=3", "unknown key 'layers' in structure; did you mean 'layer_groups'?"),
        ("structure.layer_groups=0", "structure.layer_groups: 0 is less than the minimum of 1"),
        ("structure.layer_groups=[]", "structure.layer_groups: [] should be non-empty"),
        ("structure.layer_groups=[1, 9]", "the first layers [1, 9] do not begin with 0 and rise"),
        ("structure.layer_groups=[0, x]", "structure.layer_groups.1: 'x' is not of type"),
        ("structure.layer_groups=true", "structure.layer_groups: True is not of type"),
        ("methods=[{name: snapkv, params: {window: 3.5}}]", "window must be int, not 3.5"),
    ],
)
def test_each_mistake_is_one_clear_line(override: str, expected: str) -> None:
    with pytest.raises(PaskError) as caught:
        load(DEFAULT, [override])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["- a\n- b\n", "run: [\n", "\xff", "[" * 3000, "run: a\nrun: b\n"])
def test_a_file_that_is_no_config(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(PaskError, match=r"run\.yaml: .*config"):
        load(path)


def test_a_missing_file_names_those_that_are_there() -> None:
    with pytest.raises(PaskError, match=r"no such config file.*smollm2-135m-sample\.yaml"):
        load(CONFIGS / "smolm.yaml")


def test_selecting_a_method_that_the_run_lacks() -> None:
    with pytest.raises(PaskError, match=r"'h3o' is not in this run.*did you mean 'h2o'"):
        load(DEFAULT).select(["h3o"])
