"""Loading a configuration: places, numbers, names, overrides, and LLaMA-Factory's own files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lumen.config import FileConfig, dump, foreign_keys, json_schema, load
from lumen.core import ConfigError, LumenError
from lumen.trainer.config import RunConfig

FIXTURES = Path(__file__).parents[1] / "fixtures" / "configs"
SRC = Path(__file__).parents[2] / "src"

NO_WORKERS = "`preprocessing_num_workers` changes nothing"
NO_LOADER = "`dataloader_num_workers` changes nothing"
NO_TIMEOUT = "`ddp_timeout` changes nothing"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_llamafactory_lora_file_loads_unchanged() -> None:
    loaded = load(FIXTURES / "llama3_lora_sft.yaml")
    run = loaded.run
    assert isinstance(run, RunConfig)
    assert run.dataset == ["identity", "alpaca_en_demo"]
    assert run.learning_rate == pytest.approx(1e-4)
    assert (run.lora_rank, run.lora_target, run.finetuning_type, run.stage) == (8, ["all"], "lora", "sft")
    assert (run.per_device_train_batch_size, run.gradient_accumulation_steps) == (1, 8)
    assert (run.warmup_ratio, run.lr_scheduler_type, run.bf16, run.max_samples) == (0.1, "cosine", True, 1000)
    assert run.report_to == ["none"] and run.plot_loss and run.overwrite_output_dir
    assert [note.partition(":")[0] for note in loaded.notes] == [NO_WORKERS, NO_LOADER, NO_TIMEOUT]


def test_llamafactory_qwen_lora_file_evaluates() -> None:
    loaded = load(FIXTURES / "qwen3_lora_sft.yaml")
    assert (loaded.run.val_size, loaded.run.eval_strategy, loaded.run.eval_steps) == (0.1, "steps", 500)
    assert len(loaded.notes) == 3


def test_llamafactory_full_file_notes_deepspeed() -> None:
    loaded = load(FIXTURES / "qwen3_full_sft.yaml")
    assert loaded.run.finetuning_type == "full"
    assert loaded.run.learning_rate == pytest.approx(1e-5)
    assert any(note.startswith("`deepspeed` changes nothing: on one process ZeRO has nothing") for note in loaded.notes)
    assert len(loaded.notes) == 4


def test_llamafactory_merge_file_loads() -> None:
    loaded = load(FIXTURES / "qwen3_lora_merge.yaml", needs=("model_name_or_path", "export_dir"))
    run = loaded.run
    assert run.adapter_name_or_path == ["saves/qwen3-4b/lora/sft"]
    assert (run.export_dir, run.export_size, run.export_device) == ("saves/qwen3_sft_merged", 5, "cpu")
    assert loaded.notes == []  # trust_remote_code is noted, or refused, where the model is known


def test_qlora_additions_become_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lumen.quant.recipes.check_available", lambda policy: None)
    loaded = load(FIXTURES / "llama3_lora_sft.yaml", ["quantization_bit=4", "quantization_method=bnb"])
    assert loaded.run.quant.recipe == "nf4"
    assert any("is read as `quant.recipe: nf4`" in note for note in loaded.notes)


@pytest.mark.parametrize("text", ["1e-4", "1E-4", '"1e-4"', "0.0001", "1.0e-4", "'1e-4'"])
def test_number_like_text_is_a_number(tmp_path: Path, text: str) -> None:
    assert load(write(tmp_path, f"learning_rate: {text}\nlora_rank: '16'\n")).run.learning_rate == pytest.approx(1e-4)


@pytest.mark.parametrize("text", ["true", ".nan", ".inf", "abc", "[1]", "{a: 1}", "1.5"])
def test_what_is_no_number_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="`lora_rank`") as caught:
        load(write(tmp_path, f"# a comment\nlora_rank: {text}\n"))
    assert caught.value.where.endswith("run.yaml:2")


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("lora_rank=0", "at least 1"),
        ("lora_dropout=1", "less than 1"),
        ("learning_rate=-1", "at least 0"),
        ("warmup_ratio=1.5", "at most 1"),
        ("num_train_epochs=0", "more than 0"),
        ("cutoff_len=0", "at least 1"),
        ("val_size=-0.1", "at least 0"),
        ("seed=-1", "at least 0"),
        ("device=cuda:x", "must be auto, cpu, cuda or cuda:N"),
        ("adam_beta1=2", "at most 1"),
        ("top_p=1.1", "at most 1"),
        ("export_size=0", "more than 0"),
        ("resume_from_checkpoint=[1]", "must be text or true or false"),
        ("report_to=wandb", "wandb is not supported"),
    ],
)
def test_values_out_of_range_are_refused(word: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load(None, [word])
    assert caught.value.where == f"command line: {word.partition('=')[0]}"


def test_unknown_key_suggests_and_names_the_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key `lora_rnak`; did you mean `lora_rank`") as caught:
        load(write(tmp_path, "stage: sft\n\nlora_rnak: 8\n"))
    assert caught.value.where.endswith("run.yaml:3")


def test_unknown_key_in_a_section(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key `quant.recpe`; did you mean `recipe`") as caught:
        load(write(tmp_path, "quant:\n  recpe: int8\n"))
    assert caught.value.where.endswith("run.yaml:2")


def test_every_mistake_of_a_file_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, "lora_rank: x\nbf16: maybe\n"))
    assert "`lora_rank` must be a whole number, got 'x'" in caught.value.what
    assert "`bf16` must be true or false, got 'maybe'" in caught.value.what
    assert "run.yaml:1" in caught.value.where and "run.yaml:2" in caught.value.where


@pytest.mark.parametrize(
    ("text", "what", "line"),
    [
        ("lora_rank: 8\nstage: sft\nlora_rank: 4\n", "`lora_rank` is given twice, on lines 1 and 3", 3),
        ("quant:\n  recipe: int8\n  recipe: bf16\n", "`recipe` is given twice", 3),
        ("lora_rank: 8\n  stage: sft\n", "not valid YAML", 2),
        ("stage: [sft\n", "not valid YAML", 2),
        ("- a\n- b\n", "must hold `key: value` lines", 1),
        ("just text\n", "must hold `key: value` lines", 1),
        ("a: &x [*x]\n", "contains itself", 1),
        ("a: !!python/object:os.system x\n", "not valid YAML", 1),
        ("a: !!timestamp x\n", "cannot be read", 1),
        ("a: 1\n---\nb: 2\n", "not valid YAML", 2),
    ],
)
def test_bad_yaml_names_file_and_line(tmp_path: Path, text: str, what: str, line: int) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        load(write(tmp_path, text))
    assert caught.value.where.endswith(f"run.yaml:{line}")


def test_alias_bomb_is_refused(tmp_path: Path) -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    with pytest.raises(ConfigError, match="too many values"):
        load(write(tmp_path, "\n".join(rows)))


def test_other_encodings_and_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbfstage: sft\n")
    assert load(path).run.stage == "sft"
    path.write_bytes("stage: sft\nrun_name: 中文\n".encode("gbk"))
    with pytest.raises(ConfigError, match="not UTF-8") as caught:
        load(path)
    assert caught.value.where.endswith(":2")
    with pytest.raises(ConfigError, match="no such configuration file"):
        load(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


def test_scalars_that_yaml_1_1_misreads(tmp_path: Path) -> None:
    run = load(write(tmp_path, "run_name: 2026-01-02\nsave_strategy: no\ncompile: off\nseed: 010\n")).run
    assert (run.run_name, run.save_strategy, run.compile, run.seed) == ("2026-01-02", "no", "off", 10)
    assert load(None, ["native_kernels=off"]).run.native_kernels == "off"


def test_json_files_load(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{\n\t"lora_rank": 4,\n\t"dataset": ["a", "b"]\n}')
    assert load(path).run.lora_rank == 4


def test_null_is_absent_only_where_null_is_a_value(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, "resume_from_checkpoint: null\ndeepspeed: null\nray_run_name: null\nfp8: false\n"))
    assert loaded.notes == []
    with pytest.raises(ConfigError, match="`lora_rank` is empty"):
        load(write(tmp_path, "lora_rank:\n"))


@pytest.mark.parametrize(
    ("old", "new", "value", "result"),
    [
        ("cache_path", "tokenized_path", "x", "x"),
        ("new_special_tokens", "add_special_tokens", "<a>,<b>", ["<a>", "<b>"]),
        ("checkpoint_dir", "adapter_name_or_path", "a", ["a"]),
        ("per_gpu_train_batch_size", "per_device_train_batch_size", "3", 3),
    ],
)
def test_old_names_are_accepted_with_one_note(tmp_path: Path, old: str, new: str, value: str, result: object) -> None:
    path = write(tmp_path, f"{old}: '{value}'\n")
    for loaded in (load(path), load(None, [f"{old}={value}"]), load(None, [f"--{old}", value])):
        assert getattr(loaded.run, new) == result
        assert loaded.notes == [f"`{old}` is an old name: read as `{new}`"]


def test_evaluation_strategy_and_its_new_name_together(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, "evaluation_strategy: steps\nval_size: 0.1\ndataset: a\n"))
    assert loaded.run.eval_strategy == "steps" and len(loaded.notes) == 1
    with pytest.raises(ConfigError, match="both are given"):
        load(write(tmp_path, "evaluation_strategy: steps\neval_strategy: steps\n"))


@pytest.mark.parametrize(
    "words",
    [
        ["lora_rank=16", "quant.recipe=int8", "bf16=true"],
        ["--lora_rank", "16", "--quant.recipe", "int8", "--bf16"],
        ["--lora-rank=16", "--quant.recipe=int8", "--bf16", "--cutoff_len", "2048"],
        ["--bf16", "lora_rank=16", "quant=int8"],
    ],
)
def test_overrides_of_every_form(tmp_path: Path, words: list[str]) -> None:
    run = load(write(tmp_path, "lora_rank: 8\nquant: {recipe: bf16}\n"), words).run
    assert (run.lora_rank, run.quant.recipe, run.bf16) == (16, "int8", True)


def test_overrides_win_one_by_one_and_name_themselves(tmp_path: Path) -> None:
    path = write(tmp_path, "quant:\n  recipe: int8\n  input: none\n")
    run = load(path, ["quant.weight=int8:row", "quant.weight=int8:block32"]).run
    assert (run.quant.recipe, run.quant.input, run.quant.weight) == ("int8", "none", "int8:block32")
    with pytest.raises(ConfigError) as caught:
        load(path, ["lora_rank=x"])
    assert caught.value.where == "command line: lora_rank"
    for word in ("lora_rank", "=3", "--=3", "a..b=3"):
        with pytest.raises(ConfigError):
            load(path, [word])


def test_override_text_that_is_no_yaml_stays_text() -> None:
    assert load(None, ["default_system=You: {be} kind"]).run.default_system == "You: {be} kind"
    assert load(None, ["run_name=a#b", "output_dir=@x"]).run.output_dir == "@x"
    assert load(None, ["add_tokens=[a, b]"]).run.add_tokens == ["a", "b"]


def test_typed_values_win_over_words() -> None:
    run = load(None, ["lora_rank=4"], values={"lora_rank": 32, "quant.recipe": "int8"}).run
    assert (run.lora_rank, run.quant.recipe) == (32, "int8")


def test_needs_names_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="`model_name_or_path`, `dataset` must be set"):
        load(None, ["output_dir=x"], needs=("model_name_or_path", "dataset", "output_dir"))


def test_remote_code_is_allowed_by_the_command_line_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="may not stand in a file"):
        load(write(tmp_path, "allow_remote_code: true\n"))
    loaded = load(write(tmp_path, "trust_remote_code: true\n"), ["--allow-remote-code"])
    assert loaded.run.allow_remote_code and loaded.run.trust_remote_code and not loaded.notes


def test_secrets_are_neither_shown_nor_dumped(tmp_path: Path) -> None:
    loaded = load(
        write(tmp_path, "hf_hub_token: hf_verysecret\nms_hub_token: ms_verysecret\nhub_token: x_verysecret\n")
    )
    assert "verysecret" not in json.dumps(dump(loaded.run)) + repr(loaded) + " ".join(loaded.notes)
    assert loaded.run.hf_hub_token is not None and loaded.run.hf_hub_token.get_secret_value() == "hf_verysecret"
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, "hf_hub_token: {verysecret: verysecret}\n"))
    assert "verysecret" not in str(caught.value)


def test_dump_reads_back_to_the_same_run(tmp_path: Path) -> None:
    for name in ("llama3_lora_sft", "qwen3_lora_sft", "qwen3_full_sft", "qwen3_lora_merge"):
        run = load(
            FIXTURES / f"{name}.yaml", ["quant=int8", "quant.rules=[{match: 'model.layers.0.*', weight: none}]"]
        ).run
        path = tmp_path / "resolved.json"
        path.write_text(json.dumps(dump(run)))
        again = load(path).run
        assert again == run and again.quant.policy() == run.quant.policy()


def test_schema_describes_every_key() -> None:
    schema = json_schema()
    accepted = {name for name, row in foreign_keys().items() if row.status != "refused"}
    assert set(schema["properties"]) == (set(FileConfig.model_fields) | accepted) - {"allow_remote_code"}
    assert {"type": "string"} in schema["properties"]["lora_target"]["anyOf"]  # `q_proj,v_proj` is no mistake
    for name, info in FileConfig.model_fields.items():
        assert info.description, f"{name} has no docstring"
        assert "efault" in info.description or "No default" in info.description, f"{name} names no default"
    json.dumps(schema)


def test_help_imports_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys; from lumen.cli.main import run; assert run(['--help']) == 0; "
        "assert 'torch' not in sys.modules and 'pydantic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=SRC, capture_output=True)


def test_errors_are_lumen_errors_with_three_parts(tmp_path: Path) -> None:
    with pytest.raises(LumenError) as caught:
        load(write(tmp_path, "use_galore: true\n"))
    assert caught.value.what and caught.value.where and caught.value.fix


def test_a_launcher_of_several_processes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lumen.trainer.train import run_training

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="a launcher started 2 processes"):
        run_training(RunConfig(output_dir=str(tmp_path / "run")), resolved="")
    assert not (tmp_path / "run").exists()
