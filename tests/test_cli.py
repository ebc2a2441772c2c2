"""The command line as a user meets it: real processes, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

RECIPE = "recipes/demo.yaml"
EVAL = "recipes/demo/eval.jsonl"
EVAL_ROWS = Path(EVAL).read_text()


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "tokenflow.cli", *args]


def run(*args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*args), input=stdin, capture_output=True, text=True, timeout=60, check=False
    )


@contextmanager
def started(*args: str, stdout: int = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    """A running command whose stderr is read up to the line that says it loads its models."""
    process = subprocess.Popen(command(*args), stdout=stdout, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert "loading" in process.stderr.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def workers_of(process: subprocess.Popen[str], count: int = 3) -> list[psutil.Process]:
    """What it has started, as soon as all of it is there: the nursery, and the workers of two models."""
    parent = psutil.Process(process.pid)
    while len(children := parent.children(recursive=True)) < count:
        assert process.poll() is None
    return children


def assert_gone(workers: list[psutil.Process], within_s: float) -> None:
    _, alive = psutil.wait_procs(workers, timeout=within_s)
    # Whose parent is gone waits for init to collect it, which is not our business.
    assert not [worker for worker in alive if worker.status() != psutil.STATUS_ZOMBIE]


STUCK = """\
from tokenflow import Recipe

recipe = Recipe("stuck", entry="slm")
slm = recipe.model("slm", "{demo}/small", dtype="float32")
recipe.model("llm", "{demo}/large", dtype="float32")


@slm.route
def away(result):
    return [2] * len(result.next_token_ids)


@slm.send
def never(req):
    import time
    {body}
