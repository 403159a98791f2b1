#!/bin/bash
# b has the last line of a alone
if [ "$(cat b)" = z ]; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
