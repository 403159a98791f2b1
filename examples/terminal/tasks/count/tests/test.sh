#!/bin/bash
# the first word of b is the number of lines of a
if read -r number _ < b && [ "$number" = 3 ]; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
