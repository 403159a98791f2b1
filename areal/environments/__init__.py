"""Environments: worlds in which a model acts, one instance per episode.

interface.py       what an environment is: reset, step, tools
tools.py           functions that a model may call, and the checks of its calls
adapters.py        classes of gymnasium and skyrl-gym, as environments
sandbox_tools.py   ready tools: Python, shell, files
calls.py           deadlines, threads, open episodes
load.py            the key `env`: import paths and hubs
hubs/              environments of hubs, in a Python of their own
mcp/               tools of MCP servers
per_loop.py        one thing for all episodes
rpc.py             a child process that answers requests
"""