"""


def test_text_alone_goes_to_stdout() -> None:
    done = run("run", RECIPE, "93*7=?", "--chat")
    assert done.returncode == 0
    assert done.stdout == "90*7=630, 3*7=21, 630+21=651. Answer: 651\n"
    assert "r-stitch-demo: ready in" in done.stderr
    assert "slm 9" in done.stderr and "hand-offs" in done.stderr


@pytest.mark.parametrize("recipe", ["recipes/r_stitch.py", "recipes/r_stitch_classes.py"])
def test_a_recipe_in_python_runs_as_one_in_yaml_does(recipe: str) -> None:
    """Its functions and classes are found by the workers, which are processes of their own."""
    models = {"slm.path": "recipes/demo/small", "llm.path": "recipes/demo/large", "llm.engine": "torch"}
    models |= {"slm.dtype": "float32", "llm.dtype": "float32", "llm.tensor_parallel": "1"}
    overrides = [part for key, value in models.items() for part in ("--set", f"models.{key}={value}")]
    done = run("run", recipe, "93*7=?", "--chat", *overrides)
    assert done.stdout == "90*7=630, 3*7=21, 630+21=651. Answer: 651\n"
    assert "slm 9" in done.stderr and "hand-offs" in done.stderr


def test_what_functions_of_a_recipe_print_goes_to_stderr(tmp_path: Path) -> None:
    file = tmp_path / "recipe.py"
    demo = Path("recipes/demo").resolve()
    noise = 'print("noise"); return req.keep()'
    rules = 'recipe.models[1].rules([{"after": 2, "to": "slm", "send": "keep"}])\n'
    file.write_text(STUCK.format(demo=demo, body=noise) + "\n\n" + rules)
    prompt = ("Q: 93*7=?\nA: ", "--max-tokens", "8")
    loud = run("run", str(file), *prompt)
    file.write_text(file.read_text().replace("noise", ""))
    quiet = run("run", str(file), *prompt)
    assert "noise" in loud.stderr
    assert (loud.returncode, loud.stdout) == (0, quiet.stdout)
    row = json.loads(run("run", str(file), *prompt, "--json").stdout)
    assert row["text"] == quiet.stdout.removesuffix("\n")


def test_a_dash_reads_the_prompt_from_stdin() -> None:
    done = run("run", RECIPE, "-", stdin="Q: 93*7=?\nA: ")
    assert done.stdout == "90*7=630, 3*7=21, 630+21=651. Answer: 651\n"


def test_a_trace_marks_what_the_second_model_wrote_and_tells_the_shares() -> None:
    done = run("run", RECIPE, "93*7=?", "--chat", "--trace")
    assert done.stdout.replace("«", "").replace("»", "") == "90*7=630, 3*7=21, 630+21=651. Answer: 651\n"
    assert done.stdout.count("«") == done.stdout.count("»") > 0
    assert "slm  «llm»" in done.stderr


def test_json_has_the_whole_story_of_a_response() -> None:
    done = run("run", RECIPE, "Q: 93*7=?\nA: ", "--json", "--logprobs", "--max-tokens", "5")
    row = json.loads(done.stdout)
    assert row.keys() == {"index", "prompt", "text", "finish_reason", "tokens", "usage", "timing"}
    assert row["text"] == "90*7="
    assert row["finish_reason"] == "length"
    assert [token["text"] for token in row["tokens"]] == list("90*7=")
    assert all(token["model"] in ("slm", "llm") and token["logprob"] <= 0 for token in row["tokens"])
    assert row["usage"]["completion_tokens"] == 5 == sum(row["usage"]["by_model"].values())
    assert row["usage"]["prompt_tokens"] == 14
    assert 0 < row["timing"]["ttft_s"] <= row["timing"]["latency_s"]


def test_a_batch_keeps_order_and_keys_and_reports_bad_rows_in_place(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "Q: 93*7=?\nA: ", "id": "a"},
        {"messages": [{"role": "user", "content": "93*7=?"}], "id": "b"},
        {"prompt_ids": [1, 500]},
        {"text": "no prompt here"},
        {"prompt": 7},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)) + "\nnot json\n\n")
    done = run("run", RECIPE, "--input", str(source), "--output", str(target), "--concurrency", "3")
    assert done.returncode == 1
    assert done.stdout == ""
    out = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["index"] for row in out] == [0, 1, 2, 3, 4, 5]
    assert out[0]["text"] == out[1]["text"] == "90*7=630, 3*7=21, 630+21=651. Answer: 651"
    assert (out[0]["id"], out[1]["id"]) == ("a", "b")
    messages = [row["error"]["message"] for row in out[2:]]
    assert messages[0] == "token id 500 at index 1 is out of range: the tokenizer has 100 ids"
    assert messages[1] == "line 4 has none of the keys prompt, messages, prompt_ids"
    assert messages[2] == "prompt must be a text or a list, got int"
    assert messages[3].startswith("line 6 is not JSON:")
    assert "6 prompts, 4 failed" in done.stderr


def test_a_recipe_written_for_large_models_runs_on_the_demo_models_by_overrides() -> None:
    small, large = "models.slm.path=recipes/demo/small", "models.llm.path=recipes/demo/large"
    done = run(
        "run", "recipes/r_stitch.yaml", "--chat", "93*7=?",
        "--set", small, "--set", large, "--set", "models.llm.engine=torch",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "90*7=630, 3*7=21, 630+21=651. Answer: 651\n"


def test_a_wrong_recipe_lists_its_problems_and_exits_with_2(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: x\nentry: slm\nmodels: {slm: {pth: here}}\n")
    for name in ("check", "run"):
        done = run(name, str(recipe), *(["hi"] if name == "run" else []))
        assert done.returncode == 2
        assert f'{recipe}:3:16: error: models.slm.pth: unknown key (did you mean "path"?)' in done.stderr
        assert done.stdout == ""


def test_check_describes_a_good_recipe() -> None:
    done = run("check", RECIPE)
    assert done.returncode == 0
    assert "if entropy > tau: to llm, drop_last" in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([RECIPE], "give a PROMPT (or - for stdin) or --input FILE, one of the two"),
        ([RECIPE, "hi", "--input", EVAL], "give a PROMPT (or - for stdin) or --input FILE, one of the two"),
        ([RECIPE, "hi", "--output", "x"], "--output goes with --input"),
        ([RECIPE, "hi", "--trace", "--json"], "--trace marks the text of one PROMPT"),
        (
            [RECIPE, "hi", "--concurrency", "0"],
            "argument --concurrency: must be a whole number of at least 1, got '0'",
        ),
        ([], "the following arguments are required: RECIPE"),
        (
            [RECIPE, "--input", EVAL, "--chat"],
            "--chat is for one PROMPT; rows of --input say it with the key",
        ),
        ([RECIPE, "hi", "--logprobs"], "--logprobs are reported in JSON; add --json"),
        ([RECIPE, "\udcff\udcfe"], "the prompt is not UTF-8 text"),
    ],
)
def test_wrong_usage_exits_with_2(args: list[str], message: str) -> None:
    done = run("run", *args)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_wrong_sampling_value_exits_with_2() -> None:
    done = run("run", RECIPE, "hi", "--top-p", "3")
    assert done.returncode == 2
    assert "top_p must be between 0 and 1, got 3.0" in done.stderr


def test_a_model_that_is_not_there_exits_with_1_and_says_where() -> None:
    done = run("run", RECIPE, "hi", "--set", "models.llm.path=./nowhere")
    assert done.returncode == 1
    assert "nowhere" in done.stderr.splitlines()[-1]


def test_a_killed_router_leaves_no_worker() -> None:
    with started("run", RECIPE, "--input", EVAL) as process:
        assert process.stderr is not None
        assert "ready" in process.stderr.readline()
        workers = workers_of(process)
        process.kill()
        assert_gone(workers, within_s=3)


def test_a_router_killed_while_loading_leaves_no_worker() -> None:
    with started("run", RECIPE, "hi") as process:
        workers = workers_of(process, count=1)
        process.kill()
        assert_gone(workers, within_s=3)


def test_ctrl_c_while_loading_ends_at_once_with_130() -> None:
    with started("run", RECIPE, "hi") as process:
        workers = workers_of(process, count=1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=5)
        assert process.returncode == 130
        assert errors.splitlines()[-1] == "tokenflow: interrupted"
        assert "Traceback" not in errors
        assert_gone(workers, within_s=0.5)


def test_ctrl_c_while_generating_ends_soon_with_130() -> None:
    with started("run", RECIPE, "--input", EVAL) as process:
        assert process.stdout is not None
        process.stdout.readline()
        workers = workers_of(process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=5)
        assert process.returncode == 130
        assert "Traceback" not in errors
        assert_gone(workers, within_s=0.5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_planner_ends_with_its_router(number: signal.Signals) -> None:
    """It plans for up to 64 requests, for many seconds; a terminal's Ctrl-C does not reach it."""
    with started("run", "recipes/sim.yaml", "hi", "--max-tokens", "4000") as process:
        children = workers_of(process)
        # A process that has been forked is its parent's copy for a moment.
        while not (planners := [child for child in children if "tokenflow.planner" in child.cmdline()]):
            children = workers_of(process)
        assert os.getpgid(planners[0].pid) != os.getpgid(process.pid)
        process.send_signal(number)
        _, errors = process.communicate(timeout=5)
        assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
        assert "Traceback" not in errors
        assert_gone(children, within_s=3 if number == signal.SIGKILL else 0.5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_batch_in_order_with_what_is_answered_written(number: signal.Signals) -> None:
    with started("run", RECIPE, "--input", EVAL, "--json") as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        workers = workers_of(process)
        process.send_signal(number)
        rows, errors = process.communicate(timeout=5)
        assert process.returncode == 128 + number
        assert errors.splitlines()[-1] == f"tokenflow: ended by {number.name}"
        assert [json.loads(row)["index"] for row in [first, *rows.splitlines()]] == list(
            range(1 + len(rows.splitlines()))
        )
        assert_gone(workers, within_s=0.5)


def test_rows_may_come_from_stdin() -> None:
    row = json.dumps({"prompt": "Q: 93*7=?\nA: "}) + "\n"
    done = run("run", RECIPE, "--input", "-", "--json", "--max-tokens", "1", stdin=row * 2)
    assert [json.loads(line)["index"] for line in done.stdout.splitlines()] == [0, 1]


def test_a_reader_that_leaves_ends_the_command_quietly() -> None:
    with started("run", RECIPE, "--input", EVAL) as process:
        assert process.stdout is not None
        process.stdout.readline()
        workers = workers_of(process)
        process.stdout.close()
        process.stdout = None
        assert process.wait(timeout=20) == 1
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
        assert_gone(workers, within_s=0.5)


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-"])
def test_closed_standard_files_do_no_harm(closed: str) -> None:
    shell = f"{sys.executable} -m tokenflow.cli run {RECIPE} --chat '93*7=?' {closed}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert done.stdout == "90*7=630, 3*7=21, 630+21=651. Answer: 651\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [("run {0} --chat '93*7=?'", 0), ("run {0}", 2), ("run {0} x --set models.slm.path=nowhere", 1)],
)
@pytest.mark.parametrize("lost", ["/dev/full", ">(true)"])
def test_the_exit_code_is_that_of_the_work_where_the_log_is_lost(
    arguments: str, code: int, lost: str
) -> None:
    shell = f"{sys.executable} -m tokenflow.cli {arguments.format(RECIPE)} 2> {lost}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert done.stdout == ("90*7=630, 3*7=21, 630+21=651. Answer: 651\n" if code == 0 else "")


