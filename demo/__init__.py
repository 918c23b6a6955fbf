"""The main job, shown from end to end: a session comes back after SIGKILL.

`python -m demo` makes a tiny model, runs a multi-turn session through vLLM and
`lmcache server`, kills both, starts them again and sends the next turn: once without a store and
once with one. Needs the packages of the ``cpu`` or ``gpu`` extra.

=============== =====================================================================
room            what lives there
=============== =====================================================================
`model`         the tiny model and its tokenizer
`session`       the conversation, as token ids
`services`      start, wait for, and kill the servers; nothing is ever left behind
`commands`      the command lines and environments of the servers
`store`         the embedded volume: its configuration, and calls of the `fx100` command
`measure`       one timed completion; what `lmcache server` counted
`scenario`      the order of events
`report`        the result: table, JSON, verdict
=============== =====================================================================
"""
