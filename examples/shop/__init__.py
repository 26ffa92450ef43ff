"""A shop that sells seats, each of them once, over a network that cannot be trusted.

    client ──POST /orders──▶ app ──▶ database ──relay──▶ stream ──consumer──▶ tickets

The shop, in reading order:

    models.py     its tables, and oncely's beside them
    app.py        POST /orders: an order is placed once, however often its request arrives
    relay.py      a worker that moves what happened from the database to a Redis stream
    consumer.py   a worker that prints one ticket for each order, however often its message arrives
    places.py     where they find the database and Redis

What goes wrong on purpose, and the proof that nothing came of it:

    client.py     customers whose connection is cut before the answer arrives, so they send again
    processes.py  the three processes, uvicorn and `oncely run` twice, which can be killed while they work
    demo.py       sets the shop up, lets customers in, kills the relay, counts what there is
    stage.py      the servers, tables and stream that it is set up on
    inspector.py  what there is in the database and the stream meanwhile
    tally.py      what the numbers have to be

`make demo` runs it, with a PostgreSQL and a Redis-compatible server of its own. To see what happens
without the promise, let each request have a key of its own: `python -m examples.shop.demo --fresh-keys`.
"""