def test_unbuffered_means_the_log_too() -> None:
    script = (
        "import os, sys\n"
        "from tokenflow import cli\n"
        "cli._open_standard_files()\n"
        "sys.stderr.write('so')\n"
        "os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-u", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == "so"


def test_a_working_directory_that_is_gone_is_one_line(tmp_path: Path) -> None:
    check = f"{sys.executable} -m tokenflow.cli check {Path(RECIPE).resolve()}"
    done = subprocess.run(
        ["bash", "-c", f"cd {tmp_path} && rmdir {tmp_path} && {check}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    assert done.returncode == 1
    assert done.stderr == "tokenflow: the working directory is gone: change to one that is there\n"


def test_an_answer_for_which_stdout_is_closed_is_an_error() -> None:
    shell = f"{sys.executable} -m tokenflow.cli check {RECIPE} >&-"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == "tokenflow: standard output is closed: what belongs there is lost\n"


def test_an_output_file_on_a_full_disk_ends_with_a_whole_row(tmp_path: Path) -> None:
    """The disk is full in the middle of the second row."""
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"prompt": "Q: 93*7=?\nA: ", "note": "x" * 600}) + "\n" + EVAL_ROWS)
    arguments = f"run {RECIPE} --input {source} --output {sink} --max-tokens 1 --concurrency 1"
    shell = f"ulimit -f 1; {sys.executable} -m tokenflow.cli {arguments}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert [json.loads(line)["index"] for line in sink.read_text().splitlines()] == [0]
    said = f"tokenflow: [Errno 27] File too large: {sink} has the first 1 rows, each of them whole"
    assert done.stderr.splitlines()[-1] == said


