"""lm-evaluation-harness over HTTP: its scores are those of the models."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
import yaml
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from tests.clients.conftest import MODEL, PYTHON, ROOT, run

CHOICES = {
    "task": "demo_choice",
    "output_type": "multiple_choice",
    "doc_to_text": "{{prompt}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{label}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
WRITING = {
    "task": "demo_write",
    "output_type": "generate_until",
    "doc_to_text": "{{prompt}}",
    "doc_to_target": "reference",
    "target_delimiter": "",
    "generation_kwargs": {"until": ["\n", ". A"], "max_gen_toks": 60, "temperature": 0, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Questions with a right continuation among wrong ones, and what should be written up to the answer."""
    lines = (ROOT / "recipes" / "demo" / "eval.jsonl").read_text(encoding="utf-8").splitlines()
    made = []
    for number, line in enumerate(lines[:24]):
        row = json.loads(line)
        right = row["reference"][: 12 + number % 7]
        wrong = [right[:-1] + "7", right[::-1]]
        choices = [right, *(text for text in wrong if text != right)]
        made.append(
            {
                "prompt": row["prompt"],
                "choices": choices[number % 2 :] + choices[: number % 2],
                "label": (len(choices) - number % 2) % len(choices),
                "reference": row["reference"].split(". A")[0],
            }
        )
    return made


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> TaskManager:
    """The harness's own tasks, and ours."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    source = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
    }
    for task in (CHOICES, WRITING):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump({**source, **task}))
    return TaskManager(include_path=str(folder))


def evaluate(base_url: str, tasks: TaskManager, task: str, kind: str, **arguments: object) -> dict[str, Any]:
    path = "completions" if kind == "local-completions" else "chat/completions"
    server = {"model": MODEL, "base_url": f"{base_url}/{path}", "num_concurrent": 4, "max_retries": 1}
    result = simple_evaluate(
        model=kind,
        model_args={**server, **arguments},
        tasks=[task],
        task_manager=tasks,
        log_samples=True,
        bootstrap_iters=0,
        apply_chat_template=kind != "local-completions",
    )
    assert result is not None
    return dict(result)


def test_likelihoods_are_those_of_the_model(base_url: str, tasks: TaskManager) -> None:
    """The harness asks the server for its tokenizer."""
    result = evaluate(base_url, tasks, "demo_choice", "local-completions")
    samples = result["samples"]["demo_choice"]
    asked = [(pair[0], pair[1]) for sample in samples for pair in pairs(sample)]
    got = [entry for sample in samples for entry in answers(sample)]
    expected = direct(asked)
    assert len(got) == len(expected) > 60
    for (likelihood, greedy), (wanted, wanted_greedy) in zip(got, expected, strict=True):
        assert likelihood == pytest.approx(wanted, abs=2e-3)
        assert greedy == wanted_greedy
    assert any(greedy for _, greedy in expected) and not all(greedy for _, greedy in expected)

    sums, right = iter(expected), 0
    for sample in samples:
        totals = [next(sums)[0] for _ in sample["doc"]["choices"]]
        right += totals.index(max(totals)) == sample["doc"]["label"]
    assert result["results"]["demo_choice"]["acc,none"] == right / len(samples)


@pytest.mark.parametrize("sent", ["token ids", "text", "messages"])
def test_texts_are_those_of_the_recipe(
    base_url: str, tasks: TaskManager, rows: list[dict[str, Any]], sent: str
) -> None:
    """With the server's tokenizer the harness sends token ids without the BOS token that a text gets."""
    kind = "local-chat-completions" if sent == "messages" else "local-completions"
    arguments = {"tokenized_requests": False} if sent == "text" else {}
    result = evaluate(base_url, tasks, "demo_write", kind, **arguments)
    samples = sorted(result["samples"]["demo_write"], key=lambda sample: sample["doc_id"])
    asked: list[dict[str, Any]]
    if sent == "token ids":
        asked = [{"prompt_ids": ids} for ids in without_special([row["prompt"] for row in rows])]
    elif sent == "text":
        asked = [{"prompt": row["prompt"]} for row in rows]
    else:
        asked = [{"messages": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    stops = [argument for stop in ("\n", ". A") for argument in ("--stop", stop)]
    own = [row["text"] for row in run(asked, "--max-tokens", "60", *stops)]
    assert [sample["resps"][0][0] for sample in samples] == own
    right = sum(text == row["reference"] for text, row in zip(own, rows, strict=True))
    assert result["results"]["demo_write"]["exact_match,none"] == right / len(rows)
    assert sent == "messages" or right > len(rows) // 2


def pairs(sample: dict[str, Any]) -> list[tuple[str, str]]:
    """Context and continuation of each choice."""
    arguments = sample["arguments"]
    found = list(arguments.values()) if isinstance(arguments, dict) else arguments
    return [tuple(entry.values()) if isinstance(entry, dict) else tuple(entry) for entry in found]


def answers(sample: dict[str, Any]) -> list[tuple[float, bool]]:
    """Log-likelihood and greediness of each choice."""
    return [(float(entry[0]), str(entry[1]) == "True") for entry in sample["filtered_resps"]]


def direct(asked: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    """The same, from the model itself."""
    command = [PYTHON, "-m", "tests.clients.direct"]
    done = subprocess.run(
        command, cwd=ROOT, input=json.dumps(asked), capture_output=True, text=True, check=True
    )
    return [(float(total), bool(greedy)) for total, greedy in json.loads(done.stdout)]


def without_special(texts: list[str]) -> list[list[int]]:
    """Token ids of texts, from the tokenizer itself."""
    program = (
        "import json, sys; from tokenizers import Tokenizer; "
        "tokenizer = Tokenizer.from_file('recipes/demo/small/tokenizer.json'); "
        "print(json.dumps([tokenizer.encode(t, add_special_tokens=False).ids for t in json.load(sys.stdin)]))"
    )
    command = [PYTHON, "-c", program]
    done = subprocess.run(
        command, cwd=ROOT, input=json.dumps(texts), capture_output=True, text=True, check=True
    )
    found: list[list[int]] = json.loads(done.stdout)
    return found
