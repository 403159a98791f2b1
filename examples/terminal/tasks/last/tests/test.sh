#!/bin/bash
# b has the last line of a alone
[ "$(cat b)" = z ]