def test_an_output_that_is_no_file_and_full_is_one_line() -> None:
    done = run("run", RECIPE, "--input", EVAL, "--output", "/dev/full", "--max-tokens", "1")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "tokenflow: [Errno 28] No space left on device: /dev/full"


def test_a_full_disk_is_one_line() -> None:
    shell = f"{sys.executable} -m tokenflow.cli check {RECIPE} > /dev/full"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == "tokenflow: [Errno 28] No space left on device\n"


def test_wrong_settings_are_refused_before_any_model_loads() -> None:
    done = run("run", RECIPE, "hi", "--temperature", "-1")
    assert done.returncode == 2
    assert done.stderr == "tokenflow run: temperature must be at least 0, got -1.0\n"


def test_keys_of_an_earlier_run_do_not_pass_for_this_one(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    rows = [
        {"prompt": "Q: 93*7=?\nA: ", "error": "old"},
        {"prompt": None, "prompt_ids": [500], "text": "old"},
    ]
    source.write_text("\n".join(map(json.dumps, rows)))
    done = run("run", RECIPE, "--input", str(source), "--json")
    good, bad = map(json.loads, done.stdout.splitlines())
    assert "error" not in good
    assert "text" not in bad and bad["error"]["type"] == "InvalidRequest"


@pytest.mark.parametrize(
    ("number", "body", "code"),
    [
        (signal.SIGINT, "while True: pass", 130),
        (signal.SIGTERM, "time.sleep(600)", 143),
    ],
)
def test_a_signal_ends_a_run_whose_send_never_returns(
    tmp_path: Path, number: signal.Signals, body: str, code: int
) -> None:
    """Once the log has said which function it is."""
    recipe = tmp_path / "stuck.py"
    recipe.write_text(STUCK.format(demo=Path("recipes/demo").resolve(), body=body))
    with started("run", str(recipe), "93*7=?") as process:
        assert process.stderr is not None
        workers = workers_of(process)
        for line in process.stderr:
            if "holds up the event loop" in line:
                break
        assert line.startswith(f"recipe 'stuck': send of model 'slm' (never, {recipe}:13)")
        process.send_signal(number)
        assert process.wait(timeout=8) == code
        assert_gone(workers, within_s=3)
