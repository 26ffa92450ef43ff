"""The command `oncely`: what operators do, on an application's own objects or on a database.

    app.py       the commands, and what all of them take
    target.py    an import string, as uvicorn has them; place.py says which database, Redis and tables
    rooms.py     what a command finds there: outboxes, keys, inboxes, effects, webhooks, streams;
                 discovery.py finds tables without a target
    failure.py   errors as a line on stderr, and exit codes
    output.py    tables for people, JSON for machines, and the question before anything is deleted

A command decides nothing by itself: what it does, the rooms have a function for.
"""
