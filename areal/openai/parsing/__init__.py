"""A model's output as reasoning, content and tool calls, while it is being written.

cursor.py    text that arrives in pieces, and the elements of a grammar over it
values.py    names and arguments of calls; types by the tools' JSON schemas
formats.py   one grammar per tool call format, and the table of all formats
parser.py    OutputParser: text in, events out
"""
