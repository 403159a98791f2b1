#!/bin/bash
# b has the lines of a in order
if [ "$(tr "\n" " " < b)" = "1 2 3 " ]; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
