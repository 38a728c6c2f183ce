"""`python -m cupyllm chat` and `generate` as processes: with a model of their own, and with a live server."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cupyllm import LLM, SamplingParams
from cupyllm.cli.conversation import Conversation, carry_out
from cupyllm.cli.sources import with_setting
from cupyllm.cli.terminal import Stopwatch, dim, printable
from cupyllm.errors import ConfigError, RequestError
from tests.api.faults import FaultyOps, Turnstile
from tests.api.live_server import LiveServer, run_server, wait_until, write_model_folder
from tests.cli.terminal_process import INTERRUPTED, SMALL, run, terminal

CTRL_C, CTRL_D = b"\x03", b"\x04"
HERE = ("--device", "reference", "--kv_cache_gib", "0.1", "--seed", "1")
QUESTION = "What is a page table?"
FIGURES = r"\[(stopped, )?\d+ tokens?(, [\d.]+ tokens/s)?, first after [\d.]+ m?s\]\n"


@pytest.fixture(scope="module")
def demo_answer() -> str:
    """What the demo model says to the question when it is greedy."""
    output = LLM("demo", device="reference", kv_cache_gib=0.05, show_progress=False).chat(
        [{"role": "user", "content": QUESTION}], SamplingParams(temperature=0)
    )
    return output[0].outputs[0].text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that talks on and on."""
    return write_model_folder(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[LiveServer, FaultyOps]]:
    made: list[FaultyOps] = []
    with run_server(folder, prepare=lambda loaded: made.append(FaultyOps(loaded))) as live:
        yield live, made[0]


def test_a_chat_on_a_terminal_answers_and_shows_its_speed(demo_answer: str) -> None:
    with terminal("chat", *SMALL, "--temperature", "0") as shown:
        assert "demo on reference" in shown.wait_for("> ")
        shown.type(QUESTION)
        answer = shown.wait_for(FIGURES)
        assert demo_answer in answer
        shown.wait_for("> ")
        shown.type("/set")
        assert "temperature 0" in shown.wait_for("> ")
        shown.press(CTRL_D)
        shown.wait_for("\n")
        assert shown.end() == 0


def test_ctrl_c_stops_an_answer_of_a_model_here(folder: Path) -> None:
    with terminal("at-piece-10", "chat", *HERE, "--model", str(folder), command=INTERRUPTED) as shown:
        shown.wait_for("> ")
        shown.type("the weather in Paris")
        shown.wait_for("Paris\n.")  # the first text of the answer
        shown.press(CTRL_C)
        assert "[stopped, " in shown.wait_for(FIGURES)
        shown.type("/set max_tokens 3")
        shown.type("and again")
        assert "[3 tokens" in shown.wait_for(FIGURES)
        shown.type("/quit")
        assert shown.end() == 0


def test_ctrl_c_gives_up_a_line() -> None:
    with terminal("chat", *SMALL) as shown:
        shown.wait_for("> ")
        shown.press(CTRL_C)
        # readline misses a Ctrl-C between its prompt and its wait for keys: then it is this line that is given up.
        shown.type("/nothing")
        shown.type("/set seed 1")
        shown.wait_for("seed 1\n> ")
        shown.press(CTRL_D)
        assert shown.end() == 0


def test_ctrl_c_between_an_answer_and_the_next_prompt_ends_nothing() -> None:
    result = run("after-answer", "chat", *SMALL, "--max_tokens", "3", stdin="one\ntwo\n", command=INTERRUPTED)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.count("[3 tokens") == 2


def test_ctrl_c_stops_an_answer_of_a_server_and_the_server_knows(served: tuple[LiveServer, FaultyOps]) -> None:
    server, ops = served
    with Turnstile(ops) as turnstile, terminal("chat", "--url", server.url) as shown:
        assert f"tiny at {server.url}" in shown.wait_for("> ")
        shown.type("the weather in Paris")
        wait_until(lambda: turnstile.num_arrived > 0, "the server has the question")
        shown.press(CTRL_C)
        shown.wait_for(r"\[no tokens\]|\[stopped, no tokens\]")
        turnstile.let_pass(1000)
        wait_until(lambda: server.worker.num_live == 0, "the server has given up the answer")
        shown.wait_for("> ")
        shown.type("/quit")
        assert shown.end() == 0


