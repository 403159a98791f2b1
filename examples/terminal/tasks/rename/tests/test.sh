#!/bin/bash
# b has the text of a, and a is gone
if [ ! -e a ] && [ "$(cat b)" = red ]; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
