#!/bin/bash
# b has the text of a, and a is gone
[ ! -e a ] && [ "$(cat b)" = red ]
