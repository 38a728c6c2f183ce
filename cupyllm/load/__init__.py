"""A load generator for any server that speaks the OpenAI API, and the statistics of what came back.

    connection.py  one HTTP connection, kept alive from request to request
    events.py      a stream of server-sent events, and what each says
    client.py      one request sent, its answer timed: an `Outcome`
    prompts.py     text for prompts, and the bodies of requests
    generator.py   open loop (requests come when they come) and closed loop (so many clients)
    statistics.py  outcomes in figures: rates, percentiles, goodput
    roofline.py    what the machine would allow for the same requests
    options.py     the command line, and a measurement from beginning to end

Which requests come, and when, is cupyllm/simulator/workload.py: a load can be simulated and then measured.

asyncio's streams with h11, which the server needs anyway, and no HTTP library: a client shares its machine with the
server that it measures, and an event through httpx costs several times as much processor time.

In the open loop a request is sent when it is due, whether others have been answered or not, and its times count from
when it was due, not from when the client came to send it: a server that stalls cannot hold back the requests that
would show it ("coordinated omission").
"""
