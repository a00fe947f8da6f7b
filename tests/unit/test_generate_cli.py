"""lumen chat and lumen generate, as a user types them, on a tiny model."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import save_tiny, shared_data, tiny_llama, tiny_tokenizer

from lumen.adapters.adapt import AdaptConfig, adapt
from lumen.adapters.save import save_adapter
from lumen.cli.main import run
from lumen.core import DataError
from lumen.generate.chat import Chat
from lumen.generate.config import GenerateConfig
from lumen.generate.prompts import read_prompts
from lumen.generate.sampler import encode, generate
from lumen.models.config import ModelConfig
from lumen.models.load import load_model

GREEDY = ["--greedy", "max_new_tokens=8", "infer_dtype=float32", "device=cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


def expected(messages: list[dict[str, Any]], model: Any = None) -> str:
    config = GenerateConfig(do_sample=False, max_new_tokens=8)
    return generate(model or tiny_llama(), tiny_tokenizer(), messages, config)[0].text


def with_adapter(folder: Path, path: Path) -> Any:
    config = AdaptConfig(model_name_or_path=str(folder), lora_rank=4)
    loaded = load_model(config, dtype=torch.float32, device="cpu")
    model = adapt(loaded, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(0))
    save_adapter(model, path, tokenizer=loaded.tokenizer, base=str(folder))
    return model


def test_chat_answers_prompts_as_turns_of_one_conversation(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", str(folder), "--prompt", "hi", "--prompt=你好", "--system", "Be kind.", *GREEDY]) == 0
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    first = expected(messages)
    second = expected([*messages, {"role": "assistant", "content": first}, {"role": "user", "content": "你好"}])
    assert capsys.readouterr().out == f"{first}\n{second}\n"


def test_chat_reads_piped_lines_and_commands(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n\n/clear\nhi\n/nonsense\none \\\ntwo\n/exit\nnever\n"))
    assert run(["chat", str(folder), *GREEDY]) == 0
    captured = capsys.readouterr()
    first = expected([{"role": "user", "content": "hi"}])
    third = expected(
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": first},
            {"role": "user", "content": "one \ntwo"},
        ]
    )
    assert captured.out == f"{first}\n{first}\n{third}\n"
    assert "no command /nonsense" in captured.err


def test_chat_with_an_adapter_by_option_by_folder_and_by_llama_factorys_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = with_adapter(folder, tmp_path / "adapter")
    want = expected([{"role": "user", "content": "hi"}], model)
    assert want != expected([{"role": "user", "content": "hi"}])
    (tmp_path / "inference.yaml").write_text(
        f"model_name_or_path: {folder}\nadapter_name_or_path: {tmp_path}/adapter\ntemplate: chatml\n"
        "infer_backend: huggingface\ntrust_remote_code: true\n"
    )
    for words in (
        [str(folder), "--adapter", str(tmp_path / "adapter")],
        [str(tmp_path / "adapter")],
        ["--adapter", str(tmp_path / "adapter")],
        [str(tmp_path / "inference.yaml"), "template=null"],
    ):
        assert run(["chat", *words, "--prompt", "hi", *GREEDY]) == 0
        assert capsys.readouterr().out == f"{want}\n"


def test_chat_without_a_template_continues_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path, tokenizer=tiny_tokenizer(template=False))
    assert run(["chat", str(tmp_path), "--prompt", "hi", *GREEDY]) == 0
    config = GenerateConfig(do_sample=False, max_new_tokens=8)
    assert capsys.readouterr().out == generate(tiny_llama(), tiny_tokenizer(), "hi", config)[0].text + "\n"


def test_an_interrupted_answer_is_kept_and_old_turns_make_room(folder: Path) -> None:
    chat = Chat(load_model(ModelConfig(model_name_or_path=str(folder)), device="cpu"), GenerateConfig(max_new_tokens=8))

    def stop(piece: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chat.ask("hi", stop)
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] and chat.messages[1]["content"]
    for _ in range(8):
        chat.ask("one two three four five six seven " * 4)
    assert len(chat.messages) < 18 and chat.messages[0]["content"] != "hi"
    assert len(encode(chat.loaded.tokenizer, chat.messages)) < 512
    chat.set_system("Be kind.")
    assert chat.messages == [] and chat.system == "Be kind."


def test_mistakes_exit_with_2_and_say_what_to_do(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (
        ["chat"],
        ["chat", "temperature=1"],
        ["chat", str(tmp_path / "nowhere")],
        ["chat", str(folder), "--prompt"],
        ["chat", str(folder), "--adapter", str(tmp_path / "no"), "--prompt", "x"],
        ["chat", str(folder), "temprature=1", "--prompt", "x"],
        ["chat", str(folder), "temperature=-1", "--prompt", "x"],
        ["generate"],
        ["generate", "--model", str(folder)],
        ["generate", "--model", str(folder), "--prompts", str(tmp_path / "none.txt")],
        ["generate", "--prompts", str(tmp_path / "none.txt")],
        ["generate", "--model", str(folder), "--prompts", "x.txt", "--limit", "0"],
    ):
        assert run(words) == 2, words
        captured = capsys.readouterr()
        assert captured.err and "Traceback" not in captured.err and not captured.out
    assert run(["chat", "--help"]) == 0 and run(["generate", "--help"]) == 0


def test_generate_answers_a_file_in_order_like_single_calls(folder: Path, tmp_path: Path) -> None:
    rows: list[Any] = [
        {"instruction": "Say", "input": "hi", "output": "hi!"},
        {
            "messages": [
                {"role": "user", "content": "one two three four five six"},
                {"role": "assistant", "content": "R"},
            ]
        },
        {"conversations": [{"from": "human", "value": "你好"}]},
        {"prompt": "x", "system": "Be kind."},
        "plain text",
        {"instruction": "now", "history": [["a", "b"]]},
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    out = tmp_path / "deep" / "out.jsonl"
    words = ["generate", "--model", str(folder), "--prompts", str(tmp_path / "p.jsonl"), "--out", str(out)]
    assert run([*words, "--batch-size", "4", *GREEDY]) == 0
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(answers) == len(rows)
    for answer in answers:
        assert answer["response"] == expected(answer["messages"])
        assert answer["finish_reason"] in ("stop", "length") and answer["completion_tokens"] <= 8
    assert answers[0]["messages"] == [{"role": "user", "content": "Say\nhi"}] and answers[0]["reference"] == "hi!"
    assert answers[1]["reference"] == "R" and "reference" not in answers[2]
    assert [m["role"] for m in answers[5]["messages"]] == ["user", "assistant", "user"]


def test_generate_to_standard_output_from_text_lines(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.txt").write_text("hi\n\n你好\nthird\n")
    words = ["generate", str(folder), "--prompts", str(tmp_path / "p.txt"), "--limit", "2", *GREEDY]
    assert run(words) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["messages"][0]["content"] for line in lines] == ["hi", "你好"]


def test_real_data_files_are_prompts() -> None:
    prompts = read_prompts(shared_data("alpaca_zh_demo.json"))
    assert len(prompts) > 900 and all(p.messages[-1]["role"] == "user" and p.reference for p in prompts)
    dpo = read_prompts(shared_data("dpo_en_demo.json"))
    assert dpo and all(p.messages[-1]["role"] == "user" for p in dpo)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"answer": "x"}', "no prompt, only: answer"),
        ('{"prompt": ["x"]}', "expected text"),
        ('{"messages": [{"role": "boss", "content": "x"}]}', "role 'boss' is unknown"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "nothing to answer"),
        ('{"messages": ["x"]}', "list of turns"),
        ('{"prompt": "x"', "p.jsonl:2"),
        ("7", "expected a text or an object"),
    ],
)
def test_a_row_that_is_no_prompt_is_named(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "p.jsonl").write_text(f'"fine"\n{line}\n')
    with pytest.raises(DataError, match=says) as caught:
        read_prompts(tmp_path / "p.jsonl")
    assert "p.jsonl:2" in caught.value.where