def test_a_conversation_with_a_server_remembers_what_was_said(
    served: tuple[LiveServer, FaultyOps], tmp_path: Path
) -> None:
    server, _ = served
    file = tmp_path / "talk.json"
    lines = ["/system Be brief.", "/set max_tokens 4", "first question", "second \\", "question", f"/save {file}", ""]
    result = run("chat", "--url", f"{server.url}/v1/", "--seed", "5", stdin="\n".join(lines))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("[4 tokens") == 2
    saved = json.loads(file.read_text())
    assert (saved["max_tokens"], saved["seed"]) == (4, 5)
    messages = saved["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[3]["content"] == "second \nquestion"
    for place in (2, 4):  # the server answers the whole history in the same way
        body = {"messages": messages[:place], "max_tokens": 4, "seed": 5}
        answer = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
        assert messages[place]["content"] == answer


def test_an_error_in_an_answer_is_a_line_and_the_conversation_goes_on(served: tuple[LiveServer, FaultyOps]) -> None:
    server, ops = served
    number = ops.num_steps

    def fail(step: int) -> None:
        if step == number + 3:
            raise RuntimeError("boom")

    ops.before_step = fail
    result = run("chat", "--url", server.url, "--max_tokens", "5", stdin="one\n/nope\n/set top_p 7\ntwo\n")
    ops.before_step = lambda step: None
    assert result.returncode == 0
    errors = result.stderr.splitlines()
    assert len(errors) == 3
    assert "internal error; request id" in errors[0]
    assert "there is no command /nope" in errors[1]
    assert "top_p" in errors[2]
    assert "[5 tokens" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chat", "--url", "http://127.0.0.1:9"], "http://127.0.0.1:9/v1/models cannot be reached: "),
        (["chat", "--url", "localhost:8000"], "expected an address such as http://127.0.0.1:8000"),
        (["generate", "a", "--url", "http://127.0.0.1:9", "--dtype", "float32"], "--dtype is for a model here"),
        (["generate", "a", "--temperature", "hot"], "temperature"),
        (["generate", "a", "--model", "nowhere/"], "nowhere"),
        (["generate"], "no prompt: give it as an argument or through a pipe"),
        (["generate", "a", "--raw", "--system", "b"], "--system is for conversations"),
        (["chat", "--modle", "demo"], "cupyllm chat does not take '--modle'; python -m cupyllm chat --help lists what"),
        (["generate", "a", "--api-key-env"], "--api-key-env: expected one argument; python -m cupyllm generate --help"),
        (["talk"], "invalid choice: 'talk'"),
        (["chat", "--page_size", "0"], "'page_size' cannot be 0"),
    ],
)
def test_what_cannot_begin_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_a_server_that_wants_a_key_gets_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_THIS_TEST", "sk-1,sk-2")
    with run_server(folder, api_key_env="KEY_OF_THIS_TEST") as server:
        ask = ("generate", "the", "--max-tokens", "2", "--url", server.url)
        refused = run(*ask)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "answers 401: No API key provided" in refused.stderr
        taken = run(*ask, "--api-key-env", "KEY_OF_THIS_TEST")
        assert (taken.returncode, taken.stderr) == (0, "")


@pytest.mark.parametrize(
    ("argument", "stdin"),
    [([QUESTION], ""), ([], QUESTION + "\n"), (["What is a"], None)],
    ids=["argument", "pipe", "both"],
)
def test_generate_prints_the_answer_and_nothing_else(demo_answer: str, argument: list[str], stdin: str | None) -> None:
    if stdin is None:
        with_pipe = LLM("demo", device="reference", kv_cache_gib=0.05, show_progress=False)
        asked = [{"role": "user", "content": "What is a\n\npage table?"}]
        demo_answer = with_pipe.chat(asked, SamplingParams(temperature=0))[0].outputs[0].text
        stdin = "page table?"
    result = run("generate", *argument, *SMALL, "--temperature", "0", stdin=stdin)
    assert (result.returncode, result.stdout, result.stderr) == (0, demo_answer + "\n", "")


