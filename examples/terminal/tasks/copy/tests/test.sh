#!/bin/bash
# b has the text of a, and a is still there
[ "$(cat a)" = red ] && [ "$(cat b)" = red ]
