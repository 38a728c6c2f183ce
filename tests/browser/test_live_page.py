"""What a user does on the live page, in a real Chromium against a live server."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.api.live_server import LiveServer, run_server, wait_until
from tests.api.scripted import Actor
from tests.browser.conftest import GatedOps, playwright_api

expect = playwright_api.expect
Opened = Callable[..., Any]
Stage = tuple[Actor, GatedOps]
MARKDOWN = """\
# A title
Some **bold**, *slanted* and `code`.

- one
- two

```python
print("<b>")
```

| a | b |
|---|---|
| 1 | 2 |

[good](https://example.com/) [bad](javascript:alert(1)) ![image](https://example.com/x.png)
<img src=x onerror=alert(1)><script>alert(1)</script>"""


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def last_answer(page: Any) -> Any:
    return page.locator(".message.assistant").last


def wait_for_end(page: Any) -> None:
    expect(last_answer(page).locator("footer").get_by_role("button", name="Copy")).to_be_visible()


def test_an_answer_is_streamed_and_can_be_stopped(stage: Stage, open_page: Opened) -> None:
    actor, ops = stage
    page = open_page(actor.server)
    actor.tell("one two three four five six seven eight nine ten")
    ops.close_at(12)
    ask(page, "Count")
    expect(last_answer(page).locator(".body")).to_contain_text("one two")  # the gate is closed: there is more to come
    assert actor.server.loaded.engine.has_work
    expect(page.get_by_role("button", name="Send")).to_be_hidden()
    page.keyboard.press("Escape")
    expect(last_answer(page).locator("footer")).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    ops.closed_at = None
    ops.opened.set()
    wait_until(lambda: not actor.server.loaded.engine.has_work, "the engine has dropped the answer")
    assert "ten" not in last_answer(page).inner_text()


def test_the_stop_button(stage: Stage, open_page: Opened) -> None:
    actor, ops = stage
    page = open_page(actor.server)
    actor.tell("one two three four five six seven eight nine ten")
    ops.close_at(12)
    ask(page, "Count")
    expect(last_answer(page).locator(".body")).to_contain_text("one")
    page.get_by_role("button", name="Stop").click()
    expect(last_answer(page).locator("footer")).to_contain_text("stopped")
    ops.closed_at = None
    ops.opened.set()


def test_an_answer_can_be_asked_for_again(stage: Stage, open_page: Opened) -> None:
    actor, _ = stage
    page = open_page(actor.server)
    actor.tell("first")
    ask(page, "Which?")
    wait_for_end(page)
    expect(last_answer(page).locator(".body")).to_have_text("first")
    expect(last_answer(page).locator("footer")).to_contain_text(
        re.compile(r"\d+ tokens · [\d.,]+ tokens/s · first after")
    )
    actor.tell("second")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Answer again").click()
    assert [message["content"] for message in sent.value.post_data_json["messages"]] == ["Which?"]
    expect(last_answer(page).locator(".body")).to_have_text("second")
    expect(page.locator(".message.assistant")).to_have_count(1)


def test_a_question_can_be_asked_in_other_words(stage: Stage, open_page: Opened) -> None:
    actor, _ = stage
    page = open_page(actor.server)
    for question, answer in (("First", "one"), ("Second", "two")):
        actor.tell(answer)
        ask(page, question)
        wait_for_end(page)
    page.get_by_role("button", name="Edit", exact=True).first.click()
    field = page.get_by_label("Edit the message")
    expect(field).to_have_value("First")
    field.fill("given up")
    page.keyboard.press("Escape")
    expect(page.locator(".message .body")).to_have_text(["First", "one", "Second", "two"])
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.press("ArrowUp")
    expect(field).to_have_value("Second")
    actor.tell("three")
    field.fill("Third")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.keyboard.press("Enter")
    said = [message["content"] for message in sent.value.post_data_json["messages"]]
    assert said == ["First", "one", "Third"]
    expect(last_answer(page).locator(".body")).to_have_text("three")
    wait_for_end(page)
    page.get_by_role("button", name="Edit", exact=True).first.click()
    field.fill("Only this")
    actor.tell("four")
    page.locator(".edited").get_by_role("button", name="Send").click()
    wait_for_end(page)
    expect(page.locator(".message .body")).to_have_text(["Only this", "four"])
    page.reload()
    expect(page.locator(".message .body")).to_have_text(["Only this", "four"])


def test_an_answer_that_broke_off_is_asked_for_anew(stage: Stage, open_page: Opened) -> None:
    actor, ops = stage
    page = open_page(actor.server)
    actor.tell("one two three four five six seven eight nine ten")
    ops.close_at(12)
    ops.fails = True
    ask(page, "Count")
    expect(last_answer(page).locator(".body")).to_contain_text("one")
    ops.opened.set()
    expect(page.get_by_role("alert")).to_contain_text("nternal error")
    ops.closed_at, ops.fails = None, False
    actor.tell("whole")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Try again").click()
    assert [message["content"] for message in sent.value.post_data_json["messages"]] == ["Count"]
    wait_for_end(page)
    expect(page.locator(".message .body")).to_have_text(["Count", "whole"])
    expect(page.get_by_role("alert")).to_have_count(0)


def test_what_is_set_is_sent_and_kept(stage: Stage, open_page: Opened) -> None:
    actor, _ = stage
    page = open_page(actor.server)
    page.get_by_text("Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Most tokens").fill("30")
    actor.tell("yes")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Sure?")
    body = sent.value.post_data_json
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sure?"}]
    assert (body["temperature"], body["seed"], body["max_tokens"], body["stream"]) == (0.5, 7, 30, True)
    assert "top_p" not in body
    assert body["model"] == "tiny"
    wait_for_end(page)
    page.reload()
    expect(page.get_by_label("Temperature")).to_have_value("0.5")


def test_history_is_in_the_browser(stage: Stage, open_page: Opened) -> None:
    actor, _ = stage
    page = open_page(actor.server)
    actor.tell("the first answer")
    ask(page, "The first question")
    wait_for_end(page)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".message")).to_have_count(0)
    actor.tell("the second answer")
    ask(page, "The second question")
    wait_for_end(page)
    page.reload()
    expect(last_answer(page).locator(".body")).to_have_text("the second answer")
    page.keyboard.press("Alt+h")
    page.get_by_role("button", name="The first question", exact=True).click()
    expect(last_answer(page).locator(".body")).to_have_text("the first answer")
    actor.tell("goes on")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "More")
    said = [message["content"] for message in sent.value.post_data_json["messages"]]
    assert said == ["The first question", "the first answer", "More"]
    wait_for_end(page)
    page.keyboard.press("Alt+h")
    page.get_by_role("button", name="Forget The second question").click()
    expect(page.locator("#history li")).to_have_count(1)


def test_markdown_is_shown_and_nothing_in_it_runs(stage: Stage, open_page: Opened) -> None:
    actor, _ = stage
    page = open_page(actor.server)
    actor.tell(MARKDOWN)
    ask(page, "Show me")
    wait_for_end(page)
    body = last_answer(page).locator(".body")
    assert body.locator("img, script, iframe, style").count() == 0
    assert body.locator("a").evaluate_all("all => all.map(one => [one.href, one.rel])") == [
        ["https://example.com/", "noopener noreferrer"],
        ["https://example.com/x.png", "noopener noreferrer"],
    ]
    expect(body.locator("h3")).to_have_text("A title")
    expect(body.locator("strong")).to_have_text("bold")
    expect(body.locator("li")).to_have_text(["one", "two"])
    expect(body.locator("pre code")).to_have_text('print("<b>")')
    expect(body.locator("td")).to_have_text(["1", "2"])
    expect(body).to_contain_text("<img src=x onerror=alert(1)><script>alert(1)</script>")


@pytest.mark.parametrize("nested", [">" * 3000, "- " * 3000], ids=["quotes", "lists"])
def test_what_is_nested_without_end_is_shown_as_text(stage: Stage, open_page: Opened, nested: str) -> None:
    actor, _ = stage
    page = open_page(actor.server)
    page.evaluate(
        "async (nested) => { const { renderMarkdown } = await import('/static/markdown.js');"
        " document.body.append(renderMarkdown(nested)); }",
        nested + "deepest",
    )
    expect(page.get_by_text("deepest")).to_have_count(1)


def test_a_token_tells_what_else_was_likely(server: LiveServer, open_page: Opened) -> None:
    page = open_page(server)
    page.get_by_text("Settings").click()
    page.get_by_label("Most tokens").fill("8")
    page.get_by_label("Seed").fill("1")
    ask(page, "Anything")
    wait_for_end(page)
    last_answer(page).get_by_role("button", name="Tokens", exact=True).click()
    page.locator(".token").nth(1).click()
    panel = page.locator(".alternatives")
    expect(panel).to_contain_text("Token 2")
    expect(panel.locator(".chosen")).to_have_count(1)
    shares = [text.replace("< 0.1", "0.05") for text in panel.locator(".number").all_inner_texts()]
    assert 8 <= len(shares) <= 10
    assert sum(float(share.split()[0]) for share in shares) == pytest.approx(100, abs=1)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(panel).to_contain_text("Token 3")


def test_errors_are_told_in_words_and_can_be_tried_again(stage: Stage, open_page: Opened) -> None:
    actor, _ = stage
    page = open_page(actor.server, expected=(400,))
    ask(page, "word " * 2000)
    expect(page.get_by_role("alert")).to_contain_text("shorten the prompt")
    actor.tell("fine")
    ask(page, "Short")
    wait_for_end(page)
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(last_answer(page).locator(".body")).to_have_text("fine")


def page_counts(page: Any) -> dict[str, int]:
    parts = page.locator("#page-counts").inner_text().split(" · ")
    return {name: int(number.replace(",", "")) for number, name in (part.split() for part in parts)}


def test_the_engine_view_shows_sharing_and_goes_back_in_time(server: LiveServer, open_page: Opened) -> None:
    page = open_page(server)
    expect(page.locator("#page-counts")).to_contain_text("free")
    page.get_by_role("button", name="Watch it share").click()
    expect(page.locator("#caption")).to_contain_text("Once more", timeout=60_000)
    page.get_by_role("button", name="Pause").click()
    page.locator("#seek").fill("0")
    forward, back = (page.get_by_role("button", name=f"One step {way}") for way in ("forward", "back"))
    note = page.locator("#step-note")
    while "forked" not in note.inner_text():
        forward.click()
    forked = page_counts(page)
    assert forked["shared"] == forked["live"] > 4, "four answers hold every page of the prompt"
    expect(page.locator("#rows li")).to_have_count(4)
    expect(page.locator("#rows")).to_contain_text("forked from")
    page.locator("#pages").focus()
    described = lambda: page.locator("#pages").get_attribute("aria-label") or ""  # noqa: E731
    for _ in range(200):
        page.keyboard.press("ArrowRight")
        if "reference count 4" in described():
            break
    assert re.search(
        r"live, shared\npositions \d+ to \d+ of sequences \d+, \d+, \d+, \d+\nreference count 4", described()
    )
    forward.click()
    expect(note).to_contain_text("4 pages copied before writing")
    copied = page_counts(page)
    assert copied["live"] == forked["live"] + 3
    assert copied["shared"] == forked["shared"] - 1
    back.click()
    expect(note).to_contain_text("forked")
    assert page_counts(page) == forked
    page.locator("#seek").fill("0")
    expect(note).to_have_text("none yet")
    assert page_counts(page)["live"] == 0
    page.get_by_role("button", name="Live").click()
    expect(note).not_to_contain_text("forked")
    counts = page_counts(page)
    assert counts["live"] == 0
    assert counts["cached"] == server.loaded.engine.stats.num_cached_pages
    hits = page.locator("#figure-hits").inner_text()
    assert int(hits.split()[0]) > 50, "four of five prompts were found in the prefix cache"


def test_a_paused_view_stays_where_it_is(server: LiveServer, open_page: Opened) -> None:
    page = open_page(server)
    page.get_by_text("Settings").click()
    page.get_by_label("Most tokens").fill("20")
    ask(page, "Anything")
    wait_for_end(page)
    expect(page.locator("#step-note")).to_contain_text("decode row")
    page.locator("#timeline").focus()
    page.keyboard.press("p")
    note = page.locator("#step-note").inner_text()
    ask(page, "Something else")
    wait_for_end(page)
    expect(page.locator("#forward")).to_be_enabled()
    assert page.locator("#step-note").inner_text() == note
    page.locator("#timeline").focus()
    page.keyboard.press("l")
    expect(page.locator("#step-note")).not_to_have_text(note)


def test_a_server_with_keys_asks_for_one(
    model_folder: Path, open_page: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYS_OF_THIS_TEST", "sk-right")
    with run_server(model_folder, api_key_env="KEYS_OF_THIS_TEST") as live:
        page = open_page(live, expected=(401,))
        dialog = page.get_by_role("dialog", name="API key")
        expect(dialog.get_by_role("alert")).to_be_hidden()
        dialog.get_by_label("Key").fill("sk-wrong")
        dialog.get_by_role("button", name="Use it").click()
        expect(dialog.get_by_role("alert")).to_have_text("The server does not accept this API key.")
        dialog.get_by_label("Key").fill("sk-right")
        dialog.get_by_role("button", name="Use it").click()
        expect(dialog).to_be_hidden()
        expect(page.locator("#page-counts")).to_contain_text("free")
        page.get_by_text("Settings").click()
        page.get_by_label("Most tokens").fill("8")
        ask(page, "Anything")
        wait_for_end(page)
        expect(page.locator("#step-note")).to_contain_text("step")
        assert page.evaluate("Object.values(localStorage).join()").find("sk-right") == -1
        page.context.close()


def test_nobody_is_watched_when_the_engine_is_hidden(server: LiveServer, open_page: Opened) -> None:
    page = open_page(server)
    wait_until(lambda: server.loaded.engine.observer is not None, "the page watches")
    page.get_by_role("button", name="Engine", exact=True).click()
    wait_until(lambda: server.loaded.engine.observer is None, "the page has left")
    page.keyboard.press("Alt+e")
    wait_until(lambda: server.loaded.engine.observer is not None, "the page watches again")


def test_a_finger_does_what_a_pointer_does(server: LiveServer, open_page: Opened) -> None:
    page = open_page(server, size=(390, 844), has_touch=True, is_mobile=True)
    page.get_by_text("Settings").tap()
    page.get_by_label("Most tokens").fill("60")
    page.get_by_text("Settings").tap()
    page.get_by_label("Message", exact=True).fill("Anything")
    page.get_by_role("button", name="Send").tap()
    wait_for_end(page)
    last_answer(page).get_by_role("button", name="Tokens", exact=True).tap()
    page.locator(".token").last.tap()
    bottom = "one => one.getBoundingClientRect().bottom"
    assert page.locator(".alternatives").evaluate(bottom) <= page.locator("#messages").evaluate(bottom) + 1
    page.get_by_role("button", name="Engine", exact=True).tap()
    page.locator("#pages").tap(position={"x": 5, "y": 5})
    expect(page.locator("#tip")).to_contain_text("Page 0: ")
    page.locator("#page-counts").tap()
    expect(page.locator("#tip")).to_be_hidden()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [(390, 844), (820, 1180), (1440, 900)], ids=["phone", "tablet", "desktop"])
def test_it_fits_the_screen(
    server: LiveServer, open_page: Opened, size: tuple[int, int], theme: str, tmp_path: Path
) -> None:
    page = open_page(server, size=size, color_scheme=theme)
    page.get_by_text("Settings").click()
    page.get_by_label("Most tokens").fill("40")
    page.get_by_text("Settings").click()
    ask(page, "A question that is a little longer than the screen of a phone is wide, to see whether it is wrapped")
    wait_for_end(page)
    for view in ("Chat", "Engine") if size[0] < 1000 else ("",):
        if view:
            page.get_by_role("button", name=view, exact=True).click()
            expect(page.locator(f"#{view.lower()}")).to_be_visible()
        wide = (
            "[...document.querySelectorAll('body *')].filter(one => one.getBoundingClientRect().right > innerWidth + 1)"
        )
        assert page.evaluate(f"{wide}.map(one => one.outerHTML.slice(0, 80))") == []
        page.screenshot(path=tmp_path / f"{view or 'both'}.png")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 3 * 128) == (theme == "dark")
    page.get_by_role("button", name="Change between dark and light").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != ground


def test_every_control_has_a_name(server: LiveServer, open_page: Opened) -> None:
    page = open_page(server)
    for role in ("button", "textbox", "combobox", "slider", "spinbutton", "checkbox", "img"):
        for control in page.get_by_role(role, include_hidden=True).all():
            named = control.evaluate(
                "one => one.ariaHidden || one.alt === '' || one.ariaLabel || one.innerText || one.labels?.length"
            )
            assert named, control.evaluate("one => one.outerHTML")