def test_generate_raw_continues_a_text_here_and_on_a_server(served: tuple[LiveServer, FaultyOps], folder: Path) -> None:
    server, _ = served
    ask = ("generate", "--raw", "the weather", "--temperature", "0", "--max_tokens", "9")
    here, there = run(*ask, *SMALL, "--model", str(folder)), run(*ask, "--url", server.url)
    expected = server.post("/v1/completions", {"prompt": "the weather", "temperature": 0, "max_tokens": 9}).json()
    assert here.stdout == there.stdout == expected["choices"][0]["text"] + "\n"


def test_ctrl_c_ends_generate_with_130(folder: Path) -> None:
    ask = ("at-piece-10", "generate", "the weather", *HERE, "--model", str(folder))
    with terminal(*ask, command=INTERRUPTED) as shown:
        shown.wait_for(".")
        shown.press(CTRL_C)
        assert shown.end() == 130
        shown.wait_for(FIGURES)


def test_commands_change_the_conversation() -> None:
    talk = Conversation(system="a")
    talk.ask("one")
    talk.answered("two")
    assert carry_out("/set stop END", talk) == 'stop "END"'
    assert carry_out('/set stop ["a", "b"]', talk) == 'stop ["a", "b"]'
    assert carry_out("/set stop default", talk) == "all left to the model"
    carry_out("/retry", talk)
    assert talk.is_asked
    carry_out("/system", talk)
    assert talk.messages == [{"role": "user", "content": "one"}]
    carry_out("/reset", talk)
    assert talk.messages == []
    for line in ("/help", "/set seed 1"):
        assert carry_out(line, talk)
    assert "/save FILE" in carry_out("/help", talk)
    carry_out("/quit", talk)
    assert talk.has_ended


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/", "there is no command /;"),
        ("/set temperature", "/set temperature needs a value"),
        ("/set prompt x", "there is no setting 'prompt'"),
        ("/set temperature 3", "temperature must be a number from 0 to 2"),
        ("/retry", "nothing was asked yet"),
        ("/reset now", "/reset takes nothing behind it"),
        ("/save", "/save needs a file"),
        ("/save /nowhere/a/b", "/nowhere/a/b cannot be written: No such file"),
    ],
)
def test_a_wrong_command_says_what_is_wrong(line: str, message: str) -> None:
    talk = Conversation()
    with pytest.raises((ConfigError, RequestError), match=message):
        carry_out(line, talk)
    assert talk == Conversation()


def test_a_setting_is_json_or_else_text() -> None:
    assert with_setting({}, "stop", "3") == with_setting({}, "stop", '"3"') == {"stop": "3"}
    assert with_setting({"seed": 1}, "temperature", "0.5") == {"seed": 1, "temperature": 0.5}


def test_text_of_a_model_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2J\x07b\r\n\tü\x9bc\x7f😀") == "a[2Jb\n\tüc😀"
    assert dim("a", io.StringIO()) == "a"


def test_the_speed_counts_from_the_first_token() -> None:
    watch = Stopwatch(started=0.0, first_token=2.0, last_token=4.0, num_tokens=5)
    assert watch.line() == "5 tokens, 2.0 tokens/s, first after 2.00 s"
    assert Stopwatch(started=0.0, first_token=1.0, last_token=1.0, num_tokens=1).line() == "1 token, first after 1.00 s"
    assert Stopwatch(started=0.0, first_token=0.0125, last_token=0.0125, num_tokens=1).line().endswith("after 12 ms")
    assert Stopwatch().line() == "no tokens"
