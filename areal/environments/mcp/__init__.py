"""Tools of MCP servers (Model Context Protocol), as tools of an environment.

client.py    initialize, list and call, whatever carries the messages
http.py      messages over streamable HTTP (over pipes: ../rpc.py)
toolbox.py   the servers of a run: connections for an episode, and their tools
"""
