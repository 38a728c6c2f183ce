from tests.api.live_server import *
def test_walk(server):
    c = server.openai()
    r = c.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=20, temperature=0)
    print(r)
    s = list(c.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=20, temperature=0, stream=True))
    assert "".join(x.choices[0].delta.content or "" for x in s) == r.choices[0].message.content
    print(server.post("/v1/chat/completions", {"messages": MESSAGES, "temprature": 1}).text)
    print(server.get("/nope").text, server.get("/v1/completions").text)
