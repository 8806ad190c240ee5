"""A model as lm-eval asks it. Against lm-eval's own `hf` model: `nox -s lm_eval`."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import random
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from easypipe import DatasetConfig, PipelineConfig, Trainer, train_bpe
from easypipe.cli import main
from easypipe.core.errors import ConfigError
from easypipe.train import save_pretrained
from easypipe.train.callbacks.config import LmEvalConfig
from easypipe.train.metrics.log import read_metrics
from easypipe.train.model.decoder import Decoder, ModelConfig
from easypipe.train.model.harness import Asked, HarnessModel, scores
from easypipe.train.model.pretrained.save import Seen
from easypipe.transforms.prompt.templates import CHAT_TEMPLATES
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer
from pipelines import texts

VOCAB, LENGTH = 300, 24
SHAPE = ModelConfig(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2
)
needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed: nox -s lm_eval"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    train_bpe(texts(60), VOCAB, special, folder)
    return folder


@pytest.fixture(scope="module")
def asked(tokenizer: Path) -> Asked:
    return Asked(
        model=Decoder(SHAPE, nnx.Rngs(3)),
        tokenizer=load_tokenizer(tokenizer),
        ends=(2,),
        chat_template=CHAT_TEMPLATES["chatml"],
        max_length=LENGTH,
        batch_size=3,
    )


def requests(*args: Any) -> list[Any]:
    return [SimpleNamespace(args=one) for one in args]


def direct(asked: Asked, before: list[int], scored: list[int]) -> tuple[float, bool]:
    """From the logits of a whole row, read by itself."""
    row = np.array([*before, *scored])[-(asked.max_length + 1) :]
    logits = np.asarray(asked.model(row[None, :-1].astype(np.int32))[0], np.float64)
    found = np.asarray(jax.nn.log_softmax(logits, axis=-1))[-len(scored) :]
    return (
        float(found[np.arange(len(scored)), scored].sum()),
        bool((found.argmax(axis=-1) == scored).all()),
    )


def test_continuations_are_as_likely_as_their_rows_say(asked: Asked) -> None:
    encode = asked.tokenizer.reference_encode
    pairs = [
        ("the question is ", "whether 12"),  # the space belongs to the continuation
        ("", "all by itself"),
        ("answer:", " a"),
        ("answer:", " b"),
        ("a very long text that is " * 4, "cut on its left"),
        ("one", " two three"),
    ]
    found = HarnessModel(asked).loglikelihood(requests(*pairs))
    for (text, more), (log_prob, is_greedy) in zip(pairs, found, strict=True):
        before = encode(text.rstrip()) if text else [0]
        whole = encode(text + more) if text else [0, *encode(more)]
        assert whole[: len(before)] == before
        want, greedy = direct(asked, before, whole[len(before) :])
        assert log_prob == pytest.approx(want, abs=1e-5)
        assert is_greedy == greedy
    likeliest = int(np.asarray(asked.model(np.array([[5, 6]], np.int32)))[0, -1].argmax())
    ((_, is_greedy),) = HarnessModel(asked)._scored([([5, 6], [likeliest])])
    assert is_greedy


def test_a_pair_is_cut_where_its_text_ends_and_begins_once(asked: Asked) -> None:
    model, encode = HarnessModel(asked), asked.tokenizer.reference_encode
    begin = asked.tokenizer.decode([model.prefix])
    for given in ("what", f"{begin}what"):
        assert model._pair("", given) == ([model.prefix], encode("what"))
    for text, continuation in (("is", " longer"), ("is ", "longer"), (f"{begin}is", " longer")):
        before, scored = model._pair(text, continuation)
        whole = encode("is longer")
        assert [*before, *scored][-len(whole) :] == whole
        assert before[-len(encode("is")) :] == encode("is")
        assert before.count(model.prefix) == (begin in text)


def test_a_text_is_read_in_windows_each_token_once(asked: Asked) -> None:
    text = "what is longer than a window of the model is read in several " * 3
    ids = asked.tokenizer.reference_encode(text)
    assert len(ids) > 2 * LENGTH
    want, row = 0.0, [0, *ids]
    for begin in range(0, len(ids), LENGTH):
        end = min(begin + LENGTH, len(ids))
        # the last window is as long as the others
        first = 0 if begin == 0 else end - LENGTH
        want += direct(asked, row[first : begin + 1], ids[begin:end])[0]
    model = HarnessModel(asked)
    assert model.loglikelihood_rolling(requests((text,), ("",))) == [
        pytest.approx(want, abs=1e-4),
        0.0,
    ]


def test_what_is_written_ends_before_a_stop(asked: Asked) -> None:
    model = HarnessModel(asked)
    (whole,) = model.generate_until(requests(("say", {"max_gen_toks": 12})))
    stop = whole[3:5]
    stopped = model.generate_until(
        requests(
            ("say", {"until": [stop], "max_gen_toks": 12, "do_sample": False}),
            ("say", {"max_gen_toks": 2}),
        )
    )
    assert stopped[0] == whole.split(stop)[0]
    assert whole.startswith(stopped[1])
    with pytest.raises(ConfigError, match=r"generation_kwargs.top_q: is not an option .*'top_"):
        model.generate_until(requests(("say", {"top_q": 1, "max_gen_toks": 2})))
    with pytest.raises(ConfigError, match="256 new tokens leave no room in the 24"):
        model.generate_until(requests(("say", {})))


def test_a_conversation_is_asked_by_the_template_that_was_trained(asked: Asked) -> None:
    model, talk = HarnessModel(asked), [{"role": "user", "content": "hi"}]
    opened = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert model.apply_chat_template(talk) == opened
    begun = [*talk, {"role": "assistant", "content": "I"}]
    assert model.apply_chat_template(begun, add_generation_prompt=False) == f"{opened}I"
    assert model.chat_template(True) == CHAT_TEMPLATES["chatml"]


def test_lm_eval_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    assert main(["eval", str(tmp_path), "--tasks", "mine"]) == 2
    said = capsys.readouterr().err
    assert "lm_eval: needs the package lm-eval" in said
    assert "pip install 'easypipe[eval]'" in said
    for values in ("tasks=[]", "limit=0", "batch_size=0", "max_length=1", "num_fewshot=-1"):
        assert main(["eval", str(tmp_path), "--tasks", "mine", "--set", values]) == 2
    assert "tasks: names no task" in capsys.readouterr().err


def test_what_is_configured_reaches_lm_eval(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    class Manager:
        def __init__(self, include_path: str | None, include_defaults: bool) -> None:
            given["include_path"] = include_path
            given.setdefault("indices", []).append(include_defaults)
            self.all_subtasks = ["mine"] if include_path else []
            self.all_tasks = ["all", "mine"] if include_defaults else self.all_subtasks

    def simple_evaluate(**options: Any) -> Any:
        given.update(options)
        return {"results": {"mine": {"acc": 0.5}}}

    modules = {
        "lm_eval": {"simple_evaluate": simple_evaluate},
        "lm_eval.tasks": {"TaskManager": Manager},
        "lm_eval.api": {},
        "lm_eval.api.model": {"LM": type("LM", (), {})},
    }
    for name, members in modules.items():
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules[name].__dict__.update(members)
    model, seen = Decoder(SHAPE, nnx.Rngs(0)), Seen(max_length=77)
    options = {"include_path": "tasks", "limit": 3, "num_fewshot": 2, "chat": True}
    config = LmEvalConfig(tasks=["mine"], batch_size=5, max_length=40, **options)
    assert scores(config, model, str(tokenizer), seen) == {"mine": {"acc": 0.5}}
    asked = given["model"].asked
    assert (asked.batch_size, asked.max_length) == (5, 40)
    names = ("include_path", "limit", "num_fewshot", "apply_chat_template", "tasks")
    assert [given[name] for name in names] == ["tasks", 3, 2, True, ["mine"]]
    scores(LmEvalConfig(tasks=["mine"]), model, str(tokenizer), seen)
    assert given["model"].asked.max_length == 77
    scores(dataclasses.replace(config, tasks=["all"]), model, str(tokenizer), seen)
    # lm-eval's own tasks are read where a folder is not enough, and once
    assert given["indices"] == [False, True, True]
    with pytest.raises(ConfigError, match=r"tasks\[0\]: lm-eval has no task 'minne'. .*'mine'"):
        scores(LmEvalConfig(tasks=["minne"]), model, str(tokenizer), seen)


def write_tasks(folder: Path, count: int) -> Path:
    """Three tasks: choices, perplexity, and answers that are written; `count` documents each."""
    folder.mkdir()
    draw = random.Random(0)
    words = sorted({word for text in texts(60) for word in text.split()})

    def said(length: int) -> str:
        return " ".join(draw.choices(words, k=length))

    rows = [
        {
            "question": said(draw.randint(2, 30)),
            "choices": ["yes", "no", said(3), said(6)],
            "answer": draw.randrange(4),
            "text": said(draw.randint(1, 60)),
            "reply": draw.choice(words),
        }
        for _ in range(count)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    head = f"dataset_path: json\ndataset_kwargs:\n  data_files: {folder / 'rows.jsonl'}\ntest_split: train\n"
    tasks = {
        "own_choice": "output_type: multiple_choice\ndoc_to_text: 'Q: {{question}} A:'\n"
        "doc_to_choice: '{{choices}}'\ndoc_to_target: answer\n"
        "metric_list: [{metric: acc}, {metric: acc_norm}]\n",
        "own_text": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]\n",
        "own_reply": "output_type: generate_until\ndoc_to_text: 'Q: {{question}} A:'\n"
        "doc_to_target: '{{reply}}'\nmetric_list: [{metric: exact_match}, {metric: chrf}]\n"
        "generation_kwargs: {until: ['.', ' the'], max_gen_toks: 24}\n",
    }
    for name, text in tasks.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{head}{text}")
    return folder


TASKS = ("own_choice", "own_text", "own_reply")


@needs_lm_eval
def test_a_run_is_asked_at_every_checkpoint_and_by_the_command(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = write_tasks(tmp_path / "tasks", 6)
    one = DatasetConfig(name="t", data_files={"text": texts(60)}, tokenizer=str(tokenizer))
    own = {"tasks": TASKS[:2], "include_path": str(tasks), "limit": 4}
    result = Trainer(
        SHAPE,
        data=PipelineConfig(datasets=(one,), seed=7),
        output_dir=tmp_path / "run",
        seq_length=48,
        batch_size=4,
        steps=4,
        checkpoint={"every": 2},
        callbacks={"lm_eval": own},
    ).run()
    lines = read_metrics(result.output_dir / "lm_eval.jsonl")
    assert [line["step"] for line in lines] == [2, 4]
    out = tmp_path / "scores.json"
    asked = ["--tasks", "own_choice,own_text", "--include-path", str(tasks), "--set", "limit=4"]
    assert main(["eval", str(result.output_dir), *asked, "--out", str(out)]) == 0
    assert json.loads(out.read_text()) == lines[1]["results"] != lines[0]["results"]
    assert "own_text bits_per_byte: " in capsys.readouterr().out
    assert main(["eval", str(result.output_dir), "--tasks", "hellaswagg"]) == 2
    assert "Did you mean 'hellaswag'" in capsys.readouterr().err


@needs_lm_eval
@pytest.mark.slow
def test_scores_are_those_of_hf_on_the_same_folder_in_no_more_time(
    tokenizer: Path, tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="torch is not installed: nox -s lm_eval")
    import lm_eval
    from lm_eval.tasks import TaskManager

    tasks = write_tasks(tmp_path / "tasks", 130)  # 520 choices, 130 texts, 130 replies
    shape = dataclasses.replace(SHAPE, hidden_size=128, intermediate_size=384, num_layers=4)
    seen = Seen(max_length=128)
    model = Decoder(shape, nnx.Rngs(5))
    folder = save_pretrained(model, tmp_path / "model", tokenizer=tokenizer, **seen.options())
    config = LmEvalConfig(tasks=TASKS, include_path=str(tasks))

    index = TaskManager(include_path=str(tasks), include_defaults=False)

    def theirs() -> Any:
        return lm_eval.simple_evaluate(
            model="hf",
            model_args=f"pretrained={folder},dtype=float32",
            tasks=list(TASKS),
            task_manager=index,
            batch_size=16,
            device="cpu",
            log_samples=False,
        )["results"]

    took, found = {}, {}
    for name, call in (
        ("first", lambda: scores(config, model, str(tokenizer), seen)),
        ("hf", theirs),
        ("ours", lambda: scores(config, model, str(tokenizer), seen)),
        ("hf again", theirs),
    ):
        begin = time.process_time()
        found[name] = call()
        took[name] = time.process_time() - begin
    print(
        f"\n{took}, seconds of processor time; the first has {took['first'] - took['ours']:.1f} of compilation"
    )
    compared = 0
    for task in TASKS:
        for metric, value in found["hf"][task].items():
            if isinstance(value, float) and "_stderr" not in metric:
                print(task, metric, value, found["ours"][task][metric])
                assert found["ours"][task][metric] == pytest.approx(value, rel=1e-6, abs=1e-6)
                compared += 1
    assert compared >= 7
    assert found["ours"]["own_reply"]["chrf,none"] > 0  # what is written is compared
    assert took["ours"] <= 1.2 * min(took["hf"], took["hf again"])
